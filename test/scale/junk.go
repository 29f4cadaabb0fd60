// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

const (
	// junkRequests is how many are filed, over junkConnections at once, with one token.
	junkRequests    = 10_000
	junkConnections = 16
	// others is how many machines with tokens of their own enrol meanwhile, and each how often.
	others      = 4
	otherPeriod = time.Second
	// baseline is how long they enrol before, and quiet how long after, where nobody decides on the junk.
	baseline = 12 * time.Second
	quiet    = 12 * time.Second
	// maxDelay is by how much others may be delayed.
	maxDelay = 2 * time.Second
	// junkTimeout bounds how long it takes until all of it is denied: 100 s at the rate for one requester, and what waits for its hello is looked
	// at meanwhile.
	junkTimeout = 6 * time.Minute
	// nobodysSigner has no controller.
	nobodysSigner = "example.com/nobody"
)

// phase is a part of a flood, and what was measured in it.
type phase struct {
	name                  string
	from, to              time.Time
	took                  []time.Duration
	controller, apiServer readings
}

func (p phase) length() time.Duration { return p.to.Sub(p.from) }

// flood is what became of one.
type flood struct {
	phases []phase
	// peak is the controller's memory in MiB, decided how many requests it has denied since the flood began.
	peak    float64
	decided int
}

// junk has one token file ten thousand bad requests, while machines with other tokens enrol. The same requests under a signer that is nobody's
// say how much of that is the API server's own load.
func junk(ctx context.Context, b *bench) error {
	count := b.sized(junkRequests)
	var floods [2]*flood
	for i, nobodys := range []bool{true, false} {
		fmt.Fprintf(b.progress, "scale: %d requests, to nobody's signer: %t\n", count, nobodys)
		if err := b.withSite(ctx, siteOptions{machines: others + 1, configure: func(c *config.Config) {
			c.WaitDeadline = metav1.Duration{Duration: time.Minute} // for what waits for a hello
		}}, func(s *site) (err error) {
			floods[i], err = s.flood(ctx, count, nobodys)
			return err
		}); err != nil {
			return err
		}
	}
	control, real := floods[0], floods[1]
	report := newTable("enrolments of others, one after the other", "in", "number", "median", "95 %", "slowest", "slower, median", "slower, slowest", "controller CPU", "API server CPU")
	for _, side := range []struct {
		name  string
		flood *flood
	}{{"nobody's signer: ", control}, {"signer of hellos: ", real}} {
		base := side.flood.phases[0]
		for _, p := range side.flood.phases {
			report.row(side.name+p.name, p.length(), len(p.took), quantile(p.took, .5), quantile(p.took, .95), slowest(p.took),
				quantile(p.took, .5)-quantile(base.took, .5), slowest(p.took)-slowest(base.took), share(p.controller.cpu(), p.length()), share(p.apiServer.cpu(), p.length()))
		}
	}
	report.print(b.out)
	filing, deciding := real.phases[1], real.phases[2]
	b.say("%d requests were filed in %s (%.0f a second), and all denied %s after the last; the controller had %.0f MiB at most, %.0f with nobody's signer",
		count, figure(filing.length()), float64(count)/filing.length().Seconds(), figure(deciding.length()), real.peak, control.peak)
	calls := newTable("calls of the controller, per request denied", "GET", "POST", "PUT", "PATCH", "events written", "CPU")
	both := func(name string, labels ...string) float64 {
		return (filing.controller.sum(name, labels...) + deciding.controller.sum(name, labels...)) / float64(count)
	}
	calls.row("others' enrolments with it", both("rest_client_requests_total", `method="GET"`), both("rest_client_requests_total", `method="POST"`),
		both("rest_client_requests_total", `method="PUT"`), both("rest_client_requests_total", `method="PATCH"`),
		(filing.apiServer.sum("apiserver_request_total", `resource="events"`, `verb="POST"`)+deciding.apiServer.sum("apiserver_request_total", `resource="events"`, `verb="POST"`))/float64(count),
		time.Duration((filing.controller.cpu()+deciding.controller.cpu()).Seconds()/float64(count)*float64(time.Second)))
	calls.print(b.out)
	for _, p := range real.phases[1:] {
		base := real.phases[0]
		b.expect(slowest(p.took)-slowest(base.took) < maxDelay, "%s: the slowest took %s longer than before", p.name, slowest(p.took)-slowest(base.took))
		b.expect(quantile(p.took, .5)-quantile(base.took, .5) < maxDelay, "%s: the median is %s more than before", p.name, quantile(p.took, .5)-quantile(base.took, .5))
	}
	b.expect(real.decided == count, "%d of %d requests were denied", real.decided, count)
	return nil
}

// share is how many processors were busy.
func share(cpu, of time.Duration) float64 { return cpu.Seconds() / of.Seconds() }

// flood files the requests, and follows them to their end.
func (s *site) flood(ctx context.Context, count int, nobodys bool) (*flood, error) {
	requests, err := s.junk(ctx, count, nobodys)
	if err != nil {
		return nil, err
	}
	token := s.tokens[others] // the last machine is the attacker's own
	s.machines[others].Stop()
	s.machines = s.machines[:others]
	for i := range s.machines {
		if _, err := s.enrol(ctx, i); err != nil { // connections, caches
			return nil, err
		}
	}
	enrolling := s.newStream(ctx, otherPeriod)
	defer enrolling.cancel()
	f := &flood{}
	before, err := readController(ctx, s.controller)
	if err != nil {
		return nil, err
	}
	for _, p := range []struct {
		name string
		do   func() error
	}{
		{"before", func() error { return sleep(ctx, baseline) }},
		{"while junk is filed", func() error { return s.file(ctx, token, requests) }},
		{"while it is decided", func() error {
			if nobodys {
				return sleep(ctx, quiet)
			}
			return s.awaitDenials(ctx, before, count)
		}},
	} {
		if err := s.during(ctx, f, p.name, p.do); err != nil {
			return nil, err
		}
	}
	if err := enrolling.end(); err != nil {
		return nil, err
	}
	for i := range f.phases {
		p := &f.phases[i]
		p.took = enrolling.between(p.from, p.to)
	}
	if f.peak, err = memory(s.controller.Process(), "VmHWM"); err != nil {
		return nil, err
	}
	f.decided, err = s.denied(ctx, token)
	return f, err
}

// during measures one phase.
func (s *site) during(ctx context.Context, f *flood, name string, do func() error) error {
	p := phase{name: name}
	read := func() (controller, apiServer readings, err error) {
		if controller, err = readController(ctx, s.controller); err == nil {
			apiServer, err = readAPIServer(ctx, s.cp)
		}
		return controller, apiServer, err
	}
	controller, apiServer, err := read()
	if err != nil {
		return err
	}
	p.from = time.Now()
	if err := do(); err != nil {
		return err
	}
	p.to = time.Now()
	if p.controller, p.apiServer, err = read(); err != nil {
		return err
	}
	p.controller, p.apiServer = p.controller.minus(controller), p.apiServer.minus(apiServer)
	f.phases = append(f.phases, p)
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// awaitDenials waits until the controller has denied as many since an earlier reading.
func (s *site) awaitDenials(ctx context.Context, since readings, count int) error {
	ctx, cancel := context.WithTimeout(ctx, junkTimeout)
	defer cancel()
	for {
		now, err := readController(ctx, s.controller)
		if err != nil {
			return err
		}
		got := now.minus(since).sum("node_attestation_decisions_total", `outcome="Deny"`)
		if got >= float64(count) {
			return nil
		}
		if err := sleep(ctx, time.Second); err != nil {
			return fmt.Errorf("%.0f of %d requests are denied: %w", got, count, err)
		}
	}
}

// denied counts the token's requests that are denied.
func (s *site) denied(ctx context.Context, token string) (count int, err error) {
	requester := "system:bootstrap:" + token[:6]
	options := metav1.ListOptions{Limit: 500}
	for {
		list, err := s.cp.Client().CertificatesV1().CertificateSigningRequests().List(ctx, options)
		if err != nil {
			return 0, err
		}
		for i := range list.Items {
			conditions := list.Items[i].Status.Conditions
			if list.Items[i].Spec.Username == requester && len(conditions) == 1 && conditions[0].Type == certificatesv1.CertificateDenied {
				count++
			}
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return count, nil
		}
	}
}

// file files requests as fast as the API server takes them.
func (s *site) file(ctx context.Context, token string, requests []*certificatesv1.CertificateSigningRequest) error {
	next := make(chan *certificatesv1.CertificateSigningRequest)
	var mu sync.Mutex
	var failed error
	var wait sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range junkConnections {
		// client-go shares connections between clients of one credential, unless they choose proxies their own way.
		api, err := csr.NewClient(&rest.Config{
			Host: s.cp.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: s.cp.ServerCA()}, BearerToken: token,
			Proxy: func(*http.Request) (*url.URL, error) { return nil, nil },
		})
		if err != nil {
			return err
		}
		wait.Go(func() {
			for request := range next {
				if _, err := api.Create(ctx, request, false); err != nil {
					mu.Lock()
					if failed == nil {
						failed = err
					}
					mu.Unlock()
					cancel()
				}
			}
		})
	}
	for _, request := range requests {
		select {
		case next <- request:
		case <-ctx.Done():
		}
	}
	close(next)
	wait.Wait()
	if failed != nil {
		return failed
	}
	return ctx.Err()
}

// junk makes requests in the name of the first machine: of each twenty, ten whose document does not parse, nine hellos that cost most, and a proof
// without a hello.
func (s *site) junk(ctx context.Context, count int, nobodys bool) ([]*certificatesv1.CertificateSigningRequest, error) {
	forger, err := s.newForger(ctx)
	if err != nil {
		return nil, err
	}
	requests := make([]*certificatesv1.CertificateSigningRequest, count)
	for i := range requests {
		content, signer := forger.broken, attestation.HelloSignerName
		switch {
		case i%20 == 19:
			if content, err = forger.proof(); err != nil {
				return nil, err
			}
			signer = forger.signer
		case i%2 == 1:
			content = forger.costly
		}
		if nobodys {
			signer = nobodysSigner
		}
		requests[i] = csr.Object(csr.NewName(), signer, content, forger.key.Public(), nil)
	}
	return requests, nil
}
