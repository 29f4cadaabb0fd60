// SPDX-License-Identifier: Apache-2.0

// Package strict decodes what an operator wrote in YAML or JSON: configuration and inventories. It
// refuses mistyped fields instead of ignoring them, and says in which line they are.
package strict

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// Decoder decodes a document into a struct, whose fields are named by tags as for encoding/json.
// Unknown, doubled and differently-cased fields are problems. The zero value is for configuration.
type Decoder struct {
	// Removed has the fields of earlier versions: by their paths, such as a.b, what to do instead.
	Removed map[string]string
	// Plain refuses what makes a document mean something else than it shows: anchors, aliases,
	// tags and nulls.
	Plain bool
}

// Problem is something that is wrong in a document. Text is one line.
type Problem struct {
	Line int // 0 if it is not known
	Text string
}

func (p *Problem) Error() string {
	if p.Line == 0 {
		return p.Text
	}
	return fmt.Sprintf("line %d: %s", p.Line, p.Text)
}

// Decode decodes the only document in data over the present content of into, which points to a
// struct. An error is one line of text, with the line, the name and the problem of each wrong
// field.
func (d Decoder) Decode(data []byte, into any) error {
	var document *yaml.Node
	for next, problem := range Documents(data, 1) {
		switch {
		case document == nil && problem != nil:
			return problem
		case document == nil:
			document = next
		case problem != nil || !isNull(next):
			return errors.New("holds more than one document")
		}
	}
	if document == nil {
		return nil
	}
	problems := d.DecodeNode(document, into)
	if len(problems) == 0 {
		return nil
	}
	all := make([]string, len(problems))
	for i, p := range problems {
		all[i] = p.Error()
	}
	return errors.New(strings.Join(all, "; "))
}

// Documents parses a stream of documents, without the empty ones. It ends after a syntax error.
// Lines are counted from first.
func Documents(data []byte, first int) iter.Seq2[*yaml.Node, *Problem] {
	return func(yield func(*yaml.Node, *Problem) bool) {
		for decoder := yaml.NewDecoder(bytes.NewReader(data)); ; {
			var document yaml.Node
			switch err := decoder.Decode(&document); {
			case errors.Is(err, io.EOF):
				return
			case err != nil:
				yield(nil, syntaxProblem(data, first, err))
				return
			case len(document.Content) != 1:
				continue
			}
			root := document.Content[0]
			if isNull(root) && root.Value == "" {
				continue
			}
			addLines(root, first-1)
			if !yield(root, nil) {
				return
			}
		}
	}
}

func addLines(n *yaml.Node, lines int) {
	if lines == 0 {
		return
	}
	n.Line += lines
	for _, c := range n.Content {
		addLines(c, lines)
	}
}

// syntaxProblem makes the YAML library count lines from first. The library does not name line 1.
func syntaxProblem(data []byte, first int, err error) *Problem {
	padded := append(bytes.Repeat([]byte("\n"), first-1), data...)
	for decoder, again := yaml.NewDecoder(bytes.NewReader(padded)), error(nil); again == nil; {
		if again = decoder.Decode(&yaml.Node{}); again != nil && !errors.Is(again, io.EOF) {
			err = again
		}
	}
	p := &Problem{Text: text.Line(strings.TrimPrefix(err.Error(), "yaml: "), maxSyntaxError)}
	if n, _ := fmt.Sscanf(p.Text, "line %d:", &p.Line); n == 1 {
		_, p.Text, _ = strings.Cut(p.Text, ": ")
	}
	return p
}

// CheckKind returns an error unless a document is of this kind.
func CheckKind(is metav1.TypeMeta, apiVersion, kind string) error {
	if is.APIVersion != apiVersion || is.Kind != kind {
		return fmt.Errorf("is %.64q of %.64q, not %s of %s", is.Kind, is.APIVersion, kind, apiVersion)
	}
	return nil
}
