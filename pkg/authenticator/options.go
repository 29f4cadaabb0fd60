// SPDX-License-Identifier: Apache-2.0

// Package authenticator is the node's flow: it hands the kubelet the client certificate of its node, and gets a new one when
// there is none or it is due.
//
// A Run prints what is on disk, at once. The work is done by one detached worker (Work), since client-go holds a lock that
// every request of the kubelet waits on while a run lasts. README.md, "What the plugin does", has the numbered steps; they are
// the functions of run.go and worker.go in the same order. Every reason for a failure is in reason.go.
//
// The package writes to no standard descriptor and never exits: pkg/authenticator/command does, for a main.
package authenticator

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// DefaultWorkerDeadline is the most that one worker lives. The next one carries on where it stopped.
const DefaultWorkerDeadline = 2 * time.Minute

// Options is a configuration that has been checked. NewOptions makes it.
type Options struct {
	provider            provider.Provider
	nodeName            string // as given, else empty
	providerID          string // as given, else empty
	dir                 cache.Dir
	bootstrapKubeconfig string // as given, else empty
	kubeletBootstrap    string // kubeadm's
	keepBootstrap       bool
	signerName          string
	expirationSeconds   *int32
	waitTimeout         time.Duration
	renewalWait         time.Duration
	note                noteFile
	exec                ExecInfo

	// invalid is what is wrong with the configuration. A certificate that is still valid is printed all the same, and
	// nothing else is done.
	invalid error

	// Parent is the process that asks, the zero ID for a person. Caller returns it.
	Parent process.ID
	// UserAgent is sent with each request to the API server.
	UserAgent string
	// StartWorker starts a detached process that calls Work for the same configuration. StartDetached does.
	StartWorker func() (process.ID, error)
	// WorkerDeadline is the most that one worker lives; NewOptions sets DefaultWorkerDeadline.
	WorkerDeadline time.Duration
	// OnStep, if set, is called before each step of a run or a worker.
	OnStep func(Step)

	now func() time.Time
}

// Step names a step of a run or a worker.
type Step string

// NewOptions checks a configuration. On an error, a Failure with reason Configuration, the Options are good for one thing: a Run
// that prints a certificate which is still valid, or returns that error.
func NewOptions(c Config, providers []provider.Factory, exec ExecInfo) (Options, error) {
	o := Options{
		nodeName:            c.NodeName,
		providerID:          c.ProviderID,
		dir:                 cache.At(c.CertDir),
		bootstrapKubeconfig: c.BootstrapKubeconfig,
		kubeletBootstrap:    c.KubeletBootstrapKubeconfig,
		keepBootstrap:       c.KeepBootstrapCredential,
		signerName:          c.SignerName,
		waitTimeout:         c.WaitTimeout.Duration,
		renewalWait:         c.RenewalWait.Duration,
		note:                newNoteFile(c.RuntimeDir, c.CertDir),
		exec:                exec,
		WorkerDeadline:      DefaultWorkerDeadline,
		now:                 time.Now,
	}
	if err := o.check(c, providers); err != nil {
		o.invalid = &Failure{Configuration, "see --help and kubelet-authenticator-config(5), docs/configuration.md, for what each setting may be", err}
	}
	return o, o.invalid
}

// check refuses settings that cannot work, and makes the provider.
func (o *Options) check(c Config, providers []provider.Factory) error {
	for name, path := range map[string]string{"certDir": c.CertDir, "runtimeDir": c.RuntimeDir} {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("%s %q: must be an absolute path", name, path)
		}
	}
	for name, path := range map[string]string{"kubeletKubeconfig": c.KubeletKubeconfig, "kubeletBootstrapKubeconfig": c.KubeletBootstrapKubeconfig} {
		// It goes into a file that systemd reads, and onto the kubelet's command line.
		if !kubelet.PlainPath(path) {
			return fmt.Errorf("%s %q: must be an absolute path of letters, digits and . _ - only", name, path)
		}
	}
	if c.NodeName != "" {
		if err := nodeaccess.CheckNodeName(c.NodeName); err != nil {
			return err
		}
	}
	if c.ProviderID != "" {
		if err := csr.CheckProviderID(c.ProviderID); err != nil {
			return err
		}
	}
	// The API server takes no less than 10 minutes; 10 years is what this program promises to work with.
	const shortest, longest = 10 * time.Minute, 10 * 365 * 24 * time.Hour
	if d := c.Expiration.Duration; d != 0 {
		if d < shortest || d > longest {
			return fmt.Errorf("expiration %s: must be from %s to %s, or 0 to leave it to the signer", d, shortest, longest)
		}
		seconds := int32(d / time.Second)
		o.expirationSeconds = &seconds
	}
	if o.waitTimeout < 0 || o.renewalWait < 0 || c.PrepareWait.Duration < 0 {
		return fmt.Errorf("waitTimeout %s, renewalWait %s, prepareWait %s: must not be negative", o.waitTimeout, o.renewalWait, c.PrepareWait.Duration)
	}
	if err := o.makeProvider(c, providers); err != nil {
		return err
	}
	if o.signerName == "" {
		o.signerName = o.provider.SignerName()
	}
	return csr.CheckSignerName("signerName", o.signerName)
}

func (o *Options) makeProvider(c Config, providers []provider.Factory) error {
	names := make([]string, 0, len(providers))
	for _, factory := range providers {
		names = append(names, factory.Name)
		if factory.Name != c.Provider {
			continue
		}
		p, err := factory.New(provider.Settings{TPMDevice: c.TPMDevice, ProviderIDScheme: c.ProviderIDScheme, RuntimeDir: c.RuntimeDir})
		if err != nil {
			return fmt.Errorf("provider %s: %w", c.Provider, err)
		}
		o.provider = p
		return nil
	}
	if c.Provider == "" {
		return fmt.Errorf("provider: not set; it is one of %q", names)
	}
	return fmt.Errorf("provider %.64q: not in this binary, which has %q", c.Provider, names)
}

// renews reports whether the node's own certificate may ask for the next one.
func (o *Options) renews() bool { return o.provider != nil && o.provider.Renews() }

func (o *Options) step(s Step) {
	if o.OnStep != nil {
		o.OnStep(s)
	}
}

// Caller returns the process that runs this one, if it is client-go: a person's shell is not.
func Caller(exec ExecInfo) process.ID {
	if exec.APIVersion == "" {
		return process.ID{}
	}
	id, err := process.Of(os.Getppid())
	if err != nil {
		return process.ID{}
	}
	return id
}

// Invalidate marks the configuration as wrong for a reason found before NewOptions: its file could not be read.
func (o *Options) Invalidate(err error) { o.invalid = err }

// OpenLog opens the log of a detached worker, in the certificate directory.
func (o *Options) OpenLog() (*os.File, error) {
	if err := o.dir.Create(); err != nil {
		return nil, err
	}
	return o.dir.OpenLog()
}

// Steps lists the steps of a run, and then those of a worker, in their order.
func Steps() []Step {
	return []Step{
		StepLook, StepStartWorker, StepPrint,
		StepLock, StepTidy, StepPrepare, StepSave, StepFile, StepNote, StepChallenge, StepProve, StepWait, StepCheck, StepInstall, StepRecord, StepForget,
	}
}
