// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"errors"
	"maps"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const auditManifests = manifests + "-audit"

// rendered are the objects that kustomize makes of a folder, by kind, namespace and name.
func rendered(t *testing.T, folder string) map[string]*unstructured.Unstructured {
	t.Helper()
	out, err := shared.RunKubectl(t.Context(), shared.adminKubeconfig, "kustomize", folder)
	harness.Must(t, err)
	objects := map[string]*unstructured.Unstructured{}
	for text := range strings.SplitSeq(out, "\n---\n") {
		object := &unstructured.Unstructured{}
		harness.Must(t, yaml.Unmarshal([]byte(text), &object.Object))
		objects[object.GetKind()+" "+object.GetNamespace()+"/"+object.GetName()] = object
	}
	return objects
}

// The set for audit mode is the complete set, with two changes. It refuses nothing, and lacks the
// rights that audit mode does not use. It has every object of the complete set: a GitOps tool that
// prunes would delete what is missing.
func TestAuditSetIsACompleteSetLessEnforcement(t *testing.T) {
	complete, audit := rendered(t, manifests), rendered(t, auditManifests)
	var removed, changed []string
	for name, object := range complete {
		switch other, ok := audit[name]; {
		case !ok:
			removed = append(removed, object.GetKind())
		case !reflect.DeepEqual(object, other):
			changed = append(changed, name)
		}
		delete(audit, name)
	}
	for name := range audit {
		t.Errorf("added: %s", name)
	}
	counts := map[string]int{}
	for _, kind := range removed {
		counts[kind]++
	}
	var policies int
	for _, object := range complete {
		if object.GetKind() == "ValidatingAdmissionPolicy" {
			policies++
		}
	}
	if want := map[string]int{"ValidatingAdmissionPolicy": policies, "ValidatingAdmissionPolicyBinding": policies}; policies < 7 || !maps.Equal(counts, want) {
		t.Errorf("removed: %v, not %v", counts, want)
	}
	slices.Sort(changed)
	if want := []string{"ClusterRole /" + account, "Deployment " + namespace + "/" + account, "Role " + namespace + "/" + account}; !slices.Equal(changed, want) {
		t.Errorf("changed: %q, not %q", changed, want)
	}
}

// Applied as it is, the set for audit mode leaves a cluster unchanged. The controller's
// configuration file does not mention audit mode. The controller decides and reports, and touches
// no request but rehearsals, whose verdicts it writes. Kubelets get certificates as before. The
// controller is refused nothing, and has no right that it does not use.
func TestAuditTouchesNothing(t *testing.T) {
	t.Parallel()
	l := newLive(t)
	l.kubectl(t, "apply", "--server-side", "--validate=strict", "-k", auditManifests)
	deployment, err := l.admin.AppsV1().Deployments(namespace).Get(t.Context(), account, metav1.GetOptions{})
	harness.Must(t, err)
	l.args = auditArgs(t, deployment)
	// Objects that the configuration names, and that do not exist, are in a condition from the
	// start on.
	l.start(t, nil)
	l.kubectl(t, "wait", "--for=jsonpath={.status.conditions[?(@.type==\"NodeAttestationSourcesUsable\")].reason}=SourceUnusable", "namespace/"+namespace, "--timeout=60s")
	message := l.kubectl(t, "get", "namespace", namespace, "--output=jsonpath={.status.conditions[?(@.type==\"NodeAttestationSourcesUsable\")].message}")
	for _, name := range []string{controllerprocess.Inventory, controllerprocess.CASecret} {
		if !strings.Contains(message, name) {
			t.Errorf("%s is missing, and the condition says %s", name, message)
		}
	}
	harness.Must(t, controllerprocess.Provide(t.Context(), l.ControlPlane))
	harness.Must(t, l.StartControllerManager(t.Context()))
	m := l.newMachine(t, "audited")
	l.inventoried(t, m)
	unlisted, impostor := l.newMachine(t, "unlisted"), l.newMachine(t, m.Name)
	l.startReady(t, nil)
	m.begin(t) // and gets no answer
	hopelessly := []string{l.file(t, tpmSigner, hopeless), l.file(t, tpmSigner, hopelessProof)}
	kubelets := l.file(t, builtinSigner)
	m.rehearses(t, 0, "passed: this machine would get a certificate for the node audited")
	unlisted.rehearses(t, reason.WaitingForSigner.Code(), "has not sent a challenge yet: MachineNotFound")
	impostor.rehearses(t, reason.RequestDenied.Code(), "NodeNameMismatch")
	harness.Eventually(t, patience, "its hello is filed", func() bool { return len(l.ofNode(t, helloSigner, m.Name)) > 0 })
	l.isDecided(t, l.ofNode(t, helloSigner, m.Name)[0].Name, `outcome="Challenge"`)
	for _, name := range hopelessly {
		l.isDecided(t, name, `outcome="Deny"`)
	}
	// In passing, the API server is one that does not send what there is at the start of a watch.
	l.setEnv(t, noWatchList+"=false")
	l.startReady(t, nil)
	again := l.file(t, tpmSigner, hopeless)
	l.isDecided(t, again, `outcome="Deny"`)
	harness.Eventually(t, patience, "an Event on "+again, func() bool {
		list, err := l.admin.EventsV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "regarding.name=" + again})
		harness.Must(t, err)
		return len(list.Items) > 0
	})
	l.kubectl(t, "wait", "--for=jsonpath={.status.conditions[?(@.type==\"NodeAttestationPoliciesInForce\")].reason}=AuditMode", "namespace/"+namespace, "--timeout=20s")
	// If they were applied too early, the policies would lock out all nodes.
	policies := filepath.Join(module, "packaging", "kubernetes", "policies.yaml")
	l.kubectl(t, "apply", "--server-side", "--filename="+policies)
	l.kubectl(t, "wait", "--for=jsonpath={.status.conditions[?(@.type==\"NodeAttestationPoliciesInForce\")].reason}=PoliciesLockNodesOut", "namespace/"+namespace, "--timeout=60s")
	l.kubectl(t, "delete", "--filename="+policies)
	l.kubectl(t, "wait", "--for=jsonpath={.status.conditions[?(@.type==\"NodeAttestationPoliciesInForce\")].reason}=AuditMode", "namespace/"+namespace, "--timeout=60s")
	l.stop(t)

	for _, csr := range l.requests(t) {
		if attestation.IsRehearsalSigner(csr.Spec.SignerName) {
			if len(csr.Annotations) == 0 || len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0 {
				t.Errorf("a rehearsal: %s: %v %+v", csr.Name, csr.Annotations, csr.Status)
			}
			continue
		}
		if csr.Name != kubelets && (len(csr.Status.Conditions) > 0 || len(csr.Annotations) > 0) {
			t.Errorf("touched: %s: %v %+v", csr.Name, csr.Annotations, csr.Status)
		}
	}
	l.reasonOf(t, kubelets, certificatesv1.CertificateApproved)
	harness.Eventually(t, patience, "the kubelet has its certificate", func() bool { return len(l.get(t, kubelets).Status.Certificate) > 0 })
	if records := l.kubectl(t, "get", "nodeattestations", "--all-namespaces", "--output=name"); records != "" {
		t.Errorf("records: %s", records)
	}
	l.rightsAreExact(t)
}

// rehearses runs the command rehearse, and checks its exit code and what it prints.
func (m *machine) rehearses(t *testing.T, code int, says string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), m.Plugin, append([]string{"rehearse", "--timeout=10s"}, m.Flags()...)...).CombinedOutput()
	got := 0
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		harness.Must(t, err)
	}
	if got != code || !strings.Contains(string(out), says) {
		t.Errorf("%s: exit code %d, want %d and %q: %s", m.Name, got, code, says, out)
	}
}

// isDecided waits for the line of the controller's log about a request.
func (l *live) isDecided(t *testing.T, name, as string) {
	t.Helper()
	harness.Eventually(t, patience, name+" is decided on", func() bool {
		for line := range strings.Lines(l.log(t, 0)) {
			if strings.Contains(line, name) && strings.Contains(line, as) {
				return true
			}
		}
		return false
	})
}

// auditArgs are the arguments that the Deployment has beside those that the tests' process gets
// another way.
func auditArgs(t *testing.T, deployment *appsv1.Deployment) []string {
	t.Helper()
	i := slices.IndexFunc(deployment.Spec.Template.Spec.Containers, func(c corev1.Container) bool { return c.Name == "controller" })
	args := slices.DeleteFunc(slices.Clone(deployment.Spec.Template.Spec.Containers[i].Args), func(arg string) bool {
		return strings.HasPrefix(arg, "--config=") || strings.HasPrefix(arg, "--leader-identity=")
	})
	if !slices.Equal(args, []string{"--audit"}) {
		t.Fatalf("arguments %q", args)
	}
	return args
}
