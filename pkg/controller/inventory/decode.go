// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// machineEntry is an entry as it is written: by hand with its keys in eks, or by
// `kubelet-authenticator identify` with its keys in device.
type machineEntry struct {
	// line is its first line.
	line    int
	machine Machine
	// addresses have their line numbers.
	addresses []textAt
	provider  string
	device    bool
	eks       []ekEntry
}

// ekEntry is an EK with its line number.
type ekEntry struct {
	line int
	EK
	certificate bool
}

// textAt is a text with its line number.
type textAt struct {
	line int
	text string
}

// list is a document of kind MachineInventory.
type list struct {
	apiVersion, kind string
	machines         []machineEntry
	given            bool
}

// decodeAll returns all entries of a stream of documents. It continues after an entry that cannot
// be decoded, and stops at a syntax error.
func decodeAll(data []byte, problems *problemList) (entries []machineEntry, documents int) {
	for _, part := range split(data) {
		decoder := yaml.NewDecoder(bytes.NewReader(part.content))
		for {
			var document yaml.Node
			err := decoder.Decode(&document)
			if err == io.EOF { //nolint:errorlint // Decode returns io.EOF unwrapped
				break
			}
			if err != nil {
				problems.add(part.syntaxError(err))
				return entries, documents
			}
			d := decoderAt{part.line - 1, problems}
			if len(document.Content) != 1 {
				continue
			}
			root := document.Content[0]
			if root.Kind == yaml.ScalarNode && root.ShortTag() == "!!null" && root.Value == "" {
				continue // an empty document between two separators
			}
			entries = append(entries, d.document(root)...)
			documents++
			if problems.full() {
				return entries, documents
			}
		}
	}
	return entries, documents
}

// chunk is a part of the file that begins at line.
type chunk struct {
	line    int
	content []byte
}

// syntaxError makes the YAML library count lines from the beginning of the file.
func (p chunk) syntaxError(err error) error {
	padded := append(bytes.Repeat([]byte("\n"), p.line-1), p.content...)
	decoder := yaml.NewDecoder(bytes.NewReader(padded))
	for {
		var document yaml.Node
		if again := decoder.Decode(&document); again == io.EOF { //nolint:errorlint // Decode returns io.EOF unwrapped
			break
		} else if again != nil {
			err = again
			break
		}
	}
	e := &Error{Problem: text.Line(strings.TrimPrefix(err.Error(), "yaml: "), 256)}
	if n, _ := fmt.Sscanf(e.Problem, "line %d:", &e.Line); n == 1 {
		_, e.Problem, _ = strings.Cut(e.Problem, ": ")
	}
	return e
}

// split cuts a file into documents. Files that were joined by cat have no separator between two
// outputs of identify or two lists. So split cuts before a line that begins with "{", "device:" or
// "apiVersion:", if the document already had such a line. None of these can occur twice in one
// document. It also cuts after "...", since the YAML library would expect "---" next.
func split(data []byte) []chunk {
	var parts []chunk
	begin, line, first := 0, 1, 1
	begun := false
	for at := 0; at < len(data); line++ {
		rest := data[at:]
		next := bytes.IndexByte(rest, '\n') + 1
		if next == 0 {
			next = len(rest)
		}
		switch {
		case hasPrefix(rest, "---"):
			begun = false
		case hasPrefix(rest, "..."):
			parts = append(parts, chunk{first, data[begin : at+next]})
			begin, first, begun = at+next, line+1, false
		case hasPrefix(rest, "{"), hasPrefix(rest, "device:"), hasPrefix(rest, "apiVersion:"):
			if begun {
				parts = append(parts, chunk{first, data[begin:at]})
				begin, first = at, line
			}
			begun = true
		}
		at += next
	}
	return append(parts, chunk{first, data[begin:]})
}

func hasPrefix(data []byte, prefix string) bool { return bytes.HasPrefix(data, []byte(prefix)) }

// decoderAt turns YAML nodes into entries. It adds the lines before the chunk to a node's line.
type decoderAt struct {
	before   int
	problems *problemList
}

// field decodes the value of one field.
type field func(*yaml.Node) error

func (d decoderAt) errorf(n *yaml.Node, format string, arguments ...any) error {
	return &Error{Line: d.line(n), Problem: fmt.Sprintf(format, arguments...)}
}

func (d decoderAt) line(n *yaml.Node) int { return d.before + n.Line }

// document decodes either a list or one machine. It returns the entries that can be decoded.
func (d decoderAt) document(n *yaml.Node) []machineEntry {
	l := list{}
	add := func(n *yaml.Node) error {
		e, err := d.machine(n)
		if err == nil {
			l.machines = append(l.machines, e)
		}
		d.problems.add(err)
		return nil
	}
	isList := n.Kind == yaml.MappingNode && has(n, "apiVersion", "kind", "machines")
	if !isList {
		_ = add(n) // always nil: add collects the problem
		return l.machines
	}
	err := d.mapping(n, "a list of machines", map[string]field{
		"apiVersion": d.text(&l.apiVersion),
		"kind":       d.text(&l.kind),
		"machines": func(n *yaml.Node) error {
			l.given = true
			return d.sequence(n, add)
		},
	})
	switch {
	case err != nil:
		d.problems.add(err)
	case l.apiVersion != APIVersion || l.kind != Kind:
		d.problems.add(d.errorf(n, "is %.64q of %.64q, not %s of %s", l.kind, l.apiVersion, Kind, APIVersion))
	case !l.given:
		d.problems.add(d.errorf(n, "there is no field machines; an empty list is written []"))
	}
	return l.machines
}

func has(n *yaml.Node, keys ...string) bool {
	for i := 0; i+1 < len(n.Content); i += 2 {
		for _, key := range keys {
			if n.Content[i].Value == key {
				return true
			}
		}
	}
	return false
}

func (d decoderAt) machine(n *yaml.Node) (machineEntry, error) {
	e := machineEntry{line: d.line(n)}
	var ignored string
	err := d.mapping(n, "a machine", map[string]field{
		"name":       d.text(&e.machine.Name),
		"nodeName":   d.text(&e.machine.NodeName),
		"providerID": d.text(&e.machine.ProviderID),
		"addresses": func(n *yaml.Node) error {
			return d.sequence(n, func(n *yaml.Node) error {
				address := textAt{line: d.line(n)}
				err := d.text(&address.text)(n)
				e.addresses = append(e.addresses, address)
				return err
			})
		},
		"bootstrapTokenID": d.text(&e.machine.TokenID),
		"eks":              d.keys(&e.eks),
		"provider":         d.text(&e.provider),
		"device": func(n *yaml.Node) error {
			e.device = true
			return d.mapping(n, "a device", map[string]field{
				"manufacturer": d.text(&ignored),
				"vendor":       d.text(&ignored),
				"firmware":     d.text(&ignored),
				"akName":       d.text(&ignored),
				"eks":          d.keys(&e.eks),
			})
		},
	})
	if err == nil && e.device && has(n, "eks") {
		err = d.errorf(n, "a machine has eks or a device, not both")
	}
	return e, withMachine(err, e.machine)
}

func (d decoderAt) keys(into *[]ekEntry) field {
	return func(n *yaml.Node) error {
		return d.sequence(n, func(n *yaml.Node) error {
			k := ekEntry{line: d.line(n)}
			var ignored string
			err := d.mapping(n, "an EK", map[string]field{
				"fingerprint": d.text(&k.Fingerprint),
				"template":    d.text(&k.Template),
				"problem":     d.text(&ignored),
				"slow":        d.text(&ignored),
				"certificate": func(n *yaml.Node) error {
					k.certificate = true
					return d.mapping(n, "a certificate", map[string]field{
						"fingerprint":    d.text(&k.CertificateFingerprint),
						"subject":        d.text(&ignored),
						"subjectAltName": d.text(&ignored),
						"issuer":         d.text(&ignored),
						"serial":         d.text(&ignored),
						"notAfter":       d.text(&ignored),
						"problem":        d.text(&ignored),
					})
				},
			})
			*into = append(*into, k)
			return err
		})
	}
}

// mapping refuses unknown fields, also those in another case, and fields that occur twice.
func (d decoderAt) mapping(n *yaml.Node, what string, fields map[string]field) error {
	if err := d.checkPlain(n); err != nil {
		return err
	}
	if n.Kind != yaml.MappingNode {
		return d.errorf(n, "here %s is expected, with fields and values", what)
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		var name string
		if err := d.text(&name)(n.Content[i]); err != nil {
			return err
		}
		decode, known := fields[name]
		if !known {
			return d.errorf(n.Content[i], "%s has no field %.64q", what, name)
		}
		if before, twice := seen[name]; twice {
			return d.errorf(n.Content[i], "the field %q comes a second time, after line %d", name, before)
		}
		seen[name] = d.line(n.Content[i])
		if err := decode(n.Content[i+1]); err != nil {
			return err
		}
	}
	return nil
}

func (d decoderAt) sequence(n *yaml.Node, element field) error {
	if err := d.checkPlain(n); err != nil {
		return err
	}
	if n.Kind != yaml.SequenceNode {
		return d.errorf(n, "here a list is expected")
	}
	for _, c := range n.Content {
		if err := element(c); err != nil {
			return err
		}
	}
	return nil
}

// text reads a value as it is written, since a fingerprint may look like a number, and a node name
// like a boolean.
func (d decoderAt) text(into *string) field {
	return func(n *yaml.Node) error {
		if err := d.checkPlain(n); err != nil {
			return err
		}
		if n.Kind != yaml.ScalarNode || n.ShortTag() == "!!null" {
			return d.errorf(n, "here a text is expected")
		}
		if len(n.Value) > maxText {
			return d.errorf(n, "here is a text of more than %d bytes", maxText)
		}
		*into = n.Value
		return nil
	}
}

// checkPlain refuses YAML features that make a document mean something else than it shows.
func (d decoderAt) checkPlain(n *yaml.Node) error {
	switch {
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		return d.errorf(n, "anchors and aliases are not taken")
	case n.Style&yaml.TaggedStyle != 0:
		return d.errorf(n, "tags are not taken")
	}
	return nil
}
