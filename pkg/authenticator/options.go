// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// DefaultWorkerDeadline is the longest life of one worker. The next one continues its work.
const DefaultWorkerDeadline = 2 * time.Minute

// Options are what an Authenticator is made from.
type Options struct {
	// Config is what the operator set.
	Config Config
	// ConfigError says why the configuration file could not be read. New returns it.
	ConfigError error
	// Providers are those of this binary. Config names one of them.
	Providers []provider.Factory
	// Exec is what client-go asks for.
	Exec ExecInfo
	// Parent is the process that asks. The zero ID stands for a person. Caller returns it.
	Parent process.ID
	// UserAgent is sent with each request to the API server.
	UserAgent string
	// StartWorker starts a detached process that calls Work with the same Options.
	// StartDetached does. Without it a run that needs a worker fails.
	StartWorker func() (process.ID, error)
	// WorkerDeadline is the longest life of one worker. Default: DefaultWorkerDeadline.
	WorkerDeadline time.Duration
	// Built is the time of the commit that the program was built from. A clock that is before it
	// is wrong. Default: the zero time, which means unknown.
	Built time.Time
	// OnStep is called before each step of a run or a worker. Default: nothing is called.
	OnStep func(Step)
}

// setDefaults fills the optional fields.
func (o *Options) setDefaults() {
	o.WorkerDeadline = cmp.Or(o.WorkerDeadline, DefaultWorkerDeadline)
	if o.StartWorker == nil {
		o.StartWorker = func() (process.ID, error) { return process.ID{}, errors.New("Options.StartWorker is not set") }
	}
	if o.OnStep == nil {
		o.OnStep = func(Step) {}
	}
}

// The API server takes no less than 10 minutes. This program promises to work with 10 years.
const shortestLifetime, longestLifetime = 10 * time.Minute, 10 * 365 * 24 * time.Hour

// Between two checks for announced renewals.
const shortestInterval, longestInterval = 10 * time.Second, 24 * time.Hour

// check refuses settings that cannot work. New checks the provider and its signer.
func (o *Options) check() error {
	c := o.Config
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
	// Whether the directory exists is not checked: without it there are still certificates.
	if path := c.MetricsTextfile; path != "" && (!filepath.IsAbs(path) || filepath.Ext(path) != ".prom") {
		return fmt.Errorf("metricsTextfile %q: must be an absolute path that ends in .prom, or the textfile collector does not read it", path)
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
	if d := c.Expiration.Duration; d != 0 && (d < shortestLifetime || d > longestLifetime) {
		return fmt.Errorf("expiration %s: must be from %s to %s, or 0 to leave it to the signer", d, shortestLifetime, longestLifetime)
	}
	if wait, renewal, prepare := c.WaitTimeout.Duration, c.RenewalWait.Duration, c.PrepareWait.Duration; wait < 0 || renewal < 0 || prepare < 0 {
		return fmt.Errorf("waitTimeout %s, renewalWait %s, prepareWait %s: must not be negative", wait, renewal, prepare)
	}
	if d := c.CheckInterval.Duration; d != 0 && (d < shortestInterval || d > longestInterval) {
		return fmt.Errorf("checkInterval %s: must be from %s to %s, or 0 to switch the checks off", d, shortestInterval, longestInterval)
	}
	return nil
}

// NewProvider makes the provider that the operator named.
func (o *Options) NewProvider() (provider.Provider, error) {
	c, names := o.Config, make([]string, 0, len(o.Providers))
	for _, factory := range o.Providers {
		names = append(names, factory.Name)
		if factory.Name != c.Provider {
			continue
		}
		p, err := factory.New(provider.Settings{TPMDevice: c.TPMDevice, EKTemplate: c.EKTemplate, ProviderIDScheme: c.ProviderIDScheme, RuntimeDir: c.RuntimeDir})
		if err != nil {
			return nil, fmt.Errorf("provider %s: %w", c.Provider, err)
		}
		return p, nil
	}
	if c.Provider == "" {
		return nil, fmt.Errorf("provider: not set; it is one of %q", names)
	}
	return nil, fmt.Errorf("provider %.64q: not in this binary, which has %q", c.Provider, names)
}

// Caller returns the process that runs this one if that is client-go. A person's shell is not
// returned.
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
