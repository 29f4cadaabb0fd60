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

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/nspawn"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/simulated"
)

// simulatedPrefix begins the names of MachineDeployments, Machines and hosts that are simulated: a
// simulated host is a goroutine. All others boot in systemd-nspawn.
const simulatedPrefix = "simulated-"

// platform has simulated hosts, and hosts that boot. A story can delay the boot or the release of a
// host, as a slow platform does.
type platform struct {
	*nspawn.Hosts

	simulated *simulated.Hosts
	dir       string // of the simulated ones

	mu       sync.Mutex
	clusters map[string]fleet.Cluster           // by the API server's address
	releases map[string]chan struct{}           // by host ID; closed when the host may be released
	boots    map[string]map[string]func() error // delayed boots, by MachineDeployment and host ID
}

func newPlatform(image *nspawn.Image, version string) (*platform, error) {
	p := &platform{clusters: map[string]fleet.Cluster{}, releases: map[string]chan struct{}{}, boots: map[string]map[string]func() error{}}
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

// reach lets hosts connect to an API server. A later call for the same address changes it for
// simulated hosts that are powered on afterwards.
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

// delayRelease delays the release of a host, and so the deletion of its Machine, until release is
// called.
func (p *platform) delayRelease(id string) (release func()) {
	gone := make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.releases[id] = gone
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.releases, id)
		close(gone)
	})
}

// delayBoot keeps the hosts of a MachineDeployment powered off until boot is called.
func (p *platform) delayBoot(t *testing.T, deployment string) (boot func()) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.boots[deployment] != nil {
		t.Fatalf("another story delays the boot of %s already", deployment)
	}
	p.boots[deployment] = map[string]func() error{}
	boot = func() {
		p.mu.Lock()
		boots := p.boots[deployment]
		delete(p.boots, deployment)
		p.mu.Unlock()
		var errs []error
		for _, boot := range boots {
			errs = append(errs, boot())
		}
		harness.Must(t, errors.Join(errs...))
	}
	t.Cleanup(func() { // in case the story ended without boot
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.boots, deployment)
	})
	return boot
}

// of returns the hosts of the right kind for a host ID, or for the name of a host's owner.
func (p *platform) of(name string) metal.Hosts {
	if strings.HasPrefix(name, simulatedPrefix) {
		return p.simulated
	}
	return p.Hosts
}

// Allocate implements metal.Hosts.
func (p *platform) Allocate(ctx context.Context, owner types.UID, name string) (metal.Host, error) {
	return p.of(name).Allocate(ctx, owner, name)
}

// PowerOn boots a host, unless delayBoot delays its MachineDeployment.
func (p *platform) PowerOn(ctx context.Context, id string, metadata metal.Metadata, userData []byte) error {
	boot := func(ctx context.Context) error { return p.of(id).PowerOn(ctx, id, metadata, userData) }
	if p.queueBoot(id, metadata.LocalHostname, func() error { return boot(context.WithoutCancel(ctx)) }) {
		return nil
	}
	return boot(ctx)
}

// queueBoot stores boot for later if delayBoot delays the host's MachineDeployment. It reports
// whether it did.
func (p *platform) queueBoot(id, hostname string, boot func() error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for deployment, boots := range p.boots {
		if strings.HasPrefix(hostname, deployment+"-") {
			boots[id] = boot
			return true
		}
	}
	return false
}

// Release implements metal.Hosts. It waits while delayRelease delays the host's release.
func (p *platform) Release(ctx context.Context, id string) error {
	p.mu.Lock()
	released := p.releases[id]
	p.mu.Unlock()
	if released != nil {
		select {
		case <-released:
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
