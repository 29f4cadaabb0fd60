// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// metal3 is a Cluster of Metal3's infrastructure provider (CAPM3). Each test plays CAPM3 and the
// baremetal-operator.
type metal3 struct{ *cluster }

func metal3Object(kind, namespace, name string) *unstructured.Unstructured {
	u := infraObject(kind, namespace, name)
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: u.GroupVersionKind().Group, Version: "v1beta2", Kind: kind})
	return u
}

// newMetal3 makes the Cluster, and starts the released controller for it with the rights of
// packaging/cluster-api/optional/metal3.yaml.
func newMetal3(t *testing.T, w *world) metal3 {
	t.Helper()
	if _, err := w.RunKubectl(t.Context(), w.admin, "apply", "--server-side", "--validate=strict", "--filename="+filepath.Join(module, "packaging/cluster-api/optional/metal3.yaml")); err != nil {
		t.Fatal(err)
	}
	c := w.newCluster(t, "metal3", func(c *cluster) {
		c.infra = metal3Object("Metal3Cluster", c.namespace, c.name)
		c.infra.Object["spec"] = map[string]any{"cloudProviderEnabled": false}
		c.object.Spec.InfrastructureRef.Kind = "Metal3Cluster"
	})
	w.start(t, onPlatform("metal3"))
	return metal3{c}
}

// host makes a BareMetalHost with the EK of a computer, if there is one. The Metal3Machine of that
// name consumes it.
func (c metal3) host(t *testing.T, name string, hardware *computer, consumer, state string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{}}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "metal3.io", Version: "v1alpha1", Kind: "BareMetalHost"})
	u.SetNamespace(c.namespace)
	u.SetName(name)
	u.SetLabels(map[string]string{clusterv1.ClusterNameLabel: c.name})
	if hardware != nil {
		u.SetAnnotations(map[string]string{attestation.AnnotationEK: "sha256:" + hardware.ek})
	}
	u.Object["spec"] = c.consumedBy(consumer)
	c.create(t, u)
	c.turns(t, u, state)
	return u
}

func (c metal3) consumedBy(name string) map[string]any {
	return map[string]any{"online": true, "consumerRef": map[string]any{
		"apiVersion": "infrastructure.cluster.x-k8s.io/v1beta2", "kind": "Metal3Machine", "namespace": c.namespace, "name": name,
	}}
}

// turns gives a host another state.
func (c metal3) turns(t *testing.T, host *unstructured.Unstructured, state string) {
	t.Helper()
	updateStatus(t, c.client, host, func(u *unstructured.Unstructured) {
		u.Object["status"] = map[string]any{"provisioning": map[string]any{"state": state}}
	})
}

// on makes the Machine one of Metal3 on a host, without an EK in its annotation. It has no provider
// ID, as until the Node exists.
func (c metal3) on(host string) func(*machine) {
	return func(m *machine) {
		m.providerID = "metal3://" + c.namespace + "/" + host + "/" + m.name
		m.object.Annotations = nil
		m.object.Spec.ProviderID, m.object.Status.Initialization.InfrastructureProvisioned = "", nil
		m.object.Spec.InfrastructureRef.Kind = "Metal3Machine"
		m.infra = metal3Object("Metal3Machine", c.namespace, m.name)
		m.infra.Object["spec"], m.infra.Object["status"] = map[string]any{}, map[string]any{}
	}
}

// command runs the command of that title in docs/platforms/metal3.md. Instead of ssh, it runs the
// plugin of a computer here.
func (c metal3) command(t *testing.T, title, host string, hardware *computer) string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(module, "docs/platforms/metal3.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(page), "<!-- "+title+" -->\n```sh\n")
	block, _, found := strings.Cut(block, "```")
	if !found {
		t.Fatalf("the page has no command %s", title)
	}
	harness.Must(t, shared.built())
	dir := t.TempDir()
	for name, script := range map[string]string{
		"ssh":     "shift 2; exec '" + shared.plugin + "' \"$@\" '" + strings.Join(harness.MachineOf(hardware.dir, hardware.chip, shared.plugin, host).Flags(), "' '") + "'",
		"kubectl": "exec '" + c.Kubectl() + "' '--kubeconfig=" + c.admin + "' \"$@\"",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-c", block)
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "HOST="+host, "NAMESPACE="+c.namespace, "ADDRESS=192.0.2.1")
	r := harness.Run(t, cmd)
	if r.Code != 0 {
		t.Fatalf("%s: exit code %d: %s %s", title, r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// The BareMetalHost names the TPM of a Machine without annotation, before the Machine has a
// provider ID and after.
func TestMetal3(t *testing.T) {
	t.Parallel()
	c := newMetal3(t, newWorld(t, shared.management))

	// A Machine without provider ID. Another TPM is refused.
	hardware := newComputer(t)
	host := c.host(t, "host-1", nil, "first", "provisioned")
	c.command(t, "annotate", "host-1", hardware)
	if out := c.command(t, "check", "host-1", hardware); out != "host-1: equal\n" {
		t.Errorf("the check says %q", out)
	}
	first := c.newMachineOf(t, hardware, "first", c.on("host-1"))
	first.impostor(t).denied(t, verifier.ReasonNodeNameMismatch)
	first.enrols(t)
	if record := first.remembered(t); record.Spec.ProviderID != first.providerID {
		t.Errorf("the record has the provider ID %q, not %q", record.Spec.ProviderID, first.providerID)
	}

	// CAPM3 sets the provider ID when the Node exists. The machine still has its answer.
	first.registered(t)
	update(t, c.client, first.object, func(o *clusterv1.Machine) { o.Spec.ProviderID = first.providerID })
	updateStatus(t, c.client, first.object, func(o *clusterv1.Machine) { o.Status.Initialization.InfrastructureProvisioned = new(true) })
	first.removeState(t)
	first.enrols(t)

	// The next Metal3Machine has the host, and its TPM.
	if err := c.client.Delete(t.Context(), first.object); err != nil {
		t.Fatal(err)
	}
	update(t, c.client, host, func(u *unstructured.Unstructured) { u.Object["spec"] = c.consumedBy("second") })
	first.removeState(t)
	second := c.newMachineOf(t, hardware, "second", c.on("host-1"))
	second.enrols(t)
}

// A request that waits for its host to be provisioned gets nothing if the host goes to another
// Metal3Machine meanwhile. The other one gets its certificate.
func TestMetal3ConsumerChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := newMetal3(t, w)

	hardware := newComputer(t)
	host := c.host(t, "host-1", hardware, "taken", "provisioning")
	taken := c.newMachineOf(t, hardware, "taken", c.on("host-1")).begins(t)
	taken.waits(t, 2*time.Second)
	update(t, c.client, host, func(u *unstructured.Unstructured) { u.Object["spec"] = c.consumedBy("next") })
	c.turns(t, host, "provisioned")
	next := c.newMachineOf(t, hardware, "next", c.on("host-1")).begins(t)
	next.within(t, platformInterval+decided+slack)
	select {
	case <-taken.done:
		if taken.err == nil {
			t.Error("the Machine that lost its host has a certificate")
		}
	case <-time.After(time.Second):
	}

	// A provider ID of the legacy form, and a host without annotation: the log says why.
	legacy := c.newMachine(t, "legacy", func(m *machine) {
		c.on("host-1")(m)
		m.object.Spec.ProviderID = "metal3://0b3f7c1e-8a6d-4e52-9c47-1f6f5f0a2d3b"
	}).begins(t)
	bare := c.newMachine(t, "bare", c.on("host-2"))
	unannotated := c.host(t, "host-2", nil, "bare", "provisioned")
	waiting := bare.begins(t)
	waiting.waits(t, platformInterval+slack)
	legacy.waits(t, time.Second)
	for _, says := range []string{"has the legacy form", "has no annotation " + attestation.AnnotationEK} {
		if !bytes.Contains(logOf(t, w.controllers[0]), []byte(says)) {
			t.Errorf("the log does not say %q", says)
		}
	}
	update(t, c.client, unannotated, func(u *unstructured.Unstructured) {
		u.SetAnnotations(map[string]string{attestation.AnnotationEK: strings.ToLower(bare.ek)})
	})
	waiting.within(t, platformInterval+decided+slack)
}
