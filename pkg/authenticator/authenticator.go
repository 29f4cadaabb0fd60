// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"context"
	"errors"
	"os"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Authenticator implements the commands of the plugin, with checked settings.
type Authenticator struct {
	// node has the settings that decide what the node's files mean. If node.Invalid is set, Run
	// prints a certificate that is still valid, and does nothing else.
	node *nodestate.Node
	// enroller gets certificates in a worker. A run asks it for deadlines and steps. Its provider
	// is nil if the settings are invalid.
	enroller *enrol.Enroller
	// auto is set if the operator left the choice of the provider to the program.
	auto        bool
	waitTimeout time.Duration
	renewalWait time.Duration
	exec        ExecInfo
	parent      process.ID // the zero ID for a person
	startWorker func() (process.ID, error)
}

// reviewTimeout bounds the only network call that a run makes itself.
const reviewTimeout = time.Second

// New checks the Options. Its error is the ConfigError, or a Failure with reason Configuration or
// FIPSEnforced. With an error, only Run, Overview, DryRun and Reset work. Run prints a certificate
// that is still valid, or returns the error.
func New(o Options) (*Authenticator, error) {
	o.setDefaults()
	c := o.Config
	access := nodeaccess.Node{
		Dir: cache.At(c.CertDir), Bootstrap: c.BootstrapKubeconfig, KubeletBootstrap: c.KubeletBootstrapKubeconfig,
		Asked: o.Exec.origin(), AskedBy: cmp.Or(o.Exec.Source, ExecInfoVariable), Insecure: o.Exec.insecure(), UserAgent: o.UserAgent,
	}
	node := &nodestate.Node{
		Access: access, Note: nodestate.NewNoteFile(c.RuntimeDir, c.CertDir), Name: c.NodeName,
		CheckInterval: c.CheckInterval.Duration, Now: time.Now,
	}
	a := &Authenticator{
		node: node,
		enroller: &enrol.Enroller{
			Node: node, ProviderID: c.ProviderID, SignerName: c.SignerName, KeepBootstrap: c.KeepBootstrapCredential,
			MetricsTextfile: c.MetricsTextfile, Deadline: o.WorkerDeadline, ReviewTimeout: reviewTimeout, Built: o.Built, Step: o.OnStep,
		},
		auto: c.Provider == provider.Auto, waitTimeout: c.WaitTimeout.Duration, renewalWait: c.RenewalWait.Duration,
		exec: o.Exec, parent: o.Parent, startWorker: o.StartWorker,
	}
	if d := c.Expiration.Duration; d != 0 {
		seconds := int32(min(d, longestLifetime) / time.Second) //nolint:gosec // G115: longestLifetime fits
		a.enroller.ExpirationSeconds = &seconds
	}
	if err := a.complete(o); err != nil {
		a.node.Invalid = reason.Configuration.Failure("see --help and kubelet-authenticator-config(5), docs/configuration.md, for what each setting may be", err)
		var known *provider.Error
		if errors.As(err, &known) && known.Class == provider.FIPSEnforced {
			a.node.Invalid = reason.FIPSEnforced.Failure(known.Hint, err)
		}
	}
	if o.ConfigError != nil {
		a.node.Invalid = o.ConfigError
	}
	return a, a.node.Invalid
}

// complete makes the provider, and takes the signer's name from it if the operator gave none.
func (a *Authenticator) complete(o Options) error {
	if err := o.check(); err != nil {
		return err
	}
	made, final, err := o.NewProvider()
	if err != nil {
		return err
	}
	a.enroller.Provider = made
	a.node.Access.Provider, a.node.Access.Renews = made.Name(), made.Renews()
	if a.enroller.SignerName == "" {
		a.enroller.SignerName = made.SignerName()
	}
	if !final {
		a.enroller.Choose = o.ChooseProvider
	}
	if made.Name() == provider.Auto && a.enroller.SignerName == "" {
		return nil // the signer is known once the provider is
	}
	return csr.CheckSignerName("signerName", a.enroller.SignerName)
}

// OpenLog opens the log of a detached worker, in the certificate directory.
func (a *Authenticator) OpenLog() (*os.File, error) {
	if err := a.node.Dir().Create(); err != nil {
		return nil, err
	}
	return a.node.Dir().OpenLog()
}

// Work gets a new certificate if one is needed. It is the whole life of a worker.
func (a *Authenticator) Work(ctx context.Context) error { return a.enroller.Work(ctx) }

// Rehearse attests under signers that issue no certificate. It calls remark once with each reason
// for which the rehearsal waits.
func (a *Authenticator) Rehearse(ctx context.Context, kubeconfig string, remark func(error)) (*enrol.Rehearsal, error) {
	return a.enroller.Rehearse(ctx, kubeconfig, remarkOnce(remark))
}

// DryRun builds a request and has the API server check it if one can be reached.
func (a *Authenticator) DryRun(ctx context.Context) *enrol.Report {
	return a.enroller.DryRun(ctx, a.waitTimeout)
}

// DiscardBootstrap deletes the copy of the bootstrap kubeconfig that "prepare" made, once the API
// server accepts the node's certificate. It reports whether the file was deleted.
func (a *Authenticator) DiscardBootstrap(ctx context.Context) (bool, error) {
	return a.enroller.DiscardBootstrap(ctx)
}

// Overview reads the node's files. It takes no lock, writes nothing, and uses neither the network
// nor the provider's device.
func (a *Authenticator) Overview() *nodestatus.Overview {
	n := nodestatus.Node{Node: a.node, Provider: a.enroller.Provider, SignerName: a.enroller.SignerName, Auto: a.auto}
	return n.Overview()
}

// remarkOnce returns a function that passes each text on once.
func remarkOnce(remark func(error)) func(error) {
	remarked := map[string]bool{}
	return func(r error) {
		if !remarked[r.Error()] {
			remarked[r.Error()] = true
			remark(r)
		}
	}
}

// The steps of a run.
const (
	stepStatus      enrol.Step = "status"
	stepStartWorker enrol.Step = "start worker"
	stepPrint       enrol.Step = "print"
)

// Steps lists the steps of a run, and then those of a worker, in their order.
func Steps() []enrol.Step {
	return append([]enrol.Step{stepStatus, stepStartWorker, stepPrint}, enrol.Steps()...)
}
