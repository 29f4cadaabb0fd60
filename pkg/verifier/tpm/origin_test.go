// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/elliptic"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	node "github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm"
)

const originName = "node-csr-a"

var originRequest = []byte("request")

// An origin is taken from a TPM, for its name and its request.
func TestOriginOfATPM(t *testing.T) {
	m := boot(t, swtpm.Options{})
	origin := run(m, func(t *node.TPM) (attestation.Origin, error) {
		ak, quote, err := t.Origin(attestation.OriginData(originName, originRequest))
		return attestation.Origin{Version: attestation.VersionTPM, AKPublic: ak, Quote: quote.Attest, Signature: quote.Signature}, err
	})
	name, err := Origin(string(must(origin.Marshal())), originName, originRequest)
	if err != nil || !bytes.Equal(name, nameOf(origin.AKPublic)) {
		t.Errorf("%x, %v", name, err)
	}
}

// Whatever is copied from elsewhere shows nothing.
func TestOriginRefuses(t *testing.T) {
	k, other := theKit(), newKey(elliptic.P256())
	quote := func(change func(*attest)) []byte {
		a := attest{magic: 0xff544347, kind: 0x8018, signer: make([]byte, 34), extra: attestation.OriginData(originName, originRequest), digest: make([]byte, 32)}
		call(change, &a)
		return a.marshal()
	}
	signed := func(quote []byte) attestation.Origin {
		return attestation.Origin{Version: attestation.VersionTPM, AKPublic: akPublic(&k.ak.PublicKey), Quote: quote, Signature: sign(k.ak, quote)}
	}
	changed := func(change func(*attestation.Origin)) string {
		o := signed(quote(nil))
		change(&o)
		return string(must(o.Marshal()))
	}
	good := changed(func(*attestation.Origin) {})
	for title, c := range map[string]struct {
		annotation, name string
		request          []byte
		taken            bool
	}{
		"good":                      {good, originName, originRequest, true},
		"another name":              {good, "node-csr-b", originRequest, false},
		"another request":           {good, originName, []byte("requests"), false},
		"none":                      {"", originName, originRequest, false},
		"not canonical":             {good + " ", originName, originRequest, false},
		"another's signature":       {changed(func(o *attestation.Origin) { o.Signature = sign(other, o.Quote) }), originName, originRequest, false},
		"another's AK":              {changed(func(o *attestation.Origin) { o.AKPublic = akPublic(&other.PublicKey) }), originName, originRequest, false},
		"an EK as AK":               {changed(func(o *attestation.Origin) { o.AKPublic = ekPublic("ecc-p256", k.ekKeys["ecc-p256"]) }), originName, originRequest, false},
		"a key that is no AK":       {changed(func(o *attestation.Origin) { o.AKPublic = tpm2.Marshal(tpm2.ECCSRKTemplate) }), originName, originRequest, false},
		"no signature":              {changed(func(o *attestation.Origin) { o.Signature = []byte{1} }), originName, originRequest, false},
		"a quote that does not end": {changed(func(o *attestation.Origin) { *o = signed(append(quote(nil), 0)) }), originName, originRequest, false},
		"not made by a TPM":         {changed(func(o *attestation.Origin) { *o = signed(quote(func(a *attest) { a.magic++ })) }), originName, originRequest, false},
		"no quote":                  {changed(func(o *attestation.Origin) { *o = signed(quote(func(a *attest) { a.kind-- })) }), originName, originRequest, false},
		"a proof's quote": {changed(func(o *attestation.Origin) {
			*o = signed(quote(func(a *attest) {
				a.extra = attestation.Transcript{ProofName: originName}.MAC(make([]byte, 32))
			}))
		}), originName, originRequest, false},
	} {
		name, err := Origin(c.annotation, c.name, c.request)
		if (err == nil) != c.taken || (name != nil) != c.taken {
			t.Errorf("%s: %x, %v", title, name, err)
		}
		if c.taken && !bytes.Equal(name, nameOf(akPublic(&k.ak.PublicKey))) {
			t.Errorf("%s: of another AK", title)
		}
	}
}

// Nobody else's name or request passes, however the annotation is bent.
func FuzzOrigin(f *testing.F) {
	k := theKit()
	quote := attest{magic: 0xff544347, kind: 0x8018, signer: make([]byte, 34), extra: attestation.OriginData(originName, originRequest), digest: make([]byte, 32)}.marshal()
	good := must(attestation.Origin{Version: attestation.VersionTPM, AKPublic: akPublic(&k.ak.PublicKey), Quote: quote, Signature: sign(k.ak, quote)}.Marshal())
	f.Add(string(good), originName, originRequest)
	f.Add("{}", originName, originRequest)
	f.Fuzz(func(t *testing.T, annotation, name string, request []byte) {
		ak, err := Origin(annotation, name, request)
		if (err == nil) != (ak != nil) {
			t.Fatal("an AK and an error, or neither")
		}
		if bytes.Equal(ak, nameOf(akPublic(&k.ak.PublicKey))) && (name != originName || !bytes.Equal(request, originRequest)) {
			t.Fatal("the TPM has not quoted this")
		}
	})
}
