// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/gce"
)

// filedByInstance is a request of worker-1 on Compute Engine, with a token by this Google.
func filedByInstance(t *testing.T, g *google.Google, created time.Time) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: "worker-1"}, key)
	if err != nil {
		t.Fatal(err)
	}
	binding := attestation.Binding{Version: attestation.VersionGCE, SignerName: gce.SignerName, Name: csr.NewName(), PKCS10: pkcs10}
	for _, usage := range csr.Usages(key.Public()) {
		binding.Usages = append(binding.Usages, string(usage))
	}
	vm := google.VM{Project: "some-project", ProjectNumber: 1, Zone: "europe-west1-b", Name: "worker-1", ID: "7"}
	token := g.Key().Sign(g.Key().Header(), vm.Claims(binding.Audience(), true, created))
	document, err := attestation.Identity{Version: attestation.VersionGCE, Statement: token}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	content, err := attestation.Request{PKCS10: pkcs10, Provider: gce.Name, Data: document}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	o := csr.Object(binding.Name, gce.SignerName, content, key.Public(), nil)
	o.APIVersion, o.Kind = certificatesv1.SchemeGroupVersion.String(), "CertificateSigningRequest"
	o.UID, o.CreationTimestamp = "some-uid", metav1.NewTime(created)
	o.Spec.Username, o.Spec.Groups = "system:bootstrap:abcdef", []string{"system:bootstrappers"}
	return o
}

// Evidence of clouds is judged again at the time at which it was filed, months later, without any
// service. What that cannot do says so.
func TestVerifyClouds(t *testing.T) {
	t.Parallel()
	g := google.New("command")
	keys := write(t, string(g.KeySet()))
	created := time.Now().AddDate(0, -3, 0).Truncate(time.Second)
	filed := filedByInstance(t, g, created)
	undated := filed.DeepCopy()
	undated.CreationTimestamp = metav1.Time{}
	role := filed.DeepCopy()
	role.Spec.SignerName = strings.Replace(gce.SignerName, "gce", "ec2-role", 1)
	content, err := attestation.Parse(filed.Spec.Request)
	if err != nil {
		t.Fatal(err)
	}
	content.Provider = "ec2-role"
	if role.Spec.Request, err = content.Marshal(); err != nil {
		t.Fatal(err)
	}
	list := func(entry string) string {
		return write(t, "apiVersion: "+inventory.APIVersion+"\nkind: "+inventory.Kind+"\nmachines:\n- {nodeName: worker-1, "+entry+"}\n")
	}
	byProviderID, byInstance := list("providerID: 'gce://some-project/europe-west1-b/worker-1'"), list("instance: {platform: gce, id: 7}")
	for name, c := range map[string]struct {
		policy, inventory string
		request           *certificatesv1.CertificateSigningRequest
		code              int
		says              string
	}{
		"by provider ID":        {"gce: {keysFile: " + keys + "}", byProviderID, filed, 0, "outcome Approve"},
		"by instance":           {"gce: {keysFile: " + keys + "}", byInstance, filed, 0, "outcome Approve"},
		"another instance":      {"gce: {keysFile: " + keys + "}", list("instance: {platform: gce, id: 8}"), filed, codeRefused, "FAIL"},
		"another project":       {"gce: {keysFile: " + keys + ", projects: [another-project]}", byInstance, filed, codeRefused, "AttestationIdentityInstance"},
		"without its own time":  {"gce: {keysFile: " + keys + "}", byInstance, undated, codeRefused, "AttestationIdentityAge"},
		"keys only by URL":      {"gce: {}", byInstance, filed, codeRefused, "set gce.keysFile"},
		"what STS alone judges": {"ec2Role: {regions: [eu-west-1]}", byInstance, role, codeRefused, "cannot be judged offline"},
	} {
		var stdout, stderr bytes.Buffer
		conf := strings.Replace(good, "tpm: {pcrs: {bank: sha256, indexes: [7]}}", c.policy, 1)
		args := []string{"verify", "--config", write(t, conf), "--inventory", c.inventory, write(t, manifest(t, c.request))}
		code := Program{}.Run(t.Context(), Process{Args: args, Stdout: &stdout, Stderr: &stderr})
		if all := stdout.String() + stderr.String(); code != c.code || !strings.Contains(all, c.says) {
			t.Errorf("%s: exit code %d, want %d and %q:\n%s", name, code, c.code, c.says, all)
		}
	}
}
