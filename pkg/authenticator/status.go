// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// certificateStatus is what the certificate directory holds, judged for this machine, this cluster
// and this moment. The zero value has nothing to print.
type certificateStatus struct {
	// pair can be printed. It is nil if nothing can, and problem says why.
	pair    *cache.Pair
	problem error
	// held is the pair on disk, also if it cannot be printed. It is nil if it does not parse.
	held *cache.Pair
	// permanent is set if no worker can solve the problem.
	permanent bool
	// damaged is set if a worker is to set the file aside.
	damaged bool
	// due says why a new certificate is wanted although pair can be printed. It is empty if
	// none is.
	due string
	// rejected is set if the API server answered pair with 401, foreign if pair came from
	// another cluster than the one asked for. Such a pair is printed only until there is a
	// better one.
	rejected, foreign bool
	// nodeName is the name to request a certificate for. nameErr says why there is none.
	nodeName string
	nameErr  error
	// remark is what a person should know although pair is printed.
	remark error
	// note is what the last run answered.
	note note
	// announcement is what the checks for announced renewals have found. checkFailed is set if a
	// check is due and no worker could be started for it.
	announcement cache.Announcement
	checkFailed  bool
}

// loadStatus reads the certificate directory. It opens the certificate, the note and the state file,
// takes no lock, uses no network and changes nothing.
func (a *Authenticator) loadStatus() certificateStatus {
	status := certificateStatus{note: a.note.read()}
	if err := a.dir.Check(); err != nil {
		status.fail(a, err)
		return status
	}
	pair, err := a.dir.Current()
	if err != nil {
		status.damaged = cache.IsUnusable(err)
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
		// The API server goes by its own clock: ours may be the wrong one.
		status.remark = &Failure{clockWrong, "check this machine's clock", fmt.Errorf("%s: %w", file, err)}
	}
	status.foreign = a.node().IsForeign(pair)
	if status.setNodeName(a, pair); status.problem != nil {
		return status
	}
	status.pair = pair
	status.rejected = status.note.Rejected && status.note.Certificate == pair.Fingerprint()
	if a.checks() {
		if state := readState(a.dir); state.Announcement != nil {
			status.announcement = *state.Announcement
		}
	}
	status.due = status.whyDue(a)
	return status
}

// setNodeName decides which node this is while it holds a certificate that has not expired. A name
// that the operator gave decides. A derived name never makes a certificate useless: a host's name
// can be wrong for a moment at boot, or change while the kubelet runs.
func (s *certificateStatus) setNodeName(a *Authenticator, pair *cache.Pair) {
	held := pair.NodeName()
	name, err := nodeaccess.FindNodeName(a.nodeName)
	switch {
	case s.foreign && (err != nil || name.Derived):
		s.nodeName, s.nameErr = name.Name, err // the name in another cluster means nothing here
	case a.invalid != nil && (err != nil || a.nodeName == ""):
		s.nodeName = held
	case err != nil:
		s.nodeName, s.remark = held, &Failure{Configuration, "set --node-name", err}
	case name.Name != held && name.Derived:
		s.nodeName, s.remark = held, &Failure{Configuration, "set --node-name to settle it",
			fmt.Errorf("the certificate is for node %q, but this host is called %q", held, name.Name)}
	case name.Name != held:
		s.nodeName = name.Name
		s.problem = fmt.Errorf("%s: it is for node %q, but this is node %q", a.dir.File(cache.CurrentFile), held, name.Name)
	default:
		s.nodeName = name.Name
	}
}

// fail notes why nothing can be printed, and for which node a certificate is wanted.
func (s *certificateStatus) fail(a *Authenticator, err error) {
	s.problem = err
	var foreign *cache.ForeignDirError
	s.permanent = errors.As(err, &foreign)
	if !s.permanent && !s.damaged && errors.Is(err, fs.ErrPermission) {
		s.permanent = true
		s.problem = &Failure{directoryRefused, "run it as the user that owns the directory, usually root", err}
	}
	name, err := nodeaccess.FindNodeName(a.nodeName)
	s.nodeName, s.nameErr = name.Name, err
}

// whyDue returns why a certificate that can be printed is to be replaced, empty if it is not.
func (s *certificateStatus) whyDue(a *Authenticator) string {
	switch {
	case s.rejected:
		return "the API server rejects it"
	case s.foreign:
		return fmt.Sprintf("it came from the cluster at %.253s, and the kubelet asks for another, with another CA", s.pair.Origin.Server)
	case s.pair.Exposed:
		return "others could read its key"
	case a.renews() && !a.now().Before(RenewAt(s.pair.Leaf)):
		return "its lifetime is nearly over"
	}
	if renewal := s.announcedRenewal(); renewal != nil && !a.now().Before(renewal.DueAt) {
		return "a renewal was announced"
	}
	return ""
}

// betterThan reports whether there is a certificate now that a waiting run should print.
func (s certificateStatus) betterThan(before certificateStatus) bool {
	if s.pair == nil || before.pair == nil {
		return s.pair != nil
	}
	return s.due == "" || s.pair.Fingerprint() != before.pair.Fingerprint()
}
