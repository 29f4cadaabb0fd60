// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// The kinds of documents of one version.
const (
	KindHello     = "hello"
	KindChallenge = "challenge"
	KindProof     = "proof"
	KindOrigin    = "origin"
)

// Head returns the version at the start of a provider's document, and the kind if that follows. It
// returns "" for a part that cannot be read, and does not judge the rest. Readers use it to notice
// an unknown version.
func Head(data []byte) (version Version, kind string) {
	text, found := strings.CutPrefix(string(data[:min(len(data), 160)]), `{"version":"`)
	name, text, closed := strings.Cut(text, `"`)
	version = Version(name)
	if _, number := version.split(); !found || !closed || number == 0 {
		return "", ""
	}
	if text, found = strings.CutPrefix(text, `,"kind":"`); found {
		if kind, _, found = strings.Cut(text, `"`); !found || !bounded(kind, 32, "-") {
			kind = ""
		}
	}
	return version, kind
}

// DocumentError says why bytes are not a document of ours. It never quotes them.
type DocumentError struct {
	// Kind is the document's: hello, challenge, proof or origin.
	Kind string
	// Field is the JSON field at fault, empty if the whole document is.
	Field  string
	Reason string
}

func (e *DocumentError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("malformed %s: %s", e.Kind, e.Reason)
	}
	return fmt.Sprintf("malformed %s: %s: %s", e.Kind, e.Field, e.Reason)
}

// checker is a document that knows its own limits.
type checker interface {
	check() *DocumentError
}

// encode returns the one encoding of a document: encoding/json's, fields in the order of the
// struct, no white space.
func encode(kind string, limit int, document checker) ([]byte, error) {
	if err := document.check(); err != nil {
		return nil, err
	}
	data, err := json.Marshal(document)
	if err != nil {
		return nil, err
	}
	if len(data) > limit {
		return nil, &DocumentError{kind, "", fmt.Sprintf("longer than %d bytes", limit)}
	}
	return data, nil
}

// decode reads a document strictly: it accepts exactly the bytes that encode writes. encoding/json
// accepts doubled and differently-cased keys, white space and several spellings of one value. The
// comparison refuses all of them.
func decode(kind string, limit int, data []byte, into checker) error {
	if len(data) > limit {
		return &DocumentError{kind, "", fmt.Sprintf("longer than %d bytes", limit)}
	}
	if err := json.Unmarshal(data, into); err != nil {
		return &DocumentError{kind, "", "not the JSON of its kind"}
	}
	canonical, err := encode(kind, limit, into)
	if err != nil {
		return err
	}
	if !bytes.Equal(canonical, data) {
		return &DocumentError{kind, "", "not in canonical form: no unknown, doubled or missing field, no white space, nothing after"}
	}
	return nil
}

// bounded reports whether s has 1 to limit characters, all of them in [a-z0-9], or in more.
func bounded(s string, limit int, more string) bool {
	if s == "" || len(s) > limit {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if ('a' > c || c > 'z') && ('0' > c || c > '9') && strings.IndexByte(more, c) < 0 {
			return false
		}
	}
	return true
}

// between reports whether b has 1 to limit bytes.
func between(b []byte, limit int) bool { return len(b) > 0 && len(b) <= limit }
