// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

func judge(t testing.TB, a *attempt) (*cloud.Verified, error) {
	t.Helper()
	v, err := New(a.config)
	if err != nil {
		t.Fatal(err)
	}
	return v.Verify(a.filed(t), a.keys)
}

const someProviderID = "gce://some-project/europe-west1-b/worker-0"

var someInstance = attestation.Instance{Platform: "gce", ID: "2875949485074006138", Account: "some-project"}

// What differs from the plainest evidence, and is as good.
func TestAccepted(t *testing.T) {
	for what, change := range map[string]func(a *attempt){
		"nothing":                 func(*attempt) {},
		"no list of projects":     func(a *attempt) { a.config.Projects = nil },
		"no lifetime":             func(a *attempt) { a.node.ExpirationSeconds = nil },
		"the oldest token":        func(a *attempt) { a.issued = created.Add(-cloud.MaxAge) },
		"Google's clock is ahead": func(a *attempt) { a.issued = created.Add(cloud.MaxAhead) },
		"expires as it is filed": func(a *attempt) {
			a.claims = func(claims, _ map[string]any) { claims["exp"] = created.Unix() }
		},
		"another order in the header": func(a *attempt) { a.header = `{"typ":"JWT","kid":"` + a.key.ID + `","alg":"RS256"}` },
		"the highest ID":              func(a *attempt) { a.vm.ID = "18446744073709551615" },
	} {
		a := someAttempt(t)
		change(a)
		want := someInstance
		want.ID = a.vm.ID
		verified, err := judge(t, a)
		if err != nil || verified.Instance != want || !verified.HasProviderID(someProviderID) || verified.PCRs != nil {
			t.Errorf("%s: %+v, %v", what, verified, err)
		}
	}
	a := someAttempt(t)
	a.vm.Project = "example.com:some-project"
	a.config.Projects = []string{a.vm.Project}
	if verified, err := judge(t, a); err != nil || !verified.HasProviderID("gce://example.com:some-project/europe-west1-b/worker-0") {
		t.Errorf("a project of a domain: %v", err)
	}
}

// Each row has one fault.
func TestRefused(t *testing.T) {
	claim := func(name string, value any) func(*attempt) {
		return func(a *attempt) {
			a.claims = func(claims, _ map[string]any) { claims[name] = value }
		}
	}
	noClaim := func(name string) func(*attempt) {
		return func(a *attempt) {
			a.claims = func(claims, _ map[string]any) { delete(claims, name) }
		}
	}
	engine := func(name string, value any) func(*attempt) {
		return func(a *attempt) {
			a.claims = func(_, engine map[string]any) { engine[name] = value }
		}
	}
	header := func(header string) func(*attempt) {
		return func(a *attempt) { a.header = strings.ReplaceAll(header, "KID", a.key.ID) }
	}
	token := func(change func(token string) string) func(*attempt) {
		return func(a *attempt) { a.token = change }
	}
	document := func(change func(*attestation.Identity)) func(*attempt) {
		return func(a *attempt) { a.document = change }
	}
	file := func(change func(*attestation.Request, *verifier.Filed)) func(*attempt) {
		return func(a *attempt) { a.file = change }
	}
	// payload changes the text of the claims.
	payload := func(change func(claims string) string) func(*attempt) {
		return func(a *attempt) {
			binding := attestation.Binding{
				Version: attestation.VersionGCE, ClusterUID: clusterUID, SignerName: signerName, Name: a.node.Name,
				PKCS10: []byte(a.pkcs10), Usages: a.node.Usages, ExpirationSeconds: a.node.ExpirationSeconds,
			}
			a.payload = change(a.vm.Claims(binding.Audience(), true, a.issued))
		}
	}
	// replaced replaces a part of the claims.
	replaced := func(old, replacement string) func(*attempt) {
		return payload(func(claims string) string {
			if !strings.Contains(claims, old) {
				t.Errorf("no %s in %s", old, claims)
			}
			return strings.Replace(claims, old, replacement, 1)
		})
	}
	doubled := func(member string) func(*attempt) { return replaced(member, member+","+member) }
	other := google.VM{Project: "third-project", ProjectNumber: 1, Zone: "us-east1-b", Name: "worker-0", ID: "1"}

	for what, c := range map[string]struct {
		change func(*attempt)
		reason verifier.Reason
	}{
		// The document, and whom it is for.
		"another provider": {file(func(r *attestation.Request, _ *verifier.Filed) { r.Provider = "azure" }), cloud.ReasonMalformed},
		"another version":  {document(func(i *attestation.Identity) { i.Version = attestation.VersionAzure }), cloud.ReasonMalformed},
		"another cluster":  {document(func(i *attestation.Identity) { i.ClusterUID = "other" }), cloud.ReasonCluster},
		"no creation time": {file(func(_ *attestation.Request, f *verifier.Filed) { f.Created = time.Time{} }), cloud.ReasonAge},

		// The token's encoding. The signature is valid under a lenient decoder.
		"JSON serialization": {token(func(s string) string {
			p := strings.Split(s, ".")
			return fmt.Sprintf(`{"protected":%q,"payload":%q,"signature":%q}`, p[0], p[1], p[2])
		}), cloud.ReasonMalformed},
		"two parts":            {token(func(s string) string { return s[:strings.LastIndex(s, ".")] }), cloud.ReasonMalformed},
		"four parts":           {token(func(s string) string { return s + "." }), cloud.ReasonMalformed},
		"a line feed after it": {token(func(s string) string { return s + "\n" }), cloud.ReasonMalformed},
		"a line feed in it":    {token(func(s string) string { return s[:len(s)-9] + "\n" + s[len(s)-9:] }), cloud.ReasonMalformed},
		"a space before it":    {token(func(s string) string { return " " + s }), cloud.ReasonMalformed},
		"padding":              {token(func(s string) string { return s + "==" }), cloud.ReasonMalformed},
		"standard alphabet": {token(func(s string) string {
			i := strings.LastIndex(s, ".")
			return s[:i] + strings.NewReplacer("-", "+", "_", "/").Replace(s[i:])
		}), cloud.ReasonMalformed},
		"the unused last bits": {token(func(s string) string { return s[:len(s)-1] + string(s[len(s)-1]+1) }), cloud.ReasonMalformed},
		"the payload is apart": {token(func(s string) string {
			p := strings.Split(s, ".")
			return p[0] + ".." + p[2]
		}), cloud.ReasonSignature},

		// The header.
		"alg none": {func(a *attempt) {
			a.header = `{"alg":"none","kid":"` + a.key.ID + `","typ":"JWT"}`
			a.token = func(s string) string { return s[:strings.LastIndex(s, ".")+1] }
		}, cloud.ReasonMalformed},
		"HS256 with the public key": {func(a *attempt) {
			a.header = `{"alg":"HS256","kid":"` + a.key.ID + `","typ":"JWT"}`
			a.token = func(s string) string {
				der, err := x509.MarshalPKIXPublicKey(a.key.Private.Public())
				if err != nil {
					t.Fatal(err)
				}
				signed := s[:strings.LastIndex(s, ".")]
				mac := hmac.New(sha256.New, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
				_, _ = mac.Write([]byte(signed))
				return signed + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
			}
		}, cloud.ReasonMalformed},
		"alg PS256":            {header(`{"alg":"PS256","kid":"KID","typ":"JWT"}`), cloud.ReasonMalformed},
		"another typ":          {header(`{"alg":"RS256","kid":"KID","typ":"at+jwt"}`), cloud.ReasonMalformed},
		"no typ":               {header(`{"alg":"RS256","kid":"KID"}`), cloud.ReasonMalformed},
		"no kid":               {header(`{"alg":"RS256","typ":"JWT"}`), cloud.ReasonMalformed},
		"kid is a number":      {header(`{"alg":"RS256","kid":1,"typ":"JWT"}`), cloud.ReasonMalformed},
		"kid is empty":         {header(`{"alg":"RS256","kid":"","typ":"JWT"}`), cloud.ReasonMalformed},
		"kid is long":          {header(`{"alg":"RS256","kid":"` + strings.Repeat("k", 129) + `","typ":"JWT"}`), cloud.ReasonMalformed},
		"a key in the header":  {header(`{"alg":"RS256","kid":"KID","typ":"JWT","jku":"https://example.com/"}`), cloud.ReasonMalformed},
		"a critical extension": {header(`{"alg":"RS256","kid":"KID","typ":"JWT","crit":["x"]}`), cloud.ReasonMalformed},
		"a doubled kid":        {header(`{"alg":"RS256","kid":"x","typ":"JWT","kid":"KID"}`), cloud.ReasonMalformed},
		"capital letters":      {header(`{"ALG":"RS256","kid":"KID","typ":"JWT"}`), cloud.ReasonMalformed},
		"a list as the header": {header(`["RS256"]`), cloud.ReasonMalformed},

		// The signature.
		"a stranger's signature": {func(a *attempt) { a.header, a.key = a.key.Header(), stranger() }, cloud.ReasonSignature},
		"kid of another key": {func(a *attempt) {
			for id := range a.keys.keys {
				if id != a.key.ID {
					a.header = strings.Replace(a.key.Header(), a.key.ID, id, 1)
				}
			}
		}, cloud.ReasonSignature},
		"another payload": {token(func(s string) string {
			p := strings.Split(s, ".")
			return p[0] + "." + base64.RawURLEncoding.EncodeToString([]byte("{}")) + "." + p[2]
		}), cloud.ReasonSignature},
		"no signature": {token(func(s string) string { return s[:strings.LastIndex(s, ".")+1] }), cloud.ReasonSignature},

		// The claims' form.
		"a list as claims":  {func(a *attempt) { a.payload = "[]" }, cloud.ReasonMalformed},
		"something follows": {payload(func(s string) string { return s + " x" }), cloud.ReasonMalformed},
		"a list of the same": {payload(func(s string) string {
			var members map[string]json.RawMessage
			if err := json.Unmarshal([]byte(s), &members); err != nil {
				t.Fatal(err)
			}
			var list []any
			for name, value := range members {
				list = append(list, name, value)
			}
			data, err := json.Marshal(list)
			if err != nil {
				t.Fatal(err)
			}
			return string(data)
		}), cloud.ReasonMalformed},
		"two objects":           {payload(func(s string) string { return s + "{}" }), cloud.ReasonMalformed},
		"not UTF-8":             {replaced(`"email_verified"`, "\"\xff\""), cloud.ReasonMalformed},
		"a comma too many":      {payload(func(s string) string { return s[:len(s)-1] + ",}" }), cloud.ReasonMalformed},
		"no end":                {payload(func(s string) string { return s[:len(s)-1] }), cloud.ReasonMalformed},
		"another end":           {payload(func(s string) string { return s[:len(s)-1] + "]" }), cloud.ReasonMalformed},
		"a doubled iss":         {doubled(`"iss":"https://accounts.google.com"`), cloud.ReasonMalformed},
		"a doubled claim":       {doubled(`"email_verified":true`), cloud.ReasonMalformed},
		"a doubled instance_id": {doubled(`"instance_id":"2875949485074006138"`), cloud.ReasonInstance},
		"an escaped double":     {replaced(`"email_verified":true`, `"email_verified":true,"\u0065mail_verified":true`), cloud.ReasonMalformed},
		"no iss":                {noClaim("iss"), cloud.ReasonMalformed},
		"no aud":                {noClaim("aud"), cloud.ReasonMalformed},
		"no iat":                {noClaim("iat"), cloud.ReasonMalformed},
		"no exp":                {noClaim("exp"), cloud.ReasonMalformed},
		"iss is null":           {claim("iss", nil), cloud.ReasonMalformed},
		"aud is a list":         {claim("aud", []string{"x"}), cloud.ReasonMalformed},
		"iat is a string":       {claim("iat", "1"), cloud.ReasonMalformed},
		"iat is a fraction":     {claim("iat", float64(created.Unix())-0.5), cloud.ReasonMalformed},
		"iat is negative":       {claim("iat", -1), cloud.ReasonMalformed},
		"iat is zero":           {claim("iat", 0), cloud.ReasonMalformed},
		"exp is too large":      {func(a *attempt) { a.claims = func(c, _ map[string]any) { c["exp"] = uint64(1 << 63) } }, cloud.ReasonMalformed},

		// Who issued it, for what, and when.
		"another issuer":      {claim("iss", "https://accounts.example.com"), cloud.ReasonSignature},
		"iss without https":   {claim("iss", "accounts.google.com"), cloud.ReasonSignature},
		"iss with a slash":    {claim("iss", "https://accounts.google.com/"), cloud.ReasonSignature},
		"another audience":    {claim("aud", "https://vault.example.com/role"), cloud.ReasonRequest},
		"the bare nonce":      {func(a *attempt) { a.claims = bareNonce }, cloud.ReasonRequest},
		"replayed: deleted":   {file(func(_ *attestation.Request, f *verifier.Filed) { f.Name = "node-csr-b" }), cloud.ReasonRequest},
		"copied: another key": {file(func(r *attestation.Request, _ *verifier.Filed) { r.PKCS10 = []byte("other") }), cloud.ReasonRequest},
		"another signer":      {file(func(_ *attestation.Request, f *verifier.Filed) { f.SignerName += "x" }), cloud.ReasonRequest},
		"more usages":         {file(func(_ *attestation.Request, f *verifier.Filed) { f.Usages = append(f.Usages, "server auth") }), cloud.ReasonRequest},
		"another lifetime":    {file(func(_ *attestation.Request, f *verifier.Filed) { f.ExpirationSeconds = nil }), cloud.ReasonRequest},
		"cluster taken away":  {document(func(i *attestation.Identity) { i.ClusterUID = "" }), cloud.ReasonRequest},
		"too old":             {func(a *attempt) { a.issued = created.Add(-cloud.MaxAge - time.Second) }, cloud.ReasonAge},
		"from the future":     {func(a *attempt) { a.issued = created.Add(cloud.MaxAhead + time.Second) }, cloud.ReasonAge},
		"expired":             {claim("exp", created.Unix()-1), cloud.ReasonAge},
		"the end of time":     {claim("iat", int64(math.MaxInt64)), cloud.ReasonAge},

		// The instance.
		"another project":        {func(a *attempt) { a.vm = other }, cloud.ReasonInstance},
		"format=standard":        {noClaim("google"), cloud.ReasonInstance},
		"google is a string":     {claim("google", "compute_engine"), cloud.ReasonInstance},
		"no compute_engine":      {claim("google", map[string]any{}), cloud.ReasonInstance},
		"compute_engine is null": {claim("google", map[string]any{"compute_engine": nil}), cloud.ReasonInstance},
		"no project":             {engine("project_id", nil), cloud.ReasonInstance},
		"a project of two": {func(a *attempt) {
			a.config.Projects = nil
			a.claims = func(_, engine map[string]any) { engine["project_id"] = "some-project/europe-west1-b" }
		}, cloud.ReasonInstance},
		"no project number":       {engine("project_number", nil), cloud.ReasonInstance},
		"project number as text":  {engine("project_number", "123456789012"), cloud.ReasonInstance},
		"a zone of two":           {engine("zone", "europe-west1-b/worker-1"), cloud.ReasonInstance},
		"no zone":                 {engine("zone", ""), cloud.ReasonInstance},
		"no name":                 {engine("instance_name", ""), cloud.ReasonInstance},
		"a name with a slash":     {engine("instance_name", "a/b"), cloud.ReasonInstance},
		"a name in capitals":      {engine("instance_name", "Worker-0"), cloud.ReasonInstance},
		"an ID as a number":       {engine("instance_id", 2875949485074006138), cloud.ReasonInstance},
		"an ID with a zero":       {engine("instance_id", "02875949485074006138"), cloud.ReasonInstance},
		"an ID of 65 bits":        {engine("instance_id", "18446744073709551616"), cloud.ReasonInstance},
		"an ID that is no number": {engine("instance_id", "worker-0"), cloud.ReasonInstance},
		"no ID":                   {engine("instance_id", ""), cloud.ReasonInstance},
	} {
		a := someAttempt(t)
		c.change(a)
		verified, err := judge(t, a)
		refusals, ok := errors.AsType[verifier.Refusals](err)
		if verified != nil || !ok || len(refusals) != 1 || refusals.Reason() != c.reason {
			t.Errorf("%s: %+v, %v; want %s", what, verified, err, c.reason)
		}
	}
	a := someAttempt(t)
	a.vm, a.config.Projects = other, nil
	if _, err := judge(t, a); err != nil {
		t.Errorf("the other project where none is listed: %v", err)
	}
}

// bareNonce removes our prefix from the audience.
func bareNonce(claims, _ map[string]any) {
	claims["aud"] = claims["aud"].(string)[len("https://kubelet-authenticator/"):]
}

// A false claim of an unsigned token is not the reason: no claim is read before the signature.
func TestSignatureComesFirst(t *testing.T) {
	a := someAttempt(t)
	a.header, a.key, a.payload = a.key.Header(), stranger(), "not JSON"
	_, err := judge(t, a)
	if refusals, ok := errors.AsType[verifier.Refusals](err); !ok || refusals.Reason() != cloud.ReasonSignature {
		t.Errorf("%v", err)
	}
}

// The key set may be older than the token. That is no verdict on the node.
func TestUnknownKey(t *testing.T) {
	unknown, empty := someAttempt(t), someAttempt(t)
	unknown.key = stranger()
	empty.keys = KeySet{}
	for what, a := range map[string]*attempt{"a stranger's key": unknown, "no keys": empty} {
		verified, err := judge(t, a)
		failed, ok := errors.AsType[*UnknownKeyError](err)
		_, refused := errors.AsType[verifier.Refusals](err)
		if verified != nil || !ok || refused || failed.KeyID != a.key.ID {
			t.Errorf("%s: %+v, %v", what, verified, err)
		}
	}
}

// The creator of a VM writes its attributes, labels, tags and licenses. If a future token had
// them, they would still change nothing: not which instance it is, and not which machine.
func TestMembershipIsNotMetadata(t *testing.T) {
	lies := map[string]any{
		"instance_id": "1", "project_id": "another-project", "instance_name": "control-plane-0", "zone": "us-east1-b",
		"provider-id": "gce://another-project/us-east1-b/control-plane-0", "cluster-name": "some-cluster",
		"created-by": "projects/1/zones/us-east1-b/instanceGroupManagers/control-plane",
	}
	for what, write := range map[string]func(claims, engine map[string]any){
		"attributes of the VM":   func(_, engine map[string]any) { engine["attributes"] = lies },
		"labels":                 func(_, engine map[string]any) { engine["labels"] = lies },
		"licenses":               func(_, engine map[string]any) { engine["license_id"] = []any{"1000204", lies} },
		"beside the instance":    func(claims, _ map[string]any) { claims["google"].(map[string]any)["metadata"] = lies },
		"beside Google":          func(claims, _ map[string]any) { claims["attributes"], claims["compute_engine"] = lies, lies },
		"names in other letters": func(_, engine map[string]any) { engine["Instance_ID"], engine["PROJECT_ID"] = "1", "another-project" },
		"the service account": func(claims, _ map[string]any) {
			claims["email"], claims["sub"] = "admin@another-project.example.com", "1"
		},
		"the kind of the VM":        func(_, engine map[string]any) { engine["instance_confidentiality"] = 1 },
		"when the VM was created":   func(_, engine map[string]any) { engine["instance_creation_timestamp"] = 1 },
		"the number of the project": func(_, engine map[string]any) { engine["project_number"] = 7 },
	} {
		a := someAttempt(t)
		a.claims = write
		verified, err := judge(t, a)
		if err != nil || verified.Instance != someInstance || !verified.HasProviderID(someProviderID) ||
			verified.HasProviderID("gce://another-project/us-east1-b/control-plane-0") {
			t.Errorf("%s: %+v, %v", what, verified, err)
		}
	}
	// And they open no door that is closed.
	a := someAttempt(t)
	a.config.Projects = []string{"another-project"}
	a.claims = func(claims, engine map[string]any) { claims["attributes"], engine["attributes"] = lies, lies }
	if verified, err := judge(t, a); err == nil {
		t.Errorf("accepted by its metadata: %+v", verified)
	}
}

// A machine's provider ID is compared as a whole.
func TestHasProviderID(t *testing.T) {
	verified, err := judge(t, someAttempt(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{
		"", "gce://", "gce:///europe-west1-b/worker-0", "gce://some-project/europe-west1-b/worker-1",
		"gce://some-project/europe-west1-c/worker-0", "gce://another-project/europe-west1-b/worker-0",
		someProviderID + "/", someProviderID + "?", "GCE://some-project/europe-west1-b/worker-0", "gce:/some-project/europe-west1-b/worker-0",
		" " + someProviderID, "gce://some-project/europe-west1-b/x/../worker-0", "gce://some-project/europe-west1-b//worker-0",
		"gce://some-project/europe-west1-b/2875949485074006138", "gce://123456789012/europe-west1-b/worker-0",
	} {
		if verified.HasProviderID(id) {
			t.Errorf("%q", id)
		}
	}
}

// An instance that is deleted and created again under its name has another ID, so its fingerprint
// is not the one in the record.
func TestNameIsReused(t *testing.T) {
	first, err := judge(t, someAttempt(t))
	if err != nil {
		t.Fatal(err)
	}
	again := someAttempt(t)
	again.vm.ID = "4570452845155348778"
	second, err := judge(t, again)
	if err != nil || !second.HasProviderID(someProviderID) || first.Instance.Fingerprint() == second.Instance.Fingerprint() {
		t.Errorf("%+v, %+v, %v", first, second, err)
	}
}

func TestConfig(t *testing.T) {
	for what, c := range map[string]Config{
		"no cluster":       {},
		"a wrong cluster":  {ClusterUID: "two words"},
		"no project":       {ClusterUID: "c", Projects: []string{""}},
		"a number":         {ClusterUID: "c", Projects: []string{"123456789012"}},
		"a pattern":        {ClusterUID: "c", Projects: []string{"some-*"}},
		"a project twice":  {ClusterUID: "c", Projects: []string{"some-project", "some-project"}},
		"after a good one": {ClusterUID: "c", Projects: []string{"some-project", "Some-Project"}},
	} {
		if v, err := New(c); err == nil {
			t.Errorf("%s: %+v", what, v)
		}
	}
	projects := []string{"some-project"}
	v, err := New(Config{ClusterUID: clusterUID, Projects: projects})
	if err != nil {
		t.Fatal(err)
	}
	projects[0] = "another-project" // the caller's copy
	a := someAttempt(t)
	if _, err := v.Verify(a.filed(t), a.keys); err != nil {
		t.Errorf("%v", err)
	}
}

func BenchmarkVerify(b *testing.B) {
	a := someAttempt(b)
	v, err := New(a.config)
	if err != nil {
		b.Fatal(err)
	}
	filed := a.filed(b)
	for b.Loop() {
		if _, err := v.Verify(filed, a.keys); err != nil {
			b.Fatal(err)
		}
	}
}
