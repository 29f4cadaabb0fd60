// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
)

// The keys of a Secret of type kubernetes.io/tls, and of Cluster API's <cluster>-ca.
const (
	secretCertificate = "tls.crt"
	secretKey         = "tls.key"
)

// Source returns the CA to sign with. The caller asks it again for each certificate, so a rotated
// CA is used at once. It is safe for concurrent use.
type Source interface {
	// CA returns a CA that may sign at the time now. An error means that nothing can be signed yet.
	CA(ctx context.Context, now time.Time) (*CA, error)
}

// FromSecret parses a CA from the data of a Secret, whose certificates may be a bundle.
func FromSecret(data map[string][]byte, now time.Time) (*CA, error) {
	for _, key := range []string{secretCertificate, secretKey} {
		if len(data[key]) == 0 {
			return nil, &CAError{"the Secret has no " + key}
		}
	}
	return parseBundle(data[secretCertificate], data[secretKey], now)
}

// Files is a Source that reads two files. It reads them at each use, so it misses no change.
// Reading costs less than a signature.
//
// A rotation writes one file after the other. While the two files are missing or are no valid pair,
// the last known good pair is used until it expires. Problem returns the reason. To stop a CA from
// signing, replace it in the files, or end the process.
type Files struct {
	certificate, key string
	pair             lastgood.Value[*CA]
}

// NewFiles returns a Source for the files with the CA's certificate and with its key, as parseCA
// reads them. It reads nothing yet.
func NewFiles(certificate, key string) *Files {
	// A pair that is invalid now may be a CA that is not valid yet.
	return &Files{certificate: certificate, key: key, pair: lastgood.Value[*CA]{Reparse: true}}
}

// CA returns the CA in the files, or the last known good one.
func (f *Files) CA(_ context.Context, now time.Time) (*CA, error) {
	problem := f.refresh(now)
	ca, ok := f.pair.Get()
	if !ok {
		return nil, problem
	}
	err := ca.checkTime(now)
	switch {
	case err == nil:
		return ca, nil
	case problem != nil:
		return nil, fmt.Errorf("%w; the pair in the files cannot be used either: %w", err, problem)
	}
	f.pair.Fail(err)
	return nil, err
}

// Problem returns the reason why the last call of CA did not use the pair in the files, nil if it
// did.
func (f *Files) Problem() error { return f.pair.Problem() }

// LastRead returns the last time when the files were read as a valid pair, zero if there was none.
func (f *Files) LastRead() time.Time { return f.pair.LastRead() }

// refresh reads the pair in the files, and uses it if it is valid.
func (f *Files) refresh(now time.Time) error {
	certificate, err := read(f.certificate)
	if err != nil {
		f.pair.Fail(err)
		return err
	}
	key, err := read(f.key)
	if err != nil {
		f.pair.Fail(err)
		return err
	}
	sums := [2][sha256.Size]byte{sha256.Sum256(certificate), sha256.Sum256(key)}
	return f.pair.Offer(string(sums[0][:])+string(sums[1][:]), func() (*CA, error) {
		ca, err := parseCA(certificate, key, now)
		if err != nil {
			return nil, fmt.Errorf("%s and %s: %w", f.certificate, f.key, err)
		}
		return ca, nil
	})
}

// read reads a file of bounded size.
func read(path string) ([]byte, error) {
	if path == "" {
		return nil, &CAError{"no file is named"}
	}
	return bounded.ReadFile(path, maxPEM)
}
