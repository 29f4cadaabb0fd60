// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// secretAPI is an API server with one Secret.
type secretAPI struct {
	client.Client
	mu      sync.Mutex
	secret  *corev1.Secret
	version int
	writes  int
	fail    error
	// between runs once after a read: another writer is faster.
	between func()
}

var secretResource = schema.GroupResource{Resource: "secrets"}

func (a *secretAPI) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	a.mu.Lock()
	defer func() {
		between := a.between
		a.between = nil
		a.mu.Unlock()
		if between != nil {
			between()
		}
	}()
	if a.fail != nil {
		return a.fail
	}
	if a.secret == nil {
		return apierrors.NewNotFound(secretResource, key.Name)
	}
	a.secret.DeepCopyInto(into.(*corev1.Secret))
	return nil
}

func (a *secretAPI) Create(_ context.Context, object client.Object, _ ...client.CreateOption) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.secret != nil {
		return apierrors.NewAlreadyExists(secretResource, object.GetName())
	}
	a.put(object.(*corev1.Secret).Data)
	return nil
}

func (a *secretAPI) Update(_ context.Context, object client.Object, _ ...client.UpdateOption) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if object.GetResourceVersion() != a.secret.ResourceVersion {
		return apierrors.NewConflict(secretResource, object.GetName(), errors.New("changed"))
	}
	a.put(object.(*corev1.Secret).Data)
	return nil
}

func (a *secretAPI) put(data map[string][]byte) {
	a.version++
	a.writes++
	a.secret = &corev1.Secret{Data: maps.Clone(data)}
	a.secret.ResourceVersion = strings.Repeat("1", a.version)
}

func (a *secretAPI) set(data map[string][]byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.put(data)
}

func build(keys tpm.Keys) (*tpm.Verifier, error) {
	return tpm.New(tpm.Config{
		NamedEKs: true, ClusterUID: "c", Keys: keys, PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{7}},
	})
}

var keySecret = types.NamespacedName{Namespace: "n", Name: "keys"}

func key(b byte) []byte { return append(bytes.Repeat([]byte{b}, 31), b+1) }

func TestParseKeys(t *testing.T) {
	for name, c := range map[string]struct {
		data map[string][]byte
		says string
	}{
		"one":               {map[string][]byte{"current": []byte("a"), "a": key(1)}, ""},
		"two":               {map[string][]byte{"current": []byte("b"), "a": key(1), "b": key(2)}, ""},
		"three":             {map[string][]byte{"current": []byte("b"), "a": key(1), "b": key(2), "c": key(3)}, "entries"},
		"nothing":           {nil, "no current"},
		"no current":        {map[string][]byte{"a": key(1)}, "no current"},
		"current of none":   {map[string][]byte{"current": []byte("b"), "a": key(1)}, "names no key"},
		"current of itself": {map[string][]byte{"current": []byte("current"), "a": key(1)}, "names no key"},
		"a line feed":       {map[string][]byte{"current": []byte("a\n"), "a": key(1)}, "names no key"},
		"short":             {map[string][]byte{"current": []byte("a"), "a": key(1)[:31]}, "31 bytes"},
		"short, not in use": {map[string][]byte{"current": []byte("a"), "a": key(1), "b": {}}, "0 bytes"},
		"long":              {map[string][]byte{"current": []byte("a"), "a": make([]byte, 1025)}, "1025 bytes"},
		"no id":             {map[string][]byte{"current": []byte("a"), "a": key(1), "b/c": key(2)}, "not a key ID"},
	} {
		t.Run(name, func(t *testing.T) {
			keys, err := ParseKeys(c.data)
			switch {
			case c.says == "" && (err != nil || len(keys.ByID) != len(c.data)-1):
				t.Errorf("%d keys, %v", len(keys.ByID), err)
			case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
				t.Errorf("does not say %q: %v", c.says, err)
			}
		})
	}
}

// If there is no key, one is made, and all replicas use the same.
func TestKeyStoreMakesOneKey(t *testing.T) {
	for name, start := range map[string]*corev1.Secret{"no Secret": nil, "an empty Secret": {}} {
		t.Run(name, func(t *testing.T) {
			api := &secretAPI{secret: start}
			var stores []*KeyStore
			var group sync.WaitGroup
			for range 8 {
				store := NewKeyStore(api, api, keySecret, build)
				stores = append(stores, store)
				if store.Verifier() != nil || store.Problem() == nil {
					t.Error("there are keys before any was read")
				}
				group.Go(func() {
					if err := store.Refresh(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
			group.Wait()
			if api.writes != 1 {
				t.Errorf("%d were written", api.writes)
			}
			for _, store := range stores {
				if current := keysOf(store); store.Verifier() == nil || current.Current != string(api.secret.Data["current"]) || !bytes.Equal(current.ByID[current.Current], api.secret.Data[current.Current]) {
					t.Error("a replica has another key")
				}
			}
		})
	}
}

// The replica that writes second uses the key of the first.
func TestKeyStoreYields(t *testing.T) {
	for name, start := range map[string]*corev1.Secret{"no Secret": nil, "an empty Secret": {}} {
		t.Run(name, func(t *testing.T) {
			api := &secretAPI{secret: start}
			api.between = func() { api.set(map[string][]byte{"current": []byte("winner"), "winner": key(1)}) }
			store := NewKeyStore(api, api, keySecret, build)
			if err := store.Refresh(t.Context()); err != nil || keysOf(store).Current != "winner" || api.writes != 1 {
				t.Errorf("%v, %q, %d writes", err, keysOf(store).Current, api.writes)
			}
		})
	}
}

// A changed Secret is used. An invalid Secret is not used, and the store does not change it.
func TestKeyStoreRereads(t *testing.T) {
	api := &secretAPI{}
	api.set(map[string][]byte{"current": []byte("a"), "a": key(1)})
	store := NewKeyStore(api, api, keySecret, build)
	refresh := func(good bool) *tpm.Verifier {
		t.Helper()
		writes := api.writes
		err := store.Refresh(t.Context())
		if (err == nil) != good || (store.Problem() == nil) != good || api.writes != writes || store.Verifier() == nil {
			t.Errorf("%v, problem %v, %d writes", err, store.Problem(), api.writes-writes)
		}
		if err != nil && (strings.Contains(err.Error(), string(key(9))) || !strings.Contains(err.Error(), "n/keys")) {
			t.Errorf("the error is %q", err)
		}
		return store.Verifier()
	}
	first := refresh(true)
	if refresh(true) != first {
		t.Error("another verifier for the same keys")
	}
	api.set(map[string][]byte{"current": []byte("b"), "a": key(1), "b": key(2)})
	second := refresh(true)
	if second == first || keysOf(store).Current != "b" {
		t.Error("the new keys are not used")
	}
	api.set(map[string][]byte{"current": []byte("b"), "a": key(9)})
	if refresh(false) != second {
		t.Error("the last good keys are not used")
	}
	// well-formed, and not random
	api.set(map[string][]byte{"current": []byte("b"), "b": bytes.Repeat([]byte{1}, 32)})
	if refresh(false) != second {
		t.Error("the last good keys are not used")
	}
	api.fail = apierrors.NewForbidden(secretResource, "keys", errors.New("no"))
	if refresh(false) != second {
		t.Error("the last good keys are not used")
	}
	api.fail = nil
	api.set(map[string][]byte{"current": []byte("b"), "b": key(2)})
	if refresh(true) == second {
		t.Error("a key that was taken away is still known")
	}
}

func TestKeyStoreRunsUntilItsContextEnds(t *testing.T) {
	api := &secretAPI{}
	store := NewKeyStore(api, api, keySecret, build)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- store.Start(ctx) }()
	for deadline := time.Now().Add(5 * time.Second); store.Verifier() == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no keys were made")
		}
	}
	cancel()
	if err := <-ended; err != nil || store.NeedLeaderElection() {
		t.Error(err)
	}
}

func keysOf(store *KeyStore) tpm.Keys {
	current, _ := store.latest.Get()
	return current.keys
}
