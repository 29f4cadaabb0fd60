// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/nspawn"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/simulated"
)

// simulatedPrefix begins the names of MachineDeployments, Machines and hosts that are goroutines.
// All others boot in systemd-nspawn.
const simulatedPrefix = "simulated-"

// platform has hosts of both kinds. A story can delay the boot or the release of a host, as a slow
// platform does.
type platform struct {
	*nspawn.Hosts

	simulated *simulated.Hosts
	dir       string // of the simulated ones

	mu       sync.Mutex
	clusters map[string]fleet.Cluster           // by the API server's address
	kept     map[string]chan struct{}           // by host ID; closed when the host may be released
	held     map[string]map[string]func() error // functions that boot, by MachineDeployment and host ID
}

func newPlatform(image *nspawn.Image, version string) (*platform, error) {
	p := &platform{clusters: map[string]fleet.Cluster{}, kept: map[string]chan struct{}{}, held: map[string]map[string]func() error{}}
	maker, err := swtpm.NewCA()
	if err != nil {
		return nil, err
	}
	if p.Hosts, err = nspawn.New(image); err != nil {
		return nil, err
	}
	if p.dir, err = os.MkdirTemp("", "simulated-hosts-"); err != nil {
		return nil, err
	}
	p.simulated = simulated.New(simulated.Options{Dir: p.dir, Maker: maker, Version: version, Cluster: p.cluster})
	return p, nil
}

// reach has hosts of both kinds reach an API server. It may be called again, for simulated hosts
// that are powered on from then on.
func (p *platform) reach(address string, cluster fleet.Cluster) {
	p.mu.Lock()
	_, known := p.clusters[address]
	p.clusters[address] = cluster
	p.mu.Unlock()
	if !known {
		p.Reach(address)
	}
}

func (p *platform) cluster(address string) (fleet.Cluster, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c, ok := p.clusters[address]; ok {
		return c, nil
	}
	return fleet.Cluster{}, fmt.Errorf("no API server at %s", address)
}

// keep delays the release of a host, and so the deletion of its Machine, until letGo is called.
func (p *platform) keep(id string) (letGo func()) {
	gone := make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept[id] = gone
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.kept, id)
		close(gone)
	})
}

// hold keeps the hosts of a MachineDeployment off, until boot is called.
func (p *platform) hold(t *testing.T, deployment string) (boot func()) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[deployment] != nil {
		t.Fatalf("two stories hold %s", deployment)
	}
	p.held[deployment] = map[string]func() error{}
	boot = func() {
		p.mu.Lock()
		boots := p.held[deployment]
		delete(p.held, deployment)
		p.mu.Unlock()
		var errs []error
		for _, boot := range boots {
			errs = append(errs, boot())
		}
		harness.Must(t, errors.Join(errs...))
	}
	t.Cleanup(func() { // a story that ended before
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.held, deployment)
	})
	return boot
}

// of returns the platform for a host ID, or for the name of a host's owner.
func (p *platform) of(name string) metal.Hosts {
	if strings.HasPrefix(name, simulatedPrefix) {
		return p.simulated
	}
	return p.Hosts
}

// Allocate is metal.Hosts'.
func (p *platform) Allocate(ctx context.Context, owner types.UID, name string) (metal.Host, error) {
	return p.of(name).Allocate(ctx, owner, name)
}

// PowerOn boots a host, unless its MachineDeployment is held.
func (p *platform) PowerOn(ctx context.Context, id string, metadata metal.Metadata, userData []byte) error {
	boot := func(ctx context.Context) error { return p.of(id).PowerOn(ctx, id, metadata, userData) }
	if p.holdsBack(id, metadata.LocalHostname, func() error { return boot(context.WithoutCancel(ctx)) }) {
		return nil
	}
	return boot(ctx)
}

// holdsBack keeps what boots a host, if its MachineDeployment is held.
func (p *platform) holdsBack(id, hostname string, boot func() error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for deployment, boots := range p.held {
		if strings.HasPrefix(hostname, deployment+"-") {
			boots[id] = boot
			return true
		}
	}
	return false
}

// Release is metal.Hosts'.
func (p *platform) Release(ctx context.Context, id string) error {
	p.mu.Lock()
	kept := p.kept[id]
	p.mu.Unlock()
	if kept != nil {
		select {
		case <-kept:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return p.of(id).Release(ctx, id)
}

// IDs returns the IDs of the hosts whose owner has that name, or of all hosts if name is empty.
func (p *platform) IDs(name string) []string {
	return append(p.Hosts.IDs(name), p.simulated.IDs(name)...)
}

// Logs returns a host's logs, for the message of a failed test.
func (p *platform) Logs(ctx context.Context, id string) string {
	if strings.HasPrefix(id, simulatedPrefix) {
		return id + " is simulated"
	}
	return p.Hosts.Logs(ctx, id)
}

// Close releases all hosts.
func (p *platform) Close() error {
	return errors.Join(p.Hosts.Close(), p.simulated.Stop(), os.RemoveAll(p.dir))
}
