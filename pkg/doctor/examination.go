// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
)

// DefaultTimeout bounds all checks together.
const DefaultTimeout = 30 * time.Second

// Options say what to examine.
type Options struct {
	// Config is the plugin's configuration. ConfigFile is the file that it was read from if that
	// exists. ConfigErr is the error in it.
	Config     authenticator.Config
	ConfigFile string
	ConfigErr  error
	// Explicit is set if a flag on the command line named a setting. Then doctor examines also a
	// machine without a configuration.
	Explicit bool
	// ExecFlags are the flags in Config that come from the kubelet's kubeconfig. They are reported.
	ExecFlags *nodestatus.ExecFlags
	// Providers are those of this binary. Choose names one of them for a machine that has not
	// enrolled yet (authenticator.Options).
	Providers []provider.Factory
	Choose    func(context.Context, provider.Settings) (name, why string)
	// Metadata asks the cloud's metadata service, if the provider uses one.
	Metadata metadata.Client
	// UserAgent is sent with each request to the API server.
	UserAgent string
	// Timeout is for all checks together. Default: DefaultTimeout.
	Timeout time.Duration
	// Proc is the proc file system. Default: /proc.
	Proc string
	// Now is this machine's clock. Default: time.Now.
	Now func() time.Time
	// Manifests is the directory of static pods. Default: kubelet.ManifestsDir.
	Manifests string
	// UnitDirs are the directories of drop-ins for kubelet.service. Default: those of systemd.
	UnitDirs []string
}

func (o Options) timeout() time.Duration {
	if o.Timeout <= 0 {
		return DefaultTimeout
	}
	return o.Timeout
}

// examination has the inputs that the checks share. Each is read once, by the first check that
// needs it.
type examination struct {
	Options
	ctx context.Context //nolint:containedctx // it lives as long as one call of run
	dir cache.Dir

	attestor  func() (provider.Provider, error)
	device    func() (device, error)
	pair      func() (*cache.Pair, error)
	status    func() nodestate.Status
	running   func() ([]*kubeletProcess, error)
	conf      func() kubelet.Kubeconfig
	bootstrap func() (*access, error)
	own       func() (*access, error)
	node      func() nodeaccess.Node
	need      func() string
	servers   func() []probeResult
	accepted  func() (nodeaccess.Review, error)
}

func newExamination(ctx context.Context, o Options) *examination {
	setDefault := func(s *string, otherwise string) {
		if *s == "" {
			*s = otherwise
		}
	}
	setDefault(&o.Proc, procFS)
	setDefault(&o.Manifests, kubelet.ManifestsDir)
	if o.UnitDirs == nil {
		o.UnitDirs = unitDirs
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	e := &examination{Options: o, ctx: ctx, dir: cache.At(o.Config.CertDir)}
	e.attestor = sync.OnceValues(e.makeProvider)
	e.device = sync.OnceValues(e.readDevice)
	e.pair = sync.OnceValues(e.readPair)
	e.status = sync.OnceValue(e.loadStatus)
	e.running = sync.OnceValues(func() ([]*kubeletProcess, error) { return findKubelets(e.Proc) })
	e.conf = sync.OnceValue(e.readConf)
	e.node = sync.OnceValue(e.findNode)
	e.bootstrap = sync.OnceValues(e.bootstrapAccess)
	e.own = sync.OnceValues(e.ownAccess)
	e.need = sync.OnceValue(e.whyBootstrap)
	e.servers = sync.OnceValue(e.probeServers)
	e.accepted = sync.OnceValues(e.reviewOwn)
	return e
}

func (e *examination) makeProvider() (provider.Provider, error) {
	plugin := authenticator.Options{Config: e.Config, Providers: e.Providers, Choose: e.Choose}
	p, final, err := plugin.NewProvider()
	if err != nil || final {
		return p, err
	}
	chosen, err := plugin.ChooseProvider(e.ctx)
	return chosen.Provider, err
}

// providerName returns the provider's name, or the setting if that is no provider.
func (e *examination) providerName() string {
	p, err := e.attestor()
	if err != nil {
		return e.Config.Provider
	}
	return p.Name()
}

// renews reports whether the node's own certificate may request the next one.
func (e *examination) renews() bool {
	p, err := e.attestor()
	return err != nil || p.Renews()
}

// errNeedsRoot says that this user may not read a file.
var errNeedsRoot = errors.New("only root may read it; run this as root")

// readPair returns the certificate if it exists and parses. usable decides whether it is valid.
func (e *examination) readPair() (*cache.Pair, error) {
	pair, err := e.dir.Current()
	if errors.Is(err, os.ErrPermission) {
		return nil, fmt.Errorf("%s: %w", e.dir.File(cache.CurrentFile), errNeedsRoot)
	}
	return pair, err
}

// usable returns the certificate if the plugin would print it, else nil.
func (e *examination) usable() *cache.Pair { return e.status().Pair }

// loadStatus judges the node's files as the plugin does.
func (e *examination) loadStatus() nodestate.Status {
	n := nodestate.Node{Access: e.node(), Name: e.Config.NodeName, Invalid: e.ConfigErr, Now: e.Now}
	return n.Load()
}

// unseen returns an error if only root may read the certificate.
func (e *examination) unseen() error {
	if _, err := e.pair(); errors.Is(err, errNeedsRoot) {
		return err
	}
	return nil
}

// nodeName returns this node's name as the plugin finds it. The running kubelet's flag has
// precedence over the file into which kubeadm wrote that flag.
func (e *examination) nodeName() (nodeaccess.NodeName, error) {
	if e.Config.NodeName == "" {
		if all, err := e.running(); err == nil {
			if name := nodeaccess.Canonical(all[0].flags.HostnameOverride); name != "" {
				return nodeaccess.NodeName{Name: name}, nil
			}
		}
	}
	return nodeaccess.FindNodeName(e.Config.NodeName)
}

// whileServed downgrades a failure to a warning while the plugin still has a certificate to print.
func (e *examination) whileServed(f checkup.Result) checkup.Result {
	if f.Status == checkup.Failure && e.usable() != nil {
		f.Status = checkup.Warning
	}
	return f
}
