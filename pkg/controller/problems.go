// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// Source is a CA, an inventory, or whatever else may change at any time.
type Source interface {
	// Problem returns what keeps what is there from being used, nil if nothing does.
	Problem() error
}

// Problems logs what keeps a CA, a source of machines or the challenge keys from being used, each time that it changes: the last good ones stay
// in use, and so nobody would notice.
type Problems struct {
	sources map[string]Source
	log     logr.Logger
	said    map[string]string
}

const (
	// problemsInterval is how often sources are asked.
	problemsInterval = 5 * time.Second
)

// NewProblems returns the problems of what a Controller is made of.
func NewProblems(config Config, keys *KeyStore, log logr.Logger) *Problems {
	p := &Problems{sources: map[string]Source{"challenge keys": keys}, log: log, said: map[string]string{}}
	if ca, ok := config.CA.(Source); ok {
		p.sources["CA"] = ca
	}
	if machines, ok := config.Machines.(Source); ok {
		p.sources["machines"] = machines
	}
	return p
}

// Start looks every now and then until ctx ends.
func (p *Problems) Start(ctx context.Context) error {
	ticker := time.NewTicker(problemsInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			p.look()
		}
	}
}

// NeedLeaderElection has replicas that stand by say it, too.
func (*Problems) NeedLeaderElection() bool { return false }

func (p *Problems) look() {
	for name, source := range p.sources {
		problem := ""
		if err := source.Problem(); err != nil {
			problem = text.Line(err.Error(), telemetry.MaxLogged)
		}
		if problem == p.said[name] {
			continue
		}
		if problem == "" {
			p.log.Info(fmt.Sprintf("%s: in use again", name))
		} else {
			p.log.Info(fmt.Sprintf("%s: cannot be used, the last good one is if there was one", name), "problem", problem)
		}
		p.said[name] = problem
	}
}
