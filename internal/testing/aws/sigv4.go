// SPDX-License-Identifier: Apache-2.0

package aws

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// authorization is the header of Signature Version 4 ("Create a signed AWS API request" in the IAM
// User Guide).
type authorization struct {
	accessKeyID, day, region, service string
	// signedHeaders are lower-case names, in the order of the header.
	signedHeaders []string
	signature     string
}

// parseAuthorization returns false if a part is missing or is there twice.
func parseAuthorization(header string) (a authorization, ok bool) {
	rest, ok := strings.CutPrefix(header, "AWS4-HMAC-SHA256 ")
	if !ok {
		return a, false
	}
	parts := map[string]string{}
	for part := range strings.SplitSeq(rest, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if _, twice := parts[name]; twice || !ok {
			return a, false
		}
		parts[name] = value
	}
	scope := strings.Split(parts["Credential"], "/")
	if len(parts) != 3 || len(scope) != 5 || scope[4] != "aws4_request" || parts["SignedHeaders"] == "" || parts["Signature"] == "" {
		return a, false
	}
	return authorization{scope[0], scope[1], scope[2], scope[3], strings.Split(parts["SignedHeaders"], ";"), parts["Signature"]}, true
}

// covers reports whether the signature covers host and all headers of AWS, as it has to.
func (a authorization) covers(r *http.Request) bool {
	for name := range r.Header {
		if name = strings.ToLower(name); strings.HasPrefix(name, "x-amz-") && !slices.Contains(a.signedHeaders, name) {
			return false
		}
	}
	return slices.Contains(a.signedHeaders, "host") && slices.IsSorted(a.signedHeaders)
}

// expected returns the signature that the request must have if the secret key signed it.
func (a authorization) expected(r *http.Request, body []byte, secretKey string) string {
	// 1. The canonical request.
	path := r.URL.EscapedPath()
	if path == "" {
		path = "/"
	}
	query, _ := url.ParseQuery(r.URL.RawQuery) // a malformed query gives another signature
	canonical := r.Method + "\n" + path + "\n" + strings.ReplaceAll(query.Encode(), "+", "%20") + "\n"
	for _, name := range a.signedHeaders {
		canonical += name + ":" + canonicalValue(r, name) + "\n"
	}
	canonical += "\n" + strings.Join(a.signedHeaders, ";") + "\n" + hash(string(body))

	// 2. The string to sign.
	scope := a.day + "/" + a.region + "/" + a.service + "/aws4_request"
	toSign := "AWS4-HMAC-SHA256\n" + r.Header.Get("X-Amz-Date") + "\n" + scope + "\n" + hash(canonical)

	// 3. The signing key, and the signature.
	key := []byte("AWS4" + secretKey)
	for _, text := range []string{a.day, a.region, a.service, "aws4_request", toSign} {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(text))
		key = mac.Sum(nil)
	}
	return hex.EncodeToString(key)
}

// canonicalValue returns all values of a header, without surplus white space.
func canonicalValue(r *http.Request, name string) string {
	values := r.Header.Values(name)
	switch name { // net/http takes both out of the headers
	case "host":
		values = []string{r.Host}
	case "content-length":
		values = []string{strconv.FormatInt(r.ContentLength, 10)}
	}
	trimmed := make([]string, 0, len(values))
	for _, value := range values {
		trimmed = append(trimmed, strings.Join(strings.Fields(value), " "))
	}
	return strings.Join(trimmed, ",")
}

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}
