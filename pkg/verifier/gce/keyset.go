// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

const (
	// MaxKeySet bounds a key set, in bytes. Google's has about 1,500.
	MaxKeySet = 64 << 10
	// maxKeys bounds the keys of a set, and maxKeyID the length of a key ID, in bytes.
	maxKeys, maxKeyID = 32, 128
	// minModulus is the length of the shortest key, in bits (RFC 7518, section 3.3). The longest
	// one that go-jose parses has 4096.
	minModulus = 2048
	// exponent is that of Google's keys.
	exponent = 65537
)

const (
	// Grace is how long after its removal from the key set a key still verifies requests that are
	// filed. The token must be older than the removal. So a token that is under way during a
	// rotation is accepted, and a leaked key that Google withdraws is worth nothing after it.
	Grace = time.Hour
	// retention is how long a removed key is kept: a request that was filed in time is judged again
	// for as long as it waits. Kubernetes deletes pending requests after a day.
	retention = Grace + 24*time.Hour
)

// KeySet is the keys that Google signs tokens with. The zero value has none. It is immutable.
type KeySet struct{ keys map[string]key }

type key struct {
	public *rsa.PublicKey
	// removed is when the key was found to be no longer published. It is zero if it is published.
	removed time.Time
}

// ParseKeySet parses a key set that Google publishes: a JWK Set (RFC 7517, section 5). Keys of
// another type, algorithm or use are ignored, since Google may add them: no token can use one.
// Any other fault fails the whole set: then the last known good set is the better one.
func ParseKeySet(data []byte) (KeySet, error) {
	if len(data) > MaxKeySet {
		return KeySet{}, fmt.Errorf("key set: longer than %d bytes", MaxKeySet)
	}
	set, err := cloud.ParseObject(data)
	if err != nil {
		return KeySet{}, fmt.Errorf("key set: %w", err)
	}
	var members []json.RawMessage
	if err := json.Unmarshal(set["keys"], &members); err != nil {
		return KeySet{}, errors.New(`key set: "keys" is not a list`)
	}
	if len(members) > maxKeys {
		return KeySet{}, fmt.Errorf("key set: more than %d keys", maxKeys)
	}
	keys := map[string]key{}
	for i, member := range members {
		id, public, err := parseKey(member)
		_, twice := keys[id]
		switch {
		case err != nil:
			return KeySet{}, fmt.Errorf("key set: key %d: %w", i, err)
		case public == nil: // not for our tokens
		case twice:
			return KeySet{}, fmt.Errorf("key set: key %d: the same key ID as another key", i)
		default:
			keys[id] = key{public: public}
		}
	}
	if len(keys) == 0 {
		return KeySet{}, errors.New("key set: no key for identity tokens")
	}
	return KeySet{keys}, nil
}

// parseKey returns a key and its ID, or nil if the key is not for RS256 signatures.
func parseKey(data []byte) (string, *rsa.PublicKey, error) {
	members, err := cloud.ParseObject(data)
	if err != nil {
		return "", nil, err
	}
	for name, want := range map[string]string{"kty": "RSA", "alg": algorithm, "use": "sig"} {
		if value, err := members.Text(name); err != nil || value != want {
			return "", nil, nil //nolint:nilerr // a key without that member is another kind of key
		}
	}
	var parsed jose.JSONWebKey
	if err := parsed.UnmarshalJSON(data); err != nil {
		return "", nil, err
	}
	public, ok := parsed.Key.(*rsa.PublicKey)
	switch {
	case !ok:
		return "", nil, errors.New("not a public RSA key")
	case public.N.BitLen() < minModulus || public.E != exponent:
		return "", nil, fmt.Errorf("must have at least %d bits and the exponent %d", minModulus, exponent)
	}
	return parsed.KeyID, public, checkKeyID(parsed.KeyID)
}

func checkKeyID(id string) error {
	if id == "" || len(id) > maxKeyID {
		return fmt.Errorf("a key ID must have 1 to %d bytes", maxKeyID)
	}
	return nil
}

// Merge returns the keys of s, which were fetched at the given time, and those of older that s has
// no longer. The caller replaces older by the result after each fetch.
func (s KeySet) Merge(older KeySet, fetched time.Time) KeySet {
	merged := map[string]key{}
	maps.Copy(merged, s.keys)
	for id, k := range older.keys {
		if k.removed.IsZero() {
			k.removed = fetched
		}
		if _, published := merged[id]; !published && fetched.Sub(k.removed) < retention {
			merged[id] = k
		}
	}
	return KeySet{merged}
}

// find returns the key of a token, nil if the set does not have it.
func (s KeySet) find(id string) *key {
	if k, found := s.keys[id]; found {
		return &k
	}
	return nil
}

// allows reports whether a token of this key may have been signed at issued, for a request that was
// filed at created.
func (k *key) allows(issued, created time.Time) bool {
	return k.removed.IsZero() || issued.Before(k.removed) && created.Before(k.removed.Add(Grace))
}
