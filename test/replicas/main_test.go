// SPDX-License-Identifier: Apache-2.0

// Package replicas tests one or several processes of the shipped node-attestation-controller, with
// the rights and the policies of packaging/kubernetes. It tests starts and stops, and that a killed
// controller loses nothing and does nothing twice.
package replicas

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/witness"
)

const (
	module    = "../.."
	leaseName = "node-attestation-controller"
	keySecret = "node-attestation-controller-key"
)

// bed has what all tests of the package share. The tests run one after the other.
type bed struct {
	*testbed.ControlPlane
	plugin, controller string
	client             client.Client
}

var shared *bed

func TestMain(m *testing.M) {
	os.Exit(testbed.Main(m, setUp))
}

func setUp(ctx context.Context, cp *testbed.ControlPlane, dir string) (err error) {
	b := &bed{ControlPlane: cp, plugin: filepath.Join(dir, "kubelet-authenticator"), controller: filepath.Join(dir, "node-attestation-controller")}
	for _, step := range []func() error{
		func() error { return compile.Program(ctx, module, b.plugin, "./cmd/kubelet-authenticator") },
		func() error { return controllerprocess.Build(ctx, module, b.controller) },
		func() error { return b.BindKubeadmBootstrap(ctx) },
		func() error { return controllerprocess.Install(ctx, cp, module) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	b.client, err = client.New(b.AdminConfig(), client.Options{Scheme: scheme})
	shared = b
	return err
}

// replica is one process of the controller.
type replica struct {
	*controllerprocess.Controller
	name string
}

// newReplica prepares a replica, which ends with the test.
func newReplica(t *testing.T, name string, change func(*config.Config), args ...string) *replica {
	t.Helper()
	c, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: shared.ControlPlane, Dir: t.TempDir(), Binary: shared.controller, Configure: change, Args: args,
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &replica{c, name}
	t.Cleanup(func() {
		if t.Failed() && r.Process() != nil {
			t.Logf("replica %s: %s", name, r.LogTail())
		}
		if err := r.Kill(); err != nil {
			t.Errorf("replica %s ended by itself: %v", name, err)
		}
		if log, err := os.ReadFile(r.LogFile()); err != nil || bytes.Contains(log, []byte("forbidden")) {
			t.Errorf("replica %s lacks a right, or has no log (%v): %s", name, err, r.LogTail())
		}
	})
	return r
}

func (r *replica) start(t *testing.T) {
	t.Helper()
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (r *replica) ready(t *testing.T) {
	t.Helper()
	r.start(t)
	if err := r.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// kill ends the replica as a crash does. The test fails if the replica has already ended.
func (r *replica) kill(t *testing.T) {
	t.Helper()
	if err := r.Kill(); err != nil {
		t.Fatalf("replica %s ended by itself: %v", r.name, err)
	}
}

// leads reports whether it holds the Lease, as far as it knows.
func (r *replica) leads(ctx context.Context) bool {
	metrics, err := r.Metrics(ctx)
	return err == nil && strings.Contains(metrics, `leader_election_master_status{name="`+leaseName+`"} 1`)
}

// holder returns the holder of the Lease, "" if there is none.
func holder(t *testing.T) string {
	t.Helper()
	lease, err := shared.Client().CoordinationV1().Leases(controllerprocess.Namespace).Get(t.Context(), leaseName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	if lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// forgetAfterwards deletes requests, records and the Lease after a test. Call it before replicas
// are made: cleanups run in reverse order.
func forgetAfterwards(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := errors.Join(
			shared.client.DeleteAllOf(ctx, &certificatesv1.CertificateSigningRequest{}),
			shared.client.DeleteAllOf(ctx, &v1alpha1.NodeAttestation{}, client.InNamespace(controllerprocess.Namespace)),
			shared.Client().CoordinationV1().Leases(controllerprocess.Namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
		); err != nil {
			t.Error(err)
		}
	})
}

func inventoried(t *testing.T, machines ...*machine) {
	t.Helper()
	if err := controllerprocess.SetInventory(t.Context(), shared.ControlPlane, inventoryOf(t, machines...)); err != nil {
		t.Fatal(err)
	}
}

// eachHasOneRecord calls witness.OneRecordEach. issued are the certificates by node
// name. It returns the number of recorded certificates that were never published.
func eachHasOneRecord(t *testing.T, machines []*machine, issued map[string][][]byte) (unpublished int) {
	t.Helper()
	list := &v1alpha1.NodeAttestationList{}
	if err := shared.client.List(t.Context(), list, client.InNamespace(controllerprocess.Namespace)); err != nil {
		t.Fatal(err)
	}
	all := make([]witness.Machine, len(machines))
	for i, m := range machines {
		all[i] = witness.Machine{Name: m.Name, ProviderID: m.ProviderID()}
	}
	unpublished, err := witness.OneRecordEach(list.Items, all, issued)
	if err != nil {
		t.Error(err)
	}
	return unpublished
}
