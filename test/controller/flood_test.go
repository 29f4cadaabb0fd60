// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
)

// All machines of a cluster share a bootstrap token, and an attacker has it, too. The attacker has
// filed thousands of hellos when a listed machine enrols. The machine must be enrolled before the
// flood is decided. A limit in seconds would measure how busy the computer is.
func TestListedMachineUnderAFloodedToken(t *testing.T) {
	for name, c := range map[string]struct {
		count int
		// goesOn says that requests are filed while the machine enrols, too.
		goesOn bool
		// junk returns what makes requests, for a machine whose token it uses.
		junk func(t *testing.T, f *fleet, victim *machine) func(i int) (*certificatesv1.CertificateSigningRequest, error)
	}{
		"other EKs and node names": {3000, true, func(t *testing.T, _ *fleet, _ *machine) func(int) (*certificatesv1.CertificateSigningRequest, error) {
			stranger, err := oddrequest.NewStranger()
			harness.Must(t, err)
			return func(i int) (*certificatesv1.CertificateSigningRequest, error) {
				return stranger.Hello(fmt.Sprintf("stranger-%04d", i))
			}
		}},
		// Copies that are filed faster than they are decided delay the machine: they are in the
		// same claim queue.
		"the machine's own EK and node name": {2000, false, func(t *testing.T, f *fleet, victim *machine) func(int) (*certificatesv1.CertificateSigningRequest, error) {
			p := f.newPeer(t, victim.chip, f.asToken(victim.token), victim.name, victim.name)
			document, err := hello(t, p).Marshal()
			harness.Must(t, err)
			return func(int) (*certificatesv1.CertificateSigningRequest, error) {
				return p.object(t, attestation.HelloSignerName, document), nil
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			looked := &lookedAt{}
			f := newFleet(t, func(f *fleet, _ *verifier.Policy) { f.provider = looked.through })
			m := f.newMachine(t, "listed")
			f.inventoried(t, m)
			f.stop() // so that the flood is there however slowly it is filed
			junk := c.junk(t, f, m)
			f.flood(t.Context(), t, m.token, c.count, junk)
			f.start(t)
			started := time.Now()
			// No request waits during the requester's burst.
			burst := int64(fairqueue.DefaultRates().Requester.Burst)
			harness.Eventually(t, time.Minute, "the burst is used", func() bool { return looked.requests.Load() >= burst })

			ctx, cancel := context.WithCancel(t.Context())
			var filing sync.WaitGroup
			defer filing.Wait()
			defer cancel()
			if c.goesOn {
				filing.Go(func() { f.flood(ctx, t, m.token, math.MaxInt, junk) })
			}
			m.args = []string{"--wait-timeout=2m"} // it does not give up before the test
			began := time.Now()
			enrolled := m.enrols(t)
			took := time.Since(began)
			left := int64(c.count) - looked.requests.Load()
			cancel()
			filing.Wait()
			t.Logf("enrolled within %s, %d of %d requests of the flood had not been looked at by then", took, left, c.count)
			// The reason is written into 50 requests at once and then into one each second, for any
			// number of requests and requesters.
			if waiting, most := f.waitingRequests(t), 50+int(time.Since(started)/time.Second)+1; waiting > most || waiting == 0 && c.goesOn {
				t.Errorf("%d requests say what they wait for, %d may", waiting, most)
			}
			if left < int64(c.count)/10 {
				t.Error("the machine was enrolled behind the flood")
			}
			f.onlyFor(t, enrolled.Leaf)
		})
	}
}

// lookedAt counts the requests whose evidence was verified, each once.
type lookedAt struct {
	names    sync.Map
	requests atomic.Int64
}

func (l *lookedAt) through(p tpmprovider.Provider) evidence.Provider {
	return lookedAtProvider{p, l}
}

type lookedAtProvider struct {
	tpmprovider.Provider
	*lookedAt
}

// Judge is the Provider's.
func (p lookedAtProvider) Verify(ctx context.Context, q evidence.Question) verifier.Evidence {
	if _, again := p.names.LoadOrStore(q.Request.Name, nil); !again {
		p.requests.Add(1)
	}
	return p.Provider.Verify(ctx, q)
}

// flood files requests with a token, as fast as the API server takes them, until ctx ends.
func (f *fleet) flood(ctx context.Context, t *testing.T, token string, count int, request func(i int) (*certificatesv1.CertificateSigningRequest, error)) {
	t.Helper()
	harness.Flood(ctx, t, f.asToken(token), count, request)
}
