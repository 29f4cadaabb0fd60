// SPDX-License-Identifier: Apache-2.0

package earlier

import (
	"crypto/x509"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
)

// Due reports whether each release renews the certificate now. e670793 does so after 80 to 90 % of
// the lifetime. This release does so after 70 to 90 %, and both derive the same random number from
// the certificate.
func Due(leaf *x509.Certificate) bool {
	lifetime := leaf.NotAfter.Sub(leaf.NotBefore)
	sinceEarliest := nodestate.RenewAt(leaf).Sub(leaf.NotAfter.Add(-lifetime * 3 / 10))
	return leaf.NotAfter.Add(-lifetime / 5).Add(sinceEarliest / 2).Before(time.Now())
}
