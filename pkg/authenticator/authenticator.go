// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"os"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Authenticator does what the program is asked for, under settings that were checked.
type Authenticator struct {
	// invalid says what is wrong with the settings. Then Run prints a certificate that is still
	// valid, and nothing else is done.
	invalid error

	provider            provider.Provider // nil if the settings are wrong
	nodeName            string            // as given, else empty
	providerID          string            // as given, else empty
	dir                 cache.Dir
	bootstrapKubeconfig string // as given, else empty
	kubeletBootstrap    string // kubeadm's
	keepBootstrap       bool
	signerName          string
	expirationSeconds   *int32 // nil leaves the lifetime to the signer
	waitTimeout         time.Duration
	renewalWait         time.Duration
	checkInterval       time.Duration // 0 for no checks
	metricsTextfile     string        // as given, else empty
	note                noteFile
	exec                ExecInfo
	parent              process.ID // the zero ID for a person
	userAgent           string
	startWorker         func() (process.ID, error)
	workerDeadline      time.Duration
	step                func(Step)
	built               time.Time // a clock that is before it is wrong; zero if unknown
	now                 func() time.Time
}

// New checks the Options. On an error, a Failure with reason Configuration or the ConfigError, the
// Authenticator is good for one thing: a Run that prints a certificate which is still valid, or
// returns that error.
func New(o Options) (*Authenticator, error) {
	o.setDefaults()
	c := o.Config
	a := &Authenticator{
		nodeName: c.NodeName, providerID: c.ProviderID, dir: cache.At(c.CertDir),
		bootstrapKubeconfig: c.BootstrapKubeconfig, kubeletBootstrap: c.KubeletBootstrapKubeconfig, keepBootstrap: c.KeepBootstrapCredential,
		signerName: c.SignerName, waitTimeout: c.WaitTimeout.Duration, renewalWait: c.RenewalWait.Duration,
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
		a.invalid = &Failure{Configuration, "see --help and kubelet-authenticator-config(5), docs/configuration.md, for what each setting may be", err}
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

// renews reports whether the node's own certificate may ask for the next one.
func (a *Authenticator) renews() bool { return a.provider != nil && a.provider.Renews() }

// node is what decides about this node's way to the API server.
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

// access returns the credential for the next request. why says why it is not the node's own, and is
// empty if it is. If a hello was filed with the bootstrap credential, access returns that one, since
// the proof needs the same. So it is after an approver has denied the node's own.
func (a *Authenticator) access(status certificateStatus) (to nodeaccess.Access, why string, err error) {
	node := a.node()
	why = node.WhyBootstrap(status.pair, status.rejected)
	if to, err = node.Access(status.pair, status.rejected); err != nil || !to.Own {
		return to, why, err
	}
	pending, err := a.dir.Pending()
	if err != nil || pending == nil || pending.Requester == "" || pending.Requester == to.Requester() {
		return to, why, nil //nolint:nilerr // resume says what is wrong with the file
	}
	if last := pending.Last(); !last.Hello && last.UID != "" {
		return to, why, nil // all is filed: any credential of this node may read the certificate
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
		stepLook, stepStartWorker, stepPrint,
		StepLock, StepTidy, StepAnnouncement, StepReport, StepPrepare, StepSave, StepFile, StepNote, StepChallenge, StepProve, StepWait, StepCheck, StepInstall, stepRecord, stepForget,
	}
}
