// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/pem"
	"regexp"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// settled is how long a decision may take while other suites run.
const settled = 2 * time.Minute

// Each command of docs/adopting.md is typed as it stands there, in a cluster with a node that stock
// kubeadm has joined. What the document says of each step is true. In audit mode kubelets renew,
// and nothing is written. A check before a step fails if the step would do harm. At the end the
// node has attested.
func TestAdopting(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	machine := c.newWorker(t)
	o := newOperator(t, c, machine)
	o.types(t, `ssh "root@$WORKER" "$(kubeadm token create --print-join-command)"`)
	stock := len(c.list(t))

	commands := read(t, "adopting.md").commands
	block := func(begins string) string {
		t.Helper()
		if len(commands) == 0 || !strings.HasPrefix(commands[0], begins) {
			t.Fatalf("the next commands do not begin with %q: %q", begins, commands)
		}
		command := commands[0]
		commands = commands[1:]
		return command
	}
	types := func(begins string) string {
		t.Helper()
		return o.types(t, block(begins))
	}

	// 1. Audit.
	types("mkdir --parents cluster/machines")
	harmless := block("kubectl kustomize cluster")
	if out := o.types(t, harmless); out != "" {
		t.Errorf("not safe: %s", out)
	}
	if out := o.types(t, strings.Replace(harmless, "kustomize cluster", "kustomize packaging/kubernetes", 1)); !strings.Contains(out, "ValidatingAdmission") || !strings.Contains(out, "- sign") {
		t.Errorf("the check sees no harm in anything: %s", out)
	}
	types("kubectl apply --server-side -k cluster\nkubectl create secret tls")
	if renewed := c.renews(t); renewed != "AutoApproved" {
		t.Errorf("in audit a kubelet's request was approved for the reason %s", renewed)
	}
	if out := types("kubectl get csr"); strings.Contains(out, "Pending") || strings.Count(out, "Approved,Issued") != stock+1 {
		t.Errorf("kubelets do not renew: %s", out)
	}

	// 2. List.
	types("scp dist/")
	types("ssh \"root@$WORKER\" kubelet-authenticator identify")
	if out := o.types(t, "grep --count '^nodeName: ' cluster/inventory.yaml"); out != "1\n" {
		t.Errorf("%s machines are listed", out)
	}
	rehearsed := o.types(t, block("ssh \"root@$WORKER\" kubelet-authenticator rehearse"))
	if !strings.Contains(rehearsed, "passed: this machine would get a certificate for the node "+worker) {
		t.Errorf("the rehearsal: %s", rehearsed)
	}
	if out := types("kubectl attest status"); !regexp.MustCompile(`(?m)^` + worker + ` +Rehearsed .* RehearsalPassed +<none>$`).MatchString(out) {
		t.Errorf("status shows no rehearsal: %s", out)
	}
	if out := types("kubectl attest pending"); !strings.Contains(out, "no request waits") || !strings.Contains(out, "WARNING") || !strings.Contains(out, "machines: []") {
		t.Errorf("somebody asks already: %s", out)
	}

	// 3. Enforce.
	if out := types("kubectl get csr --output=custom-columns"); strings.Contains(strings.ReplaceAll(out, "cluster.x-k8s.io/attestation-rehearsal", ""), "cluster.x-k8s.io") || !strings.Contains(out, certificatesv1.KubeAPIServerClientKubeletSignerName) {
		t.Errorf("signers: %s", out)
	}
	if out := types("kubectl attest check"); !strings.Contains(out, "audit mode") || strings.Count(out, "warning ") != 3 {
		t.Errorf("other checks than the document says are not ok: %s", out)
	}
	allListed := block("kubectl attest check |")
	nodes := c.Client().CoreV1().Nodes()
	_, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "late"}}, metav1.CreateOptions{})
	harness.Must(t, err)
	if out, err := o.try(t, allListed); err == nil {
		t.Errorf("with a Node that nobody has listed it is safe, too: %s", out)
	}
	harness.Must(t, nodes.Delete(t.Context(), "late", metav1.DeleteOptions{}))
	o.types(t, allListed)
	types("sed --in-place 's|packaging/kubernetes-audit")
	if policies := o.types(t, "kubectl get validatingadmissionpolicies --output=name"); strings.Contains(policies, "node-attestation") {
		t.Errorf("something is enforced before its step: %s", policies)
	}
	types("kubectl apply --server-side -k cluster\nkubectl rollout status")
	if renewed := c.renews(t); renewed != "UnattestedNode" {
		t.Errorf("a kubelet's request was approved for the reason %s", renewed)
	}

	if out := types("kubectl attest status"); !strings.Contains(out, "no request waits") || strings.Contains(out, "Attested") || strings.Contains(out, "Claimed") {
		t.Errorf("somebody has attested or waits: %s", out)
	}

	// 4. Move.
	rehearses := block("ssh \"root@$WORKER\" kubelet-authenticator rehearse")
	if out, err := o.try(t, strings.TrimSpace(rehearses)+" --node-name="+worker+"-0 --timeout=10s"); err == nil || !strings.Contains(out, "is that of the node "+worker) {
		t.Errorf("another name passes: %v, %s", err, out)
	}
	o.types(t, rehearses)
	for _, begins := range []string{"kubectl drain", "ssh \"root@$WORKER\" install"} {
		types(begins)
	}
	// record, Node and machine
	if out := types("kubectl get nodeattestations"); strings.Count(out, worker) != 3 {
		t.Errorf("there is no record of %s: %s", worker, out)
	}
	if out := o.types(t, "cat cluster/config.yaml"); strings.Contains(out, worker) || !strings.Contains(out, "- "+hostName) {
		t.Errorf("unattestedNodes: %s", out)
	}
	harness.Eventually(t, settled, "both replicas read unattestedNodes again", func() bool {
		logs := 0
		for _, log := range c.podLogs(t) {
			if strings.Contains(log, `unattestedNodes has changed`) && strings.Contains(log, `removed="1: `+worker) {
				logs++
			}
		}
		return logs == 2
	})

	// 5. Remove.
	if out := types("kubectl wait --for=condition=NodeAttestationPoliciesInForce"); strings.Contains(out, "Pending") {
		t.Errorf("requests wait: %s", out)
	}
	types("kubectl delete clusterrolebinding")
	if out := o.types(t, "kubectl attest status "+worker); !attested.MatchString(out) {
		t.Errorf("status: %s", out)
	}
	check := block("kubectl attest check")
	harness.Eventually(t, settled, "no check warns", func() bool { // the last restart goes on
		out, err := o.try(t, check)
		return err == nil && !strings.Contains(out, "warning ")
	})

	// The way back.
	types("kubectl delete --filename=packaging/kubernetes/policies.yaml")
	out := o.types(t, "kubectl get validatingadmissionpolicies --output=name && kubectl get deployments --namespace=node-attestation-system --output=yaml")
	if strings.Contains(out, "validatingadmissionpolicy.") || !strings.Contains(out, "- --audit\n") {
		t.Errorf("enforcement has not ended: %s", out)
	}
	if len(commands) > 0 {
		t.Errorf("not typed: %q", commands)
	}
}

// renews files what the worker's kubelet files to renew, and returns the reason for which it was
// approved.
func (c *cluster) renews(t *testing.T) (reason string) {
	t.Helper()
	config := c.AdminConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + worker, Groups: []string{"system:nodes", "system:authenticated"}}
	client, err := kubernetes.NewForConfig(config)
	harness.Must(t, err)
	key, _, err := csr.NewKey()
	harness.Must(t, err)
	der, err := csr.PKCS10(csr.Identity{NodeName: worker}, key)
	harness.Must(t, err)
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	request := csr.Object(csr.NewName(), certificatesv1.KubeAPIServerClientKubeletSignerName, content, key.Public(), nil)
	requests := client.CertificatesV1().CertificateSigningRequests()
	_, err = requests.Create(t.Context(), request, metav1.CreateOptions{})
	harness.Must(t, err)
	harness.Eventually(t, settled, "the kubelet has a certificate", func() bool {
		now, err := requests.Get(t.Context(), request.Name, metav1.GetOptions{})
		harness.Must(t, err)
		if len(now.Status.Conditions) != 1 || len(now.Status.Certificate) == 0 {
			return false
		}
		reason = now.Status.Conditions[0].Reason
		return true
	})
	return reason
}
