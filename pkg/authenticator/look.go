// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"fmt"
	"io/fs"

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
	// elsewhere is a certificate that is good in itself, but came from another cluster than the one asked for.
	elsewhere *cache.Pair
	// due says why a new certificate is wanted although pair can be printed; empty if none is.
	due string
	// rejected is set when the API server answered pair with 401.
	rejected bool
	// node is the name to ask a certificate for; nameErr says why there is none.
	node    string
	nameErr error
	// note is what the last run answered.
	note note
}

// look reads the certificate directory. It opens the certificate and the note, takes no lock, touches no network, changes
// nothing.
func (o *Options) look() standing {
	s := standing{note: o.note.read()}
	name, err := findNodeName(o.nodeName, KubeadmFlagsFile)
	s.node, s.nameErr = name.Name, err

	if err := o.dir.Check(); err != nil {
		return s.without(err)
	}
	pair, err := o.dir.Current()
	if err != nil {
		s.aside = cache.IsUnusable(err)
		return s.without(err)
	}
	if err := cache.CheckNodeCertificate(pair.Leaf, "", o.now()); err != nil {
		return s.without(fmt.Errorf("%s: %w", o.dir.File(cache.CurrentFile), err))
	}
	if name.Derived && o.servedAs(pair.NodeName(), s.note) {
		s.node, s.nameErr = pair.NodeName(), nil
	}
	if s.nameErr == nil && pair.NodeName() != s.node {
		return s.without(fmt.Errorf("%s: it is for node %q, but this is node %q", o.dir.File(cache.CurrentFile), pair.NodeName(), s.node))
	}
	if asked := o.exec.origin(); asked != nil && pair.Origin != nil && !asked.SameCluster(*pair.Origin) {
		s.elsewhere = pair
		return s.without(fmt.Errorf("%s: it came from the cluster at %s, but the kubelet asks for %s, with another CA",
			o.dir.File(cache.CurrentFile), pair.Origin.Server, asked.Server))
	}
	s.pair = pair
	s.rejected = s.note.Rejected && s.note.Certificate == pair.Fingerprint()
	s.due = o.whyDue(pair, s.rejected)
	return s
}

// without notes why nothing can be printed.
func (s standing) without(err error) standing {
	s.lack = err
	var foreign *cache.ForeignDirError
	s.final = errors.As(err, &foreign)
	if !s.final && !s.aside && errors.Is(err, fs.ErrPermission) {
		s.final = true
		s.lack = &Failure{DirectoryRefused, "run it as the user that owns the directory, as a rule root", err}
	}
	return s
}

// servedAs reports whether the very process that asks was given a certificate for this node before. The kubelet computes its name
// once, so a host renamed under a living kubelet still is the old node.
func (o *Options) servedAs(node string, n note) bool {
	return o.Parent.PID != 0 && n.Parent == o.Parent && n.NodeName == node
}

// whyDue returns why a certificate that can be printed is to be replaced, empty if it is not.
func (o *Options) whyDue(pair *cache.Pair, rejected bool) string {
	switch {
	case rejected:
		return "the API server rejects it"
	case pair.Exposed:
		return "others could read its key"
	case o.renews() && !o.now().Before(RenewAt(pair.Leaf)):
		return "its lifetime is nearly over"
	}
	return ""
}
