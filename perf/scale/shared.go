// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// strangers and copies are how many hellos are filed: of TPMs that no inventory has, and in the
	// name of a machine that it has.
	strangers, copies = 100_000, 20_000
	// sharers is how many machines have the attacker's token, and sharedRounds how often each
	// enrols in a row of the table.
	sharers, sharedRounds = 4, 3
	// slow and fast are how many copies a second are filed. Half of a requester's turns suffice for
	// slow, and not for fast.
	slow, fast = 20, 100
	// listedBound is what is promised to a listed machine whose claim nobody copies faster than
	// slow.
	listedBound = 10 * time.Second
	// sharedTimeout is how long an enrolment may take. Beside a flood of copies it may take longer.
	sharedTimeout = 2 * time.Minute
	// sharedQuota is etcd's quota in bytes: so many requests and their Events use up its default.
	sharedQuota = 8 << 30
	// shippedLimit is GOMEMLIMIT in packaging/kubernetes.
	shippedLimit = "512000000"
	noAudit      = "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: None}]\n"
)

// shared has an attacker flood the bootstrap token that all machines of a cluster share, while
// listed machines enrol with it.
func shared(ctx context.Context, b *bench) error {
	t := newTable("enrolments with the flooded token", "queued before", "number", "median", "slowest", "given up", "controller CPU", "API server CPU", "peak, MiB")
	defer t.print() // after an error, too: it takes half an hour
	err := b.withSharedToken(ctx, func(f *sharedFlood) error {
		stranger, err := oddrequest.NewStranger()
		if err != nil {
			return err
		}
		made := 0
		hello := func() (*certificatesv1.CertificateSigningRequest, error) {
			made++
			return stranger.Hello(fmt.Sprintf("stranger-%06d", made))
		}
		all := f.everybody()
		count := b.sized(strangers)
		for _, step := range []func() error{
			func() error { return f.enrol(ctx, t, "no flood", all, nil, listedBound) },
			func() error { return f.backlog(ctx, count, hello) },
			func() error { return f.enrol(ctx, t, fmt.Sprintf("%d of other EKs", count), all, nil, listedBound) },
			func() error {
				return f.enrol(ctx, t, "and more, as fast as may be", all, &source{hello, 0}, listedBound)
			},
		} {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, proofs := range []bool{false, true} {
		if err := b.withSharedToken(ctx, func(f *sharedFlood) error { return f.copies(ctx, t, proofs) }); err != nil {
			return err
		}
	}
	return nil
}

// sharedFlood is a site whose machines have one token, which the attacker has, too.
type sharedFlood struct{ *site }

func (b *bench) withSharedToken(ctx context.Context, use func(*sharedFlood) error) error {
	return b.withSite(ctx, siteOptions{
		machines: sharers, env: []string{"GOMEMLIMIT=" + shippedLimit},
		controlPlane: testbed.Options{AuditPolicy: []byte(noAudit), EtcdArgs: []string{"--quota-backend-bytes=" + strconv.Itoa(sharedQuota)}},
		// so that it is all there until the end
		configure: func(c *config.Config) { c.WaitDeadline = metav1.Duration{Duration: time.Hour} },
	}, func(s *site) error {
		for i := range s.tokens {
			s.tokens[i] = s.tokens[0]
		}
		f := &sharedFlood{s}
		for i := range s.machines { // connections, caches
			if _, err := s.enrol(ctx, i); err != nil {
				return err
			}
		}
		return use(f)
	})
}

func (f *sharedFlood) everybody() (all []int) {
	for range sharedRounds {
		for i := range f.machines {
			all = append(all, i)
		}
	}
	return all
}

// copies floods in the name of the first machine: with copies of its hello, or with proofs that
// refer to one.
func (f *sharedFlood) copies(ctx context.Context, t *table, proofs bool) error {
	what := "copies of a machine's hello"
	one, err := f.copier(ctx)
	if err != nil {
		return err
	}
	if proofs {
		what = "proofs in its name"
		if one, err = f.prover(ctx); err != nil {
			return err
		}
	}
	victim, others := make([]int, sharers*sharedRounds), []int{1, 2, 3, 1, 2, 3}
	count := f.sized(copies)
	f.note("%d %s", count, what)
	for _, step := range []func() error{
		func() error { return f.backlog(ctx, count, one) },
		func() error {
			return f.enrol(ctx, t, fmt.Sprintf("%d %s: that machine", count, what), victim, nil, listedBound)
		},
		func() error { return f.enrol(ctx, t, "  another listed machine", others, nil, listedBound) },
		func() error {
			return f.enrol(ctx, t, fmt.Sprintf("  and %d more a second: that machine", slow), victim[:4], &source{one, slow}, listedBound)
		},
		func() error {
			return f.enrol(ctx, t, fmt.Sprintf("  and %d more a second: that machine", fast), victim[:1], &source{one, fast}, 0)
		},
		func() error {
			return f.enrol(ctx, t, "  and more, as fast as may be: another listed machine", others, &source{one, 0}, listedBound)
		},
		func() error {
			return f.enrol(ctx, t, "  and more, as fast as may be: that machine", victim[:1], &source{one, 0}, 0)
		},
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// copier returns what makes copies of the first machine's hello.
func (f *sharedFlood) copier(ctx context.Context) (func() (*certificatesv1.CertificateSigningRequest, error), error) {
	original, err := helloOf(ctx, f.machines[0])
	if err != nil {
		return nil, err
	}
	return func() (*certificatesv1.CertificateSigningRequest, error) {
		another := original.DeepCopy()
		another.Name = csr.NewName()
		return another, nil
	}, nil
}

// prover files a copy of the first machine's hello, and returns what makes proofs that refer to it
// and prove nothing.
func (f *sharedFlood) prover(ctx context.Context) (func() (*certificatesv1.CertificateSigningRequest, error), error) {
	hello, err := f.copier(ctx)
	if err != nil {
		return nil, err
	}
	referred, err := hello()
	if err != nil {
		return nil, err
	}
	if err := f.file(ctx, f.withToken(f.tokens[0]), func(yield func(*certificatesv1.CertificateSigningRequest) bool) { yield(referred) }); err != nil {
		return nil, err
	}
	content, err := attestation.Parse(referred.Spec.Request)
	if err != nil {
		return nil, err
	}
	if content.Data, err = oddrequest.Proof(referred.Name); err != nil {
		return nil, err
	}
	proof := referred.DeepCopy()
	proof.Spec.SignerName = tpm.SignerName
	if proof.Spec.Request, err = content.Marshal(); err != nil {
		return nil, err
	}
	return func() (*certificatesv1.CertificateSigningRequest, error) {
		another := proof.DeepCopy()
		another.Name = csr.NewName()
		return another, nil
	}, nil
}

// source is what is filed while machines enrol: so many a second, or as fast as possible for 0.
type source struct {
	one  func() (*certificatesv1.CertificateSigningRequest, error)
	rate int
}

// requests returns them until ctx ends, or one cannot be made.
func (s *source) requests(ctx context.Context, failed *error) iter.Seq[*certificatesv1.CertificateSigningRequest] {
	return func(yield func(*certificatesv1.CertificateSigningRequest) bool) {
		for next := time.Now(); ctx.Err() == nil; {
			if s.rate > 0 {
				if sleep(ctx, time.Until(next)) != nil {
					return
				}
				next = next.Add(time.Second / time.Duration(s.rate))
			}
			request, err := s.one()
			if err != nil {
				*failed = err
				return
			}
			if !yield(request) {
				return
			}
		}
	}
}

// backlog files requests, all of them.
func (f *sharedFlood) backlog(ctx context.Context, count int, one func() (*certificatesv1.CertificateSigningRequest, error)) (err error) {
	began := time.Now()
	err = errors.Join(f.file(ctx, f.withToken(f.tokens[0]), func(yield func(*certificatesv1.CertificateSigningRequest) bool) {
		for range count {
			var request *certificatesv1.CertificateSigningRequest
			if request, err = one(); err != nil || !yield(request) {
				return
			}
		}
	}), err)
	took := time.Since(began)
	f.note("%d requests were filed in %s, %.0f a second", count, figure(took), float64(count)/took.Seconds())
	return err
}

// enrol has machines enrol, one after the other, while requests of a source are filed, and adds a
// row. A bound of 0 is none.
func (f *sharedFlood) enrol(ctx context.Context, t *table, name string, machines []int, more *source, bound time.Duration) error {
	f.note("%s", name)
	before, err := readController(ctx, f.controller)
	if err != nil {
		return err
	}
	filing := make(chan error, 1)
	attack, end := context.WithCancel(ctx)
	defer end()
	if more == nil {
		filing <- nil
	} else {
		go func() {
			var failed error
			err := f.file(ctx, f.withToken(f.tokens[0]), more.requests(attack, &failed))
			filing <- errors.Join(err, failed)
		}()
		if err := sleep(ctx, time.Second); err != nil { // it is under way
			return err
		}
	}
	var took []time.Duration
	givenUp := 0
	p, err := f.during(ctx, name, func() error {
		for _, i := range machines {
			limited, cancel := context.WithTimeout(ctx, sharedTimeout)
			began := time.Now()
			_, err := f.site.enrol(limited, i)
			cancel()
			took = append(took, time.Since(began))
			switch {
			case errors.Is(err, context.DeadlineExceeded):
				givenUp++
			case err != nil:
				return err
			}
		}
		return nil
	})
	end()
	if err := errors.Join(err, <-filing); err != nil {
		return err
	}
	peak, err := memory(f.controller.Process(), "VmHWM")
	if err != nil {
		return err
	}
	t.row(name, int(before.sum("workqueue_depth")), len(took), quantile(took, .5), slowest(took), givenUp,
		share(p.controller.cpu(), p.length()), share(p.apiServer.cpu(), p.length()), peak)
	f.expect(bound == 0 || slowest(took) <= bound, "%s: the slowest took %s", name, slowest(took))
	return nil
}
