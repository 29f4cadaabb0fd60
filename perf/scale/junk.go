// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"slices"
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
	// baseline is how long they enrol before, and quiet how long after, where nobody decides on the
	// junk.
	baseline = 12 * time.Second
	quiet    = 12 * time.Second
	// maxDelay is by how much others may be delayed.
	maxDelay = 2 * time.Second
	// junkTimeout bounds the time until all of it is denied. That takes 100 s at the rate for one
	// requester, and retries of proofs that wait for their hello add to it.
	junkTimeout = 5 * time.Minute
	// nobodysSigner has no controller.
	nobodysSigner = "example.com/nobody"
)

// flood is what became of one.
type flood struct {
	phases []phase
	// peak is the controller's memory in MiB, decided how many requests it has denied since the
	// flood began.
	peak    float64
	decided int
}

// junk has one token file ten thousand bad requests, while machines with other tokens enrol. The
// same requests under a signer that belongs to nobody show how much of that is the API server's own
// load.
func junk(ctx context.Context, b *bench) error {
	count := b.sized(junkRequests)
	var floods [2]*flood
	for i, nobodys := range []bool{true, false} {
		b.note("%d requests, to nobody's signer: %t", count, nobodys)
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
	report.print()
	filing, deciding := real.phases[1], real.phases[2]
	b.say("%d requests were filed in %s (%.0f a second), and %d of them denied %s after the last; the controller had %.0f MiB at most, %.0f with nobody's signer",
		count, figure(filing.length()), float64(count)/filing.length().Seconds(), real.decided, figure(deciding.length()), real.peak, control.peak)
	real.printCosts()
	for _, p := range real.phases[1:] {
		base := real.phases[0]
		b.expect(slowest(p.took)-slowest(base.took) < maxDelay, "%s: the slowest took %s longer than before", p.name, slowest(p.took)-slowest(base.took))
		b.expect(quantile(p.took, .5)-quantile(base.took, .5) < maxDelay, "%s: the median is %s more than before", p.name, quantile(p.took, .5)-quantile(base.took, .5))
	}
	b.expect(real.decided == count, "%d of %d requests were denied", real.decided, count)
	return nil
}

// printCosts says what each request cost that was denied: without what the others' enrolments did,
// as far as the time before the flood shows.
func (f *flood) printCosts() {
	perDenial := func(of func(phase) float64) float64 {
		base := f.phases[0]
		total := -of(base) / float64(len(base.took)) * float64(len(f.phases[1].took)+len(f.phases[2].took))
		for _, p := range f.phases[1:] {
			total += of(p)
		}
		return total / float64(f.decided)
	}
	calls := func(method string) float64 {
		return perDenial(func(p phase) float64 { return p.controller.sum("rest_client_requests_total", `method="`+method+`"`) })
	}
	costs := newTable("", "GET", "POST", "PUT", "PATCH", "events", "controller CPU", "API server CPU, with the filing")
	costs.row("for each request that was denied", calls("GET"), calls("POST"), calls("PUT"), calls("PATCH"),
		perDenial(func(p phase) float64 {
			return p.apiServer.sum("apiserver_request_total", `resource="events"`, `verb="POST"`)
		}),
		time.Duration(perDenial(func(p phase) float64 { return float64(p.controller.cpu()) })),
		time.Duration(perDenial(func(p phase) float64 { return float64(p.apiServer.cpu()) })))
	costs.print()
}

// flood files the requests, and follows them to their end.
func (s *site) flood(ctx context.Context, count int, nobodys bool) (*flood, error) {
	requests, err := s.junk(ctx, count, nobodys)
	if err != nil {
		return nil, err
	}
	token := s.tokens[others] // the last machine is the attacker's own
	attacker := s.withToken(token)
	if nobodys {
		attacker = s.cp.AdminConfig() // a token may not ask that signer
	}
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
		{"while junk is filed", func() error { return s.file(ctx, attacker, slices.Values(requests)) }},
		{"while it is decided", func() error {
			if nobodys {
				return sleep(ctx, quiet)
			}
			return s.awaitDenials(ctx, before, count)
		}},
	} {
		measured, err := s.during(ctx, p.name, p.do)
		if err != nil {
			return nil, err
		}
		f.phases = append(f.phases, *measured)
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

// awaitDenials waits until the controller has denied as many since an earlier reading, and not for
// ever: how many it has is counted afterwards.
func (s *site) awaitDenials(ctx context.Context, since readings, count int) error {
	for deadline := time.Now().Add(junkTimeout); time.Now().Before(deadline); {
		now, err := readController(ctx, s.controller)
		if err != nil {
			return err
		}
		if now.minus(since).sum("node_attestation_decisions_total", `outcome="Deny"`) >= float64(count) {
			return nil
		}
		if err := sleep(ctx, time.Second); err != nil {
			return err
		}
	}
	return nil
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

func (s *site) withToken(token string) *rest.Config {
	return &rest.Config{Host: s.cp.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: s.cp.ServerCA()}, BearerToken: token}
}

// file files requests as fast as the API server takes them.
func (s *site) file(ctx context.Context, as *rest.Config, requests iter.Seq[*certificatesv1.CertificateSigningRequest]) error {
	next := make(chan *certificatesv1.CertificateSigningRequest)
	var mu sync.Mutex
	var failed error
	var wait sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range junkConnections {
		// client-go shares connections between clients of one credential, unless they choose
		// proxies their own way.
		config := rest.CopyConfig(as)
		config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
		api, err := csr.NewClient(config)
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
	for request := range requests {
		select {
		case next <- request:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
	}
	close(next)
	wait.Wait()
	if failed != nil {
		return failed
	}
	return ctx.Err()
}

// junk makes requests in the name of the first machine. Of each twenty, ten have a document that
// does not parse, nine are the most expensive hellos, and one is a proof without a hello.
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
