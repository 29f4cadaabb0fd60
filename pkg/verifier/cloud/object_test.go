// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"encoding/json"
	"testing"
)

func TestParseObject(t *testing.T) {
	for _, c := range []struct {
		name, data string
		members    int // 0 if it is refused
	}{
		{"one", `{"a":1}`, 1},
		{"names differ in case", ` {"a":1,"A":[{}]} `, 2},
		{"name twice", `{"a":1,"a":1}`, 0},
		{"name twice, escaped", `{"a":1,"\u0061":1}`, 0},
		{"not UTF-8", "{\"a\":\"\xff\"}", 0},
		{"list", `["a",1]`, 0},
		{"null", `null`, 0},
		{"empty", ``, 0},
		{"cut off", `{"a":1`, 0},
		{"value cut off", `{"a":`, 0},
		{"name is a number", `{1:1}`, 0},
		{"another object follows", `{"a":1}{}`, 0},
		{"text follows", `{"a":1} x`, 0},
	} {
		if o, err := ParseObject([]byte(c.data)); len(o) != c.members || (err == nil) != (c.members > 0) {
			t.Errorf("%s: %v, %v", c.name, o, err)
		}
	}
}

func TestObjectMembers(t *testing.T) {
	o, err := ParseObject([]byte(`{"text":"a\u0062","empty":"","null":null,"list":["a"],"one":1,"zero":0,"negative":-1,"fraction":1.5,"large":9223372036854775808,"quoted":"1"}`))
	if err != nil {
		t.Fatal(err)
	}
	for name := range o {
		text, err := o.Text(name)
		if want, isText := map[string]string{"text": "ab", "empty": "", "quoted": "1"}[name]; (err == nil) != isText || text != want {
			t.Errorf("text of %s: %q, %v", name, text, err)
		}
		if number, err := o.Positive(name); (err == nil) != (name == "one") || err == nil && number != 1 {
			t.Errorf("number of %s: %d, %v", name, number, err)
		}
	}
	if text, err := o.Text("absent"); err == nil {
		t.Errorf("text of an absent member: %q", text)
	}
	if number, err := o.Positive("absent"); err == nil {
		t.Errorf("number of an absent member: %d", number)
	}
}

// An accepted object is also one to encoding/json.
func FuzzParseObject(f *testing.F) {
	f.Add([]byte(`{"a":1,"A":"b"}`))
	f.Add([]byte(`{"a":1,"a":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		o, err := ParseObject(data)
		if err != nil {
			return
		}
		var same map[string]json.RawMessage
		if err := json.Unmarshal(data, &same); err != nil || len(same) != len(o) {
			t.Fatalf("%q: %v, %v", data, same, err)
		}
		for name := range o {
			if text, err := o.Text(name); err != nil && text != "" {
				t.Errorf("%q: text %q with an error", name, text)
			}
		}
	})
}
