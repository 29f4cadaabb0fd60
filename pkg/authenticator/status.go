// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// certificateStatus is the state of the certificate directory, judged for this machine, this
// cluster and this time. The zero value has nothing to print.
type certificateStatus struct {
	// pair is the pair to print. It is nil if there is none, and problem says why.
	pair    *cache.Pair
	problem error
	// held is the pair on disk, even if it cannot be printed. It is nil if it does not parse.
	held *cache.Pair
	// permanent says that no worker can solve the problem.
	permanent bool
	// damaged says that a worker must set the file aside.
	damaged bool
	// due says why a new certificate is needed although pair can be printed. It is "" if none is.
	due string
	// canWait says that the certificate is due for its age, and for no other reason.
	canWait bool
	// postponed says that a renewal which can wait is not tried yet. Meanwhile this node still
	// checks for announced renewals.
	postponed bool
	// rejected says that the API server answered pair with 401. foreign says that pair came from
	// another cluster than the requested one. Such a pair is printed only until there is a better
	// one.
	rejected, foreign bool
	// nodeName is the name to request a certificate for. nameErr says why there is none.
	nodeName string
	nameErr  error
	// remark is a problem to report to people although pair is printed.
	remark error
	// note is the note of the last run.
	note note
	// announcement is the result of the checks for announced renewals. checkNotStarted says that a
	// check is due and that no worker could be started for it.
	announcement    cache.Announcement
	checkNotStarted bool
}

// loadStatus reads the certificate directory. It opens the certificate, the note and the state
// file, takes no lock, uses no network and changes nothing.
func (a *Authenticator) loadStatus() certificateStatus {
	status := certificateStatus{note: a.note.read()}
	if err := a.dir.Check(); err != nil {
		status.fail(a, err)
		return status
	}
	pair, err := a.dir.Current()
	if err != nil {
		status.damaged = cache.MustBeSetAside(err)
		status.fail(a, err)
		return status
	}
	status.held = pair
	file := a.dir.File(cache.CurrentFile)
	if err := cache.CheckNodeCertificate(pair.Leaf, "", a.now()); err != nil {
		var unusable *cache.UnusableError
		if !errors.As(err, &unusable) || !unusable.Early {
			status.fail(a, fmt.Errorf("%s: %w", file, err))
			return status
		}
		// The API server uses its own clock, and ours may be wrong.
		status.remark = reason.ClockWrong.Failure("check this machine's clock", fmt.Errorf("%s: %w", file, err))
	}
	status.foreign = a.node().IsForeign(pair)
	if status.setNodeName(a, pair); status.problem != nil {
		return status
	}
	status.pair = pair
	status.rejected = status.note.Rejected && status.note.Certificate == pair.Fingerprint()
	state := nodestate.ReadState(a.dir)
	if found := state.Announcement; found != nil && (a.checks() || found.Renewal != nil && found.Renewal.Name == askedRenewal) {
		status.announcement = *found
	}
	if a.checks() {
		now := a.now()
		status.postponed = nodestate.UntilNextAttempt(state, true, now) > 0 && nodestate.UntilNextAttempt(state, false, now) == 0
	}
	status.judgeDue(a)
	return status
}

// setNodeName decides which node this is while the machine has a certificate that has not expired.
// A configured name decides. A derived name never makes a certificate unusable: a host's name can
// be wrong for a moment at boot, or change while the kubelet runs.
func (s *certificateStatus) setNodeName(a *Authenticator, pair *cache.Pair) {
	held := pair.NodeName()
	name, err := nodeaccess.FindNodeName(a.nodeName)
	switch {
	case s.foreign && (err != nil || name.Derived):
		s.nodeName, s.nameErr = name.Name, err // the name in another cluster does not matter
	case a.invalid != nil && (err != nil || a.nodeName == ""):
		s.nodeName = held
	case err != nil:
		s.nodeName, s.remark = held, reason.Configuration.Failure(trustedfile.Hint(err, "set --node-name"), err)
	case name.Name != held && name.Derived:
		s.nodeName, s.remark = held, reason.Configuration.Failure("set --node-name",
			fmt.Errorf("the certificate is for node %q, but this host is called %q", held, name.Name))
	case name.Name != held:
		s.nodeName = name.Name
		s.problem = &otherNodeError{a.dir.File(cache.CurrentFile), held, name.Name}
	default:
		s.nodeName = name.Name
	}
}

// otherNodeError says that the certificate on disk is another node's.
type otherNodeError struct{ file, held, name string }

func (e *otherNodeError) Error() string {
	return fmt.Sprintf("%s: it is for node %q, but this is node %q", e.file, e.held, e.name)
}

// explain adds to a failure that the certificate on disk is another node's. Two kubelets with one
// certificate directory replace each other's certificate.
func (s *certificateStatus) explain(failure error) error {
	var other *otherNodeError
	if failure == nil || !errors.As(s.problem, &other) {
		return failure
	}
	f := reason.AsFailure(failure)
	return f.Reason.Failure("if two kubelets run on this machine, give each its own certificate directory (--cert-dir); "+f.Hint, fmt.Errorf("%w; %w", other, failure))
}

// fail sets the problem, and the node that needs a certificate.
func (s *certificateStatus) fail(a *Authenticator, err error) {
	s.problem = err
	var foreign *cache.ForeignDirError
	s.permanent = errors.As(err, &foreign)
	if !s.permanent && !s.damaged && errors.Is(err, fs.ErrPermission) {
		s.permanent = true
		s.problem = reason.DirectoryRefused.Failure("run it as the user that owns the directory, usually root", err)
	}
	name, err := nodeaccess.FindNodeName(a.nodeName)
	s.nodeName, s.nameErr = name.Name, err
}

// judgeDue sets why a printable certificate must be replaced, and whether that can wait.
func (s *certificateStatus) judgeDue(a *Authenticator) {
	s.due, s.canWait = "", false
	renewal := s.announcedRenewal()
	announced := renewal != nil && !a.now().Before(renewal.DueAt)
	switch {
	case s.rejected:
		s.due = "the API server rejects it"
	case s.foreign:
		s.due = fmt.Sprintf("it came from the cluster at %.253s, and the kubelet uses another cluster, with another CA", s.pair.Origin.Server)
	case s.pair.Exposed:
		s.due = "others could read its key"
	case a.renews() && !a.now().Before(nodestate.RenewAt(s.pair.Leaf)):
		s.due, s.canWait = "its lifetime is nearly over", !announced
	case announced && renewal.Name == askedRenewal:
		s.due = "a person asked for a renewal"
	case announced:
		s.due = "a renewal was announced"
	}
}

// betterThan reports whether there is a certificate now that a waiting run should print.
func (s certificateStatus) betterThan(before certificateStatus) bool {
	if s.pair == nil || before.pair == nil {
		return s.pair != nil
	}
	return s.due == "" || s.pair.Fingerprint() != before.pair.Fingerprint()
}
