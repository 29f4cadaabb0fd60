// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// standing is what the certificate directory holds, judged for this machine, this cluster and this moment. The zero value has nothing
// to print.
type standing struct {
	// pair can be printed. It is nil if nothing can, and lack says why.
	pair *cache.Pair
	lack error
	// final is set when no worker can mend the lack.
	final bool
	// aside is set when the file is to be set aside.
	aside bool
	// due says why a new certificate is wanted although pair can be printed; empty if none is.
	due string
	// rejected is set when the API server answered pair with 401, foreign when pair came from another cluster than the one asked for: then
	// pair is printed for want of a better one, and vouches for nothing.
	rejected, foreign bool
	// node is the name to ask a certificate for; nameErr says why there is none.
	node    string
	nameErr error
	// remark is what a person should know though pair is printed.
	remark error
	// note is what the last run answered.
	note note
}

// look reads the certificate directory. It opens the certificate and the note, takes no lock, touches no network, changes
// nothing.
func (o *Options) look() standing {
	s := standing{note: o.note.read()}
	if err := o.dir.Check(); err != nil {
		return o.without(s, err)
	}
	pair, err := o.dir.Current()
	if err != nil {
		s.aside = cache.IsUnusable(err)
		return o.without(s, err)
	}
	file := o.dir.File(cache.CurrentFile)
	if err := cache.CheckNodeCertificate(pair.Leaf, "", o.now()); err != nil {
		var unusable *cache.UnusableError
		if !errors.As(err, &unusable) || !unusable.Early {
			return o.without(s, fmt.Errorf("%s: %w", file, err))
		}
		// The API server goes by its own clock: ours may well be the wrong one.
		s.remark = &Failure{ClockWrong, "check this machine's clock", fmt.Errorf("%s: %w, by this machine's clock", file, err)}
	}
	s.foreign = o.node().IsForeign(pair)
	if s = o.nameNode(s, pair); s.lack != nil {
		return s
	}
	s.pair = pair
	s.rejected = s.note.Rejected && s.note.Certificate == pair.Fingerprint()
	s.due = o.whyDue(s)
	return s
}

// nameNode settles which node this is, while it holds a certificate that has not expired. A name that was given decides. One that
// is derived does not take a certificate away: a host's name can be wrong for a moment at boot, or change under a living kubelet.
func (o *Options) nameNode(s standing, pair *cache.Pair) standing {
	held := pair.NodeName()
	name, err := nodeaccess.FindNodeName(o.nodeName)
	switch {
	case s.foreign && (err != nil || name.Derived):
		s.node, s.nameErr = name.Name, err // what another cluster called it says nothing here
	case o.invalid != nil && (err != nil || o.nodeName == ""):
		s.node = held
	case err != nil:
		s.node, s.remark = held, &Failure{Configuration, "set --node-name", err}
	case name.Name != held && name.Derived:
		s.node, s.remark = held, &Failure{Configuration, "set --node-name to settle it",
			fmt.Errorf("the certificate is for node %q, but this host is called %q", held, name.Name)}
	case name.Name != held:
		s.node = name.Name
		s.lack = fmt.Errorf("%s: it is for node %q, but this is node %q", o.dir.File(cache.CurrentFile), held, name.Name)
	default:
		s.node = name.Name
	}
	return s
}

// without notes why nothing can be printed, and whose certificate is wanted.
func (o *Options) without(s standing, err error) standing {
	s.lack = err
	var foreign *cache.ForeignDirError
	s.final = errors.As(err, &foreign)
	if !s.final && !s.aside && errors.Is(err, fs.ErrPermission) {
		s.final = true
		s.lack = &Failure{DirectoryRefused, "run it as the user that owns the directory, as a rule root", err}
	}
	name, err := nodeaccess.FindNodeName(o.nodeName)
	s.node, s.nameErr = name.Name, err
	return s
}

// whyDue returns why a certificate that can be printed is to be replaced, empty if it is not.
func (o *Options) whyDue(s standing) string {
	switch {
	case s.rejected:
		return "the API server rejects it"
	case s.foreign:
		return fmt.Sprintf("it came from the cluster at %.253s, and the kubelet asks for another, with another CA", s.pair.Origin.Server)
	case s.pair.Exposed:
		return "others could read its key"
	case o.renews() && !o.now().Before(RenewAt(s.pair.Leaf)):
		return "its lifetime is nearly over"
	}
	return ""
}
