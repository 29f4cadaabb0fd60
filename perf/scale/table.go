// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// table is printed in columns: the first one is for names, and flush left; the others are for
// figures, and flush right.
type table struct {
	columns []string
	rows    [][]string
}

func newTable(columns ...string) *table { return &table{columns: columns} }

// row adds one: numbers that are not whole are printed with what counts of them, times in the unit
// that suits them. A row may be shorter than the others.
func (t *table) row(name string, figures ...any) {
	row := []string{name}
	for _, f := range figures {
		row = append(row, figure(f))
	}
	t.rows = append(t.rows, row)
}

func figure(value any) string {
	switch v := value.(type) {
	case time.Duration:
		switch {
		case v >= 10*time.Second:
			return fmt.Sprintf("%.1f s", v.Seconds())
		case v >= time.Second:
			return fmt.Sprintf("%.2f s", v.Seconds())
		case v >= 10*time.Millisecond:
			return fmt.Sprintf("%.0f ms", 1e3*v.Seconds())
		default:
			return fmt.Sprintf("%.2f ms", 1e3*v.Seconds())
		}
	case float64:
		switch {
		case v >= 100 || v == 0:
			return fmt.Sprintf("%.0f", v)
		case v >= 10:
			return fmt.Sprintf("%.1f", v)
		default:
			return fmt.Sprintf("%.2f", v)
		}
	default:
		return fmt.Sprint(v)
	}
}

func (t *table) print() {
	width := make([]int, len(t.columns))
	for _, row := range append([][]string{t.columns}, t.rows...) {
		for i, cell := range row {
			if i == len(width) {
				width = append(width, 0)
			}
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range append([][]string{t.columns}, t.rows...) {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i == 0 {
				line.WriteString(cell + pad)
			} else {
				line.WriteString("  " + pad + cell)
			}
		}
		fmt.Println(strings.TrimRight(line.String(), " "))
	}
}

// quantile returns the value below which a share of the values are, by the nearest rank. The values
// need no order.
func quantile(values []time.Duration, share float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(share*float64(len(sorted))+0.999999) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}
