// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// The keys of a Secret of type kubernetes.io/tls, which Cluster API's <cluster>-ca has too.
const (
	secretCertificate = "tls.crt"
	secretKey         = "tls.key"
)

// Source hands out the CA to sign with. It is asked anew for each certificate, so that a rotated CA is used at once, and may be asked
// by several at a time.
type Source interface {
	// CA returns a CA that may sign at the time now. An error means that nothing can be signed yet.
	CA(ctx context.Context, now time.Time) (*CA, error)
}

// FromSecret reads a CA from the data of a Secret, whose certificates may be a bundle.
func FromSecret(data map[string][]byte, now time.Time) (*CA, error) {
	for _, key := range []string{secretCertificate, secretKey} {
		if len(data[key]) == 0 {
			return nil, &CAError{"the Secret has no " + key}
		}
	}
	return ParseBundle(data[secretCertificate], data[secretKey], now)
}

// Files is a Source that reads two files. It reads them at each use, which costs less than a signature, and so misses no change.
//
// A rotation writes one file after the other. What was read last and fits together stays in use until the files hold another
// pair that does, or until it expires: whatever is wrong meanwhile, files that are gone included, Problem tells. Who wants no more
// certificates from a CA therefore has to put another in its place, or end the process.
type Files struct {
	certificate, key string

	mu sync.Mutex
	// good is the CA in use, sum what it was read from.
	good    *CA
	sum     [2][sha256.Size]byte
	problem error
}

// NewFiles returns a Source for the files with the CA's certificate and with its key, as ParseCA reads them. It reads nothing yet.
func NewFiles(certificate, key string) *Files { return &Files{certificate: certificate, key: key} }

// CA returns the CA that the files hold, or the last one that they held.
func (f *Files) CA(_ context.Context, now time.Time) (*CA, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.problem = f.refresh(now)
	if f.good == nil {
		return nil, f.problem
	}
	err := f.good.checkTime(now)
	switch {
	case err == nil:
		return f.good, nil
	case f.problem != nil:
		return nil, fmt.Errorf("%w; and those in the files cannot take over: %w", err, f.problem)
	}
	f.problem = err
	return nil, err
}

// Problem returns what kept the last call of CA from using what is in the files, nil if nothing did.
func (f *Files) Problem() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.problem
}

// refresh takes over what is in the files, if that will do.
func (f *Files) refresh(now time.Time) error {
	certificate, err := read(f.certificate)
	if err != nil {
		return err
	}
	key, err := read(f.key)
	if err != nil {
		return err
	}
	sum := [2][sha256.Size]byte{sha256.Sum256(certificate), sha256.Sum256(key)}
	if f.good != nil && sum == f.sum {
		return nil
	}
	// What will not do is judged anew each time: it may be a CA whose time has not come.
	ca, err := ParseCA(certificate, key, now)
	if err != nil {
		return fmt.Errorf("%s and %s: %w", f.certificate, f.key, err)
	}
	f.good, f.sum = ca, sum
	return nil
}

// read reads a file of bounded size.
func read(path string) ([]byte, error) {
	if path == "" {
		return nil, &CAError{"no file is named"}
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it was only read
	var content bytes.Buffer
	if _, err := content.ReadFrom(io.LimitReader(file, maxPEM+1)); err != nil {
		return nil, err
	}
	if content.Len() > maxPEM {
		return nil, &CAError{fmt.Sprintf("%s is longer than %d bytes", path, maxPEM)}
	}
	return content.Bytes(), nil
}
