// SPDX-License-Identifier: Apache-2.0

// Package nodestate reads a node's files and judges them. Node.Load returns the Status: whether the
// certificate can be used, when it is due, and when the next check and the next worker may start.
// Runs, workers, metrics, status and doctor use it, so that they agree. Except for the note, it
// writes nothing, and it takes no lock.
package nodestate

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"math"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// Node has the settings that decide what a node's files mean.
type Node struct {
	// Access selects the credential and the API server. It has the certificate directory, and the
	// name of the provider, which is empty if the settings are invalid.
	Access nodeaccess.Node
	// Note is the file about the last answer.
	Note NoteFile
	// Name is the node name that the operator set, else empty.
	Name string
	// CheckInterval is the time between two checks for announced renewals, 0 for no checks.
	CheckInterval time.Duration
	// Invalid is the error in the settings, nil if they are valid.
	Invalid error
	// Now is this machine's clock.
	Now func() time.Time
}

// Status is the state of the certificate directory, judged for this machine, this
// cluster and this time. The zero value has nothing to print.
type Status struct {
	// Pair is the pair to print. It is nil if there is none, and Problem says why.
	Pair    *cache.Pair
	Problem error
	// Held is the pair on disk, even if it cannot be printed. It is nil if it does not parse.
	Held *cache.Pair
	// Permanent says that no worker can solve the problem.
	Permanent bool
	// Damaged says that a worker must set the file aside.
	Damaged bool
	// Due says why a new certificate is needed although Pair can be printed. It is "" if none is.
	Due string
	// CanWait says that the certificate is due for its age, and for no other reason.
	CanWait bool
	// postponed says that a renewal which can wait is not tried yet. Meanwhile this node still
	// checks for announced renewals.
	postponed bool
	// Rejected says that the API server answered Pair with 401. Foreign says that Pair came from
	// another cluster than the requested one. Such a pair is printed only until there is a better
	// one.
	Rejected, Foreign bool
	// NodeName is the name to request a certificate for. NameErr says why there is none.
	NodeName string
	NameErr  error
	// Remark is a problem to report to people although Pair is printed.
	Remark error
	// Note is the note of the last run.
	Note Note
	// Announcement is the result of the checks for announced renewals. CheckNotStarted says that a
	// check is due and that no worker could be started for it.
	Announcement    cache.Announcement
	CheckNotStarted bool
	// State is the content of the state file. It is the zero State if StateErr says why the file
	// cannot be read.
	State    *cache.State
	StateErr error

	node *Node
}

// Dir returns the certificate directory.
func (n *Node) Dir() cache.Dir { return n.Access.Dir }

const (
	// PendingFails is the age at which a pending request counts as failing. By default our
	// controller denies a waiting request at this age.
	PendingFails = 20 * time.Minute
	// renewalFails is the delay after which a renewal counts as failing.
	renewalFails = 15 * time.Minute
	// BackOffCeiling is more than any back-off can be.
	BackOffCeiling = 80 * time.Minute
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

// Nearest is the shortest time until client-go runs the plugin again. The timestamp has whole
// seconds. A timestamp in the past makes client-go run the plugin for every request.
const Nearest = time.Second

// SteadyExpiration returns the expirationTimestamp while no new certificate is needed: the renewal
// time, or shortly before the end if the provider does not renew. It depends on the certificate
// alone, so that it is the same in each run.
func SteadyExpiration(leaf *x509.Certificate, renews bool) time.Time {
	end := leaf.NotAfter.Add(-min(time.Minute, leaf.NotAfter.Sub(leaf.NotBefore)/20))
	if at := RenewAt(leaf); renews && at.Before(end) {
		end = at
	}
	return end.Truncate(time.Second)
}

// NearExpiration returns the expirationTimestamp while a worker gets a better certificate. It is
// 30 s ahead, or a quarter of the remaining time if that is less. It is rounded up to a whole
// second, so it is always in the future.
func NearExpiration(leaf *x509.Certificate, now time.Time) time.Time {
	d := max(min(30*time.Second, leaf.NotAfter.Sub(now)/4), Nearest)
	return now.Add(d + time.Second - time.Nanosecond).Truncate(time.Second)
}

// RenewalFails reports whether a renewal that was due at a time is so late that it counts as
// failing.
func RenewalFails(due, now time.Time) bool { return now.After(due.Add(renewalFails)) }

// ReadState returns the state, the zero State if it cannot be read. The worker sets such a file
// aside.
func ReadState(dir cache.Dir) *cache.State {
	state, _ := readState(dir)
	return state
}

func readState(dir cache.Dir) (*cache.State, error) {
	state, err := dir.State()
	if err != nil {
		return &cache.State{}, err
	}
	return state, nil
}

// nextAttempt returns the earliest start of the next worker. The delay after an outage applies only
// to a certificate that can wait.
func nextAttempt(state *cache.State, canWait bool) time.Time {
	if !canWait && !state.UrgentAttempt.IsZero() {
		return state.UrgentAttempt
	}
	return state.NextAttempt
}

// untilNextAttempt returns the time until another worker may be started, 0 if one may be started
// now.
func untilNextAttempt(state *cache.State, canWait bool, now time.Time) time.Duration {
	at := nextAttempt(state, canWait)
	// Ignore times that were written before the clock was set back.
	if state.Last == nil || state.Last.Finished.After(now) || at.Sub(now) > BackOffCeiling {
		return 0
	}
	return max(at.Sub(now), 0)
}

// LeftNoResult reports whether a worker that has ended left no result. The zero ID is no worker. A
// check for announced renewals leaves no result and did not die.
func LeftNoResult(ended process.ID, state *cache.State) bool {
	return ended.PID != 0 && (state.Last == nil || state.Last.Worker != ended) &&
		(state.Announcement == nil || state.Announcement.Worker != ended)
}

// SignerOf returns the signer that the request filed last is for.
func SignerOf(pending *cache.Pending) string {
	if pending.Last().Hello {
		return attestation.HelloSignerFor(pending.SignerName)
	}
	return pending.SignerName
}

// WaitsFor returns the controller's last reason for which the pending request waits. It returns
// false if there is none.
func WaitsFor(pending *cache.Pending, state *cache.State) (attestation.Statement, bool) {
	if state.Waiting == nil || state.Waiting.Request != pending.Last().Name {
		return attestation.Statement{}, false
	}
	waiting, err := attestation.ParseStatement(state.Waiting.Annotation)
	return waiting, err == nil
}
