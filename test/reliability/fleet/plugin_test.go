// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"crypto/x509"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

// stage is how far a renewal has come.
type stage uint8

const (
	nothing stage = iota
	helloFiled
	challenged // no worker has seen the challenge yet
	proofFiled
	signed // no worker has seen the certificate yet
)

// plugin is a node with this project's plugin.
type plugin struct {
	*world
	index    int
	schedule *nodeSchedule
	leaf     *x509.Certificate // nil before the first
	stage    stage
	number   int // of the request that is filed
	worker   int // of the worker that lives, or died last
	alive    bool
}

// newPlugins fills the world with nodes.
func newPlugins(w *world, count int, checkInterval time.Duration) {
	for i := range count {
		w.nodes = append(w.nodes, &plugin{world: w, index: i, schedule: newNodeSchedule(checkInterval, w.clock)})
	}
}

func (p *plugin) join(age time.Duration) bool {
	p.leaf = p.issue(-age)
	p.schedule.install(p.leaf)
	if p.schedule.due() {
		return false
	}
	p.at(p.now+p.upTo(checkInterval), event{node: p.index, kind: runs}) // checks have spread out, too
	return true
}

// runsAgain has the plugin run at the kubelet's first request after the expirationTimestamp.
func (p *plugin) runsAgain() {
	at := p.schedule.expiration().Sub(start)
	p.at(at+p.upTo(kubeletInterval), event{node: p.index, kind: runs})
}

func (p *plugin) wake(e event) {
	if e.kind == deadline {
		if p.alive && e.number == p.worker {
			p.ends(reason.WaitingForSigner)
		}
		return
	}
	switch {
	case p.alive || p.schedule.tooEarly() > 0:
	case p.schedule.due():
		p.work()
	case p.schedule.checkDue():
		p.send(checks, 1)
		p.schedule.check()
	}
	if p.leaf != nil {
		p.runsAgain()
	} else { // the kubelet waits for a credential, and tries again and again
		p.at(p.now+time.Second+p.schedule.tooEarly(), event{node: p.index, kind: runs})
	}
}

// work is a worker that wants a certificate.
func (p *plugin) work() {
	p.worker++
	p.alive = true
	p.at(p.now+authenticator.DefaultWorkerDeadline, event{p.index, deadline, p.worker})
	switch p.stage {
	case nothing:
		p.files(asks, helloFiled)
	case challenged, signed, helloFiled, proofFiled: // it reads its request, and what became of it
		if !p.send(others, 1) {
			p.ends(reason.APIUnreachable)
			return
		}
		p.follows()
	}
}

// files files the next request, and watches it.
func (p *plugin) files(what call, next stage) {
	if !p.send(what, 1) {
		p.ends(reason.APIUnreachable)
		return
	}
	p.send(others, 1)
	p.stage = next
	p.number++
	p.file(p.index, p.number)
}

// follows goes on with a request that is filed.
func (p *plugin) follows() {
	switch p.stage {
	case challenged:
		p.files(others, proofFiled)
	case signed:
		before := p.leaf
		p.leaf = p.issue(p.now)
		p.renewed(before)
		p.schedule.install(p.leaf)
		p.stage, p.alive = nothing, false
	default:
		p.send(others, 1) // it watches again
	}
}

func (p *plugin) decided(number int) {
	if number != p.number {
		return
	}
	switch p.stage {
	case helloFiled:
		p.stage = challenged
	case proofFiled:
		p.stage = signed
	}
	if p.alive {
		p.follows()
	}
}

func (p *plugin) ends(why reason.Reason) {
	p.alive = false
	p.schedule.fail(why, 0)
}
