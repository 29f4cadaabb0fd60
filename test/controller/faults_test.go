// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/rest"
)

// faults makes one write of a controller fail, as if the controller or its connection was killed.
type faults struct {
	mu sync.Mutex
	// at is the write that fails, counted from 1; writes counts them.
	at, writes int
	// lost says that the API server executes the write, and only the answer is lost.
	lost bool
	// what is the request that failed.
	what string
}

func (f *faults) wrap(next http.RoundTripper) http.RoundTripper { return failing{f, next} }

// arm makes the write with number at fail, counted from now.
func (f *faults) arm(at int, lost bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.at, f.writes, f.lost, f.what = at, 0, lost, ""
}

func (f *faults) failed() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.what
}

type failing struct {
	*faults
	next http.RoundTripper
}

// RoundTrip does not count reads and Events.
func (f failing) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method == http.MethodGet || strings.Contains(request.URL.Path, "/events") {
		return f.next.RoundTrip(request)
	}
	f.mu.Lock()
	f.writes++
	hit, lost := f.writes == f.at, f.lost
	if hit {
		f.what = request.Method + " " + request.URL.Path
	}
	f.mu.Unlock()
	if !hit {
		return f.next.RoundTrip(request)
	}
	if lost {
		response, err := f.next.RoundTrip(request)
		if err != nil {
			return nil, err
		}
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
	}
	return nil, errors.New("the connection broke")
}

// Each write of the controller fails once, or succeeds and is reported as failed. The writes are
// challenge, record, approval, certificate into the record, certificate, and the hello's end. The
// machine gets exactly one certificate each time: as first, again, and as a renewal.
func TestKilledBetweenAnyTwoSteps(t *testing.T) {
	f := newFleet(t, nil)
	f.stop()
	var broken faults
	config := f.AdminConfig()
	config.Wrap(broken.wrap)
	f.stop = f.startWith(t, config)
	m := map[string]*machine{}
	for _, lost := range []bool{false, true} {
		for at := 1; at <= 8; at++ {
			name := fmt.Sprintf("killed-%d-%t", at, lost)
			m[name] = f.newMachine(t, name)
		}
	}
	var all []*machine
	for _, one := range m {
		all = append(all, one)
	}
	f.inventoried(t, all...)
	var worst time.Duration
	for _, lost := range []bool{false, true} {
		for at := 1; at <= 8; at++ {
			one := m[fmt.Sprintf("killed-%d-%t", at, lost)]
			attest := func(class string, credential *rest.Config) (key, certificate []byte) {
				t.Helper()
				p := f.newPeer(t, one.chip, credential, one.name, one.name)
				broken.arm(at, lost)
				began := time.Now()
				hello, proof := p.attests(t)
				certificate = f.issued(t, proof, one.name)
				f.closed(t, hello)
				worst = max(worst, time.Since(began))
				if at <= 6 && broken.failed() == "" {
					t.Errorf("%s, %d: there was no such write", class, at)
				}
				if at == 6 || at == 1 {
					t.Logf("%s, lost %t, %d: %s", class, lost, at, broken.failed())
				}
				return p.keyPEM, certificate
			}
			key, certificate := attest("first", f.asToken(one.token))
			attest("renewal", f.asNode(certificate, key))
			attest("again", f.asToken(one.token))
			if got := f.record(t, one.name); got.Status.Request == nil || len(got.Status.Certificates) < 3 || len(got.Status.Certificates) > 4*3 {
				t.Errorf("%s: %+v", one.name, got.Status)
			}
			_, proofs := f.requests(t, one.name)
			if len(proofs) != 3 {
				t.Errorf("%s: %d proofs", one.name, len(proofs))
			}
		}
	}
	broken.arm(0, false)
	if n := f.records(t); n != len(m) {
		t.Errorf("%d records of %d machines", n, len(m))
	}
	t.Logf("the slowest took %s", worst)
	if worst > 20*time.Second {
		t.Errorf("the slowest took %s", worst)
	}
}

// Two controllers without leader election serve twenty machines at once. There is one record for
// each machine and one certificate for each request, and no machine waits for long.
func TestTwoControllersAtOnce(t *testing.T) {
	f := newFleet(t, nil)
	f.startWith(t, f.AdminConfig())
	const count = 20
	var machines []*machine
	for i := range count {
		machines = append(machines, f.newMachine(t, fmt.Sprintf("two-%02d", i)))
	}
	f.inventoried(t, machines...)
	var wait sync.WaitGroup
	var mu sync.Mutex
	var worst time.Duration
	for _, m := range machines {
		wait.Go(func() {
			p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
			began := time.Now()
			hello, proof := p.attests(t)
			certificate := f.issued(t, proof, m.name)
			f.closed(t, hello)
			q := f.newPeer(t, m.chip, f.asNode(certificate, p.keyPEM), m.name, m.name)
			_, renewal := q.attests(t)
			f.issued(t, renewal, m.name)
			mu.Lock()
			worst = max(worst, time.Since(began))
			mu.Unlock()
		})
	}
	wait.Wait()
	t.Logf("the slowest took %s for both certificates", worst)
	if worst > time.Minute {
		t.Error("that is too long")
	}
	if n := f.records(t); n != count {
		t.Errorf("%d records of %d machines", n, count)
	}
	issued := 0
	for _, item := range f.all(t) {
		if len(item.Status.Certificate) > 0 {
			issued++
			if reasonOf(&item) != "" || item.Status.Conditions[0].Type != certificatesv1.CertificateApproved {
				t.Errorf("%+v", item.Status.Conditions)
			}
		}
	}
	if issued != 2*count {
		t.Errorf("%d certificates", issued)
	}
}
