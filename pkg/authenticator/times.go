// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"math"
	"time"
)

// RenewAt returns the time when a certificate is due: when 70 to 90 % of its lifetime are over. The
// exact time depends on the certificate alone, so that a fleet spreads out, and each run computes
// the same time. The lifetime is NotAfter - NotBefore, backdating included. client-go's certificate
// manager draws from the same range. A narrower range would cause more renewals per minute. A wider
// range would leave less time for the last renewals, or renew more often.
func RenewAt(leaf *x509.Certificate) time.Time {
	lifetime := leaf.NotAfter.Sub(leaf.NotBefore)
	sum := sha256.Sum256(leaf.Raw)
	fraction := float64(binary.BigEndian.Uint64(sum[:])) / math.MaxUint64
	return leaf.NotAfter.Add(-lifetime / 10 * 3).Add(time.Duration(fraction * float64(lifetime/5)))
}

// nearest is the shortest time until client-go runs the plugin again. The timestamp has whole
// seconds. A timestamp in the past makes client-go run the plugin for every request.
const nearest = time.Second

// steadyExpiration returns the expirationTimestamp while no new certificate is needed: the renewal
// time, or shortly before the end if the provider does not renew. It depends on the certificate
// alone, so that it is the same in each run.
func steadyExpiration(leaf *x509.Certificate, renews bool) time.Time {
	end := leaf.NotAfter.Add(-min(time.Minute, leaf.NotAfter.Sub(leaf.NotBefore)/20))
	if at := RenewAt(leaf); renews && at.Before(end) {
		end = at
	}
	return end.Truncate(time.Second)
}

// nearExpiration returns the expirationTimestamp while a worker gets a better certificate. It is
// 30 s ahead, or a quarter of the remaining time if that is less. It is rounded up to a whole
// second, so it is always in the future.
func nearExpiration(leaf *x509.Certificate, now time.Time) time.Time {
	d := max(min(30*time.Second, leaf.NotAfter.Sub(now)/4), nearest)
	return now.Add(d + time.Second - time.Nanosecond).Truncate(time.Second)
}
