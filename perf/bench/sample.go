// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// quantile returns the value below which a share q of the values lies; there is one value at least.
func quantile[T cmp.Ordered](values []T, q float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func median[T cmp.Ordered](values []T) T { return quantile(values, 0.5) }

// compared is a row of two sides that were measured in turns. The ratio is the median of the ratios
// of the rounds, and not the ratio of the medians. Other load on the machine comes and goes, and
// within a round it affects both sides.
func compared(what string, ours []time.Duration, against string, theirs []time.Duration) row {
	ratios := rounds(ours, theirs)
	return row{
		what: what, figure: milliseconds(median(ours)),
		against: against + ", " + milliseconds(median(theirs)),
		ratio:   fmt.Sprintf("%.2f", median(ratios)),
		spread:  fmt.Sprintf("%.2f-%.2f", quantile(ratios, 0.25), quantile(ratios, 0.75)),
	}
}

// rounds are the ratios of single rounds.
func rounds(ours, theirs []time.Duration) []float64 {
	ratios := make([]float64, min(len(ours), len(theirs)))
	for i := range ratios {
		ratios[i] = over(ours[i], theirs[i])
	}
	return ratios
}

// over is how often one fits into the other.
func over[T ~int | ~int64 | ~float64](one, other T) float64 { return float64(one) / float64(other) }

func milliseconds(d time.Duration) string {
	if d >= 100*time.Millisecond {
		return fmt.Sprintf("%.0f ms", d.Seconds()*1e3)
	}
	return fmt.Sprintf("%.2f ms", d.Seconds()*1e3)
}
