// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"errors"
	"os"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Authenticator implements the commands of the plugin, with checked settings.
type Authenticator struct {
	// invalid is the error in the settings, nil if they are valid. With an error, Run prints a
	// certificate that is still valid, and does nothing else.
	invalid error

	provider            provider.Provider // nil if the settings are invalid
	nodeName            string            // as given, else empty
	providerID          string            // as given, else empty
	dir                 cache.Dir
	bootstrapKubeconfig string // as given, else empty
	kubeletBootstrap    string // the file that kubeadm writes
	keepBootstrap       bool
	signerName          string
	expirationSeconds   *int32 // nil leaves the lifetime to the signer
	waitTimeout         time.Duration
	// reviewTimeout is the constant, except in tests.
	reviewTimeout   time.Duration
	renewalWait     time.Duration
	checkInterval   time.Duration // 0 for no checks
	metricsTextfile string        // as given, else empty
	note            noteFile
	exec            ExecInfo
	parent          process.ID // the zero ID for a person
	userAgent       string
	startWorker     func() (process.ID, error)
	workerDeadline  time.Duration
	step            func(Step)
	built           time.Time // a clock that shows an earlier time is wrong; zero if unknown
	now             func() time.Time
}

// New checks the Options. Its error is the ConfigError, or a Failure with reason Configuration or
// FIPSEnforced. With an error, only Run, Overview, DryRun and Reset work. Run prints a certificate
// that is still valid, or returns the error.
func New(o Options) (*Authenticator, error) {
	o.setDefaults()
	c := o.Config
	a := &Authenticator{
		nodeName: c.NodeName, providerID: c.ProviderID, dir: cache.At(c.CertDir),
		bootstrapKubeconfig: c.BootstrapKubeconfig, kubeletBootstrap: c.KubeletBootstrapKubeconfig, keepBootstrap: c.KeepBootstrapCredential,
		signerName: c.SignerName, waitTimeout: c.WaitTimeout.Duration, reviewTimeout: reviewTimeout, renewalWait: c.RenewalWait.Duration,
		checkInterval: c.CheckInterval.Duration, metricsTextfile: c.MetricsTextfile,
		note: newNoteFile(c.RuntimeDir, c.CertDir),
		exec: o.Exec, parent: o.Parent, userAgent: o.UserAgent,
		startWorker: o.StartWorker, workerDeadline: o.WorkerDeadline, step: o.OnStep, built: o.Built, now: time.Now,
	}
	if d := c.Expiration.Duration; d != 0 {
		seconds := int32(min(d, longestLifetime) / time.Second) //nolint:gosec // G115: longestLifetime fits
		a.expirationSeconds = &seconds
	}
	if err := a.complete(o); err != nil {
		a.invalid = reason.Configuration.Failure("see --help and kubelet-authenticator-config(5), docs/configuration.md, for what each setting may be", err)
		var known *provider.Error
		if errors.As(err, &known) && known.Class == provider.FIPSEnforced {
			a.invalid = reason.FIPSEnforced.Failure(known.Hint, err)
		}
	}
	if o.ConfigError != nil {
		a.invalid = o.ConfigError
	}
	return a, a.invalid
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
	if a.signerName == "" {
		a.signerName = made.SignerName()
	}
	return csr.CheckSignerName("signerName", a.signerName)
}

// renews reports whether the node may request the next certificate with its own.
func (a *Authenticator) renews() bool { return a.provider != nil && a.provider.Renews() }

// node returns the inputs that select the credential and the API server.
func (a *Authenticator) node() nodeaccess.Node {
	n := nodeaccess.Node{
		Dir: a.dir, Bootstrap: a.bootstrapKubeconfig, KubeletBootstrap: a.kubeletBootstrap,
		Asked: a.exec.origin(), AskedBy: cmp.Or(a.exec.Source, ExecInfoVariable), Renews: a.renews(), UserAgent: a.userAgent,
	}
	if a.provider != nil {
		n.Provider = a.provider.Name()
	}
	if a.exec.Cluster != nil {
		n.Insecure = a.exec.Cluster.InsecureSkipTLSVerify
	}
	return n
}

// access returns the credential for the next request. why says why the credential is not the node's
// own certificate, "" if it is. Hello and proof need the same credential. So access returns the
// bootstrap credential if the pending hello was filed with it. That may also be a hello that
// followed a denial of the node's own certificate.
func (a *Authenticator) access(status certificateStatus) (to nodeaccess.Access, why string, err error) {
	node := a.node()
	why = node.WhyBootstrap(status.pair, status.rejected)
	if to, err = node.Access(status.pair, status.rejected); err != nil || !to.Own {
		return to, why, err
	}
	pending, err := a.dir.Pending()
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

// OpenLog opens the log of a detached worker, in the certificate directory.
func (a *Authenticator) OpenLog() (*os.File, error) {
	if err := a.dir.Create(); err != nil {
		return nil, err
	}
	return a.dir.OpenLog()
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
