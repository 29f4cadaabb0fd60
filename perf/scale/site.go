// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// site is a cluster with one controller and some machines, each with a software TPM of one maker's
// and a bootstrap token of its own.
type site struct {
	*bench
	cp         *testbed.ControlPlane
	controller *controllerprocess.Controller
	maker      *swtpm.CA
	dir        string
	machines   []*fleet.Machine
	tokens     []string
	// env is added to the controller's environment.
	env []string
}

// siteOptions say what differs from one site to another.
type siteOptions struct {
	machines int
	// controlPlane says how it differs from the usual one, and env is added to the controller's
	// environment. Optional.
	controlPlane testbed.Options
	env          []string
	// configure changes the controller's configuration, and inventory what it is given as
	// inventory. Optional.
	configure func(*config.Config)
	inventory func(of []byte) []byte
}

// withSite has a function use a site whose controller is ready.
func (b *bench) withSite(ctx context.Context, o siteOptions, use func(*site) error) error {
	return b.withControlPlane(ctx, o.controlPlane, func(cp *testbed.ControlPlane) (err error) {
		s := &site{bench: b, cp: cp, env: o.env}
		defer func() {
			fleet.Stop(s.machines...)
			if s.controller != nil {
				err = errors.Join(err, s.controller.Kill())
			}
		}()
		for _, step := range []func() error{
			func() error { return cp.BindKubeadmBootstrap(ctx) },
			func() error { return s.makeMachines(ctx, o) },
			func() error { return s.startController(ctx, o.configure) },
		} {
			if err := step(); err != nil {
				return err
			}
		}
		if err := use(s); err != nil {
			return fmt.Errorf("%w\n%s", err, s.controller.LogTail())
		}
		return nil
	})
}

func (s *site) makeMachines(ctx context.Context, o siteOptions) (err error) {
	if s.dir, err = s.folder("site"); err != nil {
		return err
	}
	if s.maker, err = swtpm.NewCA(); err != nil {
		return err
	}
	s.machines, err = fleet.Make(o.machines, func(i int) (*fleet.Machine, error) {
		name := fmt.Sprintf("machine-%03d", i)
		dir := filepath.Join(s.dir, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
		return fleet.NewSwtpm(name, dir, s.maker)
	})
	if err != nil {
		return err
	}
	for range s.machines {
		token, err := s.cp.CreateBootstrapToken(ctx, time.Hour)
		if err != nil {
			return err
		}
		s.tokens = append(s.tokens, token)
	}
	inventory, err := fleet.Inventory(ctx, s.machines...)
	if err != nil {
		return err
	}
	if o.inventory != nil {
		inventory = o.inventory(inventory)
	}
	return controllerprocess.SetInventory(ctx, s.cp, inventory)
}

// startController starts one that trusts the maker's certificates. The few machines stand for many:
// each may have certificates as often as it likes.
func (s *site) startController(ctx context.Context, configure func(*config.Config)) error {
	binary, err := s.controllerBinary(ctx)
	if err != nil {
		return err
	}
	roots, intermediates := filepath.Join(s.dir, "roots.pem"), filepath.Join(s.dir, "intermediates.pem")
	if err := errors.Join(writeCertificate(roots, s.maker.Root), writeCertificate(intermediates, s.maker.Intermediate)); err != nil {
		return err
	}
	dir, err := s.folder("controller")
	if err != nil {
		return err
	}
	s.controller, err = controllerprocess.New(controllerprocess.Options{ControlPlane: s.cp, Dir: dir, Binary: binary, Env: s.env, Configure: func(c *config.Config) {
		c.LeaderElection.Enabled = false
		c.TPM.RootsFile, c.TPM.IntermediatesFile = roots, intermediates
		c.Rates.PerMachine.Every.Duration, c.Rates.PerMachine.Burst = time.Millisecond, 1000
		if configure != nil {
			configure(c)
		}
	}})
	if err != nil {
		return err
	}
	if err := s.controller.Start(ctx); err != nil {
		return err
	}
	return s.controller.Ready(ctx)
}

// restart starts a controller again, with another configuration.
func (s *site) restart(ctx context.Context, configure func(*config.Config)) error {
	if err := s.controller.Kill(); err != nil {
		return err
	}
	return s.startController(ctx, configure)
}

func writeCertificate(path string, certificate *x509.Certificate) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw}), 0o600)
}

// cluster is where the i-th machine enrols, with its own token.
func (s *site) cluster(i int) fleet.Cluster {
	return fleet.Cluster{URL: s.cp.ServerURL(), CA: s.cp.ServerCA(), Token: s.tokens[i], Issuer: s.cp.ClientCA().Certificate()}
}

// enrol has the i-th machine get a first certificate, with its token, also if it has had one
// before.
func (s *site) enrol(ctx context.Context, i int) (fleet.Times, error) {
	m := s.machines[i]
	m.Certificate, m.Key = nil, nil
	return m.Attest(ctx, s.cluster(i))
}

// enrolment is one that was made, and when it began.
type enrolment struct {
	began time.Time
	took  time.Duration
}

// stream is machines that enrol all the time: each begins once in a period, or as soon as it has
// ended where that took longer.
type stream struct {
	cancel context.CancelFunc
	wait   sync.WaitGroup

	mu     sync.Mutex
	made   []enrolment
	failed error
}

// newStream has the machines begin in turn, spread over the period.
func (s *site) newStream(ctx context.Context, period time.Duration) *stream {
	st := &stream{}
	ctx, st.cancel = context.WithCancel(ctx)
	for i := range s.machines {
		st.wait.Go(func() {
			next := time.Now().Add(period * time.Duration(i) / time.Duration(len(s.machines)))
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(time.Until(next)):
				}
				next = next.Add(period)
				if now := time.Now(); next.Before(now) {
					next = now
				}
				// What has begun is ended, so that the longest wait counts, too.
				limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), enrolTimeout)
				times, err := s.enrol(limited, i)
				cancel()
				if !st.note(times, err) {
					return
				}
			}
		})
	}
	return st
}

// enrolTimeout is more than any enrolment may take.
const enrolTimeout = 2 * time.Minute

func (st *stream) note(times fleet.Times, err error) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	if err != nil {
		st.failed = errors.Join(st.failed, err)
		return false
	}
	st.made = append(st.made, enrolment{times.Began, times.CertificateSeen})
	return true
}

// end waits until what has begun has ended.
func (st *stream) end() error {
	st.cancel()
	st.wait.Wait()
	return st.failed
}

// between returns how long those took that began between two times, or were under way at the first.
func (st *stream) between(from, to time.Time) (took []time.Duration) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, e := range st.made {
		if e.began.Before(to) && e.began.Add(e.took).After(from) {
			took = append(took, e.took)
		}
	}
	return took
}

func slowest(took []time.Duration) time.Duration {
	if len(took) == 0 {
		return 0
	}
	return slices.Max(took)
}
