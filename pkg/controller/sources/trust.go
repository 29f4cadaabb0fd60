// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
)

// clientCAConfigMap is where the API servers of a cluster publish the CAs that they trust for
// clients: the union of all their --client-ca-file. A CA that they no longer trust stays there
// until it expires.
var clientCAConfigMap = types.NamespacedName{Namespace: "kube-system", Name: "extension-apiserver-authentication"}

const clientCAKey = "client-ca-file"

const (
	// compareAge is how stale client-ca-file may be.
	compareAge = 2 * time.Second
	// verdictAge is the time after which a comparison is repeated although neither side changed,
	// since certificates expire.
	verdictAge = time.Minute
)

// ErrCANotTrusted says that the API server trusts no certificate that the CA signs.
var ErrCANotTrusted = errors.New("the API server does not trust the signing CA")

// ComparedCA is a signing.Source that compares its CA with the CAs that the API server trusts.
// While the API server does not trust the CA, ComparedCA returns an error. Otherwise a node would
// replace its certificate by one that locks it out.
//
// The API server publishes the CAs that it trusts in a ConfigMap. While that cannot be read, the
// last known good content is used. If it is missing, forbidden or empty, the CA is not compared,
// and may sign.
type ComparedCA struct {
	source signing.Source
	reader client.Reader

	refresher lastgood.Refresher
	// changed gets an entry when the verdict changes.
	changed chan struct{}

	mu sync.Mutex
	// bundle is the content of client-ca-file, and trusted its certificates. If there are none,
	// unknown says why.
	bundle  string
	trusted []*x509.Certificate
	unknown error
	// verdict is the result for the CA compared, at the time comparedAt.
	compared   *signing.CA
	comparedAt time.Time
	verdict    error
}

// NewComparedCA returns a ComparedCA. reader reads in the cluster that nodes join. It must not be a
// cache.
func NewComparedCA(source signing.Source, reader client.Reader) *ComparedCA {
	return &ComparedCA{source: source, reader: reader, changed: make(chan struct{}, 1), unknown: fmt.Errorf("configmap %s was not read yet", clientCAConfigMap)}
}

// CA returns the CA, unless it is known that the API server does not trust it.
func (c *ComparedCA) CA(ctx context.Context, now time.Time) (*signing.CA, error) {
	ca, err := c.source.CA(ctx, now)
	if err != nil {
		return nil, err
	}
	if err := c.Compare(ctx, ca, now); errors.Is(err, ErrCANotTrusted) {
		return nil, err
	}
	return ca, nil
}

// Uncompared returns the source of a CA without the comparison.
func Uncompared(source signing.Source) signing.Source {
	if compared, ok := source.(*ComparedCA); ok {
		return compared.source
	}
	return source
}

// Compare returns nil if the API server trusts the CA, and ErrCANotTrusted if it does not. Any
// other error means that this is not known.
func (c *ComparedCA) Compare(ctx context.Context, ca *signing.CA, now time.Time) error {
	c.refresher.Refresh(now, compareAge, func() { c.refresh(ctx) })
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unknown != nil {
		return c.unknown
	}
	if c.compared != ca || now.Sub(c.comparedAt).Abs() >= verdictAge {
		before := c.verdict
		c.compared, c.comparedAt, c.verdict = ca, now, nil
		if err := ca.CheckTrusted(c.trusted, now); err != nil {
			c.verdict = fmt.Errorf("%w %.16s: %s in configmap %s: %w", ErrCANotTrusted, ca.Fingerprint(), clientCAKey, clientCAConfigMap, err)
		}
		if (before == nil) != (c.verdict == nil) {
			c.notify()
		}
	}
	return c.verdict
}

// notify makes Health check at once, since a decision may notice the change before Health's next
// interval.
func (c *ComparedCA) notify() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// refresh reads the CAs that the API server trusts.
func (c *ComparedCA) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	object := &corev1.ConfigMap{}
	err := c.reader.Get(ctx, clientCAConfigMap, object)
	if err != nil {
		err = fmt.Errorf("configmap %s: %w", clientCAConfigMap, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch bundle := object.Data[clientCAKey]; {
	case apierrors.IsForbidden(err) || apierrors.IsNotFound(err) || len(c.trusted) == 0 && err != nil:
		c.forget(err)
	case err != nil: // keep the last known good content
	case bundle == "":
		c.forget(fmt.Errorf("configmap %s: has no %s", clientCAConfigMap, clientCAKey))
	case bundle != c.bundle:
		trusted, err := cert.ParseCertsPEM([]byte(bundle)) // as the API server does
		if err != nil {
			c.forget(fmt.Errorf("configmap %s: %s: %w", clientCAConfigMap, clientCAKey, err))
			return
		}
		c.bundle, c.trusted, c.unknown, c.compared = bundle, trusted, nil, nil
	}
}

// forget drops the content, and stores why the CA cannot be compared. The caller locks.
func (c *ComparedCA) forget(why error) {
	c.bundle, c.trusted, c.compared, c.unknown = "", nil, nil, why
}
