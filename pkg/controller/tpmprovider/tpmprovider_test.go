// SPDX-License-Identifier: Apache-2.0

package tpmprovider

import (
	"bytes"
	"errors"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// newTestVerifier accepts the EKs that its caller names.
func newTestVerifier(t *testing.T) *tpm.Verifier {
	t.Helper()
	v, err := tpm.New(tpm.Config{
		NamedEKs: true, ClusterUID: "c", Keys: tpm.Keys{Current: "k", ByID: map[string][]byte{"k": []byte("0123456789abcdef0123456789abcdef")}},
		PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{7}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// A proof without its hello is refused if it does not parse, or if its challenge could no longer be
// answered. Otherwise, and while there is no verifier, nothing is decided.
func TestAProofWithoutItsHello(t *testing.T) {
	const lifetime = 10 * time.Minute // newTestVerifier's
	expires := time.Unix(1800000000, 0)
	proof, err := attestation.Proof{
		Version: attestation.VersionTPM, HelloName: "h", HelloUID: "u", KeyID: "k", Expires: expires.Unix(), PCRBank: "sha256",
		PCRs: []attestation.PCR{{Index: 0, Value: make([]byte, 32)}, {Index: 7, Value: make([]byte, 32)}}, Quote: []byte{1}, Signature: []byte{1},
	}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	with := func(old, replacement string) []byte {
		changed := bytes.Replace(proof, []byte(old), []byte(replacement), 1)
		if bytes.Equal(changed, proof) {
			t.Fatalf("no %s in %s", old, proof)
		}
		return changed
	}
	verifyAt := func(p Provider, data []byte, created, now time.Time) verifier.Evidence {
		request := requestWith("example.com/signer")
		request.CreationTimestamp.Time = created
		if request.Spec.Request, err = (attestation.Request{PKCS10: []byte{1}, Provider: "tpm", Data: data}).Marshal(); err != nil {
			t.Fatal(err)
		}
		return p.Verify(t.Context(), evidence.Question{Request: request, Now: now})
	}
	verify := func(p Provider, data []byte) verifier.Evidence {
		return verifyAt(p, data, expires.Add(-lifetime), expires.Add(-lifetime))
	}
	p := Provider{Verifier: newTestVerifier(t)}
	for name, c := range map[string]struct {
		data []byte
		want verifier.Reason
	}{
		"another version":     {with("tpm/v1", "tpm/v2"), tpm.ReasonVersion},
		"another provider's":  {with("tpm/v1", "acme/v1"), tpm.ReasonVersion},
		"no version":          {[]byte("{}"), tpm.ReasonMalformed},
		"white space":         {with(`,"kid"`, `, "kid"`), tpm.ReasonMalformed},
		"white space before":  {append([]byte(" "), proof...), tpm.ReasonMalformed},
		"a line feed after":   {append(bytes.Clone(proof), '\n'), tpm.ReasonMalformed},
		"bytes after":         {append(bytes.Clone(proof), 'x'), tpm.ReasonMalformed},
		"a PCR twice":         {with(`"index":7`, `"index":0`), tpm.ReasonMalformed},
		"a field twice":       {with(`,"kid":"k"`, `,"kid":"k","kid":"k"`), tpm.ReasonMalformed},
		"a field in capitals": {with(`"kid"`, `"KID"`), tpm.ReasonMalformed},
		"an unknown field":    {with(`,"kid"`, `,"more":1,"kid"`), tpm.ReasonMalformed},
		"a missing field":     {with(`,"kid":"k"`, ``), tpm.ReasonMalformed},
		"no hello's name":     {with(`"helloName":"h"`, `"helloName":""`), tpm.ReasonMalformed},
		"a hello":             {with(`"kind":"proof"`, `"kind":"hello"`), tpm.ReasonKind},
		"a challenge":         {with(`"kind":"proof"`, `"kind":"challenge"`), tpm.ReasonKind},
		"of no kind":          {with(`"kind":"proof"`, `"kind":"other"`), tpm.ReasonMalformed},
	} {
		judged := verify(p, c.data)
		var refusals verifier.Refusals
		if !errors.As(judged.Err, &refusals) || refusals.Reason() != c.want || judged.EKUntrusted || judged.EK != "" {
			t.Errorf("%s: %+v, not %s", name, judged, c.want)
		}
		if judged := verify(Provider{}, c.data); judged.Err == nil || evidence.IsVerdict(judged.Err) {
			t.Errorf("%s: judged without challenge keys: %+v", name, judged)
		}
	}
	// The expiry is a claim. A proof whose expiry no controller sets is refused at once, and the
	// others at most a lifetime and two minutes later.
	for name, c := range map[string]struct {
		created, now time.Duration // after the claimed expiry
		want         verifier.Reason
	}{
		"at once":                                  {-lifetime, -lifetime, ""},
		"by the clock of another replica":          {-lifetime - time.Minute, -lifetime - time.Minute, ""},
		"the API server's clock is a minute ahead": {-time.Second + time.Minute, -time.Second, ""},
		"it came in time, and waits":               {-time.Second, time.Minute - time.Second, ""},
		"it came in time, and waited":              {-time.Second, time.Minute, attestation.ReasonExpired},
		"the API server's clock is behind":         {-24 * time.Hour, time.Minute, attestation.ReasonExpired},
		"it came late":                             {0, 0, attestation.ReasonExpired},
		"no time of creation":                      {0, time.Hour, attestation.ReasonExpired},
		"it is said to end later than any does":    {-lifetime - time.Minute - time.Second, -lifetime - time.Minute - time.Second, "AttestationChallengeAhead"},
		"it is said to end in years":               {-24 * time.Hour * 1000, -24 * time.Hour * 1000, "AttestationChallengeAhead"},
	} {
		created := expires.Add(c.created)
		if name == "no time of creation" {
			created = time.Time{}
		}
		judged := verifyAt(p, proof, created, expires.Add(c.now))
		var refusals verifier.Refusals
		if refused := errors.As(judged.Err, &refusals); judged.Err == nil || judged.EKUntrusted || refused != (c.want != "") || refused && refusals.Reason() != c.want {
			t.Errorf("%s: %+v, want %q", name, judged, c.want)
		}
	}
	if judged := verifyAt(p, proof, expires, time.Time{}); judged.Err == nil || evidence.IsVerdict(judged.Err) {
		t.Errorf("without a time: %+v", judged)
	}
}

// A hello is verified by its own content, even if another hello is passed with it. A proof is
// verified with the hello that it refers to.
func TestHelloIsVerifiedByItself(t *testing.T) {
	p := Provider{Verifier: newTestVerifier(t)}
	verify := func(request, hello *certificatesv1.CertificateSigningRequest) string {
		judged := p.Verify(t.Context(), evidence.Question{Request: request, Hello: hello, Named: true, Now: time.Now()})
		if judged.Err == nil || judged.EK != "" {
			t.Fatalf("%+v", judged)
		}
		return judged.Err.Error()
	}
	hello, proof := requestWith(attestation.HelloSignerName), requestWith("example.com/signer")
	nameless := requestWith(attestation.HelloSignerName)
	nameless.Name = ""
	if alone, other := verify(hello, nil), verify(hello, nameless); alone != other {
		t.Errorf("%q with another hello, %q without", other, alone)
	}
	if one, other := verify(proof, hello), verify(proof, nameless); one == other {
		t.Errorf("%q with each hello", one)
	}
}

// Without keys nothing is refused: what cannot be judged waits.
func TestTPMWithoutKeysJudgesNothing(t *testing.T) {
	p := Provider{Latest: func() *tpm.Verifier { return nil }}
	hello := requestWith(attestation.HelloSignerName)
	judged := p.Verify(t.Context(), evidence.Question{Request: hello, Named: true, Now: time.Now()})
	var refusals verifier.Refusals
	if judged.Err == nil || errors.As(judged.Err, &refusals) || judged.EKUntrusted || judged.EK != "" {
		t.Errorf("%+v", judged)
	}
	if _, _, err := p.Challenge(hello, true, time.Now()); err == nil {
		t.Error("it challenges")
	}
	if _, err := p.HelloOf(hello); err == nil {
		t.Error("it reads a proof")
	}
	if p.EK(hello, nil) != "" || len(p.Versions()) != 1 {
		t.Error("it knows something")
	}
}

func requestWith(signer string) *certificatesv1.CertificateSigningRequest {
	r := &certificatesv1.CertificateSigningRequest{}
	r.Name, r.UID, r.Spec.SignerName = "r", "u", signer
	return r
}
