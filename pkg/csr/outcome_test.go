// SPDX-License-Identifier: Apache-2.0

package csr

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/statetest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// condition of a request; a message makes it recognisable.
func condition(kind certificatesv1.RequestConditionType, status corev1.ConditionStatus, reason, message string) certificatesv1.CertificateSigningRequestCondition {
	return certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: status, Reason: reason, Message: message}
}

func TestClassify(t *testing.T) {
	const yes, no = corev1.ConditionTrue, corev1.ConditionFalse
	approved := condition(certificatesv1.CertificateApproved, yes, "A", "approved")
	denied := condition(certificatesv1.CertificateDenied, yes, "D", "denied")
	failed := condition(certificatesv1.CertificateFailed, yes, "F", "failed")
	type conditions = []certificatesv1.CertificateSigningRequestCondition
	for name, c := range map[string]struct {
		conditions  conditions
		certificate string
		want        Decision
	}{
		"nothing yet":                    {nil, "", Decision{Outcome: Pending}},
		"approved":                       {conditions{approved}, "", Decision{Outcome: Pending}},
		"approved, issued":               {conditions{approved}, "PEM", Decision{Outcome: Issued, Certificate: []byte("PEM")}},
		"issued, nobody approved":        {nil, "PEM", Decision{Outcome: Issued, Certificate: []byte("PEM")}},
		"denied":                         {conditions{denied}, "", Decision{Outcome: Denied, Reason: "D", Message: "denied"}},
		"denied, issued":                 {conditions{denied}, "PEM", Decision{Outcome: Denied, Reason: "D", Message: "denied"}},
		"approved, then denied, issued":  {conditions{approved, denied}, "PEM", Decision{Outcome: Denied, Reason: "D", Message: "denied"}},
		"denied, then approved, issued":  {conditions{denied, approved}, "PEM", Decision{Outcome: Denied, Reason: "D", Message: "denied"}},
		"failed":                         {conditions{approved, failed}, "", Decision{Outcome: Failed, Reason: "F", Message: "failed"}},
		"failed, issued":                 {conditions{approved, failed}, "PEM", Decision{Outcome: Failed, Reason: "F", Message: "failed"}},
		"status of the condition absent": {conditions{condition(certificatesv1.CertificateDenied, "", "D", "")}, "", Decision{Outcome: Denied, Reason: "D"}},
		"condition unknown":              {conditions{condition(certificatesv1.CertificateDenied, corev1.ConditionUnknown, "D", "")}, "PEM", Decision{Outcome: Denied, Reason: "D"}},
		"not denied":                     {conditions{condition(certificatesv1.CertificateDenied, no, "D", "")}, "", Decision{Outcome: Denied, Reason: "D"}},
		"not denied, not failed, issued": {conditions{condition(certificatesv1.CertificateDenied, no, "D", ""), condition(certificatesv1.CertificateFailed, no, "F", "")}, "PEM", Decision{Outcome: Denied, Reason: "D"}},
		"not approved":                   {conditions{condition(certificatesv1.CertificateApproved, no, "X", "")}, "", Decision{Outcome: Failed, Reason: reasonUnknownCondition, Message: `it has a condition of type "Approved" and status "False"`}},
		"approved, not approved":         {conditions{approved, condition(certificatesv1.CertificateApproved, "", "X", "")}, "", Decision{Outcome: Failed, Reason: reasonUnknownCondition, Message: `it has a condition of type "Approved" and status ""`}},
		"a condition of others":          {conditions{condition("Acme", yes, "X", "")}, "", Decision{Outcome: Failed, Reason: reasonUnknownCondition, Message: `it has a condition of type "Acme"`}},
		"lower case":                     {conditions{condition("approved", yes, "X", "")}, "", Decision{Outcome: Failed, Reason: reasonUnknownCondition, Message: `it has a condition of type "approved"`}},
		"approved, lower case":           {conditions{approved, condition("approved", no, "X", "")}, "", Decision{Outcome: Failed, Reason: reasonUnknownCondition, Message: `it has a condition of type "approved"`}},
		"a blank":                        {conditions{condition("Approved ", yes, "X", ""), approved}, "", Decision{Outcome: Failed, Reason: reasonUnknownCondition, Message: `it has a condition of type "Approved "`}},
		"lower case, denied":             {conditions{condition("approved", yes, "X", ""), denied}, "", Decision{Outcome: Denied, Reason: "D", Message: "denied"}},
		"lower case, issued":             {conditions{approved, condition("approved", yes, "X", "")}, "PEM", Decision{Outcome: Issued, Certificate: []byte("PEM")}},
	} {
		t.Run(name, func(t *testing.T) {
			object := &certificatesv1.CertificateSigningRequest{Status: certificatesv1.CertificateSigningRequestStatus{Conditions: c.conditions, Certificate: []byte(c.certificate)}}
			got := Classify(object)
			if got.Outcome != c.want.Outcome || got.Reason != c.want.Reason || got.Message != c.want.Message || !bytes.Equal(got.Certificate, c.want.Certificate) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

// A request that has ended for the controller and the rules has ended for the node as well.
func TestClassifyAgrees(t *testing.T) {
	want := map[state.State]Outcome{state.Pending: Pending, state.Approved: Pending, state.Issued: Issued, state.Denied: Denied, state.Failed: Failed, state.Closed: Failed}
	for _, c := range statetest.Cases() {
		if got := Classify(&certificatesv1.CertificateSigningRequest{Status: c.Status}); got.Outcome != want[c.State] {
			t.Errorf("%s: %+v, want %d", c.Title, got, want[c.State])
		}
	}
}

// A hello ends with its challenge or with a refusal. To approve or sign one does not answer it.
func TestClassifyHello(t *testing.T) {
	const yes, no = corev1.ConditionTrue, corev1.ConditionFalse
	approved := condition(certificatesv1.CertificateApproved, yes, "A", "approved")
	denied := condition(certificatesv1.CertificateDenied, yes, "D", "denied")
	failed := condition(certificatesv1.CertificateFailed, yes, "F", "failed")
	hostile := "\x1b[2J\n\x00" + strings.Repeat("x", 256<<10)
	type conditions = []certificatesv1.CertificateSigningRequestCondition
	type annotations = map[string]string
	const challenge, versions = attestation.AnnotationChallenge, attestation.AnnotationVersions
	for name, c := range map[string]struct {
		conditions  conditions
		certificate string
		annotations annotations
		want        Decision
	}{
		"nothing yet":                     {nil, "", nil, Decision{Outcome: Pending}},
		"approved":                        {conditions{approved}, "", nil, Decision{Outcome: Pending}},
		"issued":                          {nil, "PEM", nil, Decision{Outcome: Pending}},
		"approved, issued":                {conditions{approved}, "PEM", nil, Decision{Outcome: Pending}},
		"answered":                        {nil, "", annotations{challenge: "c"}, Decision{Outcome: Answered, Challenge: "c"}},
		"answered, approved, issued":      {conditions{approved}, "PEM", annotations{challenge: "c"}, Decision{Outcome: Answered, Challenge: "c"}},
		"answered with nothing":           {nil, "", annotations{challenge: ""}, Decision{Outcome: Pending}},
		"answered with nothing, issued":   {nil, "PEM", annotations{challenge: ""}, Decision{Outcome: Pending}},
		"answered with white space":       {nil, "", annotations{challenge: " "}, Decision{Outcome: Answered, Challenge: " "}},
		"answered by a peer":              {nil, "", annotations{challenge: hostile}, Decision{Outcome: Answered, Challenge: hostile}},
		"answered with versions":          {nil, "", annotations{challenge: "c", versions: "x/v1"}, Decision{Outcome: Answered, Challenge: "c"}},
		"versions, and not denied":        {nil, "", annotations{versions: "x/v1"}, Decision{Outcome: Pending}},
		"annotations of others":           {nil, "", annotations{"x/challenge": "c", attestation.AnnotationEK: "e", strings.ToUpper(challenge): "c"}, Decision{Outcome: Pending}},
		"denied":                          {conditions{denied}, "", nil, Decision{Outcome: Denied, Reason: "D", Message: "denied"}},
		"denied, answered":                {conditions{denied}, "", annotations{challenge: "c"}, Decision{Outcome: Denied, Reason: "D", Message: "denied"}},
		"denied, answered, issued":        {conditions{approved, denied}, "PEM", annotations{challenge: "c"}, Decision{Outcome: Denied, Reason: "D", Message: "denied"}},
		"denied with versions":            {conditions{denied}, "", annotations{versions: "x/v2,x/v1"}, Decision{Outcome: Denied, Reason: "D", Message: "denied", Versions: "x/v2,x/v1"}},
		"denied with a peer's versions":   {conditions{denied}, "", annotations{versions: hostile}, Decision{Outcome: Denied, Reason: "D", Message: "denied", Versions: hostile}},
		"failed":                          {conditions{failed}, "", nil, Decision{Outcome: Failed, Reason: "F", Message: "failed"}},
		"failed, answered, with versions": {conditions{failed}, "", annotations{challenge: "c", versions: "x/v1"}, Decision{Outcome: Failed, Reason: "F", Message: "failed"}},
		"not denied, answered":            {conditions{condition(certificatesv1.CertificateDenied, no, "D", "")}, "", annotations{challenge: "c"}, Decision{Outcome: Denied, Reason: "D"}},
		"a condition of others, answered": {conditions{condition("Acme", yes, "X", "")}, "", annotations{challenge: "c"}, Decision{Outcome: Failed, Reason: reasonUnknownCondition, Message: `it has a condition of type "Acme"`}},
	} {
		t.Run(name, func(t *testing.T) {
			object := &certificatesv1.CertificateSigningRequest{Status: certificatesv1.CertificateSigningRequestStatus{Conditions: c.conditions, Certificate: []byte(c.certificate)}}
			object.Annotations = c.annotations
			if got := ClassifyHello(object); !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %.300v, want %.300v", got, c.want)
			}
			// Annotations of a proof do not count.
			object.Status = certificatesv1.CertificateSigningRequestStatus{}
			if got := Classify(object); !reflect.DeepEqual(got, Decision{Outcome: Pending}) {
				t.Errorf("a proof is %.300v", got)
			}
		})
	}
}

// An approver's text is shown in a root shell's terminal and in logs.
func TestTextOfAPeerIsMadeHarmless(t *testing.T) {
	for name, text := range map[string]string{
		"escape sequence":    "\x1b]0;owned\x07\x1b[2J\x1b[31mred",
		"8-bit control":      "\u009b31mred",
		"lines":              "first\nsecond\r\nthird\u2028fourth\u0085fifth\vsixth\fseventh",
		"right to left":      "a\u202egnp.exe\u2066b\u200f",
		"NUL and DEL":        "a\x00b\x7fc",
		"not UTF-8":          "a\xff\xfeb\xc3",
		"a surrogate's half": "a\xed\xa0\x80b",
		"byte order mark":    "\ufeffa",
		"long":               strings.Repeat("x", 100_000),
		"long, not ASCII":    strings.Repeat("ä€𝄞", 20_000),
		"long, odd":          "x" + strings.Repeat("ä", 20_000),
	} {
		t.Run(name, func(t *testing.T) {
			for _, kind := range []certificatesv1.RequestConditionType{certificatesv1.CertificateDenied, certificatesv1.CertificateFailed} {
				object := &certificatesv1.CertificateSigningRequest{}
				object.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(kind, corev1.ConditionTrue, text, text)}
				d := Classify(object)
				if hello := ClassifyHello(object); !reflect.DeepEqual(hello, d) {
					t.Errorf("a hello's is %.100q: %.100q", hello.Reason, hello.Message)
				}
				for field, got := range map[string]string{"reason": d.Reason, "message": d.Message} {
					if !utf8.ValidString(got) || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
						t.Errorf("%s of %s is not printable: %q", field, kind, got)
					}
				}
				if len(d.Reason) > 64+len(" ...") || len(d.Message) > 512+len(" ...") {
					t.Errorf("%s: reason of %d and message of %d bytes", kind, len(d.Reason), len(d.Message))
				}
				if strings.HasPrefix(name, "long") != strings.HasSuffix(d.Message, " ...") {
					t.Errorf("%s: whether it was shortened does not show: %.20q", kind, d.Message)
				}
			}
		})
	}
}

func TestTextThatIsHarmlessIsKept(t *testing.T) {
	for _, text := range []string{"AttestationQuoteInvalid", "the EK (sha256:ab…) is another machine's: \"m-1\"; ask <ops@example.com>", strings.Repeat("x", 512)} {
		object := &certificatesv1.CertificateSigningRequest{}
		object.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateDenied, corev1.ConditionTrue, "", text)}
		if got := Classify(object).Message; got != text {
			t.Errorf("got %q, want %q", got, text)
		}
	}
}

// certificateDER returns a self-signed certificate.
func certificateDER(t testing.TB, name string) []byte {
	t.Helper()
	key, _, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func certificatePEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func TestParseCertificatesKeepsTheChainInOrder(t *testing.T) {
	leafDER, caDER := certificateDER(t, "leaf"), certificateDER(t, "intermediate")
	leaf, ca := certificatePEM(leafDER), certificatePEM(caDER)
	for name, c := range map[string]struct{ data, want []byte }{
		"one":                      {leaf, leaf},
		"with intermediates":       {join(leaf, ca, ca), join(leaf, ca, ca)},
		"text before, between":     {join([]byte("subject: leaf\n"), leaf, []byte("issuer: x\n"), ca), join(leaf, ca)},
		"text after":               {join(leaf, []byte("the end\n")), leaf},
		"without the last newline": {bytes.TrimSuffix(leaf, []byte("\n")), leaf},
		"carriage returns":         {bytes.ReplaceAll(leaf, []byte("\n"), []byte("\r\n")), leaf},
		"as long as may be":        {join(leaf, make([]byte, MaxCertificate-len(leaf))), leaf},
	} {
		t.Run(name, func(t *testing.T) {
			chain, first, err := ParseCertificates(c.data)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(chain, c.want) {
				t.Errorf("chain:\n%s\nwant\n%s", chain, c.want)
			}
			if !bytes.Equal(first.Raw, leafDER) {
				t.Errorf("the leaf is %q", first.Subject.CommonName)
			}
		})
	}
}

func TestParseCertificatesRefuses(t *testing.T) {
	der := certificateDER(t, "leaf")
	good := certificatePEM(der)
	_, key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"nothing":             nil,
		"garbage":             []byte("AAAAsecretAAAA"),
		"DER":                 der,
		"a key":               key,
		"a key after it":      join(good, key),
		"a key before it":     join(key, good),
		"a trusted one":       pem.EncodeToMemory(&pem.Block{Type: "TRUSTED CERTIFICATE", Bytes: der}),
		"no certificate":      certificatePEM([]byte("AAAAsecretAAAA")),
		"an empty block":      certificatePEM(nil),
		"damaged second":      join(good, certificatePEM(der[:len(der)-1])),
		"a byte too many":     certificatePEM(append(bytes.Clone(der), 0)),
		"two in one block":    certificatePEM(join(der, der)),
		"half a block":        good[:len(good)/2],
		"longer than may be":  join(good, make([]byte, MaxCertificate-len(good)+1)),
		"a header":            pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Headers: map[string]string{"A": "b"}, Bytes: der}),
		"certificates enough": bytes.Repeat(good, MaxCertificate/len(good)+1),
	} {
		t.Run(name, func(t *testing.T) {
			chain, leaf, err := ParseCertificates(data)
			if err == nil || chain != nil || leaf != nil {
				t.Fatalf("was accepted: %d bytes, %v", len(chain), err)
			}
			if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "BEGIN") || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error quotes it: %v", err)
			}
		})
	}
}

// FuzzParseCertificates: what is accepted is a chain that reads the same when it is read again, and
// holds nothing else.
func FuzzParseCertificates(f *testing.F) {
	leaf, ca := certificatePEM(certificateDER(f, "leaf")), certificatePEM(certificateDER(f, "ca"))
	_, key, err := NewKey()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(leaf)
	f.Add(join(leaf, []byte("text\n"), ca))
	f.Add(join(leaf, key))
	f.Add([]byte("-----BEGIN CERTIFICATE-----\nA: b\n\nAA==\n-----END CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		chain, first, err := ParseCertificates(data)
		if err != nil {
			if chain != nil || first != nil {
				t.Fatal("an error and a certificate")
			}
			return
		}
		block, _ := pem.Decode(chain)
		if block == nil || !bytes.Equal(block.Bytes, first.Raw) {
			t.Fatal("the chain does not begin with the leaf")
		}
		again, leaf, err := ParseCertificates(chain)
		if err != nil || !bytes.Equal(again, chain) || !bytes.Equal(leaf.Raw, first.Raw) {
			t.Fatalf("not read back: %v", err)
		}
	})
}
