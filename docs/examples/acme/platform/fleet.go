// SPDX-License-Identifier: Apache-2.0

package platform

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"strings"
	"sync"
)

// Fleet is the API about all instances, for clients that have the token.
type Fleet struct {
	Token string

	mu        sync.Mutex
	instances map[string]map[string]any
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
		f.instances = map[string]map[string]any{}
	}
	f.instances[id] = map[string]any{"id": id, "hostname": hostname, "endorsementKeys": keys}
	return nil
}

// ServeHTTP describes the instances that are asked for, of those that there are.
func (f *Fleet) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ids := strings.Split(r.URL.Query().Get("id"), ",")
	switch {
	case r.Header.Get("Authorization") != "Bearer "+f.Token:
		http.Error(w, "who are you?", http.StatusUnauthorized)
		return
	case r.Method != http.MethodGet || r.URL.Path != "/v1/instances" || len(ids) > 100:
		http.Error(w, "wanted are 1 to 100 instances", http.StatusBadRequest)
		return
	}
	found := []map[string]any{}
	f.mu.Lock()
	for _, id := range ids {
		if i, ok := f.instances[id]; ok {
			found = append(found, i)
		}
	}
	f.mu.Unlock()
	_ = json.NewEncoder(w).Encode(map[string]any{"instances": found})
}
