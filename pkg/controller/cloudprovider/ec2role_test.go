// SPDX-License-Identifier: Apache-2.0

package cloudprovider

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/stscall"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2role"
)

const anInstance = "i-0123456789abcdef0"

// signedCall is a request with a call of STS, which no STS has checked.
func signedCall(t *testing.T, uid, signature string) verifier.Filed {
	t.Helper()
	now := time.Now().UTC().Truncate(time.Second)
	statement, err := stscall.Statement{
		Region: "eu-west-1", Date: now.Format(stscall.DateFormat), AccessKeyID: "ASIA0123456789ABCDEF", SecurityToken: "dG9rZW4=",
		Signature: strings.Repeat(signature, 64),
	}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	data, err := attestation.Identity{Version: attestation.VersionEC2Role, Statement: statement}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	request, err := attestation.Request{PKCS10: []byte("x"), Provider: ec2role.Name, Data: data}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return verifier.Filed{Name: "node-csr-a", UID: uid, SignerName: "example.com/ec2-role", Request: request, Created: now}
}

const callerOf = `<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <GetCallerIdentityResult>
    <Arn>arn:aws:sts::123456789012:assumed-role/aws:ec2-instance/` + anInstance + `</Arn>
    <UserId>123456789012:aws:ec2-instance:` + anInstance + `</UserId>
    <Account>123456789012</Account>
  </GetCallerIdentityResult>
  <ResponseMetadata>
    <RequestId>01234567-89ab-cdef-0123-456789abcdef</RequestId>
  </ResponseMetadata>
</GetCallerIdentityResponse>
`

const denied = `<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <Error>
    <Type>Sender</Type>
    <Code>SignatureDoesNotMatch</Code>
    <Message>x</Message>
  </Error>
  <RequestId>01234567-89ab-cdef-0123-456789abcdef</RequestId>
</ErrorResponse>
`

// STS is asked once for a verdict, and again for what is none.
func TestSTSIsAskedOnce(t *testing.T) {
	v, err := ec2role.New(ec2role.Config{ClusterUID: someCluster, Regions: []string{"eu-west-1"}})
	if err != nil {
		t.Fatal(err)
	}
	answers := map[string]struct {
		status int
		body   string
		err    error
	}{
		"a": {http.StatusOK, callerOf, nil}, "b": {http.StatusForbidden, denied, nil},
		"c": {http.StatusServiceUnavailable, "", nil}, "d": {0, "", errors.New("down")}, "e": {http.StatusOK, "<html>", nil},
	}
	calls := map[string]int{}
	judge := EC2Role(v, NewSTS(func(_ context.Context, call *ec2role.Call) (int, []byte, error) {
		header := call.Header.Get("Authorization")
		signature := header[len(header)-1:]
		calls[signature]++
		return answers[signature].status, []byte(answers[signature].body), answers[signature].err
	}, nil))
	for range 2 {
		for signature := range answers {
			verified, err := judge(t.Context(), signedCall(t, "uid", signature), "")
			accepted, refused := signature == "a", signature == "b"
			if (err == nil) != accepted || evidence.IsVerdict(err) != refused || accepted && (verified.Instance.ID != anInstance || !verified.HasProviderID("aws:///eu-west-1a/"+anInstance)) {
				t.Errorf("%s: %+v, %v", signature, verified, err)
			}
		}
	}
	for signature, n := range calls {
		if n != 1 { // what failed is asked for again after a while
			t.Errorf("%s: %d calls", signature, n)
		}
	}
	if _, err := judge(t.Context(), signedCall(t, "another", "a"), ""); err != nil || calls["a"] != 2 {
		t.Errorf("another request got the answer of the first one: %v", err)
	}
	if _, err := judge(t.Context(), verifier.Filed{Request: []byte("x")}, ""); !evidence.IsVerdict(err) {
		t.Errorf("%v", err)
	}
}
