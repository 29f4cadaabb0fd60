// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// Limits of the shown texts of a request, in bytes.
const (
	maxName    = 253
	maxMessage = 1024
	maxIssuer  = 256
)

// Request is a CertificateSigningRequest for a node's client certificate. Everything but the name,
// the requester and the times is what the requester claims. Texts are cut, but not escaped:
// sprintf, printTable and outputformat make them safe to show.
type Request struct {
	Name   string `json:"name"`
	Signer string `json:"signer"`
	// Requester is whom the API server authenticated.
	Requester string      `json:"requester"`
	Created   metav1.Time `json:"created"`
	// State is a state of pkg/csr/state.
	State string `json:"state"`
	// Reason and Message say why it waits, or how it ended. Since is when it ended.
	Reason  string      `json:"reason,omitempty"`
	Message string      `json:"message,omitempty"`
	Since   metav1.Time `json:"since,omitzero"`
	// NodeName, ProviderID and EK are claims.
	NodeName   string     `json:"nodeName,omitempty"`
	ProviderID string     `json:"providerID,omitempty"`
	EK         *ClaimedEK `json:"ek,omitempty"`

	uid        string
	hello      bool
	challenged bool
	// rehearsal says that it leads to no certificate. judged says that it has its verdict, which is
	// Reason and Message.
	rehearsal, judged bool
	// helloName is the name of a proof's hello.
	helloName string
}

// ClaimedEK is an endorsement key that a request claims.
type ClaimedEK struct {
	Fingerprint string `json:"fingerprint"`
	Template    string `json:"template,omitempty"`
	// Certificate is the EK's own, if one came with the request. It is not verified here.
	Certificate *EKCertificate `json:"certificate,omitempty"`
}

// EKCertificate is what a certificate says.
type EKCertificate struct {
	Fingerprint string `json:"fingerprint"`
	Issuer      string `json:"issuer,omitempty"`
}

// Waits reports whether the request waits for something other than the node.
func (r *Request) Waits() bool {
	return r.State == state.Pending.String() && !r.challenged && !r.judged
}

// refused reports whether the request was refused.
func (r *Request) refused() bool {
	return (r.State == state.Denied.String() || r.State == state.Failed.String()) && r.Reason != attestation.ReasonCompleted
}

func (r *Request) fingerprint() string {
	if r.EK == nil {
		return ""
	}
	return r.EK.Fingerprint
}

const (
	signerPrefix  = "cluster.x-k8s.io/kube-apiserver-client-kubelet-"
	tpmSigner     = signerPrefix + tpm.Provider
	builtinSigner = certificatesv1.KubeAPIServerClientKubeletSignerName
)

// signers are the signers whose requests are read.
var signers = func() []string {
	all := []string{attestation.HelloSignerName, tpmSigner, builtinSigner, attestation.RehearsalHelloSignerName, attestation.RehearsalSignerName}
	for _, name := range cloud.Names {
		all = append(all, signerPrefix+name)
	}
	return all
}()

// claims parses what requests claim, as the controller does. It decides nothing.
var claims = sync.OnceValues(func() (*verifier.Rules, error) {
	policy := verifier.Policy{
		Cluster: "any", Providers: []verifier.Provider{{Name: tpm.Provider, Challenges: true}},
		Signers: []verifier.Signer{
			{Name: tpmSigner, Providers: []string{tpm.Provider}},
			{Name: builtinSigner, Providers: append([]string{tpm.Provider}, cloud.Names...), Shared: true},
		},
		Token: verifier.Off, Credential: verifier.Required, BootCounters: verifier.Warn,
		EKSources: []verifier.EKSource{verifier.EKInventory}, NameSources: []verifier.NameSource{verifier.NameInventory},
	}
	for _, name := range cloud.Names {
		policy.Providers = append(policy.Providers, verifier.Provider{Name: name})
		policy.Signers = append(policy.Signers, verifier.Signer{Name: signerPrefix + name, Providers: []string{name}})
	}
	return verifier.New(policy)
})

// readRequests returns the requests of nodes, the oldest first.
func (a *access) readRequests(ctx context.Context, now time.Time) ([]Request, error) {
	rules, err := claims()
	if err != nil {
		return nil, err
	}
	var all []Request
	for _, signer := range signers {
		err := readEach(ctx, a.nodes, func(object *certificatesv1.CertificateSigningRequest) {
			if claim, ours := rules.ParseClaim(object); ours {
				all = append(all, newRequest(object, claim, now))
			} else if r, waits := withoutEvidence(object); waits {
				all = append(all, r)
			}
		}, client.MatchingFields{"spec.signerName": signer})
		if err != nil {
			return nil, err
		}
	}
	addEKsOfHellos(all)
	slices.SortStableFunc(all, func(a, b Request) int {
		return cmp.Or(a.Created.Compare(b.Created.Time), strings.Compare(a.Name, b.Name))
	})
	return all, nil
}

const noEvidence = "a kubelet requests by itself, without evidence: is kubelet-authenticator switched on there? Run kubelet-authenticator doctor on the node"

// withoutEvidence returns a pending request of a kubelet for its client certificate that has no
// evidence of any provider. It returns false for any other request.
func withoutEvidence(object *certificatesv1.CertificateSigningRequest) (Request, bool) {
	if object.Spec.SignerName != builtinSigner || state.Of(object) != state.Pending {
		return Request{}, false
	}
	r := Request{
		Name: text.Cut(object.Name, maxMessage), Signer: object.Spec.SignerName, Requester: text.Cut(object.Spec.Username, maxName), Created: object.CreationTimestamp,
		State: state.Pending.String(), Reason: telemetry.ReasonNoEvidence, Message: noEvidence, uid: string(object.UID),
	}
	if waiting, err := attestation.ParseStatement(object.Annotations[attestation.AnnotationWaiting]); err == nil {
		r.Reason, r.Message = waiting.Reason, waiting.Text
	}
	block, rest := pem.Decode(object.Spec.Request)
	if evidence, _ := pem.Decode(rest); evidence != nil {
		return Request{}, false
	}
	if block != nil {
		if request, err := x509.ParseCertificateRequest(block.Bytes); err == nil {
			r.NodeName = text.Cut(strings.TrimPrefix(request.Subject.CommonName, "system:node:"), maxName)
		}
	}
	return r, true
}

// newRequest returns the shown parts of a request.
func newRequest(object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time) Request {
	r := Request{
		Name: text.Cut(object.Name, maxMessage), Signer: object.Spec.SignerName, Requester: text.Cut(object.Spec.Username, maxName), Created: object.CreationTimestamp,
		NodeName: text.Cut(claim.NodeName, maxName), ProviderID: text.Cut(claim.ProviderID, maxMessage),
		uid: string(object.UID), hello: claim.Hello, rehearsal: claim.Rehearsal,
	}
	current, cause := state.Explain(object)
	r.State = current.String()
	switch {
	case cause != nil:
		r.Reason, r.Message, r.Since = text.Cut(cause.Reason, maxName), text.Cut(cause.Message, maxMessage), cause.LastUpdateTime
	case current == state.Pending:
		// While the admission policies are not in force, the requester may have written the
		// annotations.
		if verdict, ok := attestation.ParseVerdict(object.Spec.SignerName, object.Annotations[attestation.AnnotationVerdict]); ok {
			r.Reason, r.Message, r.judged = verdict.Reason, verdict.Text, true
		} else if waiting, err := attestation.ParseStatement(object.Annotations[attestation.AnnotationWaiting]); err == nil {
			r.Reason, r.Message = waiting.Reason, waiting.Text
		}
	default:
		for _, c := range object.Status.Conditions {
			r.Reason, r.Message, r.Since = text.Cut(c.Reason, maxName), text.Cut(c.Message, maxMessage), c.LastUpdateTime
		}
	}
	if !r.hello {
		if name, err := (tpmprovider.Provider{}).HelloOf(object); err == nil {
			r.helloName = name
		}
		return r
	}
	r.EK = claimedEK(object)
	if value := object.Annotations[attestation.AnnotationChallenge]; value != "" && len(value) <= attestation.MaxChallenge {
		challenge, err := attestation.ParseChallenge([]byte(value))
		// nobody closes a rehearsal's hello, so an expired challenge is no reason to wait
		r.challenged = err == nil && (r.rehearsal || now.Before(time.Unix(challenge.Expires, 0)))
	}
	return r
}

// claimedEK returns the EK in a hello, nil if the hello cannot be read.
func claimedEK(object *certificatesv1.CertificateSigningRequest) *ClaimedEK {
	fingerprint := (tpmprovider.Provider{}).EK(object, nil)
	if fingerprint == "" {
		return nil
	}
	ek := &ClaimedEK{Fingerprint: fingerprint}
	content, err := attestation.Parse(object.Spec.Request)
	if err != nil {
		return ek
	}
	hello, err := attestation.ParseHello(content.Data)
	if err != nil {
		return ek
	}
	ek.Template = hello.EKTemplate
	if len(hello.EKCertificates) > 0 {
		sum := sha256.Sum256(hello.EKCertificates[0])
		ek.Certificate = &EKCertificate{Fingerprint: hex.EncodeToString(sum[:])}
		if certificate, err := x509.ParseCertificate(hello.EKCertificates[0]); err == nil {
			ek.Certificate.Issuer = text.Cut(certificate.Issuer.String(), maxIssuer)
		}
	}
	return ek
}

// addEKsOfHellos gives each proof the EK of its hello.
func addEKsOfHellos(all []Request) {
	hellos := map[string]*Request{}
	for i := range all {
		if all[i].hello {
			hellos[all[i].Name] = &all[i]
		}
	}
	for i := range all {
		if hello := hellos[all[i].helloName]; hello != nil {
			all[i].EK = hello.EK
		}
	}
}

// identity is a requester, with the node and EK that the requester claims.
type identity struct {
	node, ek, requester string
	rehearsal           bool
}

func (r *Request) identity() identity {
	return identity{r.NodeName, r.fingerprint(), r.Requester, r.rehearsal}
}

// newest returns the newest request of each requester, node name and EK for which keep is true,
// the oldest first. So a copy hides no request of another requester. A rehearsal hides no real
// request. A requester with many names gets many entries: see maxClaims.
func newest(all []Request, keep func(*Request) bool) []*Request {
	last := map[identity]*Request{}
	for i := range all {
		if r := &all[i]; keep(r) {
			last[r.identity()] = r
		}
	}
	var kept []*Request
	for i := range all {
		if r := &all[i]; last[r.identity()] == r {
			kept = append(kept, r)
		}
	}
	return kept
}

// maxClaims limits how many claims a command shows: a bootstrap token files any number.
const maxClaims = 500

// share returns at most limit requests, in their order, and the number of those that it left out.
// Each requester has the same share, so a requester with many requests displaces none of another
// requester. Of one requester it keeps the first ones.
func share(all []*Request, limit int) (kept []*Request, omitted int) {
	filed := map[string]int{}
	for _, r := range all {
		filed[r.Requester]++
	}
	left, each := limit, limit
	for n, count := range slices.Sorted(maps.Values(filed)) {
		if each = max(1, left/(len(filed)-n)); count > each {
			break
		}
		left -= count
	}
	taken := map[string]int{}
	for _, r := range all {
		if taken[r.Requester]++; taken[r.Requester] <= each && len(kept) < limit {
			kept = append(kept, r)
		}
	}
	return kept, len(all) - len(kept)
}
