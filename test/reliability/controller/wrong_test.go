// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The oracle reports each kind of wrong decision, and no right one.
func TestOracle(t *testing.T) {
	ca, err := testbed.NewCA("ca")
	harness.Must(t, err)
	request := func(name string) *certificatesv1.CertificateSigningRequest {
		key, _, err := csr.NewKey()
		harness.Must(t, err)
		der, err := csr.PKCS10(csr.Identity{NodeName: name}, key)
		harness.Must(t, err)
		content, err := attestation.Request{PKCS10: der, Provider: tpm.Name, Data: []byte("{}")}.Marshal()
		harness.Must(t, err)
		object := csr.Object(csr.NewName(), tpm.SignerName, content, key.Public(), nil)
		object.Status.Certificate, err = ca.SignCSR(der, time.Now(), time.Now().Add(time.Hour))
		harness.Must(t, err)
		return object
	}
	denied := func(reason string) *certificatesv1.CertificateSigningRequest {
		object := request("a")
		object.Status.Certificate = nil
		object.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied, Reason: reason}}
		return object
	}
	other := request("a")
	other.Status.Certificate = request("a").Status.Certificate // for another key
	for what, c := range map[string]struct {
		by     filing
		object *certificatesv1.CertificateSigningRequest
		wrong  bool
	}{
		"its own":              {filing{honest, "a"}, request("a"), false},
		"another's":            {filing{honest, "a"}, request("b"), true},
		"for another key":      {filing{honest, "a"}, other, true},
		"an impostor's":        {filing{impostor, "a"}, request("a"), true},
		"of the flood":         {filing{flooder, ""}, request("a"), true},
		"filed by nobody":      {filing{}, request("a"), true},
		"a hello that ends":    {filing{honest, "a"}, denied(attestation.ReasonCompleted), false},
		"a denial":             {filing{honest, "a"}, denied("NodeNameMismatch"), true},
		"an impostor's denial": {filing{impostor, "a"}, denied("NodeNameMismatch"), false},
	} {
		o := &oracle{c: &campaign{}, report: t.Logf, all: map[string]*verdict{}, reasons: map[author]map[string]int{honest: {}, impostor: {}, flooder: {}}}
		o.filed(c.object.Name, c.by)
		for range 2 {
			o.see(c.object)
		}
		if o.failed() != c.wrong {
			t.Errorf("%s: wrong decision: %t", what, o.failed())
		}
		if c.wrong || len(c.object.Status.Certificate) == 0 {
			continue
		}
		again := request("a")
		again.Name, again.Spec = c.object.Name, c.object.Spec
		if o.see(again); !o.failed() {
			t.Errorf("%s: a second certificate was not noticed", what)
		}
	}
}
