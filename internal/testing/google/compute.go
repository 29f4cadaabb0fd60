// SPDX-License-Identifier: Apache-2.0

package google

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// ComputeInstance is an instance as the Compute Engine API knows it.
type ComputeInstance struct {
	Project, Zone, Name string
	// ID is immutable. Compute makes it unless it is set.
	ID string
	// VTPM is shieldedInstanceConfig.enableVtpm. If it is nil, answers lack that field.
	VTPM      *bool
	LastStart time.Time
	// RSA2048 and ECCP256 are endorsement keys, and SigningKey an attestation key, in PEM. An empty
	// one is absent.
	RSA2048, ECCP256, SigningKey string
	// Silent says that a call for the keys is not answered, and Twice that the instance is listed
	// twice.
	Silent, Twice bool
}

func (i ComputeInstance) key() string { return i.Project + "/" + i.Zone + "/" + i.Name }

// Compute is the Compute Engine API, as far as a platform adapter reads it, and the token service
// of workload identity federation. Only the service's tokens count.
type Compute struct {
	// SubjectToken is the one that the token service accepts.
	SubjectToken string

	mu        sync.Mutex
	instances map[string]ComputeInstance
	tokens    map[string]bool
	number    int
	// read is called when keys have been read, before the answer.
	read func(ComputeInstance)
}

// Put adds an instance, or replaces the one of that name.
func (c *Compute) Put(i ComputeInstance) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.instances == nil {
		c.instances = map[string]ComputeInstance{}
	}
	if i.ID == "" {
		c.number++
		i.ID = strconv.Itoa(4_000_000_000_000_000_000 + c.number)
	}
	if i.LastStart.IsZero() {
		i.LastStart = time.Now()
	}
	c.instances[i.key()] = i
}

// Get returns an instance by <project>/<zone>/<name>. It is false if there is none.
func (c *Compute) Get(location string) (ComputeInstance, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, ok := c.instances[location]
	return i, ok
}

// Delete removes an instance.
func (c *Compute) Delete(location string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.instances, location)
}

// AfterRead calls a function each time that keys have been read, before they are sent.
func (c *Compute) AfterRead(f func(ComputeInstance)) { c.mu.Lock(); defer c.mu.Unlock(); c.read = f }

// Token returns a new access token.
func (c *Compute) Token() string {
	token := "ya29." + rand.Text()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tokens == nil {
		c.tokens = map[string]bool{}
	}
	c.tokens[token] = true
	return token
}

// Tokens is the token service: https://sts.googleapis.com/v1/token ("Security Token Service API").
func (c *Compute) Tokens() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method != http.MethodPost || r.ParseForm() != nil || r.PostForm.Get("grant_type") != "urn:ietf:params:oauth:grant-type:token-exchange" ||
			r.PostForm.Get("subject_token_type") != "urn:ietf:params:oauth:token-type:jwt" || r.PostForm.Get("audience") == "" ||
			r.PostForm.Get("scope") != "https://www.googleapis.com/auth/compute.readonly":
			writeJSON(w, http.StatusBadRequest, map[string]any{"error": "invalid_request"})
		case r.PostForm.Get("subject_token") != c.SubjectToken:
			writeJSON(w, http.StatusBadRequest, map[string]any{"error": "invalid_grant", "error_description": "the token is " + r.PostForm.Get("subject_token")})
		default:
			writeJSON(w, http.StatusOK, map[string]any{ //nolint:gosec // G101: a new token for each call
				"access_token": c.Token(), "issued_token_type": "urn:ietf:params:oauth:token-type:access_token", "token_type": "Bearer", "expires_in": 3600,
			})
		}
	})
}

// ServeHTTP answers a call of the API ("REST Resource: instances").
func (c *Compute) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	token, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	known, read := c.tokens[token], c.read
	c.mu.Unlock()
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/compute/v1/"), "/")
	switch {
	case !bearer || !known:
		WriteComputeError(w, http.StatusUnauthorized, "authError")
		return
	case r.Method != http.MethodGet || len(parts) < 5 || parts[0] != "projects" || parts[2] != "zones" || parts[4] != "instances":
		WriteComputeError(w, http.StatusNotFound, "notFound")
		return
	case len(parts) == 5:
		c.list(w, r, parts[1], parts[3])
		return
	}
	i, exists := c.Get(parts[1] + "/" + parts[3] + "/" + parts[5])
	switch {
	case !exists:
		WriteComputeError(w, http.StatusNotFound, "notFound")
	case len(parts) == 6:
		writeJSON(w, http.StatusOK, i.fields(r.URL.Query().Get("fields")))
	case len(parts) == 7 && parts[6] == "getShieldedInstanceIdentity":
		if i.Silent {
			<-r.Context().Done()
			return
		}
		identity := map[string]any{"kind": "compute#shieldedInstanceIdentity"}
		for name, key := range map[string]string{"signingKey": i.SigningKey, "encryptionKey": i.RSA2048, "eccP256SigningKey": i.SigningKey, "eccP256EncryptionKey": i.ECCP256} {
			if key != "" {
				identity[name] = map[string]any{"ekPub": key}
			}
		}
		if read != nil {
			read(i)
		}
		writeJSON(w, http.StatusOK, identity)
	default:
		WriteComputeError(w, http.StatusNotFound, "notFound")
	}
}

func (c *Compute) list(w http.ResponseWriter, r *http.Request, project, zone string) {
	query := r.URL.Query()
	most, err := strconv.Atoi(query.Get("maxResults"))
	if err != nil || most < 1 || most > 500 {
		WriteComputeError(w, http.StatusBadRequest, "invalid")
		return
	}
	top, fields, ofItems := strings.Cut(query.Get("fields"), "items(")
	fields, rest, _ := strings.Cut(fields, ")")
	var items []any
	c.mu.Lock()
	for _, key := range slices.Sorted(maps.Keys(c.instances)) {
		if i := c.instances[key]; i.Project == project && i.Zone == zone {
			items = append(items, i.fields(fields))
			if i.Twice {
				items = append(items, i.fields(fields))
			}
		}
	}
	c.mu.Unlock()
	after, _ := strconv.Atoi(query.Get("pageToken"))
	items = items[min(after, len(items)):]
	answer := map[string]any{}
	if strings.Contains(top+rest, "kind") {
		answer["kind"] = "compute#instanceList"
	}
	if len(items) > most {
		items = items[:most]
		if strings.Contains(rest, "nextPageToken") {
			answer["nextPageToken"] = strconv.Itoa(after + most)
		}
	}
	if ofItems && len(items) > 0 {
		answer["items"] = items
	}
	writeJSON(w, http.StatusOK, answer)
}

// fields returns the fields of a mask.
func (i ComputeInstance) fields(mask string) map[string]any {
	all := map[string]any{
		"kind": "compute#instance", "id": i.ID, "name": i.Name, "status": "RUNNING", "lastStartTimestamp": i.LastStart.Format(time.RFC3339Nano),
		"zone": fmt.Sprintf("https://www.googleapis.com/compute/v1/projects/%s/zones/%s", i.Project, i.Zone),
	}
	if i.VTPM != nil {
		all["shieldedInstanceConfig/enableVtpm"] = *i.VTPM
	}
	answer := map[string]any{}
	for field := range strings.SplitSeq(mask, ",") {
		if value, ok := all[field]; ok {
			if outer, inner, nested := strings.Cut(field, "/"); nested {
				answer[outer] = map[string]any{inner: value}
			} else {
				answer[field] = value
			}
		}
	}
	return answer
}

// WriteComputeError answers with an error, as Google's APIs do.
func WriteComputeError(w http.ResponseWriter, status int, reason string) {
	writeJSON(w, status, map[string]any{"error": map[string]any{
		"code": status, "message": "a long text", "errors": []any{map[string]any{"message": "a long text", "domain": "global", "reason": reason}},
	}})
}

func writeJSON(w http.ResponseWriter, status int, answer any) {
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(answer) // the client may be gone
}
