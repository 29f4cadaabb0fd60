// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const (
	// objectAge is how old what was read from the API server may be, and two seconds more while it is read: many requests at once share one read.
	objectAge = 500 * time.Millisecond
	// readTimeout bounds one read.
	readTimeout = 10 * time.Second
)

// SecretCA is a signing.Source that reads a Secret of type kubernetes.io/tls, such as Cluster API's <cluster>-ca. The last good pair
// stays in use, until it ends, while the Secret holds none, or cannot be read: whoever wants no more certificates from a CA has to
// put another in its place, or end the process.
type SecretCA struct {
	reader client.Reader
	secret types.NamespacedName

	shared inventory.Shared

	mu      sync.Mutex
	version string
	good    *signing.CA
	problem error
}

// NewSecretCA returns a SecretCA. The reader must not be a cache: that of a rotated CA would be late.
func NewSecretCA(reader client.Reader, secret types.NamespacedName) *SecretCA {
	return &SecretCA{reader: reader, secret: secret}
}

// CA returns the pair that the Secret holds, or held last.
func (s *SecretCA) CA(ctx context.Context, now time.Time) (*signing.CA, error) {
	s.shared.Refresh(now, objectAge, func() { s.refresh(ctx, now) })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.good == nil {
		if s.problem == nil {
			return nil, &signing.CAError{Problem: "there is none"}
		}
		return nil, s.problem
	}
	if end := s.good.NotAfter(); !now.Before(end) {
		expired := &signing.CAError{Problem: "expired at " + end.UTC().Format(time.RFC3339)}
		if s.problem == nil {
			s.problem = expired
		}
		return nil, expired
	}
	return s.good, nil
}

// Problem returns what kept the last call of CA from using what is in the Secret, nil if nothing did.
func (s *SecretCA) Problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problem
}

func (s *SecretCA) refresh(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	object := &corev1.Secret{}
	err := s.reader.Get(ctx, s.secret, object)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.problem = fmt.Errorf("signing CA: secret %s: %w", s.secret, err)
		return
	}
	s.problem = s.take(object, now)
}

// take has the pair in a Secret used, if it is another one; the caller holds the mutex.
func (s *SecretCA) take(object *corev1.Secret, now time.Time) error {
	version := string(object.UID) + "/" + object.ResourceVersion
	if s.good != nil && version == s.version {
		return nil
	}
	// What will not do is judged anew each time: it may be a CA whose time has not come.
	ca, err := signing.FromSecret(object.Data, now)
	if err != nil {
		return fmt.Errorf("secret %s: %w", s.secret, err)
	}
	s.good, s.version = ca, version
	return nil
}

// ConfigMapInventory is the source of machines whose inventory is in a ConfigMap.
type ConfigMapInventory struct {
	reader    client.Reader
	configMap types.NamespacedName
	key       string
	latest    inventory.Latest
	told      told
	shared    inventory.Shared
}

// NewConfigMapInventory returns a source for the entry key of a ConfigMap. It reads nothing yet.
func NewConfigMapInventory(reader client.Reader, configMap types.NamespacedName, key string) *ConfigMapInventory {
	return &ConfigMapInventory{reader: reader, configMap: configMap, key: key}
}

// Machines returns those in the ConfigMap, or in the last good one.
func (c *ConfigMapInventory) Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	return copied(c.lend(ctx, now))
}

func (c *ConfigMapInventory) lend(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	c.shared.Refresh(now, objectAge, func() { c.refresh(ctx) })
	known, err := c.latest.Inventory()
	if err != nil {
		return nil, err
	}
	return c.told.of(known), nil
}

// Token returns the machine in the ConfigMap that has this token.
func (c *ConfigMapInventory) Token(ctx context.Context, id string, now time.Time) (verifier.Token, error) {
	c.shared.Refresh(now, objectAge, func() { c.refresh(ctx) })
	known, err := c.latest.Inventory()
	if err != nil {
		return verifier.Token{}, err
	}
	return tokenOf(known, id), nil
}

// Problem returns what is wrong with what the ConfigMap holds, nil if that is in use.
func (c *ConfigMapInventory) Problem() error { return c.latest.Problem() }

func (c *ConfigMapInventory) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	object := &corev1.ConfigMap{}
	if err := c.reader.Get(ctx, c.configMap, object); err != nil {
		c.latest.Fail(fmt.Errorf("inventory: configmap %s: %w", c.configMap, err))
		return
	}
	content, ok := object.Data[c.key]
	if !ok {
		c.latest.Fail(fmt.Errorf("inventory: configmap %s has no entry %q", c.configMap, c.key))
		return
	}
	_ = c.latest.Offer([]byte(content)) // Problem tells
}
