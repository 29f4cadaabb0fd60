// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// row is one figure. Where there is nothing to compare it with, the last three are empty.
type row struct {
	what, figure string
	// against is what it is compared with, with that one's figure.
	against, ratio string
	// spread is from the first to the third quartile of the rounds' ratios, where there are rounds.
	spread string
}

// table is all that was measured.
type table struct{ rows []row }

func (t *table) add(rows ...row) { t.rows = append(t.rows, rows...) }

// print writes the table, columns aligned.
func (t *table) print(to io.Writer) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	for _, r := range append([]row{{"measured", "figure", "compared with", "ratio", "p25-p75"}}, t.rows...) {
		if _, err := fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", r.what, r.figure, r.against, r.ratio, r.spread); err != nil {
			return err
		}
	}
	return w.Flush()
}
