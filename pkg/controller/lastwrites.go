// SPDX-License-Identifier: Apache-2.0

package controller

import (
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/utils/lru"
)

// lastWrites has, by the UID of a hello, this replica's last write: the resource version of the
// challenge, or closedVersion. The cache may not show that write yet. An entry is removed when the
// cache shows that the hello is closed, or when there are too many.
type lastWrites struct{ versions *lru.Cache }

const (
	// maxLastWrites bounds the number of entries. Without its entry, a hello costs a few more API
	// calls.
	maxLastWrites = 20_000
	// closedVersion is no resource version.
	closedVersion = "closed"
)

func (l lastWrites) set(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Add(hello.UID, hello.ResourceVersion)
}

func (l lastWrites) isOurChallenge(hello *certificatesv1.CertificateSigningRequest) bool {
	version, ok := l.versions.Get(hello.UID)
	return ok && version == hello.ResourceVersion
}

// setClosed says that this replica has closed a hello.
func (l lastWrites) setClosed(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Add(hello.UID, closedVersion)
}

func (l lastWrites) closed(hello *certificatesv1.CertificateSigningRequest) bool {
	version, ok := l.versions.Get(hello.UID)
	return ok && version == closedVersion
}

func (l lastWrites) forget(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Remove(hello.UID)
}
