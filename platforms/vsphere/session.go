// SPDX-License-Identifier: Apache-2.0

package vsphere

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"time"

	"github.com/vmware/govmomi/fault"
	govmomisession "github.com/vmware/govmomi/session"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
)

const (
	userAgent = "node-attestation-controller-vsphere"
	// maxAnswer limits an answer. One about 1,000 machines has less than 2 MB.
	maxAnswer = 64 << 20
	// maxCredential limits a file with a user name or a password.
	maxCredential = 4 << 10
	// loginPause is how long a refused credential is not tried again. By default, vCenter locks a
	// user after five failed logins within three minutes.
	loginPause = 2 * time.Minute
)

// session is the user's session on a vCenter. It begins when it is first needed, and begins again
// when vCenter has ended it.
type session struct {
	url                    *url.URL
	transport              http.RoundTripper
	userFile, passwordFile string

	// lock has one element while the fields below are used. It is a channel, because waiting for a
	// login ends with the caller's context.
	lock   chan struct{}
	client *vim25.Client
	// refused is the last credential that vCenter refused, at the time since.
	refused *url.Userinfo
	since   time.Time
}

// Do calls vCenter within a session. If vCenter has ended the session, it logs in and calls once
// more.
func (s *session) Do(ctx context.Context, call func(*vim25.Client) error) error {
	client, err := s.begin(ctx, nil)
	if err != nil {
		return fmt.Errorf("login: %w", explain(err))
	}
	if err = call(client); fault.Is(err, &types.NotAuthenticated{}) {
		if client, err = s.begin(ctx, client); err != nil {
			return fmt.Errorf("login: %w", explain(err))
		}
		err = call(client)
	}
	return explain(err)
}

// begin returns a client with a session other than the ended one.
func (s *session) begin(ctx context.Context, ended *vim25.Client) (*vim25.Client, error) {
	select {
	case s.lock <- struct{}{}:
		defer func() { <-s.lock }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if s.client != nil && s.client != ended {
		return s.client, nil
	}
	s.client = nil

	// The files are read each time, since passwords are replaced.
	user, err := readLine(s.userFile)
	if err != nil {
		return nil, err
	}
	password, err := readLine(s.passwordFile)
	if err != nil {
		return nil, err
	}
	credential := url.UserPassword(user, password)
	if s.refused != nil && *s.refused == *credential && time.Since(s.since) < loginPause {
		return nil, fmt.Errorf("vCenter refused the user or the password at %s: it is tried again after %s, so that the user is not locked",
			s.since.UTC().Format(time.TimeOnly), loginPause)
	}

	// A client of its own: the cookie of the former session must not be sent.
	to := soap.NewClient(s.url, false)
	to.UserAgent = userAgent
	to.Transport, to.CheckRedirect = s.transport, platformkit.NoRedirect
	client, err := vim25.NewClient(ctx, to)
	if err != nil {
		return nil, err
	}
	if err := govmomisession.NewManager(client).Login(ctx, credential); err != nil {
		if fault.Is(err, &types.InvalidLogin{}) {
			s.refused, s.since = credential, time.Now()
		}
		return nil, err
	}
	s.client, s.refused = client, nil
	return client, nil
}

// Logout ends the session, if there is one.
func (s *session) Logout(ctx context.Context) {
	select {
	case s.lock <- struct{}{}:
		defer func() { <-s.lock }()
	case <-ctx.Done():
		return
	}
	if s.client != nil {
		_ = govmomisession.NewManager(s.client).Logout(ctx)
		s.client = nil
	}
}

// readLine returns the one line of a file.
func readLine(path string) (string, error) {
	content, err := bounded.ReadFile(path, maxCredential)
	if err != nil {
		return "", err
	}
	line := strings.TrimRight(string(content), "\r\n")
	if line == "" || strings.ContainsAny(line, "\r\n") {
		return "", fmt.Errorf("%s does not have one line", path)
	}
	return line, nil
}

// explain replaces the server's long text in an error by the fault's name, and says what to do.
func explain(err error) error {
	var is interface{ Fault() types.BaseMethodFault }
	switch {
	case err == nil, !errors.As(err, &is):
		return err
	case fault.Is(err, &types.InvalidLogin{}):
		return errors.New("InvalidLogin: the user or the password is wrong, or the user is locked")
	case fault.Is(err, &types.NotAuthenticated{}):
		return errors.New("NotAuthenticated: vCenter ended the session")
	}
	if kind := faultName(is.Fault()); kind == "NoPermission" {
		return errors.New("NoPermission: the user lacks a privilege: give it the role Read-only")
	} else if kind != "" {
		return errors.New(kind)
	}
	return fmt.Errorf("vCenter's answer is a fault: %.200q", err.Error())
}

// faultName returns the name of a fault's type.
func faultName(f types.BaseMethodFault) string {
	if f == nil {
		return ""
	}
	kind := reflect.TypeOf(f)
	for kind.Kind() == reflect.Pointer {
		kind = kind.Elem()
	}
	return kind.Name()
}

// newTransport returns a transport for a vCenter with a certificate of these roots. It does not use
// HTTP/2, as govmomi does not.
func newTransport(roots *x509.CertPool) *http.Transport {
	transport := platformkit.NewTransport(roots)
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP1(true)
	return transport
}

// strict returns an error for each status that SOAP does not have, such as a redirect or an error
// of a gateway. It limits the length of other answers.
type strict struct{ next http.RoundTripper }

func (s strict) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := s.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	// SOAP sends its faults with the status 500.
	if response.StatusCode == http.StatusOK || response.StatusCode == http.StatusInternalServerError {
		response.Body = http.MaxBytesReader(nil, response.Body, maxAnswer)
		return response, nil
	}
	_ = response.Body.Close()
	return nil, platformkit.StatusError(response)
}
