// SPDX-License-Identifier: Apache-2.0

package platformkit

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
)

// ErrPaused says that a call was not made, or that the platform refused it, because there are too
// many calls. The kit tries again without back-off, as soon as calls are possible.
var ErrPaused = errors.New("too many calls")

const (
	// defaultPause is how long all calls pause if the platform refused one and named no time.
	// maxPause limits the time that a platform may name.
	defaultPause, maxPause = 2 * time.Second, 5 * time.Minute
	// afterWait is the time that a call has left after it has waited.
	afterWait = time.Second
	// answerTimeout limits the time from a request to the header of its answer.
	answerTimeout = 10 * time.Second
	maxProviderID = 512
)

// Budget limits the calls to a platform's API, for all Clusters together.
type Budget struct {
	limiter *rate.Limiter

	mu    sync.Mutex
	until time.Time
}

// NewBudget allows a number of calls each second, and a burst of calls at once.
func NewBudget(perSecond float64, burst int) *Budget {
	return &Budget{limiter: rate.NewLimiter(rate.Limit(perSecond), burst)}
}

// Wait waits until a call may be made. It returns ErrPaused if the context ends before, and at once
// if it would. It leaves the call a tenth of the context's time, at most a second: a call that
// begins at the deadline fails, and the platform would be blamed.
func (b *Budget) Wait(ctx context.Context) error {
	if deadline, ok := ctx.Deadline(); ok {
		limited, cancel := context.WithDeadline(ctx, deadline.Add(-min(afterWait, time.Until(deadline)/10)))
		defer cancel()
		ctx = limited
	}
	if err := b.waitForPause(ctx); err != nil {
		return err
	}
	if err := b.limiter.Wait(ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrPaused, err)
	}
	return b.waitForPause(ctx) // one may have begun meanwhile
}

// waitForPause waits until there is no pause.
func (b *Budget) waitForPause(ctx context.Context) error {
	for {
		b.mu.Lock()
		pause := time.Until(b.until)
		b.mu.Unlock()
		if pause <= 0 {
			return nil
		}
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < pause {
			return fmt.Errorf("%w: the platform asked to wait %s more", ErrPaused, pause.Round(time.Second))
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrPaused, ctx.Err())
		}
	}
}

// Pause stops all calls for a time, at most 5 minutes. 0 is 2 s.
func (b *Budget) Pause(pause time.Duration) {
	if pause <= 0 {
		pause = defaultPause
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if until := time.Now().Add(min(pause, maxPause)); until.After(b.until) {
		b.until = until
	}
}

// Transport spends the budget for each request that goes through next. An answer 429, or 503 with a
// Retry-After (RFC 9110, section 10.2.3), pauses all calls.
func (b *Budget) Transport(next http.RoundTripper) http.RoundTripper { return budgeted{b, next} }

type budgeted struct {
	*Budget
	next http.RoundTripper
}

func (b budgeted) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := b.Wait(r.Context()); err != nil {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, err
	}
	response, err := b.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if after := response.Header.Get("Retry-After"); response.StatusCode == http.StatusTooManyRequests || response.StatusCode == http.StatusServiceUnavailable && after != "" {
		seconds, _ := strconv.Atoi(after)
		b.Pause(time.Duration(min(max(seconds, 0), int(maxPause/time.Second))) * time.Second)
	}
	return response, nil
}

// NewClient returns a client of a platform's API that spends a budget. A server that can answer in
// the platform's place decides which machine joins. So the client accepts only certificates of the
// roots (nil: those of the system), and follows no redirect. Parse the URL with ParseEndpoint,
// which requires https.
func NewClient(roots *x509.CertPool, budget *Budget) *http.Client {
	transport := NewTransport(roots)
	transport.ResponseHeaderTimeout = answerTimeout
	return &http.Client{Transport: budget.Transport(transport), CheckRedirect: NoRedirect}
}

// NewTransport returns a transport that accepts only certificates of the roots (nil: those of the
// system). It is for clients that NewClient does not suit.
func NewTransport(roots *x509.CertPool) *http.Transport {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	return transport
}

// NoRedirect is an http.Client.CheckRedirect that follows no redirect. The caller gets the answer
// with the redirect's status.
func NoRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Roots returns the CA certificates in a file in PEM, at least one.
func Roots(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificate in PEM", file)
	}
	return roots, nil
}

// ParseEndpoint returns the URL of a platform's API: https, with a host, and without user, query
// and fragment.
func ParseEndpoint(endpoint string) (*url.URL, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("it is not an https URL with a host, and without user, query and fragment") // the URL may have a password
	}
	return u, nil
}

// ReadBody returns the body of an answer with the status 200, of at most limit bytes, and closes
// it. Other answers are errors: those of StatusError.
func ReadBody(response *http.Response, limit int64) ([]byte, error) {
	defer func() { _ = response.Body.Close() }()
	if err := StatusError(response); err != nil {
		return nil, err
	}
	body, err := bounded.ReadAll(response.Body, limit)
	if err != nil {
		return nil, fmt.Errorf("the answer: %w", err)
	}
	return body, nil
}

// StatusError returns the error of an answer without the status 200. It is ErrPaused if the
// platform says that there are too many calls. It does not read the body.
func StatusError(response *http.Response) error {
	switch status := response.StatusCode; {
	case status == http.StatusOK:
		return nil
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable && response.Header.Get("Retry-After") != "":
		return fmt.Errorf("%w: %s", ErrPaused, response.Status)
	case status >= 300 && status < 400:
		return fmt.Errorf("%s: redirects are not followed", response.Status)
	case status == http.StatusUnauthorized:
		return fmt.Errorf("%s: the credential is wrong, or expired", response.Status)
	case status == http.StatusForbidden:
		return fmt.Errorf("%s: the credential lacks a right", response.Status)
	}
	return errors.New(response.Status)
}

// Match returns the groups of a regular expression that a provider ID must match. The expression
// must begin with ^ and end with $.
func Match(providerID string, form *regexp.Regexp) ([]string, error) {
	if len(providerID) <= maxProviderID {
		if parts := form.FindStringSubmatch(providerID); parts != nil {
			return parts[1:], nil
		}
	}
	return nil, fmt.Errorf("the provider ID %.128q does not have the form %s", providerID, form)
}
