// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
)

func (i *invocation) inventoryCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "inventory",
		Short: "Check inventories, offline",
		Args:  cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return cli.Usage(fmt.Errorf("%s needs a command", c.CommandPath()))
		},
	}
	c.AddCommand(i.inventoryCheckCommand())
	return c
}

// The sizes of a ConfigMap, and of the annotation that `kubectl apply` without --server-side
// writes, in bytes.
const (
	maxConfigMap   = 1 << 20
	maxAnnotations = 256 << 10
)

// partReport is the result of `inventory check` for a part.
type partReport struct {
	Name     string `json:"name"`
	Machines int    `json:"machines"`
	Bytes    int    `json:"bytes"`
	// FitsConfigMap says that the part fits into a ConfigMap. FitsClientSideApply says that
	// `kubectl apply` needs no --server-side for it.
	FitsConfigMap       bool      `json:"fitsConfigMap"`
	FitsClientSideApply bool      `json:"fitsClientSideApply"`
	Problems            []problem `json:"problems,omitempty"`

	part *inventory.Part
	// file is the prefix of line numbers.
	file string
}

type problem struct {
	Line int    `json:"line,omitempty"`
	Text string `json:"text"`
}

// inventoryReport is the result of `inventory check`.
type inventoryReport struct {
	Parts []partReport `json:"parts"`
	// Machines is the number of machines in all valid parts. Duplicates is the number of entries
	// that equal another one.
	Machines   int                  `json:"machines"`
	Duplicates int                  `json:"duplicates"`
	Conflicts  []inventory.Conflict `json:"conflicts,omitempty"`
}

func (i *invocation) inventoryCheckCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "check FILE...",
		Short: "Parse all parts of an inventory as the controller does, and report every problem",
		Long: `check parses all parts of an inventory together, strictly, as the controller does. A part is a file, or a manifest of a ConfigMap
such as "kubectl get configmap NAME -o yaml" prints: then each of its entries is a part. It prints how many machines each part has, every problem
with its line, and every contradiction between entries. The exit code is 10 if there is one.`,
		Args: someFiles,
		RunE: func(_ *cobra.Command, files []string) error {
			report, err := readInventory(files)
			if err != nil {
				return err
			}
			if err := i.output(format, report, func(out io.Writer) { report.print(out) }); err != nil {
				return err
			}
			return report.err()
		},
	}
	cli.OutputFlag(c, &format, cli.FormatText, outputformat.JSON, outputformat.YAML)
	return c
}

func someFiles(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cli.Usage(errors.New("no file is named"))
	}
	return nil
}

// output prints a value in a format, as text by write.
func (i *invocation) output(format string, value any, write func(io.Writer)) error {
	if format != cli.FormatText {
		return i.Print(format, value)
	}
	write(i.Stdout)
	return nil
}

// readInventory reads all parts. It fails only if a file cannot be read.
func readInventory(files []string) (*inventoryReport, error) {
	report := &inventoryReport{}
	for _, file := range files {
		content, err := bounded.ReadFile(file, maxManifest)
		if err != nil {
			return nil, cli.Usage(err)
		}
		for _, p := range partsOf(file, content) {
			report.Parts = append(report.Parts, p.report())
		}
	}
	var parts []*inventory.Part
	for _, p := range report.Parts {
		if p.part != nil {
			parts = append(parts, p.part)
		}
	}
	merged := inventory.Merge(parts...)
	report.Machines, report.Duplicates, report.Conflicts = merged.Len(), merged.Duplicates(), merged.Conflicts()
	return report, nil
}

// maxManifest bounds a file: a manifest indents each line of an inventory.
const maxManifest = 2 * inventory.MaxSize

// inventoryPart is the text of a part.
type inventoryPart struct {
	// name is the name of the part. file is the prefix of line numbers.
	name, file string
	text       string
	// before is the number of lines before the text in the file.
	before int
}

// partsOf returns the parts in a file: the file itself, or the entries of the ConfigMaps in it.
func partsOf(file string, content []byte) []inventoryPart {
	var parts []inventoryPart
	for decoder := yaml.NewDecoder(bytes.NewReader(content)); bytes.Contains(content, []byte("ConfigMap")); {
		var document yaml.Node
		if err := decoder.Decode(&document); err != nil {
			if !errors.Is(err, io.EOF) {
				parts = nil // the parser reports what is wrong with the file
			}
			break
		}
		if len(document.Content) == 1 {
			parts = append(parts, configMapParts(file, document.Content[0])...)
		}
	}
	if len(parts) == 0 {
		return []inventoryPart{{name: file, file: file, text: string(content)}}
	}
	return parts
}

func configMapParts(file string, n *yaml.Node) (parts []inventoryPart) {
	for _, item := range listOf(valueOf(n, "items")) {
		parts = append(parts, configMapParts(file, item)...)
	}
	if kind := valueOf(n, "kind"); kind == nil || kind.Value != "ConfigMap" {
		return parts
	}
	name := ""
	if n := valueOf(valueOf(n, "metadata"), "name"); n != nil {
		name = n.Value
	}
	data := listOf(valueOf(n, "data"))
	for i := 0; i+1 < len(data); i += 2 {
		part := inventoryPart{name: fmt.Sprintf("%s (%s %s)", file, name, data[i].Value), text: data[i+1].Value}
		part.file = part.name
		// a literal block, whose line breaks are those of the file
		if data[i+1].Style == yaml.LiteralStyle {
			part.file, part.before = file, data[i+1].Line
		}
		parts = append(parts, part)
	}
	return parts
}

func valueOf(n *yaml.Node, field string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == field {
			return n.Content[i+1]
		}
	}
	return nil
}

func listOf(n *yaml.Node) []*yaml.Node {
	if n == nil {
		return nil
	}
	return n.Content
}

func (p inventoryPart) report() partReport {
	r := partReport{Name: p.name, file: p.file, Bytes: len(p.text), FitsConfigMap: len(p.text) <= maxConfigMap}
	if asJSON, err := json.Marshal(p.text); err == nil {
		const manifest = 1 << 10 // the size of the ConfigMap around it
		r.FitsClientSideApply = len(asJSON)+manifest <= maxAnnotations
	}
	text := []byte(strings.Repeat("\n", p.before) + p.text)
	part, err := inventory.ParsePart(p.file, text)
	if err == nil {
		r.part, r.Machines = part, part.Len()
		return r
	}
	for _, e := range inventory.Problems(p.file, text) {
		r.Problems = append(r.Problems, problem{e.Line, e.Text()})
	}
	return r
}

// err returns an error if anything is wrong.
func (r *inventoryReport) err() error {
	problems := 0
	for _, p := range r.Parts {
		problems += len(p.Problems)
	}
	if problems+len(r.Conflicts) == 0 {
		return nil
	}
	return cli.Fail(CodeConfiguration, "see docs/inventory.md for the format, and for what each of these does to a running controller",
		fmt.Errorf("the inventory has %s and %s", text.Count(problems, "problem"), text.Count(len(r.Conflicts), "conflict")))
}

func (r *inventoryReport) print(out io.Writer) {
	out = text.EntryWriter(out) // each call prints a line, in which others wrote names and problems
	for _, p := range r.Parts {
		note := ""
		switch {
		case !p.FitsConfigMap:
			note = ", too long for a ConfigMap"
		case !p.FitsClientSideApply:
			note = ", as a ConfigMap with: kubectl apply --server-side"
		}
		if len(p.Problems) > 0 {
			_, _ = fmt.Fprintf(out, "%s: invalid, %s%s\n", p.Name, text.Count(p.Bytes, "byte"), note)
		} else {
			_, _ = fmt.Fprintf(out, "%s: %s, %s%s\n", p.Name, text.Count(p.Machines, "machine"), text.Count(p.Bytes, "byte"), note)
		}
	}
	r.printProblems(out)
	_, _ = fmt.Fprintf(out, "total: %s, %d repeated, %s\n", text.Count(r.Machines, "machine"), r.Duplicates, text.Count(len(r.Conflicts), "conflict"))
}

func (r *inventoryReport) printProblems(out io.Writer) {
	for _, p := range r.Parts {
		for _, problem := range p.Problems {
			_, _ = fmt.Fprintf(out, "%s:%d: %s\n", p.file, problem.Line, problem.Text)
		}
	}
	for _, conflict := range r.Conflicts {
		_, _ = fmt.Fprintf(out, "conflict: %s\n", conflict)
	}
}
