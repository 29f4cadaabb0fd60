// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// compared is how many enrol at once, and rounds how often each side has its turn.
	compared, rounds = 200, 2
	// managerQPS is the default rate limit of each client of kube-controller-manager, in requests a
	// second. The burst is 30.
	managerQPS = 20
)

// compare has as many nodes enrol with kube-controller-manager as machines with the controller, on
// the same API server, in turns.
func compare(ctx context.Context, b *bench) error {
	return b.withControlPlane(ctx, testbed.Options{AuditPolicy: []byte(callPolicy)}, func(cp *testbed.ControlPlane) error {
		if err := cp.BindKubeadmBootstrap(ctx); err != nil {
			return err
		}
		token, err := cp.CreateBootstrapToken(ctx, time.Hour)
		if err != nil {
			return err
		}
		count := b.sized(compared)
		var theirs, ours []*costs
		for round := range rounds {
			b.note("round %d of %d: %d nodes, then %d machines", round+1, rounds, count, count)
			name := fmt.Sprintf("round %d", round+1)
			err := withManager(ctx, cp, func() error {
				one, err := b.measure(ctx, cp, name+", kube-controller-manager", count, managerUser, managerProcess, func() (time.Duration, error) {
					return enrolNodes(ctx, cp, token, newNodes(fmt.Sprintf("theirs-%d", round), count))
				})
				theirs = append(theirs, one)
				return err
			})
			if err != nil {
				return err
			}
			// The controller would report each of them as issued without attestation.
			if err := deleteRequests(ctx, cp); err != nil {
				return err
			}
			err = b.withOurs(ctx, cp, []crowdSize{{prefix: fmt.Sprintf("ours-%d", round), count: count, real: realTPMs}}, func(crowds []*crowd) error {
				one, err := b.measure(ctx, cp, name+", node-attestation-controller", count, ourUser, ourProcess, func() (time.Duration, error) {
					times, err := crowds[0].attest(ctx)
					return spanned(times), err
				})
				ours = append(ours, one)
				return err
			})
			if err != nil {
				return err
			}
		}
		return b.reportComparison(theirs, ours)
	})
}

// deleteRequests deletes all CertificateSigningRequests.
func deleteRequests(ctx context.Context, cp *testbed.ControlPlane) error {
	api, err := kubernetes.NewForConfig(cp.AdminConfig())
	if err != nil {
		return err
	}
	return api.CertificatesV1().CertificateSigningRequests().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
}

// rate is how many certificates were issued a second.
func (c *costs) rate() float64 { return float64(c.count) / c.span.Seconds() }

// all is the processor time of all of them, the machines' own included.
func (c *costs) all() (sum time.Duration) {
	for _, name := range []string{c.process, apiServerProcess, etcdProcess, clients} {
		sum += c.used[name]
	}
	return sum
}

func (b *bench) reportComparison(theirs, ours []*costs) error {
	report := newTable("no client is bound by a rate", "certificates", "in", "per second", "ratio", "approver and signer", "API server", "etcd", "clients", "calls")
	sums := [2]*costs{sum("kube-controller-manager", theirs), sum("node-attestation-controller", ours)}
	row := func(c *costs, ratio float64) {
		report.row(c.name, c.count, c.span, c.rate(), ratio, c.per(c.used[c.process]), c.per(c.used[apiServerProcess]), c.per(c.used[etcdProcess]), c.per(c.used[clients]), c.callsPer())
	}
	for i := range theirs {
		row(theirs[i], 1)
		row(ours[i], ours[i].rate()/theirs[i].rate())
	}
	row(sums[0], 1)
	row(sums[1], sums[1].rate()/sums[0].rate())
	report.print()
	b.say("processor time is per certificate; of all together it is %s with kube-controller-manager, %s with the controller",
		figure(sums[0].per(sums[0].all())), figure(sums[1].per(sums[1].all())))

	// Its approver and its signer have a client each. The one that has more to ask for per
	// certificate is the slower.
	approver := float64(sums[0].calls["create subjectaccessreviews"]+sums[0].calls["update certificatesigningrequests/approval"]) / float64(sums[0].count)
	signer := sums[0].callsPer() - approver
	for _, kind := range slices.Sorted(maps.Keys(sums[1].calls)) {
		b.say("node-attestation-controller: %.2f %s", float64(sums[1].calls[kind])/float64(sums[1].count), kind)
	}
	bound := newTable("were each client bound to 20 calls a second, after 30 at once", "calls per certificate", "certificates per second")
	bound.row("kube-controller-manager: approver", approver, managerQPS/approver)
	bound.row("kube-controller-manager: signer", signer, managerQPS/signer)
	bound.row("node-attestation-controller", sums[1].callsPer(), managerQPS/sums[1].callsPer())
	bound.print()
	b.expect(sums[0].count == rounds*b.sized(compared) && sums[1].count == sums[0].count, "%d and %d certificates", sums[0].count, sums[1].count)
	b.expect(approver > 0 && signer > 0, "its approver asks for %.2f calls per certificate, its signer for %.2f", approver, signer)
	var bars []plot.Bar
	for round := range theirs {
		name := fmt.Sprintf(", round %d", round+1)
		bars = append(bars, plot.Bar{Name: "kube-controller-manager" + name, Value: theirs[round].rate(), Group: 1},
			plot.Bar{Name: "node-attestation-controller" + name, Value: ours[round].rate()})
	}
	return b.draw("enrolments-per-second.svg", plot.Bars{
		Title: fmt.Sprintf("First certificates per second, %d nodes at once", b.sized(compared)), Source: b.source("compare"),
		Value: "certificates per second, everything on one machine", Bars: bars,
	}.SVG())
}

// sum adds up rounds.
func sum(name string, all []*costs) *costs {
	total := &costs{name: "both: " + name, calls: calls{}, used: usage{}}
	for _, c := range all {
		total.process = c.process
		total.count += c.count
		total.span += c.span
		for kind, n := range c.calls {
			total.calls[kind] += n
		}
		for process, used := range c.used {
			total.used[process] += used
		}
	}
	return total
}
