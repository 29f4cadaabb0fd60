// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/nspawn"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/simulated"
)

// simulatedPrefix begins the names of MachineDeployments, Machines and hosts that are goroutines. All others boot in systemd-nspawn.
const simulatedPrefix = "simulated-"

// platform has hosts of both kinds.
type platform struct {
	*nspawn.Hosts

	simulated *simulated.Hosts
	dir       string // of the simulated ones

	mu       sync.Mutex
	clusters map[string]fleet.Cluster // by the API server's address
	held     map[string]chan struct{} // by host's ID; closed when it may be released
}

func newPlatform(image *nspawn.Image, version string) (*platform, error) {
	p := &platform{clusters: map[string]fleet.Cluster{}, held: map[string]chan struct{}{}}
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

// reach has hosts of both kinds reach an API server. It may be called again, for simulated hosts that are powered on from then on.
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

// keep has a host stay on, and its Machine stay, until it is let go.
func (p *platform) keep(id string) (letGo func()) {
	gone := make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[id] = gone
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.held, id)
		close(gone)
	})
}

// of returns the hosts that a host, or the owner of a host, with that name belongs to.
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

// PowerOn is metal.Hosts'.
func (p *platform) PowerOn(ctx context.Context, id string, metadata metal.Metadata, userData []byte) error {
	return p.of(id).PowerOn(ctx, id, metadata, userData)
}

// Release is metal.Hosts'.
func (p *platform) Release(ctx context.Context, id string) error {
	p.mu.Lock()
	held := p.held[id]
	p.mu.Unlock()
	if held != nil {
		select {
		case <-held:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return p.of(id).Release(ctx, id)
}

// IDs returns the hosts of the owners of a name, or all without one.
func (p *platform) IDs(name string) []string {
	return append(p.Hosts.IDs(name), p.simulated.IDs(name)...)
}

// Logs returns what a host has to say, for the message of a failed test.
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
