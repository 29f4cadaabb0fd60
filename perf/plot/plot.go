// SPDX-License-Identifier: Apache-2.0

// Package plot draws the results of the benchmarks as SVG, for docs/performance.md. A reader
// without the picture has its title and a description with every value.
package plot

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	width, margin = 760, 20
	// charWidth is enough for the mean character of a label, since the reader's font is unknown.
	charWidth = 7.4
	barHeight = 30
	plotTop   = 78
	plotHigh  = 270
	axisHigh  = 74 // below the plot: tick labels, axis label, source
)

// Lines compares series over a size. Axis labels have the unit.
type Lines struct {
	Title, Source, X, Y string
	Series              []Series
	// Limit is a dashed line across the plot, 0 for none.
	Limit      float64
	LimitLabel string
}

// Series has an X and a Y for each point, in the order of X.
type Series struct {
	Name string
	X, Y []float64
}

// Bars compares figures of one unit, which Value names.
type Bars struct {
	Title, Source, Value string
	Bars                 []Bar
}

// Bar is one figure. Bars of one Group have the same colour.
type Bar struct {
	Name  string
	Value float64
	Group int
}

// The colours have a contrast of 4.5 or more with the background. Series also differ by dashes.
const style = `<style>
text{font:13px system-ui,"Liberation Sans","DejaVu Sans",sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.source{font-size:11px;fill:#59636e}
.bg{fill:#ffffff}.grid{stroke:#d1d9e0}.axis{stroke:#59636e}.limit{stroke:#b62324;stroke-dasharray:7 4}
.line{fill:none;stroke-width:2}.s0{stroke:#0550ae}.s1{stroke:#953800;stroke-dasharray:8 3}.s2{stroke:#1a7f37;stroke-dasharray:2 3}
.f0{fill:#0550ae}.f1{fill:#953800}.f2{fill:#1a7f37}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.source{fill:#9198a1}.bg{fill:#0d1117}.grid{stroke:#3d444d}.axis{stroke:#9198a1}
.limit{stroke:#ff7b72}.s0{stroke:#79c0ff}.s1{stroke:#ffa657}.s2{stroke:#7ee787}.f0{fill:#79c0ff}.f1{fill:#ffa657}.f2{fill:#7ee787}}
</style>
`

// canvas collects elements of a picture.
type canvas struct{ out bytes.Buffer }

// add never fails: a Buffer takes everything.
func (c *canvas) add(format string, args ...any) { _, _ = fmt.Fprintf(&c.out, format, args...) }

func (c *canvas) text(x, y float64, anchor, class, attributes, content string) {
	c.add(`<text x="%.1f" y="%.1f" text-anchor="%s" class="%s"%s>%s</text>`+"\n", x, y, anchor, class, attributes, escape(content))
}

func (c *canvas) line(x1, y1, x2, y2 float64, class string) {
	c.add(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" class="%s"/>`+"\n", x1, y1, x2, y2, class)
}

// picture puts the elements into a document.
func (c *canvas) picture(title, description, source string, height float64) []byte {
	var out canvas
	out.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %.0f" width="%d" height="%.0f" role="img" aria-labelledby="title desc">`+"\n",
		width, height, width, height)
	out.add("<title id=\"title\">%s</title>\n<desc id=\"desc\">%s</desc>\n", escape(title), escape(description))
	out.add("%s", style+`<rect class="bg" width="100%" height="100%"/>`+"\n")
	out.text(margin, 28, "start", "title", "", title)
	out.add("%s", c.out.Bytes())
	out.text(margin, height-12, "start", "source", "", source)
	out.add("</svg>\n")
	return out.out.Bytes()
}

// SVG draws the lines, each with a point for each of its values.
func (l Lines) SVG() []byte {
	var c canvas
	mostX, mostY := 0.0, l.Limit
	for _, s := range l.Series {
		mostX, mostY = max(mostX, slices.Max(s.X)), max(mostY, slices.Max(s.Y))
	}
	xs, ys := ticks(mostX), ticks(mostY*1.04)
	left, bottom := float64(margin+70), float64(plotTop+plotHigh)
	wide := width - left - 2*margin
	atX := func(v float64) float64 { return left + wide*v/xs[len(xs)-1] }
	atY := func(v float64) float64 { return bottom - plotHigh*v/ys[len(ys)-1] }
	for _, v := range ys {
		c.line(left, atY(v), left+wide, atY(v), "grid")
		c.text(left-8, atY(v)+4, "end", "", "", Number(v))
	}
	for _, v := range xs {
		c.line(atX(v), bottom, atX(v), bottom+5, "axis")
		c.text(atX(v), bottom+20, "middle", "", "", Number(v))
	}
	c.line(left, bottom, left+wide, bottom, "axis")
	middle := plotTop + plotHigh/2.0
	c.text(margin+6, middle, "middle", "", fmt.Sprintf(` transform="rotate(-90 %d %.1f)"`, margin+6, middle), l.Y)
	c.text(left+wide/2, bottom+40, "middle", "", "", l.X)
	if l.Limit > 0 {
		c.line(left, atY(l.Limit), left+wide, atY(l.Limit), "limit")
		c.text(left+8, atY(l.Limit)-6, "start", "", "", l.LimitLabel)
	}
	description, legend := []string{l.X + " against " + l.Y}, left
	for i, s := range l.Series {
		var points, values []string
		for j := range s.X {
			points = append(points, fmt.Sprintf("%.1f,%.1f", atX(s.X[j]), atY(s.Y[j])))
			values = append(values, Number(s.X[j])+": "+Number(s.Y[j]))
			c.add(`<circle cx="%.1f" cy="%.1f" r="3.5" class="f%d"/>`+"\n", atX(s.X[j]), atY(s.Y[j]), i)
		}
		c.add(`<polyline points="%s" class="line s%d"/>`+"\n", strings.Join(points, " "), i)
		c.line(legend, plotTop-26, legend+28, plotTop-26, fmt.Sprintf("line s%d", i))
		c.text(legend+34, plotTop-22, "start", "", "", s.Name)
		legend += 34 + charWidth*float64(utf8.RuneCountInString(s.Name)) + margin
		description = append(description, s.Name+": "+strings.Join(values, ", "))
	}
	if l.Limit > 0 {
		description = append(description, l.LimitLabel+": "+Number(l.Limit))
	}
	return c.picture(l.Title, strings.Join(description, ". "), l.Source, bottom+axisHigh)
}

// SVG draws a bar below the other, from zero, with its figure at its end.
func (b Bars) SVG() []byte {
	var c canvas
	most, longest := 0.0, 0
	for _, bar := range b.Bars {
		most, longest = max(most, bar.Value), max(longest, utf8.RuneCountInString(bar.Name))
	}
	steps := ticks(most * 1.06)
	left, top := margin+charWidth*float64(longest)+8, float64(plotTop-30)
	bottom := top + barHeight*float64(len(b.Bars))
	wide := width - left - 3*margin
	at := func(v float64) float64 { return left + wide*v/steps[len(steps)-1] }
	for _, v := range steps {
		c.line(at(v), top, at(v), bottom, "grid")
		c.text(at(v), bottom+18, "middle", "", "", Number(v))
	}
	var description []string
	for i, bar := range b.Bars {
		y := top + barHeight*float64(i)
		c.text(left-8, y+20, "end", "", "", bar.Name)
		c.add(`<rect x="%.1f" y="%.1f" width="%.1f" height="%d" class="f%d"/>`+"\n", left, y+5, at(bar.Value)-left, barHeight-10, bar.Group)
		c.text(at(bar.Value)+6, y+20, "start", "", "", Number(bar.Value))
		description = append(description, bar.Name+": "+Number(bar.Value))
	}
	c.line(left, top, left, bottom, "axis")
	c.text(left+wide/2, bottom+38, "middle", "", "", b.Value)
	return c.picture(b.Title, b.Value+". "+strings.Join(description, ", "), b.Source, bottom+axisHigh)
}

// ticks are round numbers from zero on, evenly spaced, of which the last one is not below most.
func ticks(most float64) []float64 {
	if most <= 0 {
		most = 1
	}
	step := math.Pow(10, math.Floor(math.Log10(most/4)))
	for _, factor := range []float64{1, 2, 5, 10} {
		if step*factor*5 >= most {
			step *= factor
			break
		}
	}
	all := []float64{0}
	for all[len(all)-1] < most {
		all = append(all, step*float64(len(all)))
	}
	return all
}

// Number writes a figure as the pictures do: three digits that count, thousands with commas.
func Number(v float64) string {
	text := strconv.FormatFloat(v, 'f', max(0, 2-int(math.Floor(math.Log10(math.Max(math.Abs(v), 0.001))))), 64)
	whole, fraction, _ := strings.Cut(text, ".")
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction = strings.TrimRight(fraction, "0"); fraction != "" {
		return whole + "." + fraction
	}
	return whole
}

func escape(s string) string {
	var out bytes.Buffer
	_ = xml.EscapeText(&out, []byte(s)) // a Buffer takes everything
	return out.String()
}

// Write puts a picture into a folder, which is made. An empty folder means that nothing is drawn.
func Write(dir, name string, svg []byte) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: documents are for everybody
		return err
	}
	return os.WriteFile(filepath.Join(dir, name), svg, 0o644) //nolint:gosec // G306: the same
}
