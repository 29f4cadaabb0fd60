// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// currentKey is the entry of the Secret that has the ID of the key for new challenges. Each other
// entry is a key, and its name is the ID of the key.
const currentKey = "current"

// The sizes of challenge keys, in bytes. An entry of more than maxKey is invalid.
const (
	minKey = 32
	maxKey = 1024
	// maxKeys is the maximum number of keys: the current one, and the previous or the next one.
	maxKeys = 2
)

// ParseKeys reads challenge keys from the data of a Secret. There is one key, or two during a
// rotation. Each has 32 bytes to 1 KiB and is stored under its ID. The entry current has the ID of
// one of them. Errors quote no key.
func ParseKeys(data map[string][]byte) (tpm.Keys, error) {
	keys := tpm.Keys{Current: string(data[currentKey]), ByID: map[string][]byte{}}
	if len(data) > maxKeys+1 {
		return tpm.Keys{}, fmt.Errorf("it has %d entries, not %s and 1 to %d keys", len(data), currentKey, maxKeys)
	}
	for id, key := range data {
		switch {
		case id == currentKey:
			continue
		case !attestation.IsKeyID(id):
			return tpm.Keys{}, errors.New("it has an entry whose name is not a key ID")
		case len(key) < minKey || len(key) > maxKey:
			return tpm.Keys{}, fmt.Errorf("key %s has %d bytes, not %d to %d", id, len(key), minKey, maxKey)
		}
		keys.ByID[id] = key
	}
	if len(keys.Current) == 0 {
		return tpm.Keys{}, fmt.Errorf("it has no %s", currentKey)
	}
	if keys.ByID[keys.Current] == nil {
		return tpm.Keys{}, fmt.Errorf("%s names no key in it", currentKey)
	}
	return keys, nil
}

// newKey returns the data of a Secret with one new key, under a new ID.
func newKey() map[string][]byte {
	key, id := make([]byte, minKey), make([]byte, 8)
	_, _ = rand.Read(key) // never fails
	_, _ = rand.Read(id)
	name := "k-" + hex.EncodeToString(id)
	return map[string][]byte{currentKey: []byte(name), name: key}
}

// KeyStore keeps the challenge keys in a Secret that all replicas share, and a TPM verifier with
// these keys. It makes a key if the Secret is missing or empty. If two replicas make one, the API
// server stores the first, and both use that. KeyStore never changes the keys of a Secret that has
// some. It reads a changed Secret without a restart. While the Secret is invalid, the last known
// good keys are used.
//
// Rotate a key in three steps. Add the next key. Some seconds later make it the current one. Remove
// the old key after a challenge's lifetime plus the rules' WaitDeadline: a proof may wait that
// long.
type KeyStore struct {
	// Interval is the time between two reads of the Secret. Default: 2 s.
	Interval time.Duration
	// Existing makes the store fill an empty Secret, and never create one.
	Existing bool

	reader client.Reader
	writer client.Client
	secret types.NamespacedName
	build  func(tpm.Keys) (*tpm.Verifier, error)

	// refreshing lets only one Refresh at a time call the API server.
	refreshing sync.Mutex
	latest     lastgood.Value[keyedVerifier]

	mu sync.Mutex
	// accepted is the last read value of the Secret's annotation AnnotationAcceptEKChanges.
	accepted string
}

// keyedVerifier is a verifier, with the keys that it has.
type keyedVerifier struct {
	keys     tpm.Keys
	verifier *tpm.Verifier
}

// AnnotationAcceptEKChanges is an annotation of the challenge keys' Secret, in which an operator
// acknowledges held changes of endorsement keys. Its value has the names of the changes, separated
// by commas. The log and Events have these names.
const AnnotationAcceptEKChanges = "attestation.cluster.x-k8s.io/accept-ek-changes"

// AcknowledgedEKChanges returns the changes that the operator acknowledged. They are from the last
// read of the Secret, so they may be stale.
func (s *KeyStore) AcknowledgedEKChanges() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return splitNames(s.accepted)
}

func splitNames(names string) []string {
	return strings.FieldsFunc(names, func(r rune) bool { return r == ',' || r == ' ' })
}

// RemoveAcknowledgedEKChange removes an acknowledgement from the Secret's annotation.
func (s *KeyStore) RemoveAcknowledgedEKChange(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	secret, err := s.Secret(ctx)
	if err != nil {
		return fmt.Errorf("secret %s: %w", s.secret, err)
	}
	names := splitNames(secret.Annotations[AnnotationAcceptEKChanges])
	if left := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == name }); len(left) > 0 {
		secret.Annotations[AnnotationAcceptEKChanges] = strings.Join(left, ",")
	} else {
		delete(secret.Annotations, AnnotationAcceptEKChanges)
	}
	// fails with a conflict if the Secret has changed since
	if err := s.writer.Update(ctx, secret); err != nil {
		return fmt.Errorf("secret %s: annotation %s: %w", s.secret, AnnotationAcceptEKChanges, err)
	}
	s.note(secret)
	return nil
}

const keysInterval = 2 * time.Second

// NewKeyStore returns a KeyStore that makes its verifiers with build. It reads nothing yet. The
// reader must not be a cache.
func NewKeyStore(reader client.Reader, writer client.Client, secret types.NamespacedName, build func(tpm.Keys) (*tpm.Verifier, error)) *KeyStore {
	s := &KeyStore{Interval: keysInterval, reader: reader, writer: writer, secret: secret, build: build}
	s.latest.Fail(errors.New("challenge keys: none was read yet"))
	return s
}

// Verifier returns the verifier with the last known good keys, nil while there are none.
func (s *KeyStore) Verifier() *tpm.Verifier {
	current, _ := s.latest.Get()
	return current.verifier
}

// Problem returns why the Secret's content is not used, nil if it is.
func (s *KeyStore) Problem() error { return s.latest.Problem() }

// LastRead returns the time when valid content was last read, zero if never.
func (s *KeyStore) LastRead() time.Time { return s.latest.LastRead() }

// SecretName is the name of the Secret.
func (s *KeyStore) SecretName() types.NamespacedName { return s.secret }

// Secret reads the Secret, for its annotations.
func (s *KeyStore) Secret(ctx context.Context) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	return secret, s.reader.Get(ctx, s.secret, secret)
}

// UpdateSecret writes the Secret, under the version that Secret returned. Callers change only its
// annotations.
func (s *KeyStore) UpdateSecret(ctx context.Context, secret *corev1.Secret) error {
	return s.writer.Update(ctx, secret)
}

// Start reads the Secret at each Interval until ctx ends. A manager runs it.
func (s *KeyStore) Start(ctx context.Context) error {
	ticker := time.NewTicker(s.Interval)
	defer ticker.Stop()
	for {
		_ = s.Refresh(ctx) // Problem returns the error
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// NeedLeaderElection returns false, so that standby replicas read the keys, too.
func (*KeyStore) NeedLeaderElection() bool { return false }

// Refresh reads the Secret, and writes a first key into it if there is none.
func (s *KeyStore) Refresh(ctx context.Context) error {
	s.refreshing.Lock()
	defer s.refreshing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	data, err := s.read(ctx)
	if err == nil {
		err = s.latest.Offer(versionOf(data), func() (keyedVerifier, error) {
			keys, err := ParseKeys(data)
			if err != nil {
				return keyedVerifier{}, s.errorf(err)
			}
			verifier, err := s.build(keys)
			if err != nil {
				return keyedVerifier{}, s.errorf(err)
			}
			return keyedVerifier{keys, verifier}, nil
		})
		return err
	}
	err = s.errorf(err)
	s.latest.Fail(err)
	return err
}

func (s *KeyStore) errorf(err error) error {
	return fmt.Errorf("challenge keys: secret %s: %w", s.secret, err)
}

// versionOf returns a digest of the keys. Other fields of the Secret do not affect it.
func versionOf(data map[string][]byte) string {
	digest := sha256.New()
	for _, id := range slices.Sorted(maps.Keys(data)) {
		_, _ = fmt.Fprintf(digest, "%q %q\n", id, data[id]) // never fails
	}
	return string(digest.Sum(nil))
}

// read returns the Secret's data. If there is no key, it writes one first.
func (s *KeyStore) read(ctx context.Context) (map[string][]byte, error) {
	secret, err := s.Secret(ctx)
	switch {
	case apierrors.IsNotFound(err) && !s.Existing:
		secret = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.secret.Namespace, Name: s.secret.Name}, Type: corev1.SecretTypeOpaque, Data: newKey()}
		err = s.writer.Create(ctx, secret)
	case err == nil && len(secret.Data) == 0:
		secret.Data = newKey()
		err = s.writer.Update(ctx, secret) // fails with a conflict if the Secret has changed since
	case err == nil:
		s.note(secret)
		return secret.Data, nil
	default:
		return nil, err
	}
	if err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsConflict(err) {
		return nil, err
	}
	// Another replica may have written first: use its key.
	if secret, err = s.Secret(ctx); err != nil {
		return nil, err
	}
	s.note(secret)
	return secret.Data, nil
}

// note stores the operator's acknowledgements.
func (s *KeyStore) note(secret *corev1.Secret) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.accepted = secret.Annotations[AnnotationAcceptEKChanges]
}
