// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
)

// curve is figures at several sizes. Its last row is with which power of the size each of them
// grows: 0 is not at all, 1 as the size does.
type curve struct {
	*table
	sizes   []int
	figures [][]any
}

func newCurve(size string, figures ...string) *curve {
	return &curve{table: newTable(append([]string{size}, figures...)...)}
}

func (c *curve) add(size int, figures ...any) {
	c.sizes, c.figures = append(c.sizes, size), append(c.figures, figures)
	c.row(fmt.Sprint(size), figures...)
}

// series is a column over the sizes, for a picture.
func (c *curve) series(name string, column int) plot.Series {
	s := plot.Series{Name: name}
	for i, size := range c.sizes {
		if y, ok := number(c.figures[i][column]); ok {
			s.X, s.Y = append(s.X, float64(size)), append(s.Y, y)
		}
	}
	return s
}

func (c *curve) finish() {
	exponents := make([]any, len(c.columns)-1)
	for i := range exponents {
		exponents[i] = c.exponent(i)
	}
	c.row("grows with the power", exponents...)
	c.print()
}

// exponent is the slope of the line that fits best, both axes logarithmic. What is zero has no
// logarithm.
func (c *curve) exponent(column int) string {
	var xs, ys []float64
	for i, size := range c.sizes {
		if y, ok := number(c.figures[i][column]); ok && size > 0 && y > 0 {
			xs, ys = append(xs, math.Log(float64(size))), append(ys, math.Log(y))
		}
	}
	if len(xs) < 2 {
		return "-"
	}
	mx, my := mean(xs), mean(ys)
	var xy, xx float64
	for i := range xs {
		xy += (xs[i] - mx) * (ys[i] - my)
		xx += (xs[i] - mx) * (xs[i] - mx)
	}
	return fmt.Sprintf("%.2f", xy/xx)
}

func number(figure any) (float64, bool) {
	switch v := figure.(type) {
	case time.Duration:
		return v.Seconds(), true
	case float64:
		return v, true
	case int:
		return float64(v), true
	}
	return 0, false
}

func mean(values []float64) (m float64) {
	for _, v := range values {
		m += v / float64(len(values))
	}
	return m
}

// expense is what some enrolments took, and what one of them cost.
type expense struct {
	took                  []time.Duration
	controller, apiServer time.Duration
	// judging is how long it takes the controller to read what one decision depends on, and to
	// judge.
	judging time.Duration
}

// expenseOf has the machines enrol in turn, one after the other.
func (s *site) expenseOf(ctx context.Context, enrolments int) (*expense, error) {
	for i := range s.machines { // connections, caches
		if _, err := s.enrol(ctx, i); err != nil {
			return nil, err
		}
	}
	e := &expense{}
	p, err := s.during(ctx, "", func() error {
		for i := range enrolments {
			times, err := s.enrol(ctx, i%len(s.machines))
			if err != nil {
				return err
			}
			e.took = append(e.took, times.CertificateSeen)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	e.controller, e.apiServer = p.controller.cpu()/time.Duration(enrolments), p.apiServer.cpu()/time.Duration(enrolments)
	const judging = "node_attestation_judging_seconds"
	e.judging = time.Duration(p.controller.sum(judging+"_sum") / p.controller.sum(judging+"_count") * float64(time.Second))
	return e, nil
}

// idle is how many processors controller and API server take while nobody asks for anything, each
// in thousandths.
func (s *site) idle(ctx context.Context, d time.Duration) (controller, apiServer float64, err error) {
	p, err := s.during(ctx, "", func() error { return sleep(ctx, d) })
	if err != nil {
		return 0, 0, err
	}
	return 1000 * share(p.controller.cpu(), p.length()), 1000 * share(p.apiServer.cpu(), p.length()), nil
}

// mib is a figure of /metrics in bytes, in MiB.
func mib(r readings, name string) float64 { return r.sum(name) / (1 << 20) }
