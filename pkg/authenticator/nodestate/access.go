// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
)

// Access returns the credential for the next request. why says why the credential is not the node's
// own certificate, "" if it is. Hello and proof need the same credential. So Access returns the
// bootstrap credential if the pending hello was filed with it. That may also be a hello that
// followed a denial of the node's own certificate.
func (s *Status) Access() (to nodeaccess.Access, why string, err error) {
	node := s.node.Access
	why = node.WhyBootstrap(s.Pair, s.Rejected)
	if to, err = node.Access(s.Pair, s.Rejected); err != nil || !to.Own {
		return to, why, err
	}
	pending, err := node.Dir.Pending()
	if err != nil || pending == nil || pending.Requester == "" || pending.Requester == to.Requester() {
		return to, why, nil //nolint:nilerr // resume reports what is wrong with the file
	}
	if last := pending.Last(); !last.Hello && last.UID != "" {
		// all requests are filed: any credential of this node may read the certificate
		return to, why, nil
	}
	if bootstrap, err := node.BootstrapAccess(); err == nil && bootstrap.Requester() == pending.Requester {
		return bootstrap, "the pending request was filed with it", nil
	}
	return to, why, nil
}
