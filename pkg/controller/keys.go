// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// currentKey is the entry of the Secret that says which key new challenges are made with. Each other entry is a key under its id.
const currentKey = "current"

// The sizes of challenge keys, in bytes: whoever needs more than maxKey has put something else there.
const (
	minKey = 32
	maxKey = 1024
	// maxKeys is how many there may be: the current one, and the one before it or the next.
	maxKeys = 2
)

// ParseKeys reads challenge keys from the data of a Secret: current has the id of one key, or of two while they are rotated, each 32 bytes or
// more under its id. An error quotes no key.
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
			return tpm.Keys{}, errors.New("it has an entry whose name is no key id")
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

// newKey returns the data of a Secret with one new key, under an id that no other key has.
func newKey() map[string][]byte {
	key, id := make([]byte, minKey), make([]byte, 8)
	_, _ = rand.Read(key) // never fails
	_, _ = rand.Read(id)
	name := "k-" + hex.EncodeToString(id)
	return map[string][]byte{currentKey: []byte(name), name: key}
}

// KeyStore keeps the challenge keys in a Secret that all replicas share, and has a TPM verifier with them. It makes a key if there is no
// Secret, or an empty one; of two that do, the API server takes the first, and the other uses that. It never changes a Secret that has
// anything in it. A changed Secret is read without a restart; what will not do leaves the last good keys in use.
//
// A key is rotated in three steps: add the next one; some seconds later make it the current one; a challenge's lifetime and the
// rules' WaitDeadline after that take the old one away: a proof may wait so long.
type KeyStore struct {
	// Interval is how long a changed Secret may go unnoticed. Default: 2 s.
	Interval time.Duration
	// Existing has the store fill a Secret that is there, and make none.
	Existing bool

	reader client.Reader
	writer client.Client
	secret types.NamespacedName
	make   func(tpm.Keys) (*tpm.Verifier, error)

	// reading lets one Refresh at a time go to the API server.
	reading sync.Mutex
	mu      sync.Mutex
	keys    tpm.Keys
	current *tpm.Verifier
	problem error
	// accepted is the Secret's annotation AnnotationAcceptEKChanges.
	accepted string
}

// AnnotationAcceptEKChanges is on the challenge keys' Secret where an operator acknowledges changes
// of endorsement keys that are held. It has the names that the log and the Events give them,
// separated by commas.
const AnnotationAcceptEKChanges = "attestation.cluster.x-k8s.io/accept-ek-changes"

// Acknowledgements are the names of changes that an operator has acknowledged.
type Acknowledgements interface {
	// List returns them as they were read last.
	List() []string
	// Remove takes one away, once the change has taken effect.
	Remove(ctx context.Context, name string) error
}

// List returns what the operator acknowledged, as the Secret had it when it was last read.
func (s *KeyStore) List() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return splitNames(s.accepted)
}

func splitNames(names string) []string {
	return strings.FieldsFunc(names, func(r rune) bool { return r == ',' || r == ' ' })
}

// Remove takes an acknowledgement out of the Secret's annotation.
func (s *KeyStore) Remove(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	secret := &corev1.Secret{}
	if err := s.reader.Get(ctx, s.secret, secret); err != nil {
		return fmt.Errorf("secret %s: %w", s.secret, err)
	}
	names := splitNames(secret.Annotations[AnnotationAcceptEKChanges])
	if left := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == name }); len(left) > 0 {
		secret.Annotations[AnnotationAcceptEKChanges] = strings.Join(left, ",")
	} else {
		delete(secret.Annotations, AnnotationAcceptEKChanges)
	}
	if err := s.writer.Update(ctx, secret); err != nil { // of the version that was read
		return fmt.Errorf("secret %s: annotation %s: %w", s.secret, AnnotationAcceptEKChanges, err)
	}
	_, err := s.load(secret)
	return err
}

const keysInterval = 2 * time.Second

// NewKeyStore returns a KeyStore, which makes its verifiers with build. It reads nothing yet.
func NewKeyStore(reader client.Reader, writer client.Client, secret types.NamespacedName, build func(tpm.Keys) (*tpm.Verifier, error)) *KeyStore {
	return &KeyStore{Interval: keysInterval, reader: reader, writer: writer, secret: secret, make: build, problem: errors.New("challenge keys: none was read yet")}
}

// Verifier returns the verifier with the latest keys, nil while there are none. It is what TPM.Latest wants.
func (s *KeyStore) Verifier() *tpm.Verifier {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// Problem returns what keeps the Secret from being used, nil if it is in use.
func (s *KeyStore) Problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problem
}

// Start reads the Secret again and again until ctx ends. A manager runs it.
func (s *KeyStore) Start(ctx context.Context) error {
	ticker := time.NewTicker(s.Interval)
	defer ticker.Stop()
	for {
		_ = s.Refresh(ctx) // Problem tells
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// NeedLeaderElection has replicas that stand by know the keys too.
func (*KeyStore) NeedLeaderElection() bool { return false }

// Refresh reads the Secret, and makes what is missing.
func (s *KeyStore) Refresh(ctx context.Context) error {
	s.reading.Lock()
	defer s.reading.Unlock()
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	keys, err := s.read(ctx)
	if err == nil {
		err = s.take(keys)
	}
	if err != nil {
		err = fmt.Errorf("challenge keys: secret %s: %w", s.secret, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problem = err
	return err
}

func (s *KeyStore) take(keys tpm.Keys) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil && reflect.DeepEqual(keys, s.keys) {
		return nil
	}
	made, err := s.make(keys)
	if err != nil {
		return err
	}
	s.keys, s.current = keys, made
	return nil
}

// read returns what is in the Secret, after having put a key there if there was none.
func (s *KeyStore) read(ctx context.Context) (tpm.Keys, error) {
	secret := &corev1.Secret{}
	err := s.reader.Get(ctx, s.secret, secret)
	switch {
	case apierrors.IsNotFound(err) && !s.Existing:
		secret = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.secret.Namespace, Name: s.secret.Name}, Type: corev1.SecretTypeOpaque, Data: newKey()}
		err = s.writer.Create(ctx, secret)
	case err == nil && len(secret.Data) == 0:
		secret.Data = newKey()
		err = s.writer.Update(ctx, secret) // of the version that was read
	case err == nil:
		return s.load(secret)
	default:
		return tpm.Keys{}, err
	}
	if err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsConflict(err) {
		return tpm.Keys{}, err
	}
	// Whoever wrote, what is there now counts.
	if err := s.reader.Get(ctx, s.secret, secret); err != nil {
		return tpm.Keys{}, err
	}
	return s.load(secret)
}

// load reads the keys in the Secret, and keeps the operator's acknowledgements.
func (s *KeyStore) load(secret *corev1.Secret) (tpm.Keys, error) {
	s.mu.Lock()
	s.accepted = secret.Annotations[AnnotationAcceptEKChanges]
	s.mu.Unlock()
	return ParseKeys(secret.Data)
}
