// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	announcement = "../../packaging/kubernetes-revocation/component/announcement.yaml"
	// tokenCache is how long an API server remembers that a token is valid: 10 s. This has slack.
	tokenCache = 30 * time.Second
)

// read is a request that changes nothing.
type read struct {
	what string
	call
	// before and after say whether the API server answers it: after, the node's pods and the Node
	// were deleted by force.
	before, after bool
}

func get(path string) call { return call{verb: "GET", path: path} }

func review(kind, group, body string) call {
	return call{verb: "POST", path: "/apis/" + group + "/v1/" + strings.ToLower(kind) + "s", body: fmt.Sprintf(`{"apiVersion":"%s/v1","kind":"%s"%s}`, group, kind, body)}
}

const (
	core  = "/api/v1/"
	inApp = core + "namespaces/apps/"
)

// reads are what nodes may read, and beside them what they may not. docs/threat-model.md has them.
var reads = []read{
	{"own Node", get(core + "nodes/reader"), true, false},
	{"another Node", get(core + "nodes/reader-2"), false, false},
	{"all Nodes", get(core + "nodes"), false, false},
	// an empty list, in the end
	{"pods of the own node", get(core + "pods?fieldSelector=spec.nodeName%3Dreader"), true, true},
	{"a pod of the own node", get(inApp + "pods/bound-reader"), true, false},
	{"a pod of another node", get(inApp + "pods/bound-reader-2"), false, false},
	{"all pods", get(core + "pods"), false, false},
	{"Secret of a pod of the own node", get(inApp + "secrets/of-reader"), true, false},
	{"Secret of a pod of another node", get(inApp + "secrets/of-reader-2"), false, false},
	{"all Secrets", get(core + "secrets"), false, false},
	{"ConfigMap of a pod of the own node", get(inApp + "configmaps/of-reader"), true, false},
	{"ConfigMap of a pod of another node", get(inApp + "configmaps/of-reader-2"), false, false},
	{"volume claim of a pod of the own node", get(inApp + "persistentvolumeclaims/of-reader"), true, false},
	{"volume of a pod of the own node", get(core + "persistentvolumes/of-reader"), true, false},
	{"volume of a pod of another node", get(core + "persistentvolumes/of-reader-2"), false, false},
	{"service account of a pod of the own node", get(inApp + "serviceaccounts/of-reader"), true, false},
	{"all Services", get(core + "services"), true, true},
	{"all namespaces", get(core + "namespaces"), false, false},
	{"all CertificateSigningRequests", get("/apis/certificates.k8s.io/v1/certificatesigningrequests"), true, true},
	{"all CSIDrivers", get("/apis/storage.k8s.io/v1/csidrivers"), true, true},
	{"all RuntimeClasses", get("/apis/node.k8s.io/v1/runtimeclasses"), true, true},
	{"ResourceSlices of the own node", get("/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3Dreader"), true, true},
	{"own Lease", get("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/reader"), true, true},
	{"Lease of another node", get("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/reader-2"), false, false},
	{"announced renewals", get(core + "namespaces/kube-public/configmaps/node-attestation-renewal"), true, true},
	{"TokenReview", review("TokenReview", "authentication.k8s.io", `,"spec":{"token":"x"}`), true, true},
	{"SubjectAccessReview", review("SubjectAccessReview", "authorization.k8s.io", `,"spec":{"user":"admin","nonResourceAttributes":{"path":"/","verb":"get"}}`), true, true},
	{"SelfSubjectAccessReview", review("SelfSubjectAccessReview", "authorization.k8s.io", `,"spec":{"nonResourceAttributes":{"path":"/","verb":"get"}}`), true, true},
	{"SelfSubjectReview", review("SelfSubjectReview", "authentication.k8s.io", ""), true, true},
	{"discovery and version", get("/version"), true, true},
}

// makeReader makes a node with a pod that uses objects named after the node.
func makeReader(t *testing.T, name string) (stolen, other *credential) {
	t.Helper()
	ctx := t.Context()
	stolen, other = newNode(t, name)
	of := metav1.ObjectMeta{Name: "of-" + name}
	space, class := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}, ""
	_, secret := shared.admin.CoreV1().Secrets(apps).Create(ctx, &corev1.Secret{ObjectMeta: of}, metav1.CreateOptions{})
	_, config := shared.admin.CoreV1().ConfigMaps(apps).Create(ctx, &corev1.ConfigMap{ObjectMeta: of}, metav1.CreateOptions{})
	_, account := shared.admin.CoreV1().ServiceAccounts(apps).Create(ctx, &corev1.ServiceAccount{ObjectMeta: of}, metav1.CreateOptions{})
	_, claim := shared.admin.CoreV1().PersistentVolumeClaims(apps).Create(ctx, &corev1.PersistentVolumeClaim{ObjectMeta: of, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: of.Name, StorageClassName: &class, Resources: corev1.VolumeResourceRequirements{Requests: space},
	}}, metav1.CreateOptions{})
	_, volume := shared.admin.CoreV1().PersistentVolumes().Create(ctx, &corev1.PersistentVolume{ObjectMeta: of, Spec: corev1.PersistentVolumeSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: space, ClaimRef: &corev1.ObjectReference{Namespace: apps, Name: of.Name},
		PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/x"}},
	}}, metav1.CreateOptions{})
	harness.Must(t, errors.Join(secret, config, account, claim, volume))
	_, err := shared.admin.CoreV1().Pods(apps).Create(ctx, readersPod("bound-"+name, name), metav1.CreateOptions{})
	harness.Must(t, err)
	return stolen, other
}

func readersPod(name, node string) *corev1.Pod {
	of := "of-" + node
	pod := newPod(name, node)
	pod.Spec.ServiceAccountName = of
	pod.Spec.Volumes = []corev1.Volume{
		{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: of}}},
		{Name: "c", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: of}}}},
		{Name: "p", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: of}}},
	}
	return pod
}

// Reads are no matter of admission: revoked and suspended certificates read what the node may. What
// takes that away is deleting the node's pods and the Node. Watches that are open go on even then,
// and a pod's token is valid until its pod is deleted.
func TestReads(t *testing.T) {
	ctx := t.Context()
	kubeconfig := filepath.Join(t.TempDir(), "admin.kubeconfig")
	harness.Must(t, shared.WriteKubeconfig(kubeconfig, shared.AdminUser()))
	_, err := shared.RunKubectl(ctx, kubeconfig, "apply", "--server-side", "--filename="+announcement)
	harness.Must(t, err)
	stolen, fine := makeReader(t, "reader")
	makeReader(t, "reader-2")
	halted := nodeCertificate(t, "reader")
	all := map[string]*credential{"neither": fine, "revoked": stolen, "suspended": halted}
	// Both authorizers have seen the pod and its volume.
	for server := range shared.servers {
		passes(t, fine, server, get(core+"persistentvolumes/of-reader"), false)
		passes(t, fine, server, get(inApp+"secrets/of-reader"), false)
	}

	token := mint(t, stolen, "bound-reader", "of-reader")
	watches := openWatches(t, stolen, "reader")
	inForceFor(t, lists{1: {revoked(stolen), suspended(halted)}}, "reader", stolen, halted)

	rows := map[string][]string{}
	look := func(when string, allowed func(read) bool) {
		for _, r := range reads {
			want, cell := allowed(r), ""
			for who, c := range all {
				for server := range shared.servers {
					var a answer
					harness.Eventually(t, limit, fmt.Sprintf("%s, %s, %s, API server %d: allowed is %v", r.what, who, when, server, want), func() bool {
						a = c.do(ctx, server, r.call)
						return (a.code == 200 || a.code == 201) == want
					})
					if !want && a.code != 403 && a.code != 404 {
						t.Errorf("%s, %s, %s: %s", r.what, who, when, a)
					}
					if cell = "yes"; !want {
						cell = fmt.Sprintf("no (%d)", a.code)
					}
				}
			}
			rows[r.what] = append(rows[r.what], cell)
		}
	}
	look("before", func(r read) bool { return r.before })
	for server, client := range token.clients {
		if err := authenticates(ctx, client); err != nil {
			t.Errorf("the pod's token, API server %d: %v", server, err)
		}
	}

	// What attestctl suspend --evict does, with an operator's rights.
	now := int64(0)
	harness.Must(t, shared.admin.CoreV1().Pods(apps).Delete(ctx, "bound-reader", metav1.DeleteOptions{GracePeriodSeconds: &now}))
	harness.Must(t, shared.admin.CoreV1().Nodes().Delete(ctx, "reader", metav1.DeleteOptions{}))
	deleted := time.Now()
	for server, client := range token.clients {
		harness.Eventually(t, tokenCache, "the pod's token ends", func() bool { return apierrors.IsUnauthorized(authenticates(ctx, client)) })
		t.Logf("the pod's token: refused by API server %d %s after the pod was deleted", server, time.Since(deleted).Round(100*time.Millisecond))
	}
	look("after", func(r read) bool { return r.after })

	var table strings.Builder
	table.WriteString("\n| Read with a revoked or suspended certificate | At first | After `--evict` |\n| --- | --- | --- |\n")
	for _, r := range reads {
		fmt.Fprintf(&table, "| %s | %s |\n", r.what, strings.Join(rows[r.what], " | "))
	}
	t.Log(table.String())
	t.Run("watches", func(t *testing.T) { testWatchesSurvive(t, watches) })
}

// mint has a node make a token of a pod's account, for a year.
func mint(t *testing.T, c *credential, pod, account string) *credential {
	t.Helper()
	object, err := shared.admin.CoreV1().Pods(apps).Get(t.Context(), pod, metav1.GetOptions{})
	harness.Must(t, err)
	const year = int64(365 * 24 * 60 * 60)
	seconds := year
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: &seconds, BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod, UID: object.UID},
	}}
	made, err := c.clients[0].CoreV1().ServiceAccounts(apps).CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	harness.Must(t, err)
	if lives := time.Until(made.Status.ExpirationTimestamp.Time); lives < time.Duration(year-60)*time.Second {
		t.Errorf("the token lives %s", lives)
	}
	return tokenCredential(t, made.Status.Token)
}

func authenticates(ctx context.Context, client kubernetes.Interface) error {
	_, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	return err
}

// openWatches opens watches with a certificate of a node, at each API server.
func openWatches(t *testing.T, c *credential, node string) map[string]watch.Interface {
	t.Helper()
	watches := map[string]watch.Interface{}
	for server, client := range c.clients {
		name := func(what string) string { return fmt.Sprintf("%s at API server %d", what, server) }
		only := func(field, value string) metav1.ListOptions {
			return metav1.ListOptions{FieldSelector: field + "=" + value}
		}
		var errs [4]error
		watches[name("pods")], errs[0] = client.CoreV1().Pods("").Watch(t.Context(), only("spec.nodeName", node))
		watches[name("Secret")], errs[1] = client.CoreV1().Secrets(apps).Watch(t.Context(), only("metadata.name", "of-"+node))
		watches[name("Services")], errs[2] = client.CoreV1().Services("").Watch(t.Context(), metav1.ListOptions{})
		watches[name("requests")], errs[3] = client.CertificatesV1().CertificateSigningRequests().Watch(t.Context(), metav1.ListOptions{})
		harness.Must(t, errors.Join(errs[:]...))
	}
	for _, w := range watches {
		t.Cleanup(w.Stop)
	}
	return watches
}

// testWatchesSurvive changes what is watched, after the node may no longer read it.
func testWatchesSurvive(t *testing.T, watches map[string]watch.Interface) {
	ctx := t.Context()
	began := time.Now()
	_, pod := shared.admin.CoreV1().Pods(apps).Create(ctx, newPod("later", "reader"), metav1.CreateOptions{})
	secret, err := shared.admin.CoreV1().Secrets(apps).Get(ctx, "of-reader", metav1.GetOptions{})
	harness.Must(t, err)
	secret.StringData = map[string]string{"password": "new"}
	_, changed := shared.admin.CoreV1().Secrets(apps).Update(ctx, secret, metav1.UpdateOptions{})
	_, service := shared.admin.CoreV1().Services(apps).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "later"}, Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Port: 1}}},
	}, metav1.CreateOptions{})
	harness.Must(t, errors.Join(pod, changed, service))
	makeNode(t, "requester")
	later := func(e watch.Event) bool {
		switch object := e.Object.(type) {
		case *corev1.Secret:
			return string(object.Data["password"]) == "new"
		case *corev1.Pod:
			return object.Name == "later"
		case *corev1.Service:
			return object.Name == "later"
		default:
			return strings.HasPrefix(object.(metav1.Object).GetName(), "hello-requester")
		}
	}
	for name, w := range watches {
		if err := harness.AwaitEvent(w, later); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	t.Logf("each watch reported what was changed %s before", time.Since(began).Round(time.Millisecond))
}

// How long a watch lasts is what its client asks for, also beyond the end of its certificate.
// --min-request-timeout, 30 minutes by default, is only for clients that ask for nothing: theirs
// lasts up to twice as long. A restart of the API server ends each watch.
func TestWatchesLastAsTheClientAsks(t *testing.T) {
	const minimum = 2 * time.Second
	ctx := t.Context()
	server, err := shared.AddAPIServer(ctx, fmt.Sprintf("--min-request-timeout=%d", minimum/time.Second))
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, server.Stop()) })
	newNode(t, "watcher")
	ends := time.Now().Add(3 * minimum)
	pair, err := shared.ClientCA().IssueClient("system:node:watcher", []string{"system:nodes"}, time.Now().Add(-time.Minute), ends)
	harness.Must(t, err)
	c := credentialOf(t, "", func(*testbed.APIServer) []byte { return server.Kubeconfig(testbed.CertificateUser(pair)) })
	services := c.clients[0].CoreV1().Services("")
	year, began := int64(365*24*60*60), time.Now()
	long, err := services.Watch(ctx, metav1.ListOptions{TimeoutSeconds: &year})
	harness.Must(t, err)
	defer long.Stop()
	short, err := services.Watch(ctx, metav1.ListOptions{})
	harness.Must(t, err)
	defer short.Stop()
	if err := harness.AwaitEvent(short, func(watch.Event) bool { return false }); !errors.Is(err, io.EOF) {
		t.Fatalf("a watch without a limit of its own: %v", err)
	}
	t.Logf("a watch without a limit of its own ended after %s", time.Since(began).Round(100*time.Millisecond))
	// longer than any watch without a limit of its own, and than the certificate
	time.Sleep(time.Until(ends.Add(minimum)))
	if _, err := services.List(ctx, metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("a new request, %s after the certificate has ended: %v", time.Since(ends).Round(time.Second), err)
	}
	_, err = shared.admin.CoreV1().Services(apps).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "watched"}, Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Port: 1}}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	err = harness.AwaitEvent(long, func(e watch.Event) bool {
		service, ok := e.Object.(*corev1.Service)
		return ok && service.Name == "watched"
	})
	if err != nil {
		t.Errorf("a watch for a year: %v", err)
	}
	harness.Must(t, server.Stop())
	if err := harness.AwaitEvent(long, func(watch.Event) bool { return false }); !errors.Is(err, io.EOF) {
		t.Errorf("a watch for a year, after the API server was stopped: %v", err)
	}
}
