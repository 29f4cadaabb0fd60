// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
	"testing"
	"time"
)

func TestExponent(t *testing.T) {
	c := newCurve("size", "same", "linear", "square", "zero")
	for _, size := range []int{0, 10, 100, 1000} {
		c.add(size, 7, 3*time.Millisecond*time.Duration(size), float64(size*size), 0)
	}
	for column, want := range []string{"0.00", "1.00", "2.00", "-"} {
		if got := c.exponent(column); got != want {
			t.Errorf("%s: %s, want %s", c.columns[column+1], got, want)
		}
	}
}

// Pictures have the numbers of the documents, or are not drawn. A point needs a figure.
func TestDraw(t *testing.T) {
	for size, want := range map[float64]int{1: 1, 0.05: 0} {
		b := &bench{size: size, plots: t.TempDir()}
		if err := b.draw("a.svg", []byte("<svg/>")); err != nil {
			t.Fatal(err)
		}
		if files, err := os.ReadDir(b.plots); err != nil || len(files) != want {
			t.Errorf("size %v: %v, %v", size, files, err)
		}
	}
	c := newCurve("size", "time", "word")
	c.add(0, 2*time.Second, "none")
	c.add(10, 4.5, 7)
	if s := c.series("times", 0); s.Name != "times" || !slices.Equal(s.X, []float64{0, 10}) || !slices.Equal(s.Y, []float64{2, 4.5}) {
		t.Errorf("%+v", s)
	}
	if s := c.series("words", 1); !slices.Equal(s.X, []float64{10}) || !slices.Equal(s.Y, []float64{7}) {
		t.Errorf("%+v", s)
	}
}

func TestReadings(t *testing.T) {
	const before = "# HELP calls_total calls\ncalls_total{code=\"200\",method=\"GET\"} 3\ncalls_total{code=\"200\",method=\"PUT\"} 1\n"
	const after = "calls_total{code=\"200\",method=\"GET\"} 5\ncalls_total{code=\"404\",method=\"GET\"} 2\ncalls_total{code=\"200\",method=\"PUT\"} 1\n" +
		"calls_total_more 9\nprocess_cpu_seconds_total 1.25\n"
	r := parseReadings(after)
	for _, c := range []struct {
		labels []string
		want   float64
	}{{nil, 8}, {[]string{`method="GET"`}, 7}, {[]string{`method="GET"`, `code="404"`}, 2}, {[]string{`method="POST"`}, 0}} {
		if got := r.sum("calls_total", c.labels...); got != c.want {
			t.Errorf("%v: %v, want %v", c.labels, got, c.want)
		}
	}
	if got := r.minus(parseReadings(before)).sum("calls_total"); got != 4 {
		t.Errorf("%v were added, want 4", got)
	}
	if got := r.cpu(); got != 1250*time.Millisecond {
		t.Errorf("processor time %s", got)
	}
}
