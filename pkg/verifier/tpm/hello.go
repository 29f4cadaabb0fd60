// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/ecdsa"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Request is a hello or a proof. Without Created, it counts as filed now.
type Request = verifier.Filed

// VerifiedHello is a hello that passed, so its EK is trusted. Only a proof shows that the TPM with
// this EK has this AK, or that the node has either. The zero value gets no challenge.
type VerifiedHello struct {
	// SignerName is the signer for the proof, as the hello names it.
	SignerName string
	EK         Endorsement
	// AKName is the AK's Name (TPM 2.0 Part 1, "Names"), computed here.
	AKName []byte

	hello    *helloEvaluation
	verifier *Verifier
}

// helloEvaluation is the state of a hello while it is judged. A field is nil if its rule failed.
type helloEvaluation struct {
	request  Request
	content  attestation.Request
	document *attestation.Hello
	ek       *candidateEK
	akName   []byte
	akKey    *ecdsa.PublicKey
	// trusted says that no rule failed.
	trusted bool
}

// errNoTime reports a mistake of the caller.
var errNoTime = errors.New("no time was given")

// ParsedHello is a hello that was parsed and not verified, for one decision: parsing takes longer
// than all rules but the signatures. It is immutable, and may be verified more than once. The zero
// value refuses everything.
type ParsedHello struct {
	hello    helloEvaluation
	refusals verifier.Refusals
	verifier *Verifier
}

// ParseHello parses a hello. That needs neither time nor trust. The methods of the result return
// the errors.
func (v *Verifier) ParseHello(request Request) *ParsedHello {
	o := &ParsedHello{verifier: v}
	o.hello = v.parseHello(&o.refusals, request)
	return o
}

// ClaimedEK returns the fingerprint of the EK that the hello claims, so that the caller can look it
// up. Nothing vouches for it: anybody can claim any EK.
func (parsed *ParsedHello) ClaimedEK() (Fingerprint, error) {
	if err := parsed.refusals.Err(); err != nil {
		return Fingerprint{}, err
	}
	if parsed.hello.ek == nil { // not reached: each failed rule adds a refusal
		return Fingerprint{}, verifier.Refusals{}
	}
	return parsed.hello.ek.Fingerprint, nil
}

// ClaimedEKTemplate returns the name of the template of the EK that the hello claims, "" if
// ClaimedEK fails. Nothing vouches for it.
func (parsed *ParsedHello) ClaimedEKTemplate() string {
	if _, err := parsed.ClaimedEK(); err != nil {
		return ""
	}
	return parsed.hello.ek.template
}

// Verify is Verifier.VerifyHello.
func (parsed *ParsedHello) Verify(namedEKs []Fingerprint, now time.Time) (*VerifiedHello, error) {
	if now.IsZero() {
		return nil, errNoTime
	}
	var refusals verifier.Refusals
	h := parsed.verify(&refusals, namedEKs, now)
	if err := refusals.Err(); err != nil {
		return nil, err
	}
	if !h.trusted { // not reached: each failed rule adds a refusal
		return nil, verifier.Refusals{}
	}
	return &VerifiedHello{SignerName: h.document.SignerName, EK: h.ek.Endorsement, AKName: bytes.Clone(h.akName), hello: h, verifier: parsed.verifier}, nil
}

// parser only parses requests. It has no keys and no roots, so it cannot verify.
var parser = &Verifier{versions: attestation.Versions{attestation.VersionTPM}}

// ClaimedEK is ParsedHello.ClaimedEK, of a hello in any version that this package knows.
func ClaimedEK(request Request) (Fingerprint, error) {
	return parser.ParseHello(request).ClaimedEK()
}

// ClaimedEKTemplate is ParsedHello.ClaimedEKTemplate, of a hello in any version that this package
// knows.
func ClaimedEKTemplate(request Request) string {
	return parser.ParseHello(request).ClaimedEKTemplate()
}

// HelloName returns the name of the hello that a proof refers to, in any version that this package
// knows. Nothing vouches for the name: VerifyProof checks it.
func HelloName(request Request) (string, error) {
	name, _, err := parser.HelloReference(request)
	return name, err
}

// HelloReference returns the name and the UID of the hello that a proof refers to, so that the
// caller can fetch it. Nothing vouches for them: VerifyProof checks them.
func (v *Verifier) HelloReference(request Request) (name, uid string, err error) {
	var refusals verifier.Refusals
	p := v.parseProof(&refusals, request)
	if err := refusals.Err(); err != nil {
		return "", "", err
	}
	return p.document.HelloName, p.document.HelloUID, nil
}

// VerifyHello verifies a hello. Its error is verifier.Refusals.
//
// namedEKs are the EKs that an authoritative source outside of the policy names for this call. Such
// a source is a record, an inventory, the platform's API, or an annotation that no node can write.
// They are used only with Config.NamedEKs, and need no certificate then. They add to Config.Roots
// and do not restrict it: the caller must find out which machine has the EK.
func (v *Verifier) VerifyHello(request Request, namedEKs []Fingerprint, now time.Time) (*VerifiedHello, error) {
	return v.ParseHello(request).Verify(namedEKs, now)
}

// Challenge answers a hello that this verifier accepted. The node can read the secret only with the
// TPM that has the EK. That TPM must also hold a key with the AK's Name (TPM 2.0 Part 1,
// "Credential Protection"). random must be cryptographically secure. Parts of Go's library ignore
// it, and use the system's random numbers.
func (v *Verifier) Challenge(random io.Reader, claim *VerifiedHello, now time.Time) (*attestation.Challenge, error) {
	if claim == nil || claim.hello == nil || claim.verifier != v {
		return nil, errors.New("challenge: not for a hello that this verifier has passed")
	}
	if now.IsZero() {
		return nil, errNoTime
	}
	h := claim.hello
	expires := now.Add(v.lifetime).Unix()
	secret, err := v.secret(v.keys[v.current], h, h.document.SignerName, expires, v.pcrs)
	if err != nil {
		return nil, err
	}
	key, err := tpm2.ImportEncapsulationKey(&h.ek.public)
	if err != nil {
		return nil, err
	}
	blob, encrypted, err := tpm2.CreateCredential(fullReader{random}, key, h.akName, secret)
	if err != nil {
		return nil, err
	}
	// go-tpm returns the TPMS_ID_OBJECT and the encrypted secret. In the document each has its size
	// in front, as the TPM expects it.
	return &attestation.Challenge{
		Version:         attestation.VersionTPM,
		Kind:            attestation.KindChallenge,
		KeyID:           v.current,
		Expires:         expires,
		CredentialBlob:  tpm2.Marshal(tpm2.TPM2BIDObject{Buffer: blob}),
		EncryptedSecret: tpm2.Marshal(tpm2.TPM2BEncryptedSecret{Buffer: encrypted}),
		PCRs:            attestation.PCRSelection{Bank: v.pcrs.Bank, Indexes: slices.Clone(v.pcrs.Indexes)},
		EventLog:        v.eventLog,
	}, nil
}

// fullReader fills the whole buffer, since go-tpm calls Read only once.
type fullReader struct{ io.Reader }

func (f fullReader) Read(p []byte) (int, error) { return io.ReadFull(f.Reader, p) }

// secret derives the secret of the challenge to h.
func (v *Verifier) secret(key []byte, h *helloEvaluation, signer string, expires int64, pcrs attestation.PCRSelection) ([]byte, error) {
	return attestation.Secret(key, h.request.UID, attestation.SecretInfo{
		Version:      h.document.Version,
		ClusterUID:   v.clusterUID,
		SignerName:   signer,
		EKPublicKey:  h.ek.publicKey,
		AKName:       h.akName,
		HelloRequest: h.request.Request,
		Expires:      expires,
		PCRs:         pcrs,
	})
}

// parseRequest parses spec.request up to its document. It returns false if the document cannot be
// judged.
func (v *Verifier) parseRequest(refusals *verifier.Refusals, request Request, kind string) (attestation.Request, bool) {
	if request.Name == "" || request.UID == "" {
		refusals.Add(ReasonMalformed, "%s: the object has no name or no UID", kind)
		return attestation.Request{}, false
	}
	content, err := attestation.Parse(request.Request)
	if err != nil {
		refusals.Add(ReasonMalformed, "%s: %v", kind, err)
		return content, false
	}
	if content.Provider != Provider {
		refusals.Add(reasonProvider, "%s: the provider is %.64q, not %q", kind, content.Provider, Provider)
		return content, false
	}
	version, got := attestation.Head(content.Data)
	if version == "" {
		refusals.Add(ReasonMalformed, "%s: does not start with a version", kind)
		return content, false
	}
	if version != attestation.VersionTPM || !slices.Contains(v.versions, version) {
		refusals.Add(ReasonVersion, "%s: version %.64q is not served, but %s", kind, version, v.versions)
		return content, false
	}
	if got != kind && slices.Contains([]string{attestation.KindHello, attestation.KindChallenge, attestation.KindProof}, got) {
		refusals.Add(ReasonKind, "a %s stands where a %s belongs", got, kind)
		return content, false
	}
	return content, true
}

// parseHello applies the rules of a hello that need neither time nor trust.
func (v *Verifier) parseHello(refusals *verifier.Refusals, request Request) helloEvaluation {
	h := helloEvaluation{request: request}
	if !attestation.IsHelloSigner(request.SignerName) {
		refusals.Add(reasonSigner, "hello: filed under signer %.128q", request.SignerName)
	}
	content, ok := v.parseRequest(refusals, request, attestation.KindHello)
	if !ok {
		return h
	}
	h.content = content
	document, err := attestation.ParseHello(content.Data)
	if err != nil {
		refusals.Add(ReasonMalformed, "%v", err)
		return h
	}
	h.document = document
	if common := v.versions.Common(document.Versions); common != document.Version {
		refusals.Add(reasonVersionDowngrade, "hello: in version %.64s, though both sides know %.64s", document.Version, common)
	}
	switch {
	case attestation.IsHelloSigner(document.SignerName):
		refusals.Add(reasonSigner, "hello: means to ask the signer of hellos, which never issues")
	case attestation.IsHelloSigner(request.SignerName) && request.SignerName != attestation.HelloSignerFor(document.SignerName):
		refusals.Add(reasonSigner, "hello: it is a rehearsal and names another signer, or it names the signer of rehearsals and is none")
	}
	h.ek = publicEK(refusals, document)
	return h
}

// verify applies every rule to a hello. It adds the refusals of parsing, and applies the other
// rules to a copy.
func (parsed *ParsedHello) verify(refusals *verifier.Refusals, namedEKs []Fingerprint, now time.Time) *helloEvaluation {
	before := len(*refusals)
	*refusals = append(*refusals, parsed.refusals...)
	h := parsed.hello
	if h.document == nil {
		return &h
	}
	if h.ek != nil {
		ek := *h.ek
		ek.publicKey = bytes.Clone(ek.publicKey)
		h.ek = &ek
		parsed.verifier.verifyEK(refusals, h.ek, h.document.EKCertificates, namedEKs, now)
	}
	h.akName, h.akKey = publicAK(refusals, h.document.AKPublic)
	h.trusted = len(*refusals) == before && len(h.ek.sources) > 0 && h.akKey != nil
	return &h
}

// publicAK returns the Name and the key of an AK whose public area is the template, byte for byte
// except the point. So the TPM itself made the AK (sensitiveDataOrigin), never exports it
// (fixedTPM, fixedParent), and signs nothing else with it (restricted). No software key can be
// loaded under these attributes.
func publicAK(refusals *verifier.Refusals, public []byte) ([]byte, *ecdsa.PublicKey) {
	key, err := template.CheckAK(public)
	var bad *template.KeyError
	switch {
	case errors.As(err, &bad):
		refusals.Add(reasonAKPoint, "AK: %v", err)
		return nil, nil
	case err != nil:
		refusals.Add(reasonAKTemplateMismatch, "AK: the public area is not the template")
		return nil, nil
	}
	name, err := template.Name(public)
	if err != nil {
		refusals.Add(reasonAKTemplateMismatch, "AK: %v", err)
		return nil, nil
	}
	return name, key
}
