// SPDX-License-Identifier: Apache-2.0

package stscall

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"slices"
	"strings"
	"testing"
)

func someStatement() Statement {
	return Statement{
		Region: "eu-west-1", Date: "20261128T120000Z", AccessKeyID: "ASIAEXAMPLEEXAMPLE12", SecurityToken: "IQoJb3JpZ2luX2Vj+/a==",
		Signature: strings.Repeat("0a", 32),
	}
}

const canonical = `{"region":"eu-west-1","date":"20261128T120000Z","accessKeyID":"ASIAEXAMPLEEXAMPLE12","securityToken":"IQoJb3JpZ2luX2Vj+/a==","signature":"0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a"}`

func TestOneEncoding(t *testing.T) {
	if data, err := someStatement().Marshal(); err != nil || string(data) != canonical {
		t.Fatalf("%s, %v", data, err)
	}
	if s, err := Parse([]byte(canonical)); err != nil || *s != someStatement() {
		t.Fatalf("%v, %v", s, err)
	}
	for name, data := range map[string]string{
		"empty":          "",
		"white space":    canonical + "\n",
		"something more": canonical + "{}",
		"doubled key":    strings.Replace(canonical, "{", `{"region":"eu-west-1",`, 1),
		"another case":   strings.Replace(canonical, "region", "Region", 1),
		"unknown key":    strings.Replace(canonical, "{", `{"host":"example.com",`, 1),
		"escape":         strings.Replace(canonical, "eu-west-1", `eu-west\u002d1`, 1),
		"null":           "null",
		"other order":    `{"date":"20261128T120000Z","region":"eu-west-1",` + canonical[len(`{"region":"eu-west-1","date":"20261128T120000Z",`):],
		"too long":       strings.Replace(canonical, "IQoJ", strings.Repeat("IQoJ", maxToken), 1),
	} {
		if s, err := Parse([]byte(data)); err == nil {
			t.Errorf("%s: accepted as %v", name, s)
		}
	}
}

func TestForms(t *testing.T) {
	for name, change := range map[string]func(*Statement){
		"no region":              func(s *Statement) { s.Region = "" },
		"host as region":         func(s *Statement) { s.Region = "eu-west-1.example.com/" },
		"date with fraction":     func(s *Statement) { s.Date = "20261128T120000.5Z" },
		"date of another form":   func(s *Statement) { s.Date = "2026-11-28T12:00:00Z" },
		"no such day":            func(s *Statement) { s.Date = "20261131T120000Z" },
		"long-lived key":         func(s *Statement) { s.AccessKeyID = "AKIAEXAMPLEEXAMPLE12" },
		"key with a scope":       func(s *Statement) { s.AccessKeyID = "ASIAEXAMPLEEXAMPLE12/x" },
		"key too long":           func(s *Statement) { s.AccessKeyID = "ASIA" + strings.Repeat("A", 61) },
		"no token":               func(s *Statement) { s.SecurityToken = "" },
		"token with a line end":  func(s *Statement) { s.SecurityToken += "\n" },
		"token with a header":    func(s *Statement) { s.SecurityToken += "\r\nX: y" },
		"token too long":         func(s *Statement) { s.SecurityToken = strings.Repeat("a", maxToken+1) },
		"signature too short":    func(s *Statement) { s.Signature = s.Signature[1:] },
		"signature in upper":     func(s *Statement) { s.Signature = strings.ToUpper(s.Signature) },
		"signature, one more":    func(s *Statement) { s.Signature += "0" },
		"signature has no hex":   func(s *Statement) { s.Signature = strings.Repeat("zz", 32) },
		"signature and line end": func(s *Statement) { s.Signature += "\n" },
	} {
		s := someStatement()
		change(&s)
		if data, err := s.Marshal(); err == nil {
			t.Errorf("%s: accepted as %s", name, data)
		}
	}
}

func TestPartitions(t *testing.T) {
	for region, want := range map[string][2]string{
		"eu-west-1":      {"aws", "https://sts.eu-west-1.amazonaws.com/"},
		"us-east-2":      {"aws", "https://sts.us-east-2.amazonaws.com/"},
		"ap-southeast-7": {"aws", "https://sts.ap-southeast-7.amazonaws.com/"},
		"mx-central-1":   {"aws", "https://sts.mx-central-1.amazonaws.com/"},
		"cn-northwest-1": {"aws-cn", "https://sts.cn-northwest-1.amazonaws.com.cn/"},
		"us-gov-west-1":  {"aws-us-gov", "https://sts.us-gov-west-1.amazonaws.com/"},
	} {
		p, err := PartitionOf(region)
		if err != nil {
			t.Errorf("%s: %v", region, err)
			continue
		}
		if got := [2]string{p.Name, p.URL(region)}; got != want {
			t.Errorf("%s: %v, want %v", region, got, want)
		}
	}
	for _, region := range []string{"", "us--1", "us-east-0", "us-east-1\n", "us-east-1a", "xx-east-1", "US-EAST-1", "us-iso-east-1", "us-gov-east-1.x", "aws-global"} {
		if p, err := PartitionOf(region); err == nil {
			t.Errorf("%q: in %s", region, p.Name)
		}
	}
}

func TestHeader(t *testing.T) {
	if sum := sha256.Sum256([]byte(Body)); hex.EncodeToString(sum[:]) != BodySHA256 {
		t.Errorf("BodySHA256 should be %x", sum)
	}
	s := someStatement()
	header := s.Header("nonce")
	want := http.Header{
		"Authorization": {"AWS4-HMAC-SHA256 Credential=ASIAEXAMPLEEXAMPLE12/20261128/eu-west-1/sts/aws4_request, SignedHeaders=" +
			"content-length;content-type;host;x-amz-date;x-amz-security-token;x-kubelet-authenticator-nonce, Signature=" + s.Signature},
		"Content-Type": {ContentType}, "X-Amz-Date": {s.Date}, "X-Amz-Security-Token": {s.SecurityToken}, "X-Kubelet-Authenticator-Nonce": {"nonce"},
	}
	if len(header) != len(want) {
		t.Errorf("%v, want %v", header, want)
	}
	for name := range want {
		if !slices.Equal(header[name], want[name]) {
			t.Errorf("%s: %v, want %v", name, header[name], want[name])
		}
	}

	again := s
	again.Signature = ""
	if err := again.SetSignature(header.Get("Authorization")); err != nil || again != s {
		t.Errorf("%v, %v", again, err)
	}
	// A signer that leaves the nonce out would make evidence that no controller accepts.
	unsigned := strings.Replace(header.Get("Authorization"), ";x-kubelet-authenticator-nonce", "", 1)
	if err := again.SetSignature(unsigned); err == nil {
		t.Error("a signature without the nonce is accepted")
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(canonical))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Parse(data)
		if err != nil {
			return
		}
		if again, err := s.Marshal(); err != nil || string(again) != string(data) {
			t.Fatalf("%q is accepted, its encoding is %q, %v", data, again, err)
		}
		for name, values := range s.Header("nonce") {
			if strings.ContainsAny(values[0], "\r\n") {
				t.Fatalf("%s: %q", name, values[0])
			}
		}
	})
}
