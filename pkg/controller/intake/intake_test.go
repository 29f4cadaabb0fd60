// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/types"
)

// policy has one signer, for TPMs.
func policy() verifier.Policy {
	return verifier.Policy{
		Cluster: "c", Providers: []verifier.Provider{{Name: "tpm", Challenges: true}},
		Signers: []verifier.Signer{{Name: "example.com/tpm", Providers: []string{"tpm"}}},
		Token:   verifier.Off, Credential: verifier.Required, BootCounters: verifier.Warn,
		EKSources: []verifier.EKSource{verifier.EKInventory}, NameSources: []verifier.NameSource{verifier.NameInventory},
	}
}

func requestNamed(name, uid string) *certificatesv1.CertificateSigningRequest {
	object := &certificatesv1.CertificateSigningRequest{}
	object.Name, object.UID = name, types.UID(uid)
	return object
}

func helloNamed(name string) *certificatesv1.CertificateSigningRequest {
	hello := requestNamed(name, "uid-"+name)
	hello.Spec.SignerName, hello.Spec.Username = attestation.HelloSignerName, "system:bootstrap:abcdef"
	return hello
}

// panicking is a provider whose parsers panic.
type panicking struct{ evidence.Challenger }

func (panicking) Name() string                                                      { return "tpm" }
func (panicking) HelloOf(*certificatesv1.CertificateSigningRequest) (string, error) { panic("parser") }
func (panicking) EK(_, _ *certificatesv1.CertificateSigningRequest) string          { panic("parser") }

// A request that makes a parser panic does not end the process: it is kept, without its claim.
func TestParserPanic(t *testing.T) {
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	cache := NewRequestCache(rules)
	cache.Providers = map[string]evidence.Provider{"tpm": panicking{}}
	hello := helloNamed("h")
	hello.Spec.Request, err = attestation.Request{PKCS10: []byte("x"), Provider: "tpm", Data: []byte("d")}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if found, ok := bounded.summaryIn(cache.Reduce(hello)); !ok || found != (summary{}) {
		t.Errorf("%+v", found)
	}
}

// A hello that is too large to read is in the cache, without its claim.
func TestClaimOfALargeHello(t *testing.T) {
	large := helloNamed("h")
	large.Spec.Request = make([]byte, maxClaimSize+1)
	if found := summarize(nil, nil, large, ""); found != (summary{}) { // nothing is called
		t.Errorf("%+v", found)
	}
}

// originStub takes each origin for an AK.
type originStub struct{ evidence.Challenger }

func (originStub) OriginAK(origin string, _ *certificatesv1.CertificateSigningRequest) string {
	return origin
}

// A request that is too long shows no AK, nor one that no provider can verify.
func TestOriginsThatAreNotVerified(t *testing.T) {
	stub := map[string]evidence.Provider{"tpm": originStub{}}
	short, long := requestNamed("short", "uid"), requestNamed("long", "uid")
	short.Spec.Request, long.Spec.Request = make([]byte, attestation.MaxRequestSize), make([]byte, attestation.MaxRequestSize+1)
	if originAK(stub, "ak", short) != "ak" || originAK(stub, "ak", long) != "" || originAK(nil, "ak", short) != "" || originAK(stub, "", short) != "" {
		t.Error("another origin is verified")
	}
}

func TestClassOf(t *testing.T) {
	for username, want := range map[string]fairqueue.Class{
		"system:node:a": fairqueue.Nodes, "system:bootstrap:abcdef": fairqueue.Tokens, "system:bootstrap:ABCDEF": fairqueue.Others, "admin": fairqueue.Others,
	} {
		if got := ClassOf(username); got != want {
			t.Errorf("%s: %d", username, got)
		}
	}
}
