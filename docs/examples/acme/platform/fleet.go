// SPDX-License-Identifier: Apache-2.0

package platform

import (
	"cmp"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"strconv"
	"strings"
	"sync"
)

// Fleet is the API about all instances, for clients that have the token.
type Fleet struct {
	Token string

	mu        sync.Mutex
	instances map[string]*Instance
	launched  int
}

// Instance is what the API says about an instance.
type Instance struct {
	ID       string `json:"id"`
	Serial   string `json:"serial"`
	Hostname string `json:"hostname"`
	UserData string `json:"userData"`
	// EndorsementKeys are SubjectPublicKeyInfo in PEM.
	EndorsementKeys []string `json:"-"`
	// Silent says that calls about its TPM are not answered, and Twice that lists have it twice.
	Silent, Twice bool `json:"-"`
}

// Launch adds an instance, or replaces it, with the endorsement keys of its virtual TPM.
func (f *Fleet) Launch(id, hostname string, eks ...any) error {
	keys := []string{}
	for _, ek := range eks {
		der, err := x509.MarshalPKIXPublicKey(ek)
		if err != nil {
			return err
		}
		keys = append(keys, string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.instances == nil {
		f.instances = map[string]*Instance{}
	}
	f.launched++
	f.instances[id] = &Instance{ID: id, Serial: strconv.Itoa(f.launched), Hostname: hostname, EndorsementKeys: keys}
	return nil
}

// Change changes an instance, and removes it if change returns false.
func (f *Fleet) Change(id string, change func(*Instance) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !change(f.instances[id]) {
		delete(f.instances, id)
	}
}

// ServeHTTP describes the instances that are asked for, of those that exist, or the TPM of one.
func (f *Fleet) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer "+f.Token {
		http.Error(w, "who are you?", http.StatusUnauthorized)
		return
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/instances", f.list)
	mux.HandleFunc("GET /v1/instances/{id}/tpm", f.tpm)
	mux.ServeHTTP(w, r)
}

func (f *Fleet) list(w http.ResponseWriter, r *http.Request) {
	ids := strings.Split(r.URL.Query().Get("id"), ",")
	if len(ids) > 100 {
		http.Error(w, "wanted are 1 to 100 instances", http.StatusBadRequest)
		return
	}
	found := []Instance{}
	f.mu.Lock()
	for _, id := range ids {
		if i, ok := f.instances[id]; ok {
			if found = append(found, *i); i.Twice {
				found = append(found, *i)
			}
		}
	}
	f.mu.Unlock()
	_ = json.NewEncoder(w).Encode(map[string]any{"instances": found})
}

func (f *Fleet) tpm(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	i := *cmp.Or(f.instances[r.PathValue("id")], &Instance{})
	f.mu.Unlock()
	switch {
	case i.ID == "":
		http.NotFound(w, r)
	case i.Silent:
		<-r.Context().Done()
	default:
		_ = json.NewEncoder(w).Encode(map[string]any{"serial": i.Serial, "endorsementKeys": i.EndorsementKeys})
	}
}
