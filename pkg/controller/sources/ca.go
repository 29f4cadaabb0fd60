// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
)

// SecretCA is a signing.Source that reads a Secret of type kubernetes.io/tls, such as Cluster API's
// <cluster>-ca. While the Secret is invalid or cannot be read, the last known good pair is used
// until it expires. To stop a CA from signing, replace it in the Secret, or end the process.
type SecretCA struct {
	reader client.Reader
	secret types.NamespacedName

	refresher lastgood.Refresher
	pair      lastgood.Value[*signing.CA]
}

// NewSecretCA returns a SecretCA. reader must not be a cache, which would see a rotation late.
func NewSecretCA(reader client.Reader, secret types.NamespacedName) *SecretCA {
	// A pair that is invalid now may be a CA that is not valid yet.
	return &SecretCA{reader: reader, secret: secret, pair: lastgood.Value[*signing.CA]{Reparse: true}}
}

// CA returns the pair in the Secret, or the last known good one.
func (c *SecretCA) CA(ctx context.Context, now time.Time) (*signing.CA, error) {
	c.refresher.Refresh(now, maxAge, func() { c.refresh(ctx, now) })
	ca, ok := c.pair.Get()
	if !ok {
		if err := c.pair.Problem(); err != nil {
			return nil, err
		}
		return nil, &signing.CAError{Problem: "there is none"}
	}
	if end := ca.NotAfter(); !now.Before(end) {
		expired := &signing.CAError{Problem: "expired at " + end.UTC().Format(time.RFC3339)}
		if c.pair.Problem() == nil {
			c.pair.Fail(expired)
		}
		return nil, expired
	}
	return ca, nil
}

// Problem returns why the last call of CA did not use the pair in the Secret, nil if it did.
func (c *SecretCA) Problem() error { return c.pair.Problem() }

// LastRead returns the time when a valid pair was last read, zero if never.
func (c *SecretCA) LastRead() time.Time { return c.pair.LastRead() }

func (c *SecretCA) refresh(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	object := &corev1.Secret{}
	if err := c.reader.Get(ctx, c.secret, object); err != nil {
		c.pair.Fail(fmt.Errorf("signing CA: secret %s: %w", c.secret, err))
		return
	}
	// Problem returns the error
	_ = c.pair.Offer(string(object.UID)+"/"+object.ResourceVersion, func() (*signing.CA, error) {
		ca, err := signing.FromSecret(object.Data, now)
		if err != nil {
			return nil, fmt.Errorf("secret %s: %w", c.secret, err)
		}
		return ca, nil
	})
}
