// SPDX-License-Identifier: Apache-2.0

package collect

import (
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/utils/lru"
)

// LastWrites has, by the UID of a hello, this replica's last write: the resource version of the
// challenge, or closedVersion. The cache may not show that write yet. An entry is removed when the
// cache shows that the hello is closed, or when there are too many.
type LastWrites struct{ versions *lru.Cache }

// NewLastWrites returns an empty LastWrites.
func NewLastWrites() LastWrites { return LastWrites{lru.New(maxLastWrites)} }

const (
	// maxLastWrites bounds the number of entries. Without its entry, a hello costs a few more API
	// calls.
	maxLastWrites = 20_000
	// closedVersion is no resource version.
	closedVersion = "closed"
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

// Forget drops the entry of a hello.
func (l LastWrites) Forget(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Remove(hello.UID)
}
