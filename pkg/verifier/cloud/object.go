// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// Object is a JSON object (RFC 8259, section 4). Its names are unique and case-sensitive.
// encoding/json alone takes the last of two equal names, and ignores case: another reader of the
// same bytes could see another value.
type Object map[string]json.RawMessage

// ParseObject parses one JSON object in UTF-8, with nothing after it. Values stay as they are.
func ParseObject(data []byte) (Object, error) {
	if !utf8.Valid(data) { // encoding/json would replace what is not
		return nil, errors.New("not UTF-8")
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	if start, err := decoder.Token(); err != nil || start != json.Delim('{') {
		return nil, errors.New("not a JSON object")
	}
	o := Object{}
	for decoder.More() {
		token, err := decoder.Token()
		if err != nil {
			return nil, err
		}
		name, _ := token.(string) // the decoder takes nothing else here
		if _, twice := o[name]; twice {
			return nil, fmt.Errorf("%.32q comes twice", name)
		}
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return nil, err
		}
		o[name] = value
	}
	if _, err := decoder.Token(); err != nil {
		return nil, err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows the JSON object")
	}
	return o, nil
}

// Text returns a member that is a string. It has no default: a missing one is an error.
func (o Object) Text(name string) (string, error) {
	value, found := o[name]
	if !found || value[0] != '"' {
		return "", fmt.Errorf("%q is not a string", name)
	}
	var text string
	err := json.Unmarshal(value, &text)
	return text, err
}

// Positive returns a member that is a whole number greater than zero.
func (o Object) Positive(name string) (int64, error) {
	var number int64
	if err := json.Unmarshal(o[name], &number); err != nil || number <= 0 {
		return 0, fmt.Errorf("%q is not a positive whole number", name)
	}
	return number, nil
}
