// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"math"
	"time"
)

// RenewAt returns when a certificate is due: a fifth of its lifetime before its end, moved later by
// up to half of that. The certificate itself decides how far, so that a fleet spreads out, and each
// run gets the same time. The lifetime is NotAfter - NotBefore, backdating included.
func RenewAt(leaf *x509.Certificate) time.Time {
	lifetime := leaf.NotAfter.Sub(leaf.NotBefore)
	sum := sha256.Sum256(leaf.Raw)
	fraction := float64(binary.BigEndian.Uint64(sum[:])) / math.MaxUint64
	return leaf.NotAfter.Add(-lifetime / 5).Add(time.Duration(fraction * float64(lifetime/10)))
}

// nearest is the shortest time until client-go asks again. The timestamp has whole seconds only,
// and one in the past makes client-go ask for every request.
const nearest = time.Second

// steadyExpiration is the expirationTimestamp while no new certificate is wanted: the renewal
// point, or a little before the end if the provider does not renew. It depends on the certificate
// alone, so that it is the same in each run.
func steadyExpiration(leaf *x509.Certificate, renews bool) time.Time {
	end := leaf.NotAfter.Add(-min(time.Minute, leaf.NotAfter.Sub(leaf.NotBefore)/20))
	if at := RenewAt(leaf); renews && at.Before(end) {
		end = at
	}
	return end.Truncate(time.Second)
}

// nearExpiration is the expirationTimestamp while a better certificate is awaited: at most 30 s or
// a quarter of what remains, and always in the future.
func nearExpiration(leaf *x509.Certificate, now time.Time) time.Time {
	d := max(min(30*time.Second, leaf.NotAfter.Sub(now)/4), nearest)
	return now.Add(d + time.Second - time.Nanosecond).Truncate(time.Second)
}
