// SPDX-License-Identifier: Apache-2.0

package aws

import (
	"net/http"
	"testing"
)

// TestPublishedSignatures checks the imitation against two requests that AWS has published with
// their signatures: get-vanilla of the test suite of Signature Version 4, and the example ListUsers
// of the IAM User Guide.
func TestPublishedSignatures(t *testing.T) {
	const secretKey = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
	for _, c := range []struct{ name, url, contentType, credential, signedHeaders, signature string }{
		{
			"get-vanilla", "https://example.amazonaws.com/", "", "AKIDEXAMPLE/20150830/us-east-1/service/aws4_request",
			"host;x-amz-date", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
		},
		{
			"ListUsers", "https://iam.amazonaws.com/?Action=ListUsers&Version=2010-05-08", "application/x-www-form-urlencoded; charset=utf-8",
			"AKIDEXAMPLE/20150830/us-east-1/iam/aws4_request",
			"content-type;host;x-amz-date", "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7",
		},
	} {
		r, err := http.NewRequest(http.MethodGet, c.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-Amz-Date", "20150830T123600Z")
		if c.contentType != "" {
			r.Header.Set("Content-Type", c.contentType)
		}
		a, ok := parseAuthorization("AWS4-HMAC-SHA256 Credential=" + c.credential + ", SignedHeaders=" + c.signedHeaders + ", Signature=" + c.signature)
		if !ok || !a.covers(r) {
			t.Fatalf("%s: the header is not accepted", c.name)
		}
		if got := a.expected(r, nil, secretKey); got != c.signature {
			t.Errorf("%s: %s, want %s", c.name, got, c.signature)
		}
	}
}
