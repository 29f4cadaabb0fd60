// SPDX-License-Identifier: Apache-2.0

package plugintest

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// Sign issues a certificate for the request's key, as its subject asks but for change.
func Sign(t testing.TB, pkcs10 []byte, change func(*x509.Certificate)) []byte {
	t.Helper()
	request, err := x509.ParseCertificateRequest(pkcs10)
	if err != nil {
		t.Error(err)
		return nil
	}
	ca, _, keyPEM := NewCertificate(t, &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, NotAfter: Noon.Add(time.Hour), IsCA: true, BasicConstraintsValid: true})
	key, err := csr.ParseKey(keyPEM)
	if err != nil {
		t.Error(err)
		return nil
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: request.Subject, NotBefore: Noon.Add(-time.Minute), NotAfter: Noon.Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca, request.PublicKey, key)
	if err != nil {
		t.Error(err)
		return nil
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// PKCS10Of returns the PKCS#10 request in a request with evidence.
func PKCS10Of(t testing.TB, request []byte) []byte {
	t.Helper()
	parsed, err := attestation.Parse(request)
	if err != nil {
		t.Error(err)
	}
	return parsed.PKCS10
}

// APIServer plays as much of an API server as a worker needs.
type APIServer struct {
	T testing.TB
	// Decide says what becomes of a request that is filed.
	Decide func(*certificatesv1.CertificateSigningRequest)
	// Review answers a SelfSubjectReview.
	Review http.HandlerFunc
	// Refuses are credentials that get a 401: "token" or "certificate".
	Refuses []string
	// Denies has the reason for which a request with a credential is denied.
	Denies map[string]string

	mu    sync.Mutex
	Filed []string // whose credential each request was filed with
}

func (a *APIServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	credential := "none"
	if r.Header.Get("Authorization") != "" {
		credential = "token"
	}
	if len(r.TLS.PeerCertificates) > 0 {
		credential = "certificate"
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.Review != nil && strings.HasSuffix(r.URL.Path, "/selfsubjectreviews") {
		a.Review(w, r)
		return
	}
	var object certificatesv1.CertificateSigningRequest
	if err := json.NewDecoder(r.Body).Decode(&object); err != nil || r.Method != http.MethodPost {
		a.T.Errorf("%s %s: %v", r.Method, r.URL, err)
	}
	a.Filed = append(a.Filed, credential)
	w.Header().Set("Content-Type", "application/json")
	if slices.Contains(a.Refuses, credential) {
		w.WriteHeader(http.StatusUnauthorized)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: 401, Reason: metav1.StatusReasonUnauthorized, Message: "Unauthorized"})
		return
	}
	object.UID = "uid"
	if why := a.Denies[credential]; why != "" {
		object.Status.Conditions = append(object.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue, Reason: why, Message: "so it is",
		})
	} else {
		a.Decide(&object)
	}
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(object)
}
