// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
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

// Load reads the node's files. It opens the certificate, the note and the state file. It takes no
// lock, uses no network and changes nothing.
func (n *Node) Load() Status {
	dir := n.Dir()
	s := Status{node: n, Note: n.Note.Read()}
	s.State, s.StateErr = readState(dir)
	if err := dir.Check(); err != nil {
		s.fail(err)
		return s
	}
	pair, err := dir.Current()
	if err != nil {
		s.Damaged = cache.MustBeSetAside(err)
		s.fail(err)
		return s
	}
	s.Held = pair
	file := dir.File(cache.CurrentFile)
	if err := cache.CheckNodeCertificate(pair.Leaf, "", n.Now()); err != nil {
		var unusable *cache.UnusableError
		if !errors.As(err, &unusable) || !unusable.Early {
			s.fail(fmt.Errorf("%s: %w", file, err))
			return s
		}
		// The API server uses its own clock, and ours may be wrong.
		s.Remark = reason.ClockWrong.Failure("check this machine's clock", fmt.Errorf("%s: %w", file, err))
	}
	s.Foreign = n.Access.IsForeign(pair)
	if s.setNodeName(pair); s.Problem != nil {
		return s
	}
	s.Pair = pair
	s.judge()
	return s
}

// StatusOf judges a certificate, nil for none, without reading a file.
func (n *Node) StatusOf(pair *cache.Pair, state *cache.State) Status {
	s := Status{node: n, Pair: pair, Held: pair, State: state}
	if pair != nil {
		s.judge()
	}
	return s
}

// judge judges a certificate that can be printed.
func (s *Status) judge() {
	s.Rejected = s.Note.Rejected && s.Note.Certificate == s.Pair.Fingerprint()
	if found := s.State.Announcement; found != nil && (s.node.Checks() || found.Renewal != nil && found.Renewal.Name == AskedRenewal) {
		s.Announcement = *found
	}
	if s.node.Checks() {
		now := s.node.Now()
		s.postponed = untilNextAttempt(s.State, true, now) > 0 && untilNextAttempt(s.State, false, now) == 0
	}
	s.judgeDue()
}

// SetRejected records whether the API server rejects the certificate, and judges it again.
func (s *Status) SetRejected(rejected bool) {
	s.Rejected = rejected
	s.judgeDue()
}

// setNodeName decides which node this is while the machine has a certificate that has not expired.
// A configured name decides. A derived name never makes a certificate unusable: a host's name can
// be wrong for a moment at boot, or change while the kubelet runs.
func (s *Status) setNodeName(pair *cache.Pair) {
	held := pair.NodeName()
	name, err := nodeaccess.FindNodeName(s.node.Name)
	switch {
	case s.Foreign && (err != nil || name.Derived):
		s.NodeName, s.NameErr = name.Name, err // the name in another cluster does not matter
	case s.node.Invalid != nil && (err != nil || s.node.Name == ""):
		s.NodeName = held
	case err != nil:
		s.NodeName, s.Remark = held, reason.Configuration.Failure(trustedfile.Hint(err, "set --node-name"), err)
	case name.Name != held && name.Derived:
		s.NodeName, s.Remark = held, reason.Configuration.Failure("set --node-name",
			fmt.Errorf("the certificate is for node %q, but this host is called %q", held, name.Name))
	case name.Name != held:
		s.NodeName = name.Name
		s.Problem = &otherNodeError{s.node.Dir().File(cache.CurrentFile), held, name.Name}
	default:
		s.NodeName = name.Name
	}
}

// otherNodeError says that the certificate on disk is another node's.
type otherNodeError struct{ file, held, name string }

func (e *otherNodeError) Error() string {
	return fmt.Sprintf("%s: it is for node %q, but this is node %q", e.file, e.held, e.name)
}

// Explain adds to a failure that the certificate on disk is another node's. Two kubelets with one
// certificate directory replace each other's certificate.
func (s *Status) Explain(failure error) error {
	var other *otherNodeError
	if failure == nil || !errors.As(s.Problem, &other) {
		return failure
	}
	f := reason.AsFailure(failure)
	return f.Reason.Failure("if two kubelets run on this machine, give each its own certificate directory (--cert-dir); "+f.Hint, fmt.Errorf("%w; %w", other, failure))
}

// fail sets the problem, and the node that needs a certificate.
func (s *Status) fail(err error) {
	s.Problem = err
	var foreign *cache.ForeignDirError
	s.Permanent = errors.As(err, &foreign)
	if !s.Permanent && !s.Damaged && errors.Is(err, fs.ErrPermission) {
		s.Permanent = true
		s.Problem = reason.DirectoryRefused.Failure("run it as the user that owns the directory, usually root", err)
	}
	name, err := nodeaccess.FindNodeName(s.node.Name)
	s.NodeName, s.NameErr = name.Name, err
}

// judgeDue sets why a printable certificate must be replaced, and whether that can wait.
func (s *Status) judgeDue() {
	s.Due, s.CanWait = "", false
	renewal := s.AnnouncedRenewal()
	announced := renewal != nil && !s.node.Now().Before(renewal.DueAt)
	switch {
	case s.Rejected:
		s.Due = "the API server rejects it"
	case s.Foreign:
		s.Due = fmt.Sprintf("it came from the cluster at %.253s, and the kubelet uses another cluster, with another CA", s.Pair.Origin.Server)
	case s.Pair.Exposed:
		s.Due = "others could read its key"
	case s.node.Access.Renews && !s.node.Now().Before(RenewAt(s.Pair.Leaf)):
		s.Due, s.CanWait = "its lifetime is nearly over", !announced
	case announced && renewal.Name == AskedRenewal:
		s.Due = "a person asked for a renewal"
	case announced:
		s.Due = "a renewal was announced"
	}
}

// BetterThan reports whether there is a certificate now that a waiting run should print.
func (s *Status) BetterThan(before Status) bool {
	if s.Pair == nil || before.Pair == nil {
		return s.Pair != nil
	}
	return s.Due == "" || s.Pair.Fingerprint() != before.Pair.Fingerprint()
}
