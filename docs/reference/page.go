// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
)

// page is a document or a section with one table.
type page struct{ lines []string }

// newSection begins a section with a title.
func newSection(title, introduction string, columns ...string) *page {
	p := &page{[]string{"## " + title, "", introduction, ""}}
	p.row(columns...)
	p.row(slices.Repeat([]string{"---"}, len(columns))...)
	return p
}

func (p *page) String() string { return strings.Join(p.lines, "\n") + "\n" }

// escapes keeps a bar from ending a cell, and a word such as <scheme> from being markup.
var escapes = strings.NewReplacer("|", `\|`, "<", "&lt;")

// row adds a row to the table. A cell is one line.
func (p *page) row(cells ...string) {
	for i, cell := range cells {
		cells[i] = escapes.Replace(strings.Join(strings.Fields(cell), " "))
	}
	p.lines = append(p.lines, "| "+strings.Join(cells, " | ")+" |")
}

// code returns a text as code, and nothing for none.
func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}
