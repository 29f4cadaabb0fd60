// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

const (
	tpmSigner     = "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"
	acmeSigner    = "acme.example.com/kubelet"
	sharedSigner  = certificatesv1.KubeAPIServerClientKubeletSignerName
	nodeName      = "worker-1"
	servingSigner = certificatesv1.KubeletServingSignerName
	oursToServe   = "cluster.x-k8s.io/kubelet-serving-tpm"
	providerID    = "acme://zone/worker-1"
	ek1, ek2      = "e1e1", "e2e2"
	certificate1  = "c1c1"
)

var testNow = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// makers makes each key of the tests once, and only where it is wanted: RSA ones take their time.
var makers = sync.OnceValue(func() map[string]func() crypto.Signer {
	all := map[string]func() crypto.Signer{}
	for name, curve := range map[string]elliptic.Curve{"p224": elliptic.P224(), "p256": elliptic.P256(), "p384": elliptic.P384(), "p521": elliptic.P521()} {
		all[name] = sync.OnceValue(func() crypto.Signer { return must(ecdsa.GenerateKey(curve, rand.Reader)) })
	}
	for name, bits := range map[string]int{"rsa1024": 1024, "rsa2047": 2047, "rsa2048": 2048, "rsa4096": 4096, "rsa4104": 4104} {
		all[name] = sync.OnceValue(func() crypto.Signer { return must(rsa.GenerateKey(rand.Reader, bits)) })
	}
	return all
})

func key(name string) crypto.Signer { return makers()[name]() }

// rsaWithExponent3 is a key as rsa.GenerateKey does not make them.
var rsaWithExponent3 = sync.OnceValue(func() crypto.Signer {
	one := big.NewInt(1)
	for {
		p, q := must(rand.Prime(rand.Reader, 1024)), must(rand.Prime(rand.Reader, 1024))
		phi := new(big.Int).Mul(new(big.Int).Sub(p, one), new(big.Int).Sub(q, one))
		d := new(big.Int).ModInverse(big.NewInt(3), phi)
		if d == nil || p.Cmp(q) == 0 {
			continue
		}
		key := &rsa.PrivateKey{PublicKey: rsa.PublicKey{N: new(big.Int).Mul(p, q), E: 3}, D: d, Primes: []*big.Int{p, q}}
		key.Precompute()
		if key.N.BitLen() == 2048 {
			return key
		}
	}
})

// goodPKCS10 is what the node's half writes.
func goodPKCS10(k crypto.Signer) []byte {
	return must(csr.PKCS10(csr.Identity{NodeName: nodeName, ProviderID: providerID}, k))
}

// draft is a certification request that anything can be wrong with.
type draft struct {
	version, subject, publicKey, attributes, algorithm []byte
	key                                                crypto.Signer
}

// draftOf is a good one.
func draftOf(key crypto.Signer) *draft {
	p := must(splitPKCS10(goodPKCS10(key)))
	return &draft{[]byte{tagInteger, 1, 0}, p.subject, p.publicKey, p.attributes, p.algorithm, key}
}

func (d *draft) info() []byte {
	return element(tagSequence, d.version, d.subject, d.publicKey, d.attributes)
}

func (d *draft) signature(info []byte) []byte {
	sum := sha256.Sum256(info)
	return must(d.key.Sign(rand.Reader, sum[:], crypto.SHA256))
}

func (d *draft) sign() []byte { return d.signed(d.info()) }

func (d *draft) signed(info []byte) []byte {
	return element(tagSequence, info, d.algorithm, element(tagBitString, []byte{0}, d.signature(info)))
}

// template is a request as crypto/x509 writes it: for what its users get wrong.
func template(bend func(*x509.CertificateRequest)) []byte {
	return templateWith(key("p256"), bend)
}

func templateWith(key crypto.Signer, bend func(*x509.CertificateRequest)) []byte {
	r := &x509.CertificateRequest{
		Subject:         pkix.Name{Organization: []string{groupNodes}, CommonName: userNode + nodeName},
		ExtraExtensions: []pkix.Extension{providerIDExtension(providerID)},
	}
	bend(r)
	return must(x509.CreateCertificateRequest(rand.Reader, r, key))
}

func providerIDExtension(id string) pkix.Extension {
	return pkix.Extension{Id: csr.ProviderIDOID, Value: element(tagUTF8, []byte(id))}
}

// rdn is a RelativeDistinguishedName of the attributes given.
func rdn(attributes ...[]byte) []byte { return element(tagSet, attributes...) }

func attribute(oid string, tag byte, value string) []byte {
	return element(tagSequence, element(tagOID, []byte(oid)), element(tag, []byte(value)))
}

// extensionRequest is the attributes with one extensionRequest of the extensions given.
func extensionRequest(extensions ...[]byte) []byte {
	return element(tagAttributes, extensionAttribute(extensions...))
}

func extensionAttribute(extensions ...[]byte) []byte {
	return element(tagSequence, element(tagOID, []byte(oidExtensionRequest)), element(tagSet, element(tagSequence, extensions...)))
}

func extension(oid string, value []byte) []byte {
	return element(tagSequence, element(tagOID, []byte(oid)), element(tagOctetString, value))
}

// world is a request with everything around it.
type world struct {
	policy  Policy
	in      Input
	signing bool
	// rateLimited says that the request is over its rate.
	rateLimited bool
}

func goodPolicy() Policy {
	return Policy{
		Cluster:   "c1",
		Providers: []Provider{{"tpm", true}, {"acme", false}},
		Signers: []Signer{
			{Name: tpmSigner, Providers: []string{"tpm"}},
			{Name: acmeSigner, Providers: []string{"acme"}},
			{Name: sharedSigner, Providers: []string{"tpm"}, Shared: true},
		},
		Bootstrappers:  []Bootstrapper{{"system:serviceaccount:infra:joiner", "system:serviceaccounts:infra"}},
		ServingSigners: []string{servingSigner, oursToServe}, SignedServingSigners: []string{oursToServe},
		ForbiddenAddresses: []string{"api.example.com", "192.0.2.1", "10.96.0.0/12", "2001:db8:ffff::/48"},
		Token:              Required, Credential: Required, BootCounters: Warn,
		EKSources: []EKSource{EKInventory}, NameSources: []NameSource{NameInventory, NameMachine},
	}
}

func machine(name string, eks ...string) Machine {
	m := Machine{
		Ref: MachineRef{"ns/" + name, "uid-" + name}, ProviderID: "acme://zone/" + name, Ready: true,
		Names: []NodeName{{NameMachine, name}},
	}
	for _, ek := range eks {
		m.EKs = append(m.EKs, NamedEK{EKInventory, ek})
	}
	return m
}

// object is a CertificateSigningRequest of this class.
func object(class Class, signer, name, document string, pkcs10 []byte) *certificatesv1.CertificateSigningRequest {
	provider := "tpm"
	switch signer {
	case acmeSigner:
		provider = "acme"
	case InsecureSignerName:
		provider = InsecureProvider
	}
	o := csr.Object(name, signer, must(attestation.Request{PKCS10: pkcs10, Provider: provider, Data: []byte(document)}.Marshal()), key("p256").Public(), nil)
	o.UID = types.UID("uid-" + name)
	o.CreationTimestamp = metav1.NewTime(testNow.Add(-time.Minute))
	o.Spec.Username, o.Spec.UID = "system:bootstrap:abc123", ""
	o.Spec.Groups = []string{"system:bootstrappers", "system:bootstrappers:kubeadm:default-node-token", "system:authenticated"}
	if class == Renewal {
		o.Spec.Username, o.Spec.Groups = userNode+nodeName, []string{groupNodes, "system:authenticated"}
		o.Spec.Extra = map[string]certificatesv1.ExtraValue{ExtraCredentialID: {x509Prefix + certificate1}}
	}
	return o
}

// recordOf is that of a machine with one certificate.
func recordOf(name, ek string) Record {
	sha256 := certificate1
	if name != nodeName {
		sha256 = "c1 of " + name
	}
	return Record{
		Cluster: "c1", Machine: machine(name).Ref, Provider: "tpm", EK: ek, AK: "a1",
		ProviderID: "acme://zone/" + name, NodeName: name, Boot: &Boot{7, 1, 1000, true},
		HelloUID: "uid-older-hello", ProofUID: "uid-older", ProofSHA256: digest([]byte("older")), FirstProofUID: "uid-older",
		Certificates: []Certificate{{SHA256: sha256, ProofUID: "uid-older", NotAfter: testNow.Add(time.Hour)}},
	}
}

// good is a request with which nothing is wrong.
func good(class Class) *world {
	pkcs10 := goodPKCS10(key("p256"))
	w := &world{policy: goodPolicy(), in: Input{
		Now:      testNow,
		Request:  object(class, tpmSigner, "proof", "a proof", pkcs10),
		Hello:    object(class, attestation.HelloSignerName, "hello", "a hello", pkcs10),
		Evidence: Evidence{Provider: "tpm", EK: ek1, AK: "a1", Boot: &Boot{7, 1, 2000, true}},
		Machines: []Machine{machine("worker-2", ek2), machine(nodeName, ek1)},
		Records:  []Record{recordOf("worker-2", ek2)},
		Token:    Token{true, machine(nodeName).Ref},
		Node:     Absent,
	}}
	if class != First {
		w.in.Records = append(w.in.Records, recordOf(nodeName, ek1))
		w.in.Node = Present
		w.in.Token = Token{}
	}
	return w
}

// goodHello is a hello with which nothing is wrong.
func goodHello(class Class) *world {
	w := good(class)
	w.in.Request, w.in.Hello = w.in.Hello, nil
	w.in.Evidence.Boot, w.in.Evidence.SignerName = nil, tpmSigner
	return w
}

// goodSigning is a proof that was approved after the record was written.
func goodSigning(class Class) *world {
	w := good(class)
	w.approve()
	return w
}

// goodInsecure is a request without evidence with which nothing is wrong.
func goodInsecure() *world {
	w := good(First)
	w.policy.InsecureSigner = InsecureSignerName
	w.in.Request = object(First, InsecureSignerName, "insecure", `{"version":"insecure/v1"}`, goodPKCS10(key("p256")))
	w.in.Hello, w.in.Evidence, w.machine().EKs = nil, Evidence{}, nil
	return w
}

// goodAcme is one of a provider that challenges nobody.
func goodAcme(class Class) *world {
	w := good(class)
	w.in.Request = object(class, acmeSigner, "acme", "a document", goodPKCS10(key("p256")))
	w.in.Hello = nil
	w.in.Evidence = Evidence{Provider: "acme", EK: ek1}
	for i := range w.in.Records {
		w.in.Records[i].Provider = "acme"
	}
	return w
}

// goodUnattested is what a kubelet without the plugin files, on a node that is left alone.
func goodUnattested() *world {
	w := good(Renewal)
	w.policy.UnattestedNodes = []string{"control-plane-0", nodeName}
	w.in.Request = object(Renewal, sharedSigner, "stock", "x", goodPKCS10(key("p256")))
	w.in.Request.Spec.Request = stockRequest(nodeName, "", key("p256"))
	w.in.Hello, w.in.Evidence, w.in.Records = nil, Evidence{}, w.in.Records[:1]
	return w
}

// stockRequest is one PEM block.
func stockRequest(name, id string, key crypto.Signer) []byte {
	return []byte(block(attestation.BlockRequest, string(must(csr.PKCS10(csr.Identity{NodeName: name, ProviderID: id}, key)))))
}

// goodCloud is one of a provider whose evidence says which machine it is of.
func goodCloud(class Class) *world {
	w := goodAcme(class)
	w.in.Evidence.EK, w.in.Evidence.Machine = "", machine(nodeName).Ref.Name
	for i := range w.in.Records {
		w.in.Records[i].EK = ""
	}
	return w
}

// approve writes the record and approves, as the controller does.
func (w *world) approve() {
	rules := must(New(w.policy))
	d := rules.Judge(w.in)
	if d.Outcome != Approve {
		panic(d.Refusals.Error())
	}
	w.in.Records = slices.DeleteFunc(w.in.Records, func(r Record) bool { return r.Machine == d.Grant.Record.Machine })
	w.in.Records = append(w.in.Records, d.Grant.Record)
	w.condition(certificatesv1.CertificateApproved)
	w.signing = true
}

func (w *world) condition(kind certificatesv1.RequestConditionType) {
	w.in.Request.Status.Conditions = append(w.in.Request.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue})
}

// rehearse makes a request of our TPM signer, or its hello, a rehearsal. It reports false for any
// other request.
func (w *world) rehearse() bool {
	if w.in.Request == nil || w.signing {
		return false
	}
	spec := &w.in.Request.Spec
	switch spec.SignerName {
	case tpmSigner:
		spec.SignerName = attestation.RehearsalSignerName
		if w.in.Hello != nil && w.in.Hello.Spec.SignerName == attestation.HelloSignerName {
			w.in.Hello.Spec.SignerName = attestation.RehearsalHelloSignerName
		}
	case attestation.HelloSignerName:
		spec.SignerName = attestation.RehearsalHelloSignerName
		if w.in.Evidence.SignerName == tpmSigner {
			w.in.Evidence.SignerName = attestation.RehearsalSignerName
		}
	default:
		return false
	}
	return true
}

func (w *world) judge(t *testing.T) Decision {
	t.Helper()
	rules, err := New(w.policy)
	if err != nil {
		t.Fatal(err)
	}
	judge := func(in Input) Decision {
		d := rules.Judge(in)
		if w.signing {
			d = rules.JudgeSigning(in)
		}
		if w.rateLimited {
			d = d.RateLimited()
		}
		return d
	}
	d := judge(w.in)
	// The relevant machines suffice for each decision.
	claim, _ := rules.ParseClaim(w.in.Request)
	fewer := w.in
	fewer.Machines = NewMachineIndex(w.in.Machines).Relevant(claim, "", w.in)
	if got := judge(fewer); !reflect.DeepEqual(got, d) {
		t.Errorf("by %d of %d machines: %s, %v, by all of them: %s, %v", len(fewer.Machines), len(w.in.Machines), got.Outcome, got.Refusals, d.Outcome, d.Refusals)
	}
	return d
}

// machine returns the honest machine, record its record.
func (w *world) machine() *Machine { return &w.in.Machines[1] }
func (w *world) record() *Record   { return &w.in.Records[1] }

// pkcs10 puts a certification request into the proof and its hello.
func (w *world) pkcs10(der []byte) {
	for _, o := range []*certificatesv1.CertificateSigningRequest{w.in.Request, w.in.Hello} {
		if o != nil {
			content := must(attestation.Parse(o.Spec.Request))
			content.PKCS10 = der
			o.Spec.Request = must(content.Marshal())
		}
	}
}

// withKey puts a good certification request with another key into both.
func (w *world) withKey(key crypto.Signer) {
	w.pkcs10(goodPKCS10(key))
	for _, o := range []*certificatesv1.CertificateSigningRequest{w.in.Request, w.in.Hello} {
		o.Spec.Usages = csr.Usages(key.Public())
	}
}

// both changes what proof and hello have in common.
func (w *world) both(bend func(*certificatesv1.CertificateSigningRequestSpec)) {
	bend(&w.in.Request.Spec)
	if w.in.Hello != nil {
		bend(&w.in.Hello.Spec)
	}
}

// named makes the request ask for another node name, with or without the provider ID.
func (w *world) named(name, id string) {
	w.pkcs10(must(csr.PKCS10(csr.Identity{NodeName: name, ProviderID: id}, key("p256"))))
}

// raw replaces part of the proof's spec.request.
func (w *world) raw(old, replacement string) {
	changed := bytes.Replace(w.in.Request.Spec.Request, []byte(old), []byte(replacement), 1)
	if bytes.Equal(changed, w.in.Request.Spec.Request) {
		panic("nothing replaced")
	}
	w.in.Request.Spec.Request = changed
}

func block(kind, content string) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: []byte(content)}))
}
