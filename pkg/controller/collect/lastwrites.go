// SPDX-License-Identifier: Apache-2.0

package collect

import (
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/utils/lru"
)

// LastWrites has, by the UID of a request, this replica's last write: the resource version of a
// hello's challenge, closedVersion, or publishedVersion. The cache may not show that write yet. An
// entry is removed when the cache shows that the request is finished, or when there are too many.
type LastWrites struct{ versions *lru.Cache }

// NewLastWrites returns an empty LastWrites.
func NewLastWrites() LastWrites { return LastWrites{lru.New(maxLastWrites)} }

const (
	// maxLastWrites bounds the number of entries. Without its entry, a request costs a few more API
	// calls.
	maxLastWrites = 20_000
	// closedVersion and publishedVersion are no resource versions.
	closedVersion, publishedVersion = "closed", "published"
)

// SetChallenge says that this version of a hello has this replica's challenge.
func (l LastWrites) SetChallenge(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Add(hello.UID, hello.ResourceVersion)
}

func (l LastWrites) isOurChallenge(hello *certificatesv1.CertificateSigningRequest) bool {
	version, ok := l.versions.Get(hello.UID)
	return ok && version == hello.ResourceVersion
}

// SetClosed says that this replica has closed a hello.
func (l LastWrites) SetClosed(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Add(hello.UID, closedVersion)
}

// Closed reports whether this replica has closed a hello.
func (l LastWrites) Closed(hello *certificatesv1.CertificateSigningRequest) bool {
	version, ok := l.versions.Get(hello.UID)
	return ok && version == closedVersion
}

// SetPublished says that this replica has published a request's certificate.
func (l LastWrites) SetPublished(request *certificatesv1.CertificateSigningRequest) {
	l.versions.Add(request.UID, publishedVersion)
}

// TakePublished reports whether this replica has published a request's certificate, and drops the
// entry. So if the cache never shows the certificate, the next decision reads the request live.
func (l LastWrites) TakePublished(request *certificatesv1.CertificateSigningRequest) bool {
	version, ok := l.versions.Get(request.UID)
	if !ok || version != publishedVersion {
		return false
	}
	l.Forget(request)
	return true
}

// Forget drops the entry of a request.
func (l LastWrites) Forget(request *certificatesv1.CertificateSigningRequest) {
	l.versions.Remove(request.UID)
}
