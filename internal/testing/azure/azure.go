// SPDX-License-Identifier: Apache-2.0

// Package azure imitates the parts of Azure that vouch for VMs: the metadata service of each VM
// with its attested documents, the token end point, and Azure Resource Manager. No real service was
// reached to make it. The form of its documents is that of published ones, which package
// verifier/azure has as test data.
package azure

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"time"
)

// Authority is a CA, or a certificate that one issued, with its key.
type Authority struct {
	Certificate *x509.Certificate
	Key         *rsa.PrivateKey
}

// NewRoot returns a root CA of this name.
func NewRoot(name string) Authority {
	return issue(Authority{}, &x509.Certificate{
		Subject: pkix.Name{Country: []string{"US"}, Organization: []string{"Imitation"}, CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
}

// Intermediate returns an intermediate CA.
func (a Authority) Intermediate(name string) Authority {
	return issue(a, &x509.Certificate{
		Subject: pkix.Name{Country: []string{"US"}, Organization: []string{"Imitation"}, CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}

// Signer returns a certificate such as those that sign documents, for these DNS names. change may
// be nil.
func (a Authority) Signer(change func(*x509.Certificate), names ...string) Authority {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: names[len(names)-1]}, DNSNames: names, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if change != nil {
		change(template)
	}
	return issue(a, template)
}

// issue completes a certificate. An issuer without a certificate means that it is self-signed.
func issue(issuer Authority, template *x509.Certificate) Authority {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		panic(err)
	}
	if template.SerialNumber == nil {
		template.SerialNumber = new(big.Int).SetBytes(key.N.Bytes()[:16])
	}
	if template.NotBefore.IsZero() {
		template.NotBefore, template.NotAfter = time.Now().AddDate(-1, 0, 0), time.Now().AddDate(2, 0, 0)
	}
	if issuer.Certificate == nil {
		issuer = Authority{template, key}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer.Certificate, key.Public(), issuer.Key)
	if err != nil {
		panic(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	return Authority{certificate, key}
}

// The object identifiers in documents.
var (
	oidSignedData    = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 2}
	oidData          = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	oidRSA           = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 1}
	oidSHA256WithRSA = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11}
)

// TLV encodes a value in DER: the tag, the length, and the parts.
func TLV(tag byte, parts ...[]byte) []byte {
	var content []byte
	for _, part := range parts {
		content = append(content, part...)
	}
	der := []byte{tag}
	switch n := len(content); {
	case n < 0x80:
		der = append(der, byte(n))
	case n < 0x100:
		der = append(der, 0x81, byte(n))
	default:
		der = append(der, 0x82, byte(n>>8), byte(n)) //nolint:gosec // documents have less than 64 KiB
	}
	return append(der, content...)
}

// OID encodes an object identifier, and the NULL of an algorithm's parameters if it is asked for.
func OID(id asn1.ObjectIdentifier, null bool) []byte {
	der, err := asn1.Marshal(id)
	if err != nil {
		panic(err)
	}
	if null {
		return TLV(0x30, der, []byte{5, 0})
	}
	return der
}

// Document is an attested document before it is encoded.
type Document struct {
	Content []byte
	// Certificates are in their order. Azure's documents have the signer's alone.
	Certificates []*x509.Certificate
	// Signers have signed the content.
	Signers []Authority
	// The fields below make documents that Azure does not make. Digest replaces the digest
	// algorithm, and Bag the tag of the certificates. Signed and Unsigned are attributes in DER.
	Digest               asn1.ObjectIdentifier
	Bag                  byte
	Signed, Unsigned     []byte
	Detached, Enveloped  bool
	SignatureOver        []byte
	DataIsNotOctetString bool
}

// Sign returns the document of this content as Azure makes it.
func (a Authority) Sign(content string) Document {
	return Document{Content: []byte(content), Certificates: []*x509.Certificate{a.Certificate}, Signers: []Authority{a}}
}

// DER encodes the document.
func (d Document) DER() []byte {
	version := []byte{2, 1, 1}
	digest := OID(oidSHA256WithRSA, true)
	if d.Digest != nil {
		digest = OID(d.Digest, true)
	}
	data := TLV(0xa0, TLV(0x04, d.Content))
	if d.DataIsNotOctetString {
		data = TLV(0xa0, TLV(0x0c, d.Content))
	}
	if d.Detached {
		data = nil
	}
	bag := byte(0xa0)
	if d.Bag != 0 {
		bag = d.Bag
	}
	var certificates, signers []byte
	for _, c := range d.Certificates {
		certificates = append(certificates, c.Raw...)
	}
	for _, s := range d.Signers {
		over := d.Content
		if d.SignatureOver != nil {
			over = d.SignatureOver
		}
		sum := sha256.Sum256(over)
		signature, err := rsa.SignPKCS1v15(nil, s.Key, crypto.SHA256, sum[:])
		if err != nil {
			panic(err)
		}
		serial, err := asn1.Marshal(s.Certificate.SerialNumber)
		if err != nil {
			panic(err)
		}
		signers = append(signers, TLV(0x30, version, TLV(0x30, s.Certificate.RawIssuer, serial), digest, d.Signed,
			OID(oidRSA, true), TLV(0x04, signature), d.Unsigned)...)
	}
	kind := oidSignedData
	if d.Enveloped {
		kind = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 3}
	}
	return TLV(0x30, OID(kind, false), TLV(0xa0, TLV(0x30, version, TLV(0x31, digest),
		TLV(0x30, OID(oidData, false), data), TLV(bag, certificates), TLV(0x31, signers))))
}

// VM is a virtual machine.
type VM struct {
	// ID is the vmId, and ResourceID the path in Azure Resource Manager.
	ID, Subscription, ResourceID string
}

// Content returns the content of a document of the VM that is made at a time, in Azure's order.
func (vm VM) Content(nonce string, created time.Time) string {
	const layout = "01/02/06 15:04:05 -0000"
	return fmt.Sprintf(`{"licenseType":"","nonce":"%s","plan":{"name":"","product":"","publisher":""},"sku":"22_04-lts-gen2",`+
		`"subscriptionId":"%s","timeStamp":{"createdOn":"%s","expiresOn":"%s"},"vmId":"%s"}`,
		nonce, vm.Subscription, created.UTC().Format(layout), created.UTC().Add(6*time.Hour).Format(layout), vm.ID)
}

// Fault is what is wrong with a service.
type Fault int32

const (
	// Down closes each connection without an answer.
	Down Fault = iota + 1
	// Slow answers only when the client has gone.
	Slow
	// Lying answers for another VM, or with another signer.
	Lying
	// Redirecting sends the client to another path, which has the right answer.
	Redirecting
	// Forbidding answers with status 403.
	Forbidding
	// Missing answers with status 404.
	Missing
	// Flooding answers without an end.
	Flooding
)

// Service is an HTTP service of Azure, with a Fault that can be set.
type Service struct {
	serve func(w http.ResponseWriter, r *http.Request, lies bool)
	fault atomic.Int32
}

// Set sets what is wrong with the service, 0 for nothing.
func (s *Service) Set(fault Fault) { s.fault.Store(int32(fault)) }

const redirected = "/redirected"

// ServeHTTP answers a request.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, was := strings.CutPrefix(r.URL.Path, redirected)
	r.URL.Path = path
	switch fault := Fault(s.fault.Load()); fault {
	case Down:
		panic(http.ErrAbortHandler)
	case Slow:
		_, _ = io.Copy(io.Discard, r.Body) // only then does the server see that the client has gone
		<-r.Context().Done()
	case Forbidding:
		http.Error(w, `{"error":{"code":"AuthorizationFailed"}}`, http.StatusForbidden)
	case Missing:
		http.Error(w, `{"error":{"code":"ResourceNotFound"}}`, http.StatusNotFound)
	case Flooding:
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	case Redirecting:
		if was {
			s.serve(w, r, false)
			return
		}
		w.Header().Set("Location", redirected+r.URL.RequestURI())
		w.WriteHeader(http.StatusTemporaryRedirect)
	default:
		s.serve(w, r, fault == Lying)
	}
}

// answer writes JSON.
func answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_ = json.NewEncoder(w).Encode(value) // the client may be gone
}

var nonceForm = regexp.MustCompile(`^[0-9A-Za-z]{0,32}$`)

// Metadata returns the metadata service of a VM, whose documents the signer signs. Real ones listen
// at 169.254.169.254:80.
func Metadata(vm VM, signer Authority) *Service {
	return &Service{serve: func(w http.ResponseWriter, r *http.Request, lies bool) {
		query := r.URL.Query()
		nonce := query.Get("nonce")
		switch {
		case r.Header.Get("Metadata") != "true" || r.Header.Get("X-Forwarded-For") != "":
			http.Error(w, `{"error":"Bad request. Required metadata header not specified"}`, http.StatusBadRequest)
		case query.Get("api-version") != "2025-04-07" || !nonceForm.MatchString(nonce):
			http.Error(w, `{"error":"Bad request. api-version or nonce is invalid"}`, http.StatusBadRequest)
		case r.URL.Path == "/metadata/attested/document":
			if lies {
				nonce = "20260728192400"
			}
			document := signer.Sign(vm.Content(nonce, time.Now())).DER()
			answer(w, map[string]string{"encoding": "pkcs7", "signature": base64.StdEncoding.EncodeToString(document)})
		case r.URL.Path == "/metadata/instance/compute":
			answer(w, map[string]string{"resourceId": vm.ResourceID, "subscriptionId": vm.Subscription, "vmId": vm.ID})
		default:
			http.NotFound(w, r)
		}
	}}
}

// Identity is an application with a federated credential. It may read VMs.
type Identity struct{ Tenant, Client, Assertion, Token string }

// Login returns the token end point. Real ones serve over TLS.
func Login(identity Identity) *Service {
	return &Service{serve: func(w http.ResponseWriter, r *http.Request, lies bool) {
		switch {
		case r.Method != http.MethodPost || r.URL.Path != "/"+identity.Tenant+"/oauth2/v2.0/token" || r.ParseForm() != nil ||
			r.PostForm.Get("grant_type") != "client_credentials" || r.PostForm.Get("client_id") != identity.Client ||
			r.PostForm.Get("client_assertion_type") != "urn:ietf:params:oauth:client-assertion-type:jwt-bearer" ||
			!strings.HasSuffix(r.PostForm.Get("scope"), "/.default"):
			http.Error(w, `{"error":"invalid_request"}`, http.StatusBadRequest)
		case r.PostForm.Get("client_assertion") != identity.Assertion:
			http.Error(w, `{"error":"invalid_client"}`, http.StatusUnauthorized)
		case lies:
			answer(w, map[string]any{"token_type": "mac", "expires_in": -1, "access_token": ""})
		default:
			answer(w, map[string]any{"token_type": "Bearer", "expires_in": 3599, "ext_expires_in": 3599, "access_token": identity.Token})
		}
	}}
}

// Management returns Azure Resource Manager with these VMs. Real ones serve over TLS.
func Management(identity Identity, vms ...VM) *Service {
	return &Service{serve: func(w http.ResponseWriter, r *http.Request, lies bool) {
		if r.Method != http.MethodGet || r.Header.Get("Authorization") != "Bearer "+identity.Token {
			http.Error(w, `{"error":{"code":"AuthenticationFailed"}}`, http.StatusUnauthorized)
			return
		}
		if r.URL.Query().Get("api-version") == "" {
			http.Error(w, `{"error":{"code":"MissingApiVersionParameter"}}`, http.StatusBadRequest)
			return
		}
		for _, vm := range vms {
			if strings.EqualFold(vm.ResourceID, r.URL.Path) {
				id := vm.ResourceID
				if lies {
					id += "0"
				}
				answer(w, map[string]any{"id": id, "properties": map[string]any{"vmId": vm.ID}})
				return
			}
		}
		http.Error(w, `{"error":{"code":"ResourceNotFound"}}`, http.StatusNotFound)
	}}
}
