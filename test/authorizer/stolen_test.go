// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const (
	// checkInterval is the shortest that the plugin takes.
	checkInterval = 10 * time.Second
	// refusedIn is how long a revoked certificate may go on reading.
	refusedIn = 2 * time.Second
	// slack is what a machine may take longer on which other suites run.
	slack = 3 * time.Second
)

// reads are requests of a thief, by what they read.
type reads = map[string]func(ctx context.Context, api kubernetes.Interface) error

// readsOf returns what a thief reads with the key of a node. Its pod, and the objects of that pod,
// have the name of the node.
func readsOf(node string) reads {
	get := func(path ...string) func(context.Context, kubernetes.Interface) error {
		return func(ctx context.Context, api kubernetes.Interface) error {
			return api.CoreV1().RESTClient().Get().AbsPath("/api/v1/" + strings.Join(path, "/")).MaxRetries(0).Do(ctx).Error()
		}
	}
	only := func(field string) metav1.ListOptions { return metav1.ListOptions{FieldSelector: field + "=" + node} }
	pods := "namespaces/" + metav1.NamespaceDefault + "/pods/" + node
	return reads{
		"Secret":                         get("namespaces", metav1.NamespaceDefault, "secrets", node),
		"ConfigMap":                      get("namespaces", metav1.NamespaceDefault, "configmaps", node),
		"Node":                           get("nodes", node),
		"Services":                       get("services"),
		"logs of a pod":                  get(pods, "log"),
		"kubelet through the API server": get("nodes", node, "proxy", "pods"),
		"pods": func(ctx context.Context, api kubernetes.Interface) error {
			_, err := api.CoreV1().Pods("").List(ctx, only("spec.nodeName"))
			return err
		},
		"new watch of pods": func(ctx context.Context, api kubernetes.Interface) error {
			w, err := api.CoreV1().Pods("").Watch(ctx, only("spec.nodeName"))
			if err == nil {
				w.Stop()
			}
			return err
		},
		"new watch of a Secret": func(ctx context.Context, api kubernetes.Interface) error {
			w, err := api.CoreV1().Secrets(metav1.NamespaceDefault).Watch(ctx, only("metadata.name"))
			if err == nil {
				w.Stop()
			}
			return err
		},
		"list of all requests": func(ctx context.Context, api kubernetes.Interface) error {
			_, err := api.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
			return err
		},
	}
}

// allowed reports whether an API server did not refuse a read. What is behind the API server may
// have failed: the node's container runtime runs no container, so it has no logs.
func allowed(err error) bool { return !apierrors.IsForbidden(err) }

// makeReadable gives a node a pod with a Secret and a ConfigMap, and the rights to read logs and
// kubelets. Clusters with such rights exist, and a node has none of its own.
func makeReadable(t *testing.T, node string) {
	t.Helper()
	ctx, api, own := t.Context(), shared.Client(), metav1.ObjectMeta{Name: node}
	_, err := api.CoreV1().Secrets(metav1.NamespaceDefault).Create(ctx, &corev1.Secret{ObjectMeta: own}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = api.CoreV1().ConfigMaps(metav1.NamespaceDefault).Create(ctx, &corev1.ConfigMap{ObjectMeta: own}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = api.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Create(ctx, &corev1.ServiceAccount{ObjectMeta: own}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = api.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, &corev1.Pod{ObjectMeta: own, Spec: corev1.PodSpec{
		NodeName: node, ServiceAccountName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}},
		Volumes: []corev1.Volume{
			{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: node}}},
			{Name: "c", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: node}}}},
		},
	}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = api.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: own, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods/log", "nodes/proxy"}, Verbs: []string{"get"}},
	}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = api.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: own, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: node},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "system:node:" + node}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
}

// thief reads with a stolen key at one API server.
type thief struct {
	name    string
	api     kubernetes.Interface
	refused map[string]time.Time // the first refusal
	problem error
}

// goesOn reads until each read was refused, or ctx ends.
func (s *thief) goesOn(ctx context.Context, what reads) {
	for len(s.refused) < len(what) && ctx.Err() == nil && s.problem == nil {
		for name, read := range what {
			_, was := s.refused[name]
			switch err := read(ctx, s.api); {
			case harness.IsRefused(err, attestation.MessageRevoked):
				if !was {
					s.refused[name] = time.Now()
				}
			case !allowed(err):
				s.problem = fmt.Errorf("%s: %s is refused for another reason: %w", s.name, name, err)
			case was:
				s.problem = fmt.Errorf("%s: %s is allowed again: %w", s.name, name, err)
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// mustBeRefused fails the test unless each read is refused now.
func (s *thief) mustBeRefused(t *testing.T, when string, what reads) {
	t.Helper()
	for name, read := range what {
		if err := read(t.Context(), s.api); !harness.IsRefused(err, attestation.MessageRevoked) {
			t.Errorf("%s, %s: %s: %v", when, s.name, name, err)
		}
	}
}

// mustBeAllowed fails the test unless each read is allowed now.
func (s *thief) mustBeAllowed(t *testing.T, when string, what reads) {
	t.Helper()
	for name, read := range what {
		if err := read(t.Context(), s.api); !allowed(err) {
			t.Errorf("%s, %s: %s: %v", when, s.name, name, err)
		}
	}
}

// mustReadNothingByLongSelectors fails the test unless a thief is refused, however long the API
// server's question for the authorizer is. The longest selector is almost the longest that an API
// server reads, and makes a question of some 8 MB.
func (s *thief) mustReadNothingByLongSelectors(t *testing.T) {
	t.Helper()
	for _, count := range []int{1_000, 45_000, 240_000} {
		query := "labelSelector=a" + strings.Repeat("%2Ca", count-1)
		began := time.Now()
		err := s.api.CoreV1().RESTClient().Get().RequestURI("/api/v1/services?" + query).MaxRetries(0).Do(t.Context()).Error()
		t.Logf("%s, with a query of %d bytes: answered after %s", s.name, len(query), time.Since(began).Round(time.Millisecond))
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s, with a query of %d bytes: %.200v", s.name, len(query), err)
		}
	}
}

// A key of a real kubelet is stolen, and revoked by the command. At each API server, the thief can
// read nothing more. The node gets a new certificate by its evidence, without a token, and reads
// all of that again.
func TestStolenKeyReadsNothing(t *testing.T) {
	t.Parallel()
	const name = "stolen"
	m := harness.NewMachine(t, built.Plugin, name, swtpm.Options{Certified: []string{"ecc-p256"}})
	n := harness.StartKubeletNode(t, m, harness.KubeletNodeOptions{
		Cluster: shared.ControlPlane, Components: built.Kubelet, CheckInterval: checkInterval, Admit: shared.admit,
	})
	makeReadable(t, name)
	stolen, before, what := n.Credential(t), n.Pair(t).Fingerprint(), readsOf(name)
	var thieves []*thief
	credentials := map[string]harness.Credential{
		"API server 0": stolen, "API server 1": stolen.At(shared.servers[1].URL()),
	}
	// The same certificate in another encoding has another fingerprint.
	encodings, err := shared.ClientCA().ReencodeConfig(stolen.Config)
	harness.Must(t, err)
	for encoding, config := range encodings {
		credentials["API server 1, encoded with "+encoding] = harness.Credential{Node: name, Config: config}.At(shared.servers[1].URL())
	}
	for at, credential := range credentials {
		s := &thief{name: at, api: credential.Client(t), refused: map[string]time.Time{}}
		thieves = append(thieves, s)
		// Each API server's own graph of nodes and pods has to have the pod.
		harness.Eventually(t, 10*time.Second, s.name+" allows the node to read its Secret", func() bool { return allowed(what["Secret"](t.Context(), s.api)) })
		s.mustBeAllowed(t, "before anything is revoked", what)
	}

	harness.NextSecond()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var wait sync.WaitGroup
	for _, s := range thieves {
		wait.Go(func() { s.goesOn(ctx, what) })
	}
	created := revoke(t, name)
	wait.Wait()
	for _, s := range thieves {
		harness.Must(t, s.problem)
		var last time.Time
		for read := range what {
			at, was := s.refused[read]
			if !was {
				t.Fatalf("%s: %s is not refused", s.name, read)
			}
			if at.After(last) {
				last = at
			}
		}
		took := last.Sub(created).Round(time.Millisecond)
		t.Logf("%s: each read is refused %s after the command had created the NodeRevocation", s.name, took)
		if took > refusedIn+slack {
			t.Errorf("that is more than %s", refusedIn+slack)
		}
	}

	harness.Eventually(t, time.Minute, "the node has a new certificate, and is ready", func() bool {
		why, err := harness.NotReady(t.Context(), shared.Client(), name)
		return err == nil && why == "" && n.Pair(t).Fingerprint() != before
	})
	t.Logf("the node has a new certificate %s after the revocation", time.Since(created).Round(100*time.Millisecond))
	p := harness.WatchNode(t, shared.Client(), name)
	harness.Eventually(t, 15*time.Second, "the node's kubelet renews the Lease", func() bool {
		_, renewed := p.FirstAfter(time.Now().Add(-15 * time.Second))
		return renewed
	})
	for i, server := range shared.servers[:2] {
		own := &thief{name: fmt.Sprintf("the node at API server %d", i), api: n.Credential(t).At(server.URL()).Client(t)}
		own.mustBeAllowed(t, "with its new certificate", what)
	}
	for _, s := range thieves {
		s.mustBeRefused(t, "after the node is back", what)
	}
	thieves[0].mustReadNothingByLongSelectors(t)
}

// revoke runs the command. It returns when the command had created the NodeRevocation.
func revoke(t *testing.T, node string) time.Time {
	t.Helper()
	return harness.KubectlAttest(t, shared.ControlPlane, built.Commands, "created", "revoke", node, "--reason=key stolen", "--yes", "--wait=false")
}
