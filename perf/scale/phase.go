// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"
)

// phase is a part of a measurement, and what was measured in it.
type phase struct {
	name     string
	from, to time.Time
	// took are the enrolments.
	took []time.Duration
	// controller and apiServer are what their metrics have counted in it.
	controller, apiServer readings
}

func (p phase) length() time.Duration { return p.to.Sub(p.from) }

// during measures while a function runs.
func (s *site) during(ctx context.Context, name string, do func() error) (*phase, error) {
	controller, apiServer, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	p := &phase{name: name, from: time.Now()}
	if err := do(); err != nil {
		return nil, err
	}
	p.to = time.Now()
	if p.controller, p.apiServer, err = s.read(ctx); err != nil {
		return nil, err
	}
	p.controller, p.apiServer = p.controller.minus(controller), p.apiServer.minus(apiServer)
	return p, nil
}

func (s *site) read(ctx context.Context) (controller, apiServer readings, err error) {
	if controller, err = readController(ctx, s.controller); err == nil {
		apiServer, err = readAPIServer(ctx, s.cp)
	}
	return controller, apiServer, err
}

// share is how many processors were busy.
func share(cpu, of time.Duration) float64 { return cpu.Seconds() / of.Seconds() }

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
