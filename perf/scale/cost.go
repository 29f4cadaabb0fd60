// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// costReal and costModels are how many machines have swtpm, and the model: the kernel counts
	// processor time in hundredths of a second. Of each cloud there are as many as with the model.
	costReal, costModels = 24, 150
	// restFor is how long the controller is looked at with nothing to do.
	restFor = 5 * time.Second
	// mostCalls bounds the calls per certificate. They are 7, and some are repeated after a
	// conflict.
	mostCalls = 7.5
	// renewAfter is how long after the enrolments the renewals start. A controller reads the hello
	// of a machine that has attested within ten seconds from the API server. Real renewals come
	// hours later.
	renewAfter = 12 * time.Second
)

// polled are the calls of a controller with nothing to do. They belong to no request.
var polled = []call{"get secrets", "get configmaps", "get namespaces/status", "patch namespaces/status", "create selfsubjectreviews"}

// costs are of enrolments, or renewals, of one kind, and what they cost.
type costs struct {
	name  string
	count int
	calls calls
	used  usage
	span  time.Duration
	// process is whose the calls are.
	process string
}

// cost measures what the controller, the API server and etcd do for an enrolment and for a renewal
// with a TPM and in clouds, and beside that kube-controller-manager.
func cost(ctx context.Context, b *bench) error {
	return b.withControlPlane(ctx, testbed.Options{AuditPolicy: []byte(callPolicy)}, func(cp *testbed.ControlPlane) error {
		if err := cp.BindKubeadmBootstrap(ctx); err != nil {
			return err
		}
		dir, err := b.folder("clouds")
		if err != nil {
			return err
		}
		gce, err := newGCE(dir)
		if err != nil {
			return err
		}
		ec2, err := newEC2(dir)
		if err != nil {
			return err
		}
		sizes := []crowdSize{
			{prefix: "swtpm", count: b.sized(costReal), real: costReal}, {prefix: "model", count: b.sized(costModels)},
			{prefix: "gce", count: b.sized(costModels), cloud: gce}, {prefix: "ec2", count: b.sized(costModels), cloud: ec2},
		}
		var all []*costs
		err = b.withOurs(ctx, cp, sizes, func(crowds []*crowd) error {
			if err := b.reportIdle(ctx, cp); err != nil {
				return err
			}
			for _, what := range []string{"enrolment", "renewal"} {
				if what == "renewal" {
					if err := pause(ctx, renewAfter); err != nil {
						return err
					}
				}
				for i, c := range crowds {
					one, err := b.measure(ctx, cp, what+", "+sizes[i].prefix, len(c.machines), ourUser, ourProcess, func() (time.Duration, error) {
						times, err := c.attest(ctx)
						return spanned(times), err
					})
					if err != nil {
						return err
					}
					all = append(all, one)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		token, err := cp.CreateBootstrapToken(ctx, time.Hour)
		if err != nil {
			return err
		}
		nodes := newNodes("theirs", b.sized(costModels))
		err = withManager(ctx, cp, func() error {
			for _, what := range []string{"enrolment", "renewal"} {
				one, err := b.measure(ctx, cp, what+", kube-controller-manager", len(nodes), managerUser, managerProcess, func() (time.Duration, error) {
					return enrolNodes(ctx, cp, token, nodes)
				})
				if err != nil {
					return err
				}
				all = append(all, one)
			}
			return nil
		})
		if err != nil {
			return err
		}
		b.reportCosts(all)
		return nil
	})
}

// crowdSize is a crowd to make: of its machines the first few have swtpm, or all are a cloud's.
type crowdSize struct {
	prefix      string
	count, real int
	cloud       *cloud
}

// withOurs has a function use crowds that one replica of the controller knows, which has nothing to
// do yet.
func (b *bench) withOurs(ctx context.Context, cp *testbed.ControlPlane, sizes []crowdSize, use func([]*crowd) error) (err error) {
	var crowds []*crowd
	var machines []*fleet.Machine
	for _, s := range sizes {
		cluster, err := joining(ctx, cp)
		if err != nil {
			return err
		}
		var c *crowd
		if s.cloud != nil {
			c, err = s.cloud.newCrowd(s.prefix, s.count, cluster)
		} else {
			c, err = b.newCrowd(s.prefix, s.count, s.real, cluster)
		}
		if err != nil {
			return err
		}
		defer c.stop()
		crowds = append(crowds, c)
		machines = append(machines, c.machines...)
	}
	inventory, err := b.inventory(ctx, machines)
	if err != nil {
		return err
	}
	one, stop, err := b.replicas(ctx, cp, 1, func(c *config.Config) {
		inventory(c)
		for _, s := range sizes {
			if s.cloud != nil {
				s.cloud.configure(c)
			}
		}
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if _, err := leader(ctx, one); err != nil {
		return err
	}
	return use(crowds)
}

// measure has something done, and counts what it costs until nothing more comes of it.
func (b *bench) measure(ctx context.Context, cp *testbed.ControlPlane, name string, count int, user, process string, do func() (time.Duration, error)) (*costs, error) {
	mark, err := cp.AuditMark()
	if err != nil {
		return nil, err
	}
	before, err := readUsage()
	if err != nil {
		return nil, err
	}
	profiled := b.profile(ctx, cp, name, user == ourUser)
	span, err := do()
	if err := errors.Join(err, profiled()); err != nil {
		return nil, err
	}
	counted, err := settled(ctx, cp, mark, user, polled...)
	if err != nil {
		return nil, err
	}
	after, err := readUsage()
	if err != nil {
		return nil, err
	}
	return &costs{name: name, count: count, calls: counted, used: after.since(before), span: span, process: process}, nil
}

// per is a share of one certificate's.
func (c *costs) per(used time.Duration) time.Duration { return used / time.Duration(c.count) }

func (c *costs) callsPer() float64 { return float64(c.calls.total()) / float64(c.count) }

// pause waits for some time.
func pause(ctx context.Context, span time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(span):
		return nil
	}
}

// reportIdle says what the controller costs that has nothing to do.
func (b *bench) reportIdle(ctx context.Context, cp *testbed.ControlPlane) error {
	mark, err := cp.AuditMark()
	if err != nil {
		return err
	}
	before, err := readUsage()
	if err != nil {
		return err
	}
	if err := pause(ctx, restFor); err != nil {
		return err
	}
	after, err := readUsage()
	if err != nil {
		return err
	}
	events, err := cp.AuditSince(mark)
	if err != nil {
		return err
	}
	counted := countCalls(events, ourUser)
	b.say("with nothing to do, the controller uses %.1f ms of processor time a second; beside its Lease it asks for %v within %s",
		after.since(before)[ourProcess].Seconds()*1000/restFor.Seconds(), counted, figure(restFor))
	return nil
}

func (b *bench) reportCosts(all []*costs) {
	cpu := newTable("processor time per certificate", "number", "controller", "API server", "etcd", "calls", "of these reads")
	columns := []string{"calls per certificate"}
	var counts []calls
	for _, c := range all {
		cpu.row(c.name, c.count, c.per(c.used[c.process]), c.per(c.used[apiServerProcess]), c.per(c.used[etcdProcess]), c.callsPer(), float64(c.calls.reads())/float64(c.count))
		columns = append(columns, c.name)
		counts = append(counts, c.calls)
	}
	cpu.print()
	detail := newTable(columns...)
	for _, kind := range kinds(counts...) {
		var row []any
		for _, c := range all {
			row = append(row, float64(c.calls[kind])/float64(c.count))
		}
		detail.row(string(kind), row...)
	}
	detail.print()
	for _, c := range all {
		if c.process == ourProcess {
			b.expect(c.callsPer() <= mostCalls, "%s takes %.2f calls", c.name, c.callsPer())
		}
	}
}
