// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

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

// BetterThan reports whether there is a certificate now that a waiting run should print.
func (s *Status) BetterThan(before Status) bool {
	if s.Pair == nil || before.Pair == nil {
		return s.Pair != nil
	}
	return s.Due == "" || s.Pair.Fingerprint() != before.Pair.Fingerprint()
}
