// SPDX-License-Identifier: Apache-2.0

package cloudprovider

import (
	"context"
	"errors"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/googlekeys"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/lookup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/gce"
)

// GoogleKeys returns the last known good keys of Google's identity tokens.
type GoogleKeys interface {
	Keys(ctx context.Context) (gce.KeySet, error)
	// Expire says that a token has a key that Keys did not have.
	Expire()
}

// minKeysAge is the least age at which an unknown key makes the controller fetch the keys again. A
// node can name any key.
const minKeysAge = time.Minute

// fetchedKeys are keys by URL.
type fetchedKeys struct {
	client *googlekeys.Client
	cache  *lookup.Cache[gce.KeySet]
	// minAge is minKeysAge, or less in tests.
	minAge time.Duration
	// latest is used by one call at a time, as there is one key in the cache.
	latest gce.KeySet
}

// NewGoogleKeys returns the keys that a client fetches. They are fetched again when they have
// expired. If that fails, the last keys stay in use.
func NewGoogleKeys(client *googlekeys.Client, metrics *telemetry.LookupMetrics) GoogleKeys {
	return &fetchedKeys{client: client, minAge: minKeysAge, cache: lookup.New[gce.KeySet](lookup.Config{
		Service: gce.Name, Concurrency: 1, Timeout: 15 * time.Second, Size: 1, KeepStale: true, Metrics: metrics,
	})}
}

func (k *fetchedKeys) Keys(ctx context.Context) (gce.KeySet, error) {
	return k.cache.Get(ctx, "", func(ctx context.Context) (gce.KeySet, time.Duration, error) {
		data, maxAge, err := k.client.Fetch(ctx)
		if err != nil {
			return gce.KeySet{}, 0, err
		}
		keys, err := gce.ParseKeySet(data)
		if err != nil {
			return gce.KeySet{}, 0, err
		}
		k.latest = keys.Merge(k.latest, time.Now())
		return k.latest, maxAge, nil
	})
}

func (k *fetchedKeys) Expire() { k.cache.Expire("", k.minAge) }

// fileKeys are keys in a file.
type fileKeys struct{ lastgood.File[gce.KeySet] }

// keysFileAge bounds how stale the file may be.
const keysFileAge = 5 * time.Second

// NewGoogleKeysFile returns the keys in a file that the operator mirrors. A key that is not in the
// file any more verifies nothing.
func NewGoogleKeysFile(path string) GoogleKeys {
	return &fileKeys{lastgood.File[gce.KeySet]{
		Name: "keys of Google", Path: path, MaxSize: gce.MaxKeySet, MaxAge: keysFileAge, Parse: gce.ParseKeySet,
	}}
}

func (k *fileKeys) Keys(context.Context) (gce.KeySet, error) { return k.Get(time.Now()) }

func (k *fileKeys) Expire() {}

// GCE returns the Judge of provider gce. A token whose key is not known waits, and makes the keys
// be fetched again.
func GCE(v *gce.Verifier, keys GoogleKeys) Judge {
	return func(ctx context.Context, request verifier.Filed, _ string) (*cloud.Verified, error) {
		set, err := keys.Keys(ctx)
		if err != nil {
			return nil, err
		}
		verified, err := v.Verify(request, set)
		if _, unknown := errors.AsType[*gce.UnknownKeyError](err); unknown {
			keys.Expire()
		}
		return verified, err
	}
}
