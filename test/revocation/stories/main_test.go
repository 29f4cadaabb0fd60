// SPDX-License-Identifier: Apache-2.0

// Package stories tests the operator's steps after the theft of a key, with the shipped controller
// and a real API server. It revokes, rotates and suspends, and checks which machines get new
// certificates by their evidence.
package stories

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const module = "../../.."

// bed is what all tests of the package share. They run one after the other.
type bed struct {
	*testbed.ControlPlane
	// second is another API server of the same cluster.
	second     *testbed.APIServer
	controller string
	scheme     *runtime.Scheme
	client     client.Client
	maker      *swtpm.CA
	token      string
}

var shared *bed

func TestMain(m *testing.M) {
	os.Exit(testbed.Main(m, setUp))
}

func setUp(ctx context.Context, cp *testbed.ControlPlane, dir string) (err error) {
	b := &bed{ControlPlane: cp, controller: filepath.Join(dir, "node-attestation-controller"), scheme: runtime.NewScheme()}
	for _, step := range []func() error{
		func() error { return controllerprocess.Build(ctx, module, b.controller) },
		func() (err error) { b.second, err = b.AddAPIServer(ctx); return err },
		func() error { return b.BindKubeadmBootstrap(ctx) },
		func() error { return controllerprocess.Install(ctx, cp, module) },
		func() error { return controllerprocess.InstallRevocation(ctx, cp, module) },
		func() error { return errors.Join(clientgoscheme.AddToScheme(b.scheme), v1alpha1.AddToScheme(b.scheme)) },
		func() (err error) { b.token, err = b.CreateBootstrapToken(ctx, time.Hour); return err },
		func() (err error) { b.maker, err = swtpm.NewCA(); return err },
		func() (err error) {
			b.client, err = client.New(b.AdminConfig(), client.Options{Scheme: b.scheme})
			return err
		},
	} {
		if err := step(); err != nil {
			return err
		}
	}
	shared = b
	return nil
}

// newController prepares a controller with revocation, which ends with the test.
func newController(t *testing.T, change func(*config.Config)) *controllerprocess.Controller {
	t.Helper()
	c, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: shared.ControlPlane, Dir: t.TempDir(), Binary: shared.controller, Args: []string{"--revocation"},
		Configure: func(c *config.Config) {
			// there is one at a time, and the next one need not wait for the Lease of a killed one
			c.LeaderElection.Enabled = false
			if change != nil {
				change(c)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && c.Process() != nil {
			t.Log(c.LogTail())
		}
		if err := c.Kill(); err != nil {
			t.Errorf("the controller ended by itself: %v", err)
		}
		if log, err := os.ReadFile(c.LogFile()); err != nil || bytes.Contains(log, []byte("forbidden")) {
			t.Errorf("the controller lacks a right, or has no log (%v): %s", err, c.LogTail())
		}
	})
	return c
}

// started returns a controller that is ready.
func started(t *testing.T, change func(*config.Config)) *controllerprocess.Controller {
	t.Helper()
	c := newController(t, change)
	start(t, c)
	return c
}

func start(t *testing.T, c *controllerprocess.Controller) {
	t.Helper()
	if err := errors.Join(c.Start(t.Context()), c.Ready(t.Context())); err != nil {
		t.Fatal(err)
	}
}

// node is a machine that is a node. It has what its kubelet has: a certificate, a Node and a Lease.
type node struct {
	*fleet.Machine
}

// newNodes makes machines, and enters them into the inventory.
func newNodes(t *testing.T, prefix string, count int) []*node {
	t.Helper()
	made, err := fleet.Make(count, func(i int) (*fleet.Machine, error) {
		return fleet.NewModel(fmt.Sprintf("%s-%04d", prefix, i), t.TempDir(), shared.maker)
	})
	if err != nil {
		t.Fatal(err)
	}
	nodes := make([]*node, count)
	for i, m := range made {
		nodes[i] = &node{m}
		t.Cleanup(m.Stop)
	}
	setInventory(t, made...)
	return nodes
}

func setInventory(t *testing.T, machines ...*fleet.Machine) {
	t.Helper()
	content, err := fleet.Inventory(t.Context(), machines...)
	if err == nil {
		err = controllerprocess.SetInventory(t.Context(), shared.ControlPlane, content)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func cluster() fleet.Cluster {
	return fleet.Cluster{URL: shared.ServerURL(), CA: shared.ServerCA(), Token: shared.token, Issuer: shared.ClientCA().Certificate()}
}

// attest gets a certificate, with the one that the node has, or the bootstrap token.
func (n *node) attest(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err := n.Attest(ctx, cluster())
	return err
}

// joins has the node get its first certificate, and make its Node and Lease.
func (n *node) joins(t *testing.T) {
	t.Helper()
	if err := n.attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	api := n.client(t)
	if err := api.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}); err != nil {
		t.Fatal(err)
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: n.Name}}
	if err := api.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, object := range []client.Object{lease, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}} {
			if err := client.IgnoreNotFound(shared.client.Delete(context.WithoutCancel(t.Context()), object)); err != nil {
				t.Error(err)
			}
		}
	})
}

// credential returns the node's present certificate.
func (n *node) credential() harness.Credential {
	return harness.Credential{Node: n.Name, Config: n.Credential(cluster())}
}

// encodings returns a credential with its certificate encoded in other ways, as a thief can do.
// Each may write.
func encodings(t *testing.T, stolen harness.Credential) (others []harness.Credential) {
	t.Helper()
	configs, err := shared.ClientCA().ReencodeConfig(stolen.Config)
	harness.Must(t, err)
	for _, config := range configs {
		other := harness.Credential{Node: stolen.Node, Config: config}
		other.MustWrite(t)
		others = append(others, other)
	}
	return others
}

// mustBeRefused fails the test unless each of the credentials is refused by both API servers.
func mustBeRefused(t *testing.T, message string, credentials ...harness.Credential) {
	t.Helper()
	for _, c := range credentials {
		c.RefusedWithin(t, 0, message)
		c.At(shared.second.URL()).RefusedWithin(t, 0, message)
	}
}

// client returns a client with the node's present certificate.
func (n *node) client(t *testing.T) client.Client {
	t.Helper()
	api, err := client.New(n.credential().Config, client.Options{Scheme: shared.scheme})
	if err != nil {
		t.Fatal(err)
	}
	return api
}

// revoke creates a NodeRevocation, as kubectl attest does.
func revoke(t *testing.T, mode v1alpha1.RevocationMode, change func(*v1alpha1.NodeRevocationSpec), nodes ...*node) *v1alpha1.NodeRevocation {
	t.Helper()
	r := &v1alpha1.NodeRevocation{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-", Namespace: controllerprocess.Namespace}}
	r.Spec = v1alpha1.NodeRevocationSpec{Cluster: controllerprocess.ClusterUID, Mode: mode, Reason: "the key was stolen", All: len(nodes) == 0}
	for _, n := range nodes {
		r.Spec.Nodes = append(r.Spec.Nodes, n.Name)
	}
	if change != nil {
		change(&r.Spec)
	}
	harness.NextSecond()
	if err := shared.client.Create(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(shared.client.Delete(context.WithoutCancel(t.Context()), r)); err != nil {
			t.Error(err)
		}
	})
	return r
}

// record returns the record of a node.
func (n *node) record(t *testing.T) *v1alpha1.NodeAttestation {
	t.Helper()
	records := &v1alpha1.NodeAttestationList{}
	if err := shared.client.List(t.Context(), records, client.InNamespace(controllerprocess.Namespace), client.MatchingFields{v1alpha1.FieldNodeName: n.Name}); err != nil {
		t.Fatal(err)
	}
	if len(records.Items) != 1 {
		t.Fatalf("%s has %d records", n.Name, len(records.Items))
	}
	return &records.Items[0]
}

// eventually waits until a condition holds, up to half a minute.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	harness.Eventually(t, 30*time.Second, what, holds)
}
