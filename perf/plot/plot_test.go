// SPDX-License-Identifier: Apache-2.0

package plot

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

var (
	lines = Lines{
		Title: "Memory <of> the controller", Source: "make bench-scale ONLY=memory", X: "machines", Y: "memory, MiB",
		Series: []Series{{"leader & standby", []float64{0, 1000, 20000}, []float64{36.1, 44.8, 181}}, {"idle", []float64{0, 20000}, []float64{30, 120}}},
		Limit:  512, LimitLabel: "limit",
	}
	bars = Bars{Title: "Rate", Source: "make bench-scale ONLY=compare", Value: "certificates per second", Bars: []Bar{{"theirs", 140, 1}, {"ours", 38.8, 0}}}
)

// element is one of a picture, with its text.
type element struct {
	name, text string
	attributes map[string]string
}

func parse(t *testing.T, svg []byte) (all []*element) {
	t.Helper()
	var open []*element
	for decoder := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			e := &element{name: token.Name.Local, attributes: map[string]string{}}
			for _, a := range token.Attr {
				e.attributes[a.Name.Local] = a.Value
			}
			all, open = append(all, e), append(open, e)
		case xml.CharData:
			if len(open) > 0 {
				open[len(open)-1].text += string(token)
			}
		case xml.EndElement:
			open = open[:len(open)-1]
		}
	}
}

func (e *element) number(t *testing.T, name string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(e.attributes[name], 64)
	if err != nil {
		t.Fatalf("%s of %s: %v", name, e.name, err)
	}
	return v
}

// A reader who sees no picture reads all values, and one who sees it reads axes with units. No text
// leaves the picture.
func TestPicturesCanBeRead(t *testing.T) {
	for name, c := range map[string]struct {
		svg         []byte
		texts       []string
		description []string
	}{
		"lines": {lines.SVG(), []string{lines.Title, lines.Source, lines.X, lines.Y, "leader & standby", "idle", "limit", "20,000"}, []string{"1,000: 44.8", "20,000: 181", "limit: 512"}},
		"bars":  {bars.SVG(), []string{bars.Title, bars.Source, bars.Value, "theirs", "ours", "140", "38.8"}, []string{"theirs: 140", "ours: 38.8"}},
	} {
		elements := parse(t, c.svg)
		svg := elements[0]
		if svg.attributes["role"] != "img" || svg.attributes["aria-labelledby"] != "title desc" || elements[1].name != "title" || elements[1].text != c.texts[0] {
			t.Errorf("%s: no name for a screen reader: %+v, %+v", name, svg, elements[1])
		}
		for _, want := range c.description {
			if !strings.Contains(elements[2].text, want) {
				t.Errorf("%s: the description %q lacks %q", name, elements[2].text, want)
			}
		}
		if !bytes.Contains(c.svg, []byte("prefers-color-scheme:dark")) {
			t.Errorf("%s: no dark colours", name)
		}
		shown := map[string]bool{}
		box := strings.Fields(svg.attributes["viewBox"])
		wide, _ := strconv.ParseFloat(box[2], 64)
		high, _ := strconv.ParseFloat(box[3], 64)
		for _, e := range elements {
			if e.name != "text" {
				continue
			}
			shown[e.text] = true
			length := float64(utf8.RuneCountInString(e.text)) * charWidth
			x, y := e.number(t, "x"), e.number(t, "y")
			if strings.Contains(e.attributes["transform"], "rotate") {
				length = 0
			}
			x -= length * map[string]float64{"start": 0, "middle": .5, "end": 1}[e.attributes["text-anchor"]]
			if x < 0 || x+length > wide || y < 0 || y > high {
				t.Errorf("%s: %q is at %.0f to %.0f, %.0f, outside of %.0f x %.0f", name, e.text, x, x+length, y, wide, high)
			}
		}
		for _, want := range c.texts {
			if !shown[want] {
				t.Errorf("%s: %q is not shown", name, want)
			}
		}
	}
}

// Lengths and heights are proportional to the values.
func TestScale(t *testing.T) {
	var lengths []float64
	for _, e := range parse(t, bars.SVG()) {
		if e.name == "rect" && e.attributes["class"] != "bg" {
			lengths = append(lengths, e.number(t, "width"))
		}
	}
	if len(lengths) != 2 || lengths[1]/lengths[0] < .27 || lengths[1]/lengths[0] > .285 { // 38.8 of 140
		t.Errorf("bars of %v", lengths)
	}
	var zero, limit float64
	var heights []float64
	for _, e := range parse(t, lines.SVG()) {
		switch {
		case e.name == "line" && e.attributes["class"] == "limit":
			limit = e.number(t, "y1")
		case e.name == "line" && e.attributes["class"] == "grid" && zero == 0: // the first one
			zero = e.number(t, "y1")
		case e.name == "circle":
			heights = append(heights, e.number(t, "cy"))
		}
	}
	if len(heights) != 5 {
		t.Fatalf("%d points", len(heights))
	}
	if got := (zero - heights[2]) / (zero - limit); got < .35 || got > .357 { // 181 of 512
		t.Errorf("a point at %v of the limit", got)
	}
}

func TestTicks(t *testing.T) {
	for most, want := range map[float64]string{0: "0 0.2 0.4 0.6 0.8 1", 1.7: "0 0.5 1 1.5 2", 146: "0 50 100 150", 532: "0 200 400 600", 20000: "0 5,000 10,000 15,000 20,000"} {
		var got []string
		for _, v := range ticks(most) {
			got = append(got, Number(v))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%v: %v, want %s", most, got, want)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.953: "0.953", 1.5: "1.5", 2.667: "2.67", 38.84: "38.8", 139.9: "140", 20000: "20,000", 1234567: "1,234,567"} {
		if got := Number(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}

func TestWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "plots")
	if err := Write(dir, "a.svg", bars.SVG()); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "a.svg")); err != nil || !bytes.Equal(got, bars.SVG()) {
		t.Errorf("%v: %s", err, got)
	}
	if err := Write("", "a.svg", bars.SVG()); err != nil {
		t.Error(err)
	}
}
