// SPDX-License-Identifier: Apache-2.0

package records

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Frequent requests of a machine must not fill its record beyond the limit of the CRD.
func TestRecordKeepsTheNewestCertificates(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	record := &v1alpha1.NodeAttestation{}
	record.Status.Certificates = []v1alpha1.IssuedCertificate{{RequestUID: "expired", NotAfter: metav1.NewTime(now.Add(-time.Second))}}
	note := func(i int, request *certificatesv1.CertificateSigningRequest) {
		t.Helper()
		der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(int64(i)), NotAfter: now.Add(time.Hour)},
			&x509.Certificate{SerialNumber: big.NewInt(int64(i))}, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := AddCertificate(record, request, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0, now); err != nil {
			t.Fatal(err)
		}
	}
	for i := range MaxCertificates + 3 {
		note(i, requestNamed("", big.NewInt(int64(i)).String()))
	}
	got := record.Status.Certificates
	if len(got) != MaxCertificates || got[0].RequestUID != "3" || !HasCertificateFor(record, "66") || HasCertificateFor(record, "2") || HasCertificateFor(record, "expired") {
		t.Errorf("%d certificates, the first for %s", len(got), got[0].RequestUID)
	}
	// A revocation selects by when the API server stored the request.
	if got[0].Requested != nil {
		t.Errorf("requested %s", got[0].Requested)
	}
	dated := requestNamed("", "dated")
	dated.CreationTimestamp = metav1.NewTime(now.Add(-time.Minute))
	note(0, dated)
	if c := record.Status.Certificates[len(record.Status.Certificates)-1]; c.Requested == nil || !c.Requested.Equal(&dated.CreationTimestamp) {
		t.Errorf("%+v", c)
	}
	// A request whose certificate cannot be published does not push out the certificate in use.
	stuck := requestNamed("", "stuck")
	for i := range 3 * MaxCertificates {
		note(i, stuck)
	}
	if got = record.Status.Certificates; len(got) != MaxCertificates || !HasCertificateFor(record, "66") || !HasCertificateFor(record, "5") || HasCertificateFor(record, "4") || got[len(got)-1].RequestUID != "stuck" {
		t.Errorf("%d certificates, the first for %s", len(got), got[0].RequestUID)
	}
}

func requestNamed(name, uid string) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid)}}
}

// The rules get their grant back from the record.
func TestGrantIsReadBack(t *testing.T) {
	now := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	grants := map[string]verifier.Record{
		"with an EK": {
			Cluster: "c", Machine: verifier.MachineRef{Name: "m", UID: "u"}, Provider: "tpm", EK: "ek", AK: "ak", EKSource: verifier.EKInventory,
			ProviderID: "acme://m", NodeName: "node", Boot: &verifier.Boot{Resets: 1, Restarts: 2, Clock: 3},
			HelloUID: "hello", ProofUID: "proof", ProofSHA256: "digest", FirstProofUID: "first",
		},
		"without": {
			Cluster: "c", Machine: verifier.MachineRef{Name: "m"}, Provider: "acme", NodeName: "node", ProofUID: "proof", ProofSHA256: "digest", FirstProofUID: "proof",
		},
	}
	for name, want := range grants {
		object, err := NewStore(nil, "n", nil).New(want)
		if err != nil {
			t.Fatal(err)
		}
		object.Status.Boot, object.Status.Hello = &v1alpha1.BootCounters{Resets: 9}, &v1alpha1.HelloReference{UID: "older"}
		var hello *certificatesv1.CertificateSigningRequest
		if want.HelloUID != "" {
			hello = requestNamed("h", want.HelloUID)
		}
		SetGrant(object, want, requestNamed("p", "proof"), hello, now)
		if got := recordOf(object); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v", name, got)
		}
		if object.Status.Request.Name != "p" || !object.Status.LastAttested.Time.Equal(now) {
			t.Errorf("%s: %+v", name, object.Status)
		}
	}
}

// A recovered certificate is in the record once, and is not the newest certificate.
func TestGrantAddsRecoveredCertificate(t *testing.T) {
	now := time.Now()
	object := &v1alpha1.NodeAttestation{}
	for range MaxCertificates { // of a former EK, so that the grant drops none
		object.Status.Certificates = append(object.Status.Certificates, v1alpha1.IssuedCertificate{
			SHA256: fmt.Sprint(len(object.Status.Certificates)), FormerEK: true, NotAfter: metav1.NewTime(now.Add(time.Hour)),
		})
	}
	end := now.Add(24 * time.Hour)
	grant := verifier.Record{EK: "ek", ProofUID: "p", Certificates: []verifier.Certificate{{SHA256: "recovered", NotAfter: end, Recovered: true}}}
	for range 2 {
		SetGrant(object, grant, requestNamed("p", "p"), nil, now)
		all := object.Status.Certificates
		if last := all[len(all)-1]; len(all) != MaxCertificates || all[0].SHA256 != "1" || last.SHA256 != "recovered" || !last.Recovered() || !last.Noted || !last.NotAfter.Time.Equal(end) {
			t.Fatalf("%+v", all)
		}
		if newest := newestCertificate(object); newest != nil {
			t.Errorf("the newest certificate is %+v", newest)
		}
	}
	if got := recordOf(object).Certificates; len(got) != 1 || !got[0].Recovered || got[0].SHA256 != "recovered" || HasCertificateFor(object, "p") {
		t.Errorf("%+v", got)
	}
}

// A grant drops certificates that the rules dropped. It keeps those of a former EK until they
// expire, although they vouch for nothing.
func TestGrantKeepsCertificates(t *testing.T) {
	now := time.Now()
	object := &v1alpha1.NodeAttestation{}
	object.Spec.EK = &v1alpha1.EndorsementKey{Fingerprint: "former", Source: "Inventory"}
	object.Status.EKReplaced = &v1alpha1.EKReplacement{EKs: []string{"next"}}
	for i, c := range []v1alpha1.IssuedCertificate{{SHA256: "kept"}, {SHA256: "dropped"}, {SHA256: "of an older EK", FormerEK: true}, {SHA256: "ended", FormerEK: true}} {
		c.NotAfter = metav1.NewTime(now.Add(time.Hour))
		if i == 3 {
			c.NotAfter = metav1.NewTime(now)
		}
		object.Status.Certificates = append(object.Status.Certificates, c)
	}
	grant := verifier.Record{EK: "former", EKSource: verifier.EKInventory, ProofUID: "p", Certificates: []verifier.Certificate{{SHA256: "kept"}}}
	SetGrant(object, grant, requestNamed("p", "p"), nil, now)
	var kept []string
	for _, c := range object.Status.Certificates {
		kept = append(kept, c.SHA256)
	}
	if !reflect.DeepEqual(kept, []string{"kept", "of an older EK"}) || len(object.Status.EKHistory) > 0 || object.Status.EKReplaced == nil {
		t.Errorf("%q, %+v", kept, object.Status)
	}
	if got := recordOf(object); len(got.Certificates) != 1 || !reflect.DeepEqual(got.EKReplacedBy, []string{"next"}) {
		t.Errorf("%+v", got)
	}

	grant.EK, grant.Certificates = "next", nil
	object.Status.Certificates[0].FormerEK = false
	SetGrant(object, grant, requestNamed("q", "q"), nil, now)
	history := object.Status.EKHistory
	if len(history) != 1 || history[0].Fingerprint != "former" || history[0].Source != "Inventory" || history[0].RequestUID != "q" || object.Status.EKReplaced != nil {
		t.Errorf("%+v", object.Status)
	}
	if len(object.Status.Certificates) != 2 || !object.Status.Certificates[0].FormerEK {
		t.Errorf("%+v", object.Status.Certificates)
	}
	if got := recordOf(object); len(got.Certificates) > 0 || !reflect.DeepEqual(got.FormerEKs, []string{"former"}) {
		t.Errorf("the certificates of the former EK vouch: %+v", got)
	}
	for i := range 2 * maxEKHistory {
		grant.EK = strconv.Itoa(i)
		SetGrant(object, grant, requestNamed("r", "r"), nil, now)
	}
	if history = object.Status.EKHistory; len(history) != maxEKHistory || history[len(history)-1].Fingerprint != strconv.Itoa(2*maxEKHistory-2) {
		t.Errorf("%d former EKs, the newest %+v", len(history), history[len(history)-1])
	}
}

// Bytes that are not a certificate are not stored in the record.
func TestAddNoCertificate(t *testing.T) {
	record := &v1alpha1.NodeAttestation{}
	if _, err := AddCertificate(record, requestNamed("r", "r"), []byte("-----"), 0, time.Now()); err == nil || len(record.Status.Certificates) > 0 {
		t.Errorf("%v, %+v", err, record.Status)
	}
}

// A full record drops what is refused already, then what ends first. So a machine that renews again
// and again does not remove a stolen certificate from what can be revoked.
func TestFullRecordDropsWhatEndsFirst(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	certificate := func(name string, ends time.Duration) v1alpha1.IssuedCertificate {
		return v1alpha1.IssuedCertificate{SHA256: name, RequestUID: types.UID(name), NotAfter: metav1.NewTime(now.Add(ends))}
	}
	revoked := certificate("revoked", 5*time.Hour)
	revoked.Revoked = true
	all := []v1alpha1.IssuedCertificate{certificate("stolen", 4*time.Hour), certificate("short", time.Hour), revoked}
	for i := range 3 * MaxCertificates {
		all = bounded(append(all, certificate(strconv.Itoa(i), 2*time.Hour)))
		has := func(name string) bool {
			return slices.ContainsFunc(all, func(c v1alpha1.IssuedCertificate) bool { return c.SHA256 == name })
		}
		if !has("stolen") || !has(strconv.Itoa(i)) || has("revoked") != (i < MaxCertificates-3) || has("short") != (i < MaxCertificates-2) {
			t.Fatalf("after %d certificates: stolen %v, revoked %v, short %v", i+1, has("stolen"), has("revoked"), has("short"))
		}
	}
}
