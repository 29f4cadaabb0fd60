// SPDX-License-Identifier: Apache-2.0

package azure

import (
	"bytes"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"math/big"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/smallstep/pkcs7"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

const (
	theVM           = "b1310a36-d400-46f6-82cb-6217df846586"
	theSubscription = "8a205152-b25a-417f-a676-80465535a6c9"
	other           = "00000000-0000-4000-8000-000000000001"
	theResource     = "/subscriptions/" + theSubscription + "/resourceGroups/Group/providers/Microsoft.Compute/virtualMachines/Worker-0"
	theCluster      = "some-cluster"
)

var created = time.Now().UTC().Truncate(time.Second)

// world has the CAs of the tests: Azure's imitation, and a CA that nobody trusts.
var world = sync.OnceValue(func() (w struct{ root, intermediate, signer, foreign azure.Authority }) {
	w.root = azure.NewRoot("Root")
	w.intermediate = w.root.Intermediate("Issuing CA 01")
	w.signer = w.intermediate.Signer(nil, "eastus.metadata.azure.com", "metadata.azure.com")
	w.foreign = azure.NewRoot("Foreign")
	return w
})

func config() Config {
	return Config{
		ClusterUID: theCluster, Subscriptions: []string{other, theSubscription},
		Roots: []*x509.Certificate{world().root.Certificate}, Intermediates: []*x509.Certificate{world().intermediate.Certificate},
	}
}

func newVerifier(t testing.TB, c Config) *Verifier {
	t.Helper()
	v, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func vm() azure.VM { return azure.VM{ID: theVM, Subscription: theSubscription} }

// filed returns a request with no evidence yet.
func filed() verifier.Filed {
	lifetime := int32(86400)
	return verifier.Filed{
		Name: "node-csr-a", UID: "uid", SignerName: "cluster.x-k8s.io/kube-apiserver-client-kubelet-azure",
		Usages: []string{"digital signature", "client auth"}, ExpirationSeconds: &lifetime, Created: created,
	}
}

var pkcs10 = []byte{0x30, 3, 2, 1, 1}

// nonceOf is what the node asks Azure to sign for a request.
func nonceOf(r verifier.Filed, cluster string) string {
	return attestation.Binding{
		Version: attestation.VersionAzure, ClusterUID: cluster, SignerName: r.SignerName, Name: r.Name,
		PKCS10: pkcs10, Usages: r.Usages, ExpirationSeconds: r.ExpirationSeconds,
	}.Alphanumeric()
}

// file puts a document into a request.
func file(t testing.TB, r verifier.Filed, cluster string, statement []byte) verifier.Filed {
	t.Helper()
	data, err := attestation.Identity{Version: attestation.VersionAzure, ClusterUID: cluster, Statement: statement}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	r.Request, err = attestation.Request{PKCS10: pkcs10, Provider: Name, Data: data}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func valid(t testing.TB) verifier.Filed {
	return file(t, filed(), theCluster, world().signer.Sign(vm().Content(nonceOf(filed(), theCluster), created)).DER())
}

// reason returns the reason of a refusal, the error if it is none, and nothing if err is nil.
func reason(err error) string {
	if err == nil {
		return ""
	}
	if refusals, ok := errors.AsType[verifier.Refusals](err); ok && len(refusals) == 1 {
		return string(refusals[0].Reason)
	}
	return err.Error()
}

func TestAccepted(t *testing.T) {
	v := newVerifier(t, config())
	id, err := ParseResourceID(theResource)
	if err != nil {
		t.Fatal(err)
	}
	verified, err := v.Verify(valid(t))
	if err != nil {
		t.Fatal(err)
	}
	Connect(verified, id, theVM)
	if want := (attestation.Instance{Platform: "azure", ID: theVM, Account: theSubscription}); verified.Instance != want {
		t.Errorf("instance %+v, want %+v", verified.Instance, want)
	}
	for providerID, want := range map[string]bool{
		"azure://" + theResource:                  true,
		"azure://" + strings.ToLower(theResource): true,
		"azure://" + theResource + "1":            false,
		theResource:                               false,
		"azure://" + strings.Replace(theResource, theSubscription, other, 1): false,
	} {
		if verified.HasProviderID(providerID) != want {
			t.Errorf("HasProviderID(%s) is not %t", providerID, want)
		}
	}
	// The same bytes are judged again later, and when the controller has restarted.
	if _, err := newVerifier(t, config()).Verify(valid(t)); err != nil {
		t.Error(err)
	}
}

// Only what Azure Resource Manager says connects a VM with a machine.
func TestNoProviderIDWithoutLookup(t *testing.T) {
	v := newVerifier(t, config())
	id, _ := ParseResourceID(theResource)
	elsewhere := id
	elsewhere.Subscription = other
	for name, vmIDs := range map[string]map[ResourceID]string{
		"no answer": nil, "another VM's ID": {id: other}, "empty ID": {id: ""}, "another subscription": {elsewhere: theVM},
	} {
		verified, err := v.Verify(valid(t))
		if err != nil {
			t.Fatal(err)
		}
		for id, vmID := range vmIDs {
			Connect(verified, id, vmID)
		}
		for _, id := range []ResourceID{id, elsewhere} {
			if verified.HasProviderID("azure://" + id.String()) {
				t.Errorf("%s: has the provider ID %s", name, id)
			}
		}
	}
}

func TestRefused(t *testing.T) {
	const malformed, signature = string(cloud.ReasonMalformed), string(cloud.ReasonSignature)
	w := world()
	nonce := nonceOf(filed(), theCluster)
	content := vm().Content(nonce, created)
	changed := func(old, new string) []byte {
		t.Helper()
		if strings.Count(content, old) != 1 {
			t.Fatalf("%q is not once in %s", old, content)
		}
		return w.signer.Sign(strings.Replace(content, old, new, 1)).DER()
	}
	good := w.signer.Sign(content)
	with := func(change func(*azure.Document)) []byte {
		d := good
		change(&d)
		return d.DER()
	}
	by := func(a azure.Authority) []byte { return a.Sign(content).DER() }
	sha1 := asn1.ObjectIdentifier{1, 3, 14, 3, 2, 26}
	attribute := azure.TLV(0x30, azure.OID(asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 3}, false), azure.TLV(0x31, azure.OID(asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}, false)))
	impostor := w.foreign.Signer(nil, "metadata.azure.com")
	namesake := azure.NewRoot("Root").Intermediate("Issuing CA 01").Signer(nil, "metadata.azure.com")
	twin := w.foreign.Signer(func(c *x509.Certificate) {
		c.SerialNumber = w.signer.Certificate.SerialNumber
	}, "metadata.azure.com")
	named := func(names ...string) []byte { return by(w.intermediate.Signer(nil, names...)) }
	dated := func(from, to time.Duration) []byte {
		return by(w.intermediate.Signer(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = created.Add(from), created.Add(to) }, "metadata.azure.com"))
	}
	der := good.DER()
	indefinite := append(append([]byte{0x30, 0x80}, der[4:]...), 0, 0)
	longer := append([]byte{0x30, 0x83, 0, der[2], der[3]}, der[4:]...)
	at := func(d time.Duration) []byte { return w.signer.Sign(vm().Content(nonce, created.Add(d))).DER() }

	for name, row := range map[string]struct {
		statement []byte
		want      string
	}{
		// The form.
		"empty sequence":                {[]byte{0x30, 0}, malformed},
		"bytes at the end":              {append(good.DER(), 0), malformed},
		"indefinite length":             {indefinite, malformed},
		"length not minimal":            {longer, malformed},
		"too long":                      {w.signer.Sign(content + strings.Repeat(" ", maxDocument)).DER(), malformed},
		"enveloped":                     {with(func(d *azure.Document) { d.Enveloped = true }), malformed},
		"detached":                      {with(func(d *azure.Document) { d.Detached = true }), malformed},
		"content is no octets":          {with(func(d *azure.Document) { d.DataIsNotOctetString = true }), malformed},
		"digest SHA-1":                  {with(func(d *azure.Document) { d.Digest = sha1 }), malformed},
		"signed attributes":             {with(func(d *azure.Document) { d.Signed = azure.TLV(0xa0, attribute) }), malformed},
		"unsigned attributes":           {with(func(d *azure.Document) { d.Unsigned = azure.TLV(0xa1, attribute) }), malformed},
		"no signer":                     {with(func(d *azure.Document) { d.Signers = nil }), malformed},
		"two signers":                   {with(func(d *azure.Document) { d.Signers = append(d.Signers, w.signer) }), malformed},
		"no certificates":               {with(func(d *azure.Document) { d.Certificates = nil }), malformed},
		"certificates with another tag": {with(func(d *azure.Document) { d.Bag = 0x31 }), malformed},
		"another's certificate":         {with(func(d *azure.Document) { d.Certificates = []*x509.Certificate{w.intermediate.Certificate} }), malformed},
		"certificate that is twice":     {with(func(d *azure.Document) { d.Certificates = append(d.Certificates, w.signer.Certificate) }), malformed},

		// The content.
		"member twice":            {changed(`"sku"`, `"vmId":"`+other+`","sku"`), malformed},
		"member in other case":    {changed(`"vmId"`, `"vmid"`), malformed},
		"no subscription":         {changed(`"subscriptionId"`, `"tenantId"`), malformed},
		"no nonce":                {changed(`"nonce"`, `"once"`), malformed},
		"vmId in upper case":      {changed(theVM, strings.ToUpper(theVM)), malformed},
		"subscription no GUID":    {changed(theSubscription, "subscription"), malformed},
		"no time":                 {changed(`"timeStamp"`, `"time"`), malformed},
		"time of creation twice":  {changed(`"expiresOn"`, `"createdOn":"01/02/26 15:04:05 -0000","expiresOn"`), malformed},
		"no time of creation":     {changed(`"createdOn"`, `"created"`), malformed},
		"no expiry":               {changed(`"expiresOn"`, `"expires"`), malformed},
		"time with a fraction":    {changed(` -0000","exp`, `.5 -0000","exp`), malformed},
		"something after content": {w.signer.Sign(content + "{}").DER(), malformed},
		"content is a list":       {w.signer.Sign("[" + content + "]").DER(), malformed},

		// The signer.
		"another signature": {with(func(d *azure.Document) { d.SignatureOver = []byte("other") }), signature},
		"signed by another key": {with(func(d *azure.Document) {
			d.Signers = []azure.Authority{{Certificate: w.signer.Certificate, Key: impostor.Key}}
		}), signature},
		"CA of the same name":    {by(namesake), signature},
		"self-signed":            {by(azure.Authority{}.Signer(nil, "metadata.azure.com")), `attested document: no configured CA is its signer's issuer, "CN=metadata.azure.com"`},
		"another CA":             {by(impostor), `attested document: no configured CA is its signer's issuer, "CN=Foreign,O=Imitation,C=US"`},
		"signer's CA in the bag": {impostor.Sign(content).DER(), `attested document: no configured CA is its signer's issuer, "CN=Foreign,O=Imitation,C=US"`},
		"Azure's certificate first, another signer": {with(func(d *azure.Document) {
			d.Certificates, d.Signers = []*x509.Certificate{w.signer.Certificate, impostor.Certificate}, []azure.Authority{impostor}
		}), `attested document: no configured CA is its signer's issuer, "CN=Foreign,O=Imitation,C=US"`},
		"Azure's certificate first, a namesake signer": {with(func(d *azure.Document) {
			d.Certificates, d.Signers = []*x509.Certificate{w.signer.Certificate, namesake.Certificate}, []azure.Authority{namesake}
		}), signature},
		"Azure's certificate, another's serial number": {with(func(d *azure.Document) {
			d.Certificates, d.Signers = []*x509.Certificate{w.signer.Certificate, twin.Certificate}, []azure.Authority{twin}
		}), `attested document: no configured CA is its signer's issuer, "CN=Foreign,O=Imitation,C=US"`},
		"not for server authentication": {by(w.intermediate.Signer(func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageEmailProtection}
		}, "metadata.azure.com")), signature},
		"another cloud":        {named("metadata.azure.us"), signature},
		"suffix behind":        {named("metadata.azure.com.evil"), signature},
		"prefix without a dot": {named("evilmetadata.azure.com"), signature},
		"two labels below":     {named("a.b.metadata.azure.com"), signature},
		"empty label below":    {named(".metadata.azure.com"), signature},
		"parent domain":        {named("azure.com"), signature},
		"in the common name":   {by(w.intermediate.Signer(func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: "metadata.azure.com"} }, "example.com")), signature},
		"certificate expired":  {dated(-time.Hour, -time.Second), signature},
		"certificate not yet":  {dated(time.Second, time.Hour), signature},

		// The request.
		"nonce of another request": {changed(nonce, nonceOf(func() verifier.Filed { r := filed(); r.Name = "node-csr-b"; return r }(), theCluster)), string(cloud.ReasonRequest)},
		"nonce in other case":      {changed(nonce, swapCase(nonce)), string(cloud.ReasonRequest)},
		"nonce and more":           {changed(nonce, nonce+"0"), string(cloud.ReasonRequest)},
		"empty nonce":              {changed(nonce, ""), string(cloud.ReasonRequest)},
		"too old":                  {at(-cloud.MaxAge - time.Second), string(cloud.ReasonAge)},
		"in the future":            {at(cloud.MaxAhead + time.Second), string(cloud.ReasonAge)},
		"expired":                  {changed(created.Add(6*time.Hour).Format("01/02/06 15:04:05"), created.Add(-cloud.MaxAhead-time.Second).Format("01/02/06 15:04:05")), string(cloud.ReasonAge)},
		"another subscription":     {changed(theSubscription, "00000000-0000-4000-8000-000000000002"), string(cloud.ReasonInstance)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			verified, err := newVerifier(t, config()).Verify(file(t, filed(), theCluster, row.statement))
			if verified != nil || reason(err) != row.want {
				t.Errorf("%v, %q, want %q", verified, reason(err), row.want)
			}
		})
	}
}

// Limits are inclusive, and what does not count may differ.
func TestTolerated(t *testing.T) {
	w := world()
	nonce := nonceOf(filed(), theCluster)
	content := vm().Content(nonce, created)
	below := w.root.Intermediate("Issuing CA 02") // not configured
	good := below.Signer(nil, "metadata.azure.com").Sign(content)
	good.Certificates = append([]*x509.Certificate{below.Certificate}, good.Certificates...)
	for name, statement := range map[string][]byte{
		"oldest":                w.signer.Sign(vm().Content(nonce, created.Add(-cloud.MaxAge))).DER(),
		"newest":                w.signer.Sign(vm().Content(nonce, created.Add(cloud.MaxAhead))).DER(),
		"new member":            w.signer.Sign(strings.Replace(content, `"sku"`, `"vmSize":null,"sku"`, 1)).DER(),
		"region alone":          w.intermediate.Signer(nil, "westeurope.metadata.azure.com").Sign(content).DER(),
		"intermediate CA in it": good.DER(),
	} {
		if _, err := newVerifier(t, config()).Verify(file(t, filed(), theCluster, statement)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWeakKey(t *testing.T) {
	for name, bits := range map[string]int{"weak": 1024, "slow": 8192} {
		d := world().signer.Sign(vm().Content(nonceOf(filed(), theCluster), created))
		d.Certificates = append(d.Certificates, &x509.Certificate{Raw: keyed(t, bits)})
		_, err := newVerifier(t, config()).Verify(file(t, filed(), theCluster, d.DER()))
		if reason(err) != string(cloud.ReasonMalformed) || !strings.Contains(err.Error(), "2048 to 4096") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// keyed returns a certificate with a modulus of so many bits. Its signature is another
// certificate's.
func keyed(t *testing.T, bits int) []byte {
	t.Helper()
	modulus := new(big.Int).SetBit(big.NewInt(1), bits-1, 1)
	public, err := asn1.Marshal(struct {
		N *big.Int
		E int
	}{modulus, 65537})
	if err != nil {
		t.Fatal(err)
	}
	var parts []asn1.RawValue
	if _, err := asn1.Unmarshal(world().foreign.Certificate.Raw, &parts); err != nil {
		t.Fatal(err)
	}
	var fields []asn1.RawValue
	if _, err := asn1.Unmarshal(parts[0].FullBytes, &fields); err != nil {
		t.Fatal(err)
	}
	algorithm := azure.OID(asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 1}, true)
	fields[6].FullBytes = azure.TLV(0x30, algorithm, azure.TLV(0x03, append([]byte{0}, public...)))
	var tbs []byte
	for _, f := range fields {
		tbs = append(tbs, f.FullBytes...)
	}
	return azure.TLV(0x30, azure.TLV(0x30, tbs), parts[1].FullBytes, parts[2].FullBytes)
}

func swapCase(s string) string {
	return strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' {
			return c - 'a' + 'A'
		}
		if c >= 'A' && c <= 'Z' {
			return c - 'A' + 'a'
		}
		return c
	}, s)
}

// The whole request is bound: a copied document proves no other one.
func TestBinding(t *testing.T) {
	statement := world().signer.Sign(vm().Content(nonceOf(filed(), theCluster), created)).DER()
	another := int32(3600)
	for name, row := range map[string]struct {
		change  func(*verifier.Filed)
		cluster string
		want    verifier.Reason
	}{
		"as filed":                  {func(*verifier.Filed) {}, theCluster, ""},
		"another name":              {func(r *verifier.Filed) { r.Name = "node-csr-b" }, theCluster, cloud.ReasonRequest},
		"another signer":            {func(r *verifier.Filed) { r.SignerName += "x" }, theCluster, cloud.ReasonRequest},
		"another usage":             {func(r *verifier.Filed) { r.Usages = r.Usages[1:] }, theCluster, cloud.ReasonRequest},
		"another lifetime":          {func(r *verifier.Filed) { r.ExpirationSeconds = &another }, theCluster, cloud.ReasonRequest},
		"cluster removed":           {func(*verifier.Filed) {}, "", cloud.ReasonRequest},
		"another cluster":           {func(*verifier.Filed) {}, "other-cluster", cloud.ReasonCluster},
		"filed again after a day":   {func(r *verifier.Filed) { r.Created = created.Add(24 * time.Hour) }, theCluster, cloud.ReasonAge},
		"filed again in an hour":    {func(r *verifier.Filed) { r.Created = created.Add(time.Hour) }, theCluster, cloud.ReasonAge},
		"no time of the API server": {func(r *verifier.Filed) { r.Created = time.Time{} }, theCluster, cloud.ReasonAge},
	} {
		r := filed()
		row.change(&r)
		_, err := newVerifier(t, config()).Verify(file(t, r, row.cluster, statement))
		if reason(err) != string(row.want) {
			t.Errorf("%s: %v, want %q", name, err, row.want)
		}
	}
}

func TestOtherClouds(t *testing.T) {
	for named, domain := range map[Cloud]string{Public: "metadata.azure.com", USGovernment: "metadata.azure.us", China: "metadata.azure.cn"} {
		signer := world().intermediate.Signer(nil, domain)
		r := file(t, filed(), theCluster, signer.Sign(vm().Content(nonceOf(filed(), theCluster), created)).DER())
		for _, at := range []Cloud{Public, USGovernment, China} {
			c := config()
			c.Cloud = at
			if _, err := newVerifier(t, c).Verify(r); (err == nil) != (at == named) {
				t.Errorf("document of %s, verifier of %s: %v", named, at, err)
			}
		}
	}
}

func TestConfig(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"no cluster":             func(c *Config) { c.ClusterUID = "" },
		"malformed cluster":      func(c *Config) { c.ClusterUID = "two words" },
		"unknown cloud":          func(c *Config) { c.Cloud = "Germany" },
		"malformed subscription": func(c *Config) { c.Subscriptions = []string{strings.ToUpper(theSubscription)} },
		"subscription twice":     func(c *Config) { c.Subscriptions = []string{other, other} },
		"root is no CA":          func(c *Config) { c.Roots = append(c.Roots, world().signer.Certificate) },
		"intermediate is no CA":  func(c *Config) { c.Intermediates = append(c.Intermediates, world().signer.Certificate) },
		"no certificate":         func(c *Config) { c.Roots = append(c.Roots, nil) },
	} {
		c := config()
		change(&c)
		if v, err := New(c); err == nil {
			t.Errorf("%s: made %+v", name, v)
		}
	}
	// The verifier keeps its own copy.
	c := config()
	v := newVerifier(t, c)
	c.Subscriptions[1] = other
	if _, err := v.Verify(valid(t)); err != nil {
		t.Error(err)
	}
}

// A document that Azure made on 2026-07-28 at 13:24:00 UTC. It was published as test data of
// Taskcluster's worker-manager (github.com/taskcluster/taskcluster, commit 9d59eb59f6fd).
const (
	realDocument = "testdata/document-2026-07-28.der"
	realNonce    = "20260728-192400"
)

func readReal(t testing.TB) []byte {
	t.Helper()
	der, err := os.ReadFile(realDocument)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// The shipped CAs verify a document of Azure's. Only its nonce is not that of a request.
func TestRealDocument(t *testing.T) {
	signed, err := parseSignedData(readReal(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := signed.verify(); err != nil {
		t.Fatal(err)
	}
	says, err := parseContent(signed.content)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 7, 28, 13, 24, 0, 0, time.UTC)
	if says.vmID != theVM || says.subscription != theSubscription || says.nonce != realNonce || !says.created.Equal(at) || !says.expires.Equal(at.Add(6*time.Hour)) {
		t.Errorf("%+v", says)
	}
	v := newVerifier(t, Config{ClusterUID: theCluster})
	if err := v.checkSigner(signed, says); err != nil {
		t.Error(err)
	}
	r := filed()
	r.Created = at
	if _, err := v.Verify(file(t, r, theCluster, readReal(t))); reason(err) != string(cloud.ReasonRequest) {
		t.Error(err)
	}
	for name, change := range map[string]func(*content){
		"after the certificate":  func(c *content) { c.created = time.Date(2026, 11, 11, 6, 6, 24, 0, time.UTC) },
		"before the certificate": func(c *content) { c.created = time.Date(2026, 5, 15, 6, 6, 22, 0, time.UTC) },
	} {
		says := says
		change(&says)
		if err := v.checkSigner(signed, says); reason(err) != string(cloud.ReasonSignature) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := newVerifier(t, Config{ClusterUID: theCluster, Cloud: USGovernment}).checkSigner(signed, says); reason(err) != string(cloud.ReasonSignature) {
		t.Error(err)
	}
}

// No bit of a real document can change.
func TestRealDocumentChanged(t *testing.T) {
	der := readReal(t)
	v := newVerifier(t, Config{ClusterUID: theCluster})
	r := filed()
	r.Created = time.Date(2026, 7, 28, 13, 24, 0, 0, time.UTC)
	for i := range der {
		if i > 400 && i%7 != 0 { // each byte of the form and the content, a part of the rest
			continue
		}
		changed := bytes.Clone(der)
		changed[i] ^= 1 << (i % 8)
		_, err := v.Verify(file(t, r, theCluster, changed))
		if _, unknown := errors.AsType[*UnknownIssuerError](err); unknown {
			continue
		}
		if got := reason(err); got != string(cloud.ReasonMalformed) && got != string(cloud.ReasonSignature) {
			t.Errorf("byte %d changed: %v", i, err)
		}
	}
}

// Each shipped intermediate CA comes from a shipped root, and is not about to expire.
func TestAuthorities(t *testing.T) {
	roots, intermediates := x509.NewCertPool(), x509.NewCertPool()
	for _, c := range Roots() {
		roots.AddCert(c)
	}
	for _, c := range Intermediates() {
		intermediates.AddCert(c)
	}
	if len(Roots()) != 2 || len(Intermediates()) != 7 {
		t.Errorf("%d roots, %d intermediates", len(Roots()), len(Intermediates()))
	}
	for _, c := range Intermediates() {
		if _, err := c.Verify(x509.VerifyOptions{Roots: roots, Intermediates: intermediates, CurrentTime: c.NotBefore.AddDate(0, 1, 0)}); err != nil {
			t.Errorf("%s: %v", c.Subject, err)
		}
	}
}

func BenchmarkVerify(b *testing.B) {
	v, r := newVerifier(b, config()), valid(b)
	for b.Loop() {
		if _, err := v.Verify(r); err != nil {
			b.Fatal(err)
		}
	}
}

// What is accepted, a general parser reads the same way, and no more bytes belong to it.
func FuzzSignedData(f *testing.F) {
	f.Add(readReal(f))
	f.Add(world().signer.Sign(vm().Content("n", created)).DER())
	f.Fuzz(func(t *testing.T, der []byte) {
		signed, err := parseSignedData(der)
		if err != nil {
			return
		}
		parsed, err := pkcs7.Parse(der)
		if err != nil {
			t.Fatal(err)
		}
		if signer := parsed.GetOnlySigner(); signer == nil || !signer.Equal(signed.signer) {
			t.Errorf("signer %v, want %v", signed.signer.Subject, signer)
		}
		if !bytes.Equal(parsed.Content, signed.content) || len(parsed.Certificates) != 1+len(signed.others) {
			t.Errorf("content %q and %d certificates, want %q and %d", signed.content, 1+len(signed.others), parsed.Content, len(parsed.Certificates))
		}
		if (parsed.Verify() == nil) != (signed.verify() == nil) {
			t.Errorf("signature: %v, want %v", signed.verify(), parsed.Verify())
		}
	})
}

func FuzzContent(f *testing.F) {
	f.Add([]byte(vm().Content("n", created)))
	f.Fuzz(func(t *testing.T, data []byte) {
		says, err := parseContent(data)
		if err == nil && (!cloudname.IsGUID(says.vmID) || !cloudname.IsGUID(says.subscription) || says.created.IsZero()) {
			t.Errorf("%+v", says)
		}
	})
}
