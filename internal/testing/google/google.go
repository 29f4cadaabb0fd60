// SPDX-License-Identifier: Apache-2.0

// Package google imitates the parts of Google Cloud that vouch for instances of Compute Engine: the
// metadata service of each instance, the identity tokens that it returns, and the published keys,
// with their rotation. No real service was reached to make it: it follows Google's documentation.
package google

import (
	"crypto"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/big"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Key is a signing key of Google.
type Key struct {
	ID      string
	Private *rsa.PrivateKey
}

// NewKey returns a key of 2048 bits, as Google's are. A seed always gives the same key, so that
// separate processes can imitate one Google, and a fuzzer finds the same input again.
func NewKey(seed string) Key {
	one, e := big.NewInt(1), big.NewInt(65537)
	p, q := prime(seed+" p"), prime(seed+" q")
	private := &rsa.PrivateKey{PublicKey: rsa.PublicKey{N: new(big.Int).Mul(p, q), E: 65537}, Primes: []*big.Int{p, q}}
	phi := new(big.Int).Mul(new(big.Int).Sub(p, one), new(big.Int).Sub(q, one))
	private.D = new(big.Int).ModInverse(e, phi)
	private.Precompute()
	if err := private.Validate(); err != nil {
		panic(err)
	}
	sum := sha256.Sum256(private.N.Bytes())
	return Key{hex.EncodeToString(sum[:20]), private}
}

// prime returns a prime of 1024 bits. The product of two has 2048 bits, since both begin with two
// ones.
func prime(seed string) *big.Int {
	var data []byte
	for i := range 4 {
		sum := sha256.Sum256([]byte(fmt.Sprint(seed, " ", i)))
		data = append(data, sum[:]...)
	}
	data[0] |= 0xc0
	data[len(data)-1] |= 1
	p, two, e := new(big.Int).SetBytes(data), big.NewInt(2), big.NewInt(65537)
	for !p.ProbablyPrime(0) || new(big.Int).Mod(p, e).Cmp(big.NewInt(1)) == 0 {
		p.Add(p, two)
	}
	return p
}

// Header returns the header of this key's tokens.
func (k Key) Header() string { return `{"alg":"RS256","kid":"` + k.ID + `","typ":"JWT"}` }

// Sign returns a JWT in compact form, with any header and payload.
func (k Key) Sign(header, payload string) []byte {
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(header)) + "." + encode([]byte(payload))
	digest := sha256.Sum256([]byte(signed))
	signature, err := rsa.SignPKCS1v15(nil, k.Private, crypto.SHA256, digest[:])
	if err != nil {
		panic(err)
	}
	return []byte(signed + "." + encode(signature))
}

// JWK returns the public key as Google publishes it.
func (k Key) JWK() map[string]any {
	encode := base64.RawURLEncoding.EncodeToString
	return map[string]any{
		"kty": "RSA", "alg": "RS256", "use": "sig", "kid": k.ID,
		"n": encode(k.Private.N.Bytes()), "e": encode(big.NewInt(int64(k.Private.E)).Bytes()),
	}
}

// KeySet returns the key set of keys.
func KeySet(keys ...Key) []byte {
	list := []any{}
	for _, k := range keys {
		list = append(list, k.JWK())
	}
	data, err := json.MarshalIndent(map[string]any{"keys": list}, "", "  ")
	if err != nil {
		panic(err)
	}
	return data
}

// VM is an instance of Compute Engine.
type VM struct {
	Project       string
	ProjectNumber int64
	Zone, Name    string
	ID            string
	// Attributes are the metadata that the VM's creator wrote. They are not part of a token.
	Attributes map[string]string
	// NoServiceAccount is set if the VM has none. Then it gets no token.
	NoServiceAccount bool
}

// Claims returns the claims of a token that is issued at a time, in Google's order. Only full ones
// name the VM.
func (vm VM) Claims(audience string, full bool, issued time.Time) string {
	claims := map[string]any{
		"aud": audience, "iss": "https://accounts.google.com", "iat": issued.Unix(), "exp": issued.Add(time.Hour).Unix(),
		"azp": "109876543210987654321", "sub": "109876543210987654321",
		"email": "123456789012-compute@developer.gserviceaccount.com", "email_verified": true,
	}
	if full {
		claims["google"] = map[string]any{"compute_engine": map[string]any{
			"project_id": vm.Project, "project_number": vm.ProjectNumber, "zone": vm.Zone,
			"instance_id": vm.ID, "instance_name": vm.Name, "instance_creation_timestamp": issued.Add(-time.Hour).Unix(),
		}}
	}
	data, err := json.Marshal(claims)
	if err != nil {
		panic(err)
	}
	return string(data)
}

// Fault is what is wrong with a service.
type Fault int32

const (
	// Down closes each connection without an answer.
	Down Fault = iota + 1
	// Slow answers only when the client has gone.
	Slow
	// Lying uses keys that are not Google's.
	Lying
	// Redirecting sends the client to another path, which has the right answer.
	Redirecting
	// Failing answers with status 500.
	Failing
)

// Google has the signing keys.
type Google struct {
	// Now is the clock of tokens. Default: time.Now. It must not change while a service serves.
	Now func() time.Time

	seed      string
	mutex     sync.Mutex
	keys      []Key // the first one signs
	rotations int
	liar      Key
}

// New returns a Google with two published keys, as Google has. A seed always gives the same ones.
func New(seed string) *Google {
	return &Google{
		Now: time.Now, seed: seed, liar: NewKey(seed + " liar"),
		keys: []Key{NewKey(seed + " 0"), NewKey(seed + " 1")},
	}
}

// Key returns the key that signs.
func (g *Google) Key() Key {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.keys[0]
}

// Rotate makes the next key sign. The old one is published no longer, and a new one is.
func (g *Google) Rotate() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.rotations++
	g.keys = append(g.keys[1:], NewKey(fmt.Sprint(g.seed, " ", g.rotations+1)))
}

// KeySet returns the published key set.
func (g *Google) KeySet() []byte {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return KeySet(g.keys...)
}

// Service is an HTTP service of Google, with a Fault that can be set.
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
		<-r.Context().Done()
	case Failing:
		http.Error(w, "try again", http.StatusInternalServerError)
	case Redirecting:
		if was {
			s.serve(w, r, false)
			return
		}
		w.Header().Set("Location", redirected+r.URL.RequestURI())
		w.WriteHeader(http.StatusFound)
	default:
		s.serve(w, r, fault == Lying)
	}
}

// Keys returns the service that publishes the keys. Real keys are served over TLS.
func (g *Google) Keys() *Service {
	return &Service{serve: func(w http.ResponseWriter, _ *http.Request, lies bool) {
		data := g.KeySet()
		if lies {
			data = KeySet(g.liar)
		}
		w.Header().Set("Content-Type", "application/json; charset=UTF-8")
		w.Header().Set("Cache-Control", "public, max-age=21600, must-revalidate, no-transform")
		w.Header().Set("Age", "600")
		_, _ = w.Write(data) // the client may be gone
	}}
}

// Metadata returns the metadata service of a VM. Real ones listen at 169.254.169.254:80.
func (g *Google) Metadata(vm VM) *Service {
	const root = "/computeMetadata/v1/"
	return &Service{serve: func(w http.ResponseWriter, r *http.Request, lies bool) {
		w.Header().Set("Metadata-Flavor", "Google")
		if r.Header.Get("Metadata-Flavor") != "Google" || r.Header.Get("X-Forwarded-For") != "" {
			http.Error(w, "the header Metadata-Flavor: Google is missing", http.StatusForbidden)
			return
		}
		path, query := strings.TrimPrefix(r.URL.Path, root), r.URL.Query()
		attribute, isAttribute := strings.CutPrefix(path, "instance/attributes/")
		value, found := vm.Attributes[attribute]
		switch {
		case path == "project/project-id":
			value = vm.Project
		case path == "instance/zone":
			value = "projects/123456789012/zones/" + vm.Zone
		case path == "instance/name":
			value = vm.Name
		case path == "instance/id":
			value = vm.ID
		case isAttribute && found:
		case path == "instance/service-accounts/default/identity" && !vm.NoServiceAccount && query.Get("audience") != "":
			key := g.Key()
			if lies {
				key = g.liar
			}
			value = string(key.Sign(key.Header(), vm.Claims(query.Get("audience"), query.Get("format") == "full", g.Now())))
		default:
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/text")
		_, _ = w.Write([]byte(value)) // the client may be gone
	}}
}
