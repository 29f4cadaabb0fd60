// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"errors"
	"os"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
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

	provider          provider.Provider // nil if the settings are invalid
	providerID        string            // as given, else empty
	keepBootstrap     bool
	signerName        string
	expirationSeconds *int32 // nil leaves the lifetime to the signer
	waitTimeout       time.Duration
	// reviewTimeout is the constant, except in tests.
	reviewTimeout   time.Duration
	renewalWait     time.Duration
	metricsTextfile string // as given, else empty
	exec            ExecInfo
	parent          process.ID // the zero ID for a person
	startWorker     func() (process.ID, error)
	workerDeadline  time.Duration
	step            func(Step)
	built           time.Time // a clock that shows an earlier time is wrong; zero if unknown
}

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
	a := &Authenticator{
		node: &nodestate.Node{
			Access: access, Note: nodestate.NewNoteFile(c.RuntimeDir, c.CertDir), Name: c.NodeName,
			CheckInterval: c.CheckInterval.Duration, Now: time.Now,
		},
		providerID: c.ProviderID, keepBootstrap: c.KeepBootstrapCredential,
		signerName: c.SignerName, waitTimeout: c.WaitTimeout.Duration, reviewTimeout: reviewTimeout, renewalWait: c.RenewalWait.Duration,
		metricsTextfile: c.MetricsTextfile, exec: o.Exec, parent: o.Parent,
		startWorker: o.StartWorker, workerDeadline: o.WorkerDeadline, step: o.OnStep, built: o.Built,
	}
	if d := c.Expiration.Duration; d != 0 {
		seconds := int32(min(d, longestLifetime) / time.Second) //nolint:gosec // G115: longestLifetime fits
		a.expirationSeconds = &seconds
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
	made, err := o.NewProvider()
	if err != nil {
		return err
	}
	a.provider = made
	a.node.Access.Provider, a.node.Access.Renews = made.Name(), made.Renews()
	if a.signerName == "" {
		a.signerName = made.SignerName()
	}
	return csr.CheckSignerName("signerName", a.signerName)
}

// OpenLog opens the log of a detached worker, in the certificate directory.
func (a *Authenticator) OpenLog() (*os.File, error) {
	if err := a.node.Dir().Create(); err != nil {
		return nil, err
	}
	return a.node.Dir().OpenLog()
}

// Step names a step of a run or a worker.
type Step string

// Steps lists the steps of a run, and then those of a worker, in their order.
func Steps() []Step {
	return []Step{
		stepStatus, stepStartWorker, stepPrint,
		StepLock, StepTidy, StepAnnouncement, StepReport, StepPrepare, StepSave, StepFile, StepSaveUID, StepChallenge, StepProve, StepWait, StepCheck, StepInstall, stepRecord, stepForget,
	}
}
