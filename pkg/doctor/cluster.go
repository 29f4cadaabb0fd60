// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// access is an access to the API server, and a description of its credential.
type access struct {
	nodeaccess.Access
	// credential describes the credential in words.
	credential string
}

// open returns an access for which an HTTP client can be made.
func open(to nodeaccess.Access) (*access, error) {
	if _, err := csr.HTTPClient(to.Config); err != nil {
		return nil, fmt.Errorf("%s: its CA or its client certificate cannot be used", to.Source)
	}
	a := &access{Access: to, credential: "the bootstrap credential"}
	if to.Own {
		a.credential = "the node's certificate"
	}
	return a, nil
}

// findNode returns the inputs that decide how this node reaches the API server. They are those of a
// plugin that the kubelet would start now.
func (e *examination) findNode() nodeaccess.Node {
	return nodeaccess.Node{
		Dir: e.dir, Bootstrap: e.Config.BootstrapKubeconfig, KubeletBootstrap: e.Config.KubeletBootstrapKubeconfig,
		Asked: e.asked(), AskedBy: e.conf().Path, Provider: e.providerName(), Renews: e.renews(), UserAgent: e.UserAgent,
	}
}

// bootstrapAccess finds the bootstrap kubeconfig that the plugin would use.
func (e *examination) bootstrapAccess() (*access, error) {
	to, err := e.node().BootstrapAccess()
	switch {
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w: %w", err, errNeedsRoot)
	case err != nil:
		return nil, err
	}
	return open(to)
}

// asked returns the cluster that client-go would pass to the plugin. It is nil if the kubelet's
// kubeconfig names none.
func (e *examination) asked() *cache.Origin {
	if k := e.conf(); k.Kind == kubelet.Ours && k.ClusterProblem == nil {
		return &k.Cluster
	}
	return nil
}

// ownAccess returns the access with the node's certificate to the cluster that the plugin would
// use.
func (e *examination) ownAccess() (*access, error) {
	if err := e.unseen(); err != nil {
		return nil, err
	}
	pair := e.usable()
	if pair == nil {
		return nil, errors.New("there is no usable certificate")
	}
	to, err := e.node().OwnAccess(pair)
	if err != nil {
		return nil, err
	}
	return open(to)
}

// whyBootstrap returns why the bootstrap credential is needed. It returns "" if it is not needed,
// or if this user may not read the certificate. It asks the API server only if nothing else
// decides.
func (e *examination) whyBootstrap() string {
	if e.unseen() != nil {
		return ""
	}
	pair := e.usable()
	if why := e.node().WhyBootstrap(pair, false); why != "" {
		return why
	}
	review, err := e.accepted()
	return e.node().WhyBootstrap(pair, err == nil && review.Status == http.StatusUnauthorized)
}

// requester is the access that the next request would be filed with.
func (e *examination) requester() (*access, error) {
	if e.need() == "" {
		return e.own()
	}
	return e.bootstrap()
}

func checkBootstrapFile(_ context.Context, e *examination) checkup.Result {
	why := e.need()
	a, err := e.bootstrap()
	if err == nil {
		findings := []checkup.Result{ok("%s: for %s", a.Source, a.Cluster.Server)}
		if info, err := os.Stat(a.Source); err == nil {
			findings = append(findings, assessFile(a.Source, info, secret))
		}
		return checkup.Worst(findings...)
	}
	if errors.Is(err, errNeedsRoot) {
		return skipped("%v", err)
	}
	problem, remedy := nodeaccess.Misconfigured, "create a new one: kubeadm token create --print-join-command"
	var found *nodeaccess.Error
	if errors.As(err, &found) {
		problem, remedy = found.Problem, found.Hint
	}
	switch {
	case problem == nodeaccess.ForeignBootstrap:
		return failure(remedy, "%v", err)
	case problem == nodeaccess.Misconfigured && why == "":
		return warning(remedy, "%v", err)
	case problem == nodeaccess.Misconfigured:
		return e.whileServed(failure(remedy, "%v", err))
	case e.unseen() != nil:
		return skipped("%v; cannot tell whether it is needed: %v", err, e.unseen())
	case why == "":
		return ok("not needed: the node renews with its own certificate")
	}
	return e.whileServed(failure(remedy, "%v, and %s", err, why))
}

// refusalMessage returns the message of a refusal.
func refusalMessage(a *nodeaccess.Answer) string {
	return cmp.Or(a.Message(), http.StatusText(a.Status))
}

// brief returns the cause of a transport error, without the URL that such an error repeats.
func brief(err error) string {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		if wrapped.Timeout() {
			return "no answer in time"
		}
		err = wrapped.Err
	}
	return strings.TrimSpace(err.Error())
}
