// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/earlier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	namespace = controllerprocess.Namespace
	// patience is how long a test waits for what has to happen.
	patience = harness.Soon
)

// cluster is one with an inventory, and with a controller that is replaced.
type cluster struct {
	*testbed.ControlPlane
	t          *testing.T
	records    client.Client
	controller *controllerprocess.Controller
	// binary is the path of the controller's program, of any release.
	binary    string
	inventory strings.Builder
}

// newCluster makes one with a release's manifests, in which that release's controller runs.
func newCluster(t *testing.T, r earlier.Release) *cluster {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	harness.Must(t, err)
	c := &cluster{ControlPlane: cp, t: t, binary: filepath.Join(t.TempDir(), "node-attestation-controller")}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.controller.LogTail())
		}
		if err := c.controller.Kill(); err != nil {
			t.Error(err)
		}
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, cp.BindKubeadmBootstrap(t.Context()))
	harness.Must(t, controllerprocess.Install(t.Context(), cp, r.Module))
	scheme := runtime.NewScheme()
	harness.Must(t, v1alpha1.AddToScheme(scheme))
	c.records, err = client.New(cp.AdminConfig(), client.Options{Scheme: scheme})
	harness.Must(t, err)
	// The file is written once: the configuration of the earlier release has to do for this one,
	// too.
	c.controller, err = controllerprocess.New(controllerprocess.Options{
		ControlPlane: cp, Dir: t.TempDir(), Binary: c.binary,
		Configure: func(c *config.Config) {
			// a node renews more often than in a life
			c.Rates.PerMachine.Every.Duration = time.Millisecond
			// a certificate of 10 minutes is due at once
			c.Lifetimes.Backdate.Duration = time.Hour
		},
		Edit: asDocumented,
	})
	harness.Must(t, err)
	c.starts(r)
	return c
}

// deniedEK is that of no machine.
var deniedEK = strings.Repeat("f", 64)

// asDocumented sets each setting to the default that the earlier release's documentation names, so
// that the later release has to read each of them.
func asDocumented(file map[string]any) {
	for field, value := range map[string]any{
		"namespace": namespace, "signers": []any{map[string]any{"name": "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm", "shared": false}},
		"sharedHello": false, "tokenGroup": "system:bootstrappers", "token": "Off", "credential": "Required", "bootCounters": "Warn", "waitDeadline": "20m",
		"unattestedNodes": []any{"control-plane-0"}, "audit": false,
		"challengeKeySecret": "node-attestation-controller-key", "leaderElection": map[string]any{"enabled": true, "leaseName": "node-attestation-controller"},
		"bootstrappers": []any{map[string]any{"username": "installer", "group": "installers"}},
		"serving":       map[string]any{"signers": []any{"cluster.x-k8s.io/kubelet-serving-tpm"}, "forbiddenAddresses": []any{"10.0.0.0/24"}},
	} {
		if _, ok := file[field]; !ok {
			file[field] = value
		}
	}
	tpm := file["tpm"].(map[string]any)
	tpm["eventLog"], tpm["challengeLifetime"] = false, "10m"
	tpm["deniedEKs"] = []any{deniedEK}
}

// apply applies a release's manifests, as the recipe in docs/operations.md does first.
func (c *cluster) apply(r earlier.Release) {
	c.t.Helper()
	harness.Must(c.t, controllerprocess.Apply(c.t.Context(), c.ControlPlane, r.Module))
	harness.Must(c.t, controllerprocess.AwaitPolicies(c.t.Context(), c.ControlPlane))
}

// starts starts a release's controller.
func (c *cluster) starts(r earlier.Release) {
	c.t.Helper()
	replace(c.t, r.Controller, c.binary)
	harness.Must(c.t, c.controller.Start(c.t.Context()))
	harness.Must(c.t, c.controller.Ready(c.t.Context()))
}

// stops ends the controller as its pod ends.
func (c *cluster) stops() {
	c.t.Helper()
	harness.Must(c.t, c.controller.Stop())
}

// log is all that the controllers have said.
func (c *cluster) log() string {
	c.t.Helper()
	return read(c.t, c.controller.LogFile())
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	harness.Must(t, err)
	return string(data)
}

// lists puts what identify printed into the inventory.
func (c *cluster) lists(entry string) {
	c.t.Helper()
	c.inventory.WriteString("---\n" + entry)
	harness.Must(c.t, controllerprocess.SetInventory(c.t.Context(), c.ControlPlane, []byte(c.inventory.String())))
}

// record returns the record of a node, nil if there is none.
func (c *cluster) record(node string) *v1alpha1.NodeAttestation {
	c.t.Helper()
	list := &v1alpha1.NodeAttestationList{}
	harness.Must(c.t, c.records.List(c.t.Context(), list, client.InNamespace(namespace), client.MatchingFields{"spec.nodeName": node}))
	switch len(list.Items) {
	case 0:
		return nil
	case 1:
		return &list.Items[0]
	}
	c.t.Fatalf("%d records of %s", len(list.Items), node)
	return nil
}

// replace replaces a program as a package manager does: running processes keep the old one.
func replace(t *testing.T, from, to string) {
	t.Helper()
	// by another process: see copyProgram of the test bed
	const script = `cp -- "$1" "$2.new" && mv -- "$2.new" "$2"`
	if out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "sh", "-c", script, "sh", from, to).CombinedOutput(); err != nil {
		t.Fatalf("replace %s: %v\n%s", to, err, out)
	}
}
