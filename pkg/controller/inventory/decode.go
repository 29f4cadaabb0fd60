// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/strict"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// machineEntry is an entry as it is written: by hand with its keys in eks, or by
// `kubelet-authenticator identify` with its keys in device.
type machineEntry struct {
	Line       strict.Line
	Name       strict.Text   `json:"name"`
	NodeName   strict.Text   `json:"nodeName"`
	ProviderID strict.Text   `json:"providerID"`
	Addresses  []strict.Text `json:"addresses"`
	TokenID    strict.Text   `json:"bootstrapTokenID"`
	EKs        []ekEntry     `json:"eks"`
	Instance   *struct {
		Line     strict.Line
		Platform strict.Text `json:"platform"`
		ID       strict.Text `json:"id"`
	} `json:"instance"`
	Provider strict.Text `json:"provider"`
	Device   *struct {
		EKs []ekEntry `json:"eks"`

		Manufacturer strict.Text `json:"manufacturer"`
		Vendor       strict.Text `json:"vendor"`
		Firmware     strict.Text `json:"firmware"`
		AKName       strict.Text `json:"akName"`
	} `json:"device"`
}

type ekEntry struct {
	Line        strict.Line
	Fingerprint strict.Text `json:"fingerprint"`
	Template    strict.Text `json:"template"`
	Certificate *struct {
		Fingerprint strict.Text `json:"fingerprint"`

		Subject        strict.Text `json:"subject"`
		SubjectAltName strict.Text `json:"subjectAltName"`
		Issuer         strict.Text `json:"issuer"`
		Serial         strict.Text `json:"serial"`
		NotAfter       strict.Text `json:"notAfter"`
		Problem        strict.Text `json:"problem"`
	} `json:"certificate"`

	Problem strict.Text `json:"problem"`
	Slow    strict.Text `json:"slow"`
}

// list is a document of kind MachineInventory. An entry is decoded by itself, so that its problems
// name its machine.
type list struct {
	APIVersion strict.Text `json:"apiVersion"`
	Kind       strict.Text `json:"kind"`
	Machines   []yaml.Node `json:"machines"`
}

// An anchor or a tag would make an entry mean something else than it shows.
var decoder = strict.Decoder{Plain: true}

// decodeAll returns all entries of a stream of documents. It continues after an entry that cannot
// be decoded, and stops at a syntax error.
func decodeAll(data []byte, problems *problemList) (entries []machineEntry, documents int) {
	for _, part := range split(data) {
		for root, problem := range strict.Documents(part.content, part.line) {
			if problem != nil {
				problems.add(&Error{Line: problem.Line, Problem: problem.Text})
				return entries, documents
			}
			entries = append(entries, decodeDocument(root, problems)...)
			documents++
			if problems.full() {
				return entries, documents
			}
		}
	}
	return entries, documents
}

// decodeDocument decodes either a list or one machine. It returns the entries that can be decoded.
func decodeDocument(root *yaml.Node, problems *problemList) (entries []machineEntry) {
	l := list{Machines: []yaml.Node{*root}}
	if isList(root) {
		l.Machines = nil
		switch all := decoder.DecodeNode(root, &l); {
		case len(all) > 0:
			for _, p := range all {
				problems.add(&Error{Line: p.Line, Problem: p.Text})
			}
		case l.APIVersion.Value != APIVersion || l.Kind.Value != Kind:
			problems.add(&Error{Line: root.Line, Problem: fmt.Sprintf("is %.64q of %.64q, not %s of %s", l.Kind.Value, l.APIVersion.Value, Kind, APIVersion)})
		case l.Machines == nil:
			problems.add(&Error{Line: root.Line, Problem: "there is no field machines; an empty list is written []"})
		}
	}
	for i := range l.Machines {
		var e machineEntry
		all := decoder.DecodeNode(&l.Machines[i], &e)
		for _, p := range all {
			problems.add(&Error{Line: p.Line, Machine: e.name(), Problem: p.Text})
		}
		if len(all) == 0 {
			entries = append(entries, e)
		}
	}
	return entries
}

func isList(n *yaml.Node) bool {
	for i := 0; i+1 < len(n.Content) && n.Kind == yaml.MappingNode; i += 2 {
		if slices.Contains([]string{"apiVersion", "kind", "machines"}, n.Content[i].Value) {
			return true
		}
	}
	return false
}

// name is for errors, "" if the entry has none.
func (e *machineEntry) name() string {
	return text.Line(cmp.Or(e.Name.Value, e.NodeName.Value), 253)
}

// chunk is a part of the file that begins at line.
type chunk struct {
	line    int
	content []byte
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
