// SPDX-License-Identifier: Apache-2.0

package azure

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// object is a JSON object (RFC 8259, section 4). Its names are unique and case-sensitive.
// encoding/json alone takes the last of two equal names, and ignores case: another reader of the
// same bytes could see another value.
type object map[string]json.RawMessage

func parseObject(data []byte) (object, error) {
	if !utf8.Valid(data) { // encoding/json would replace what is not
		return nil, errors.New("not UTF-8")
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	if start, err := decoder.Token(); err != nil || start != json.Delim('{') {
		return nil, errors.New("not a JSON object")
	}
	o := object{}
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

// text returns a member that is a string. It has no default: a missing one is an error.
func (o object) text(name string) (string, error) {
	value, found := o[name]
	if !found || value[0] != '"' {
		return "", fmt.Errorf("%q is not a string", name)
	}
	var text string
	err := json.Unmarshal(value, &text)
	return text, err
}
