// SPDX-License-Identifier: Apache-2.0

package sts_test

import (
	"context"
	"crypto/tls"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/stscall"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sts"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2role"
)

func someCall() *ec2role.Call {
	return &ec2role.Call{
		Method: http.MethodPost, URL: "https://sts.eu-west-1.amazonaws.com/", Header: stscall.Unsigned("nonce"), Body: stscall.Body,
	}
}

func TestSend(t *testing.T) {
	for _, c := range []struct {
		name   string
		fault  aws.Fault
		change func(*ec2role.Call, *sts.Client)
		// status is that of an answer, 0 if there is an error.
		status int
		text   string
	}{
		{"not signed", aws.None, nil, 403, "MissingAuthenticationToken"},
		{"internal error", aws.InternalError, nil, 500, "InternalFailure"},
		{"throttled", aws.Throttled, nil, 400, "Throttling"},
		{"down", aws.Down, nil, 0, "no route to host"},
		{"redirect", aws.Redirecting, nil, 0, "a redirect"},
		{"too long", aws.TooLong, nil, 0, "longer than 16384 bytes"},
		{"plain HTTP", aws.None, func(c *ec2role.Call, _ *sts.Client) { c.URL = "http://sts.eu-west-1.amazonaws.com/" }, 0, "not https"},
		{"certificate of another host", aws.None, func(_ *ec2role.Call, c *sts.Client) {
			c.Transport.(*http.Transport).TLSClientConfig.ServerName = "sts.example.com"
		}, 0, "certificate"},
		{"unknown CA", aws.None, func(_ *ec2role.Call, c *sts.Client) { c.Transport.(*http.Transport).TLSClientConfig = &tls.Config{} }, 0, "certificate"},
		{"no transport", aws.None, func(_ *ec2role.Call, c *sts.Client) { c.Transport = nil }, 0, "no transport"},
	} {
		platform := aws.New(t)
		platform.SetFault(c.fault)
		call, client := someCall(), sts.Client{Transport: platform.Transport()}
		if c.change != nil {
			c.change(call, &client)
		}
		status, body, err := client.Send(t.Context(), call)
		text := string(body)
		if err != nil {
			text = err.Error()
		}
		if status != c.status || (err == nil) != (c.status != 0) || !strings.Contains(text, c.text) {
			t.Errorf("%s: status %d, %q, %v", c.name, status, body, err)
		}
		if c.fault == aws.Redirecting && platform.Calls() != 1 {
			t.Errorf("%s: %d calls", c.name, platform.Calls())
		}
	}
}

// TestSlow shows that a call ends with its context.
func TestSlow(t *testing.T) {
	platform := aws.New(t)
	platform.SetFault(aws.Slow)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, _, err := (sts.Client{Transport: platform.Transport()}).Send(ctx, someCall()); err == nil || ctx.Err() == nil {
		t.Errorf("%v", err)
	}
}

// stuck is a server that never answers.
type stuck struct{ deadline time.Time }

func (s *stuck) RoundTrip(r *http.Request) (*http.Response, error) {
	s.deadline, _ = r.Context().Deadline()
	return nil, context.DeadlineExceeded
}

// TestDeadline shows that a call has a time limit of its own.
func TestDeadline(t *testing.T) {
	server := &stuck{}
	_, _, err := sts.Client{Transport: server}.Send(context.Background(), someCall())
	if left := time.Until(server.deadline); err == nil || left <= 0 || left > 10*time.Second {
		t.Errorf("%s left, %v", left, err)
	}
}

// TestNewClient shows that the released client verifies TLS, and can use a proxy.
func TestNewClient(t *testing.T) {
	transport := sts.NewClient().Transport.(*http.Transport)
	if transport.Proxy == nil || transport.TLSClientConfig.InsecureSkipVerify || transport.TLSClientConfig.RootCAs != nil || !transport.DisableCompression {
		t.Errorf("%+v", transport)
	}
}
