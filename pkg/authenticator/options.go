// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// DefaultWorkerDeadline is the longest life of one worker. The next one continues its work.
const DefaultWorkerDeadline = 2 * time.Minute

// Options configure an Authenticator.
type Options struct {
	// Config has the operator's settings.
	Config Config
	// ConfigError says why the configuration file could not be read. New returns it.
	ConfigError error
	// Providers are the providers in this binary, the strongest first. Config names one of them.
	Providers []provider.Factory
	// Choose names one of Providers for this machine, and says why. It is for Config.Provider
	// "auto" on a node without a certificate. It may open a device. If it is nil, "auto" is no
	// provider.
	Choose func(context.Context, provider.Settings) (name, why string)
	// Exec is client-go's request.
	Exec ExecInfo
	// Parent is the process that runs the plugin, as Caller returns it. The zero ID means a person.
	Parent process.ID
	// UserAgent is sent with each request to the API server.
	UserAgent string
	// StartWorker starts a detached process that calls Work with the same Options, such as by
	// StartDetached. Without it, a run that needs a worker fails.
	StartWorker func() (process.ID, error)
	// WorkerDeadline is the longest life of one worker. Default: DefaultWorkerDeadline.
	WorkerDeadline time.Duration
	// Built is the time of the commit that the program was built from. A clock before that time is
	// wrong. The zero time means unknown.
	Built time.Time
	// OnStep is called before each step of a run or a worker. Optional.
	OnStep func(enrol.Step)
}

// setDefaults fills the optional fields.
func (o *Options) setDefaults() {
	o.WorkerDeadline = cmp.Or(o.WorkerDeadline, DefaultWorkerDeadline)
	if o.StartWorker == nil {
		o.StartWorker = func() (process.ID, error) { return process.ID{}, errors.New("Options.StartWorker is not set") }
	}
	if o.OnStep == nil {
		o.OnStep = func(enrol.Step) {}
	}
}

// The API server accepts lifetimes of 10 minutes or more. This program supports up to 10 years.
const shortestLifetime, longestLifetime = 10 * time.Minute, 10 * 365 * 24 * time.Hour

// Bounds of CheckInterval.
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
		// The path goes into a file that systemd reads, and into the kubelet's command line.
		if !kubelet.PlainPath(path) {
			return fmt.Errorf("%s %q: must be an absolute path of letters, digits and . _ - only", name, path)
		}
	}
	// The directory need not exist: certificates do not depend on it.
	if path := c.MetricsTextfile; path != "" && (!filepath.IsAbs(path) || filepath.Ext(path) != ".prom") {
		return fmt.Errorf("metricsTextfile %q: must be an absolute path that ends in .prom, or the textfile collector does not read it", path)
	}
	if c.NodeName != "" {
		if err := nodeaccess.CheckNodeName(c.NodeName); err != nil {
			return err
		}
	}
	if err := attestation.CheckClusterUID(c.ClusterUID); err != nil {
		return fmt.Errorf("clusterUID: %w", err)
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

// Caller returns the parent process if that uses client-go. It returns the zero ID for a person's
// shell.
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
