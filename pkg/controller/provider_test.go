// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// A hello is judged by what it is itself, even if another is given as the one that it refers to; a proof, by that one.
func TestAHelloIsJudgedByItself(t *testing.T) {
	v, err := tpm.New(tpm.Config{
		NamedEKs: true, ClusterUID: "c", Keys: tpm.Keys{Current: "k", ByID: map[string][]byte{"k": []byte("0123456789abcdef0123456789abcdef")}},
		PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{7}},
	})
	if err != nil {
		t.Fatal(err)
	}
	provider := TPM{Verifier: v}
	judge := func(request, hello *certificatesv1.CertificateSigningRequest) string {
		evidence := provider.Judge(t.Context(), Question{Request: request, Hello: hello, Named: true, Now: time.Now()})
		if evidence.Err == nil || evidence.EK != "" {
			t.Fatalf("%+v", evidence)
		}
		return evidence.Err.Error()
	}
	hello, proof := requestWith(attestation.HelloSignerName), requestWith("example.com/signer")
	nameless := requestWith(attestation.HelloSignerName)
	nameless.Name = ""
	if alone, other := judge(hello, nil), judge(hello, nameless); alone != other {
		t.Errorf("%q with another hello, %q without", other, alone)
	}
	if one, other := judge(proof, hello), judge(proof, nameless); one == other {
		t.Errorf("%q with each hello", one)
	}
}
