// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// node is what decides about this node's way to the API server.
func (o *Options) node() nodeaccess.Node {
	n := nodeaccess.Node{
		Dir: o.dir, Bootstrap: o.bootstrapKubeconfig, KubeletBootstrap: o.kubeletBootstrap,
		Asked: o.exec.origin(), AskedBy: ExecInfoVariable, Renews: o.renews(), UserAgent: o.UserAgent,
	}
	if o.provider != nil {
		n.Provider = o.provider.Name()
	}
	if o.exec.Cluster != nil {
		n.Insecure = o.exec.Cluster.InsecureSkipTLSVerify
	}
	return n
}

// access shows the node's own certificate if that may ask for the next one, else the bootstrap
// credential.
func (o *Options) access(s standing) (nodeaccess.Access, error) {
	return classified(o.node().Access(s.pair, s.rejected))
}

func (o *Options) ownAccess(pair *cache.Pair) (nodeaccess.Access, error) {
	return classified(o.node().OwnAccess(pair))
}

func (o *Options) bootstrapAccess() (nodeaccess.Access, error) {
	return classified(o.node().BootstrapAccess())
}

// classified makes a *Failure of the error.
func classified(to nodeaccess.Access, err error) (nodeaccess.Access, error) {
	if err != nil {
		return to, AsFailure(err)
	}
	return to, nil
}
