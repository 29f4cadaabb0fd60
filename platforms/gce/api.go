// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/oauth2"
	"golang.org/x/oauth2/google"
	"golang.org/x/sync/singleflight"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
)

const (
	defaultEndpoint = "https://compute.googleapis.com"
	scope           = "https://www.googleapis.com/auth/compute.readonly"
	// callsPerSecond leaves a part of a project's read quota to others. burst is for a list of
	// zones.
	callsPerSecond, burst = 15, 30
	// maxAnswer, maxErrorAnswer and maxConfiguration bound answers and the credential's file, in
	// bytes.
	maxAnswer, maxErrorAnswer, maxConfiguration = 4 << 20, 16 << 10, 64 << 10
	// tokenTimeout bounds a call that gets a token.
	tokenTimeout = 10 * time.Second
)

// throttled are Compute Engine's error reasons for too many calls. Their status is 403 ("API rate
// quota").
var throttled = []string{"rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED"}

var reasonForm = regexp.MustCompile(`^[A-Za-z_]{1,64}$`)

// Config says which Compute Engine is asked, and as whom.
type Config struct {
	// Projects are the IDs of the projects whose instances are asked about.
	Projects []string
	// Endpoint is the https URL of Compute Engine. Default: https://compute.googleapis.com.
	Endpoint string
	// Tokens are access tokens.
	Tokens oauth2.TokenSource
	// Roots are the CAs of Compute Engine. Default: those of the system.
	Roots *x509.CertPool
}

// Open implements clusterapi.OpenPlatform. It reads the environment variables that
// docs/platforms/gce.md lists.
func Open(context.Context, manager.Manager) (clusterapi.EKTrust, error) { return open(os.Getenv) }

func open(getenv func(string) string) (clusterapi.EKTrust, error) {
	c := Config{Projects: strings.FieldsFunc(getenv("GCE_PROJECTS"), func(r rune) bool { return r == ',' || r == ' ' }), Endpoint: getenv("GCE_ENDPOINT")}
	if file := getenv("GCE_CA_FILE"); file != "" {
		roots, err := platformkit.Roots(file)
		if err != nil {
			return nil, fmt.Errorf("GCE_CA_FILE: %w", err)
		}
		c.Roots = roots
	}
	var err error
	if c.Tokens, err = tokensOf(getenv("GOOGLE_APPLICATION_CREDENTIALS"), c.Roots); err != nil {
		return nil, fmt.Errorf("GOOGLE_APPLICATION_CREDENTIALS: %w", err)
	}
	trust, err := New(c, platformkit.Options{}, platformkit.NewBudget(callsPerSecond, burst))
	if err != nil {
		return nil, fmt.Errorf("GCE_PROJECTS, GCE_ENDPOINT: %w", err)
	}
	return trust, nil
}

// tokensOf returns the tokens of a Kubernetes service account. Without a file, GKE's metadata
// server has them (Workload Identity Federation for GKE). The file is the configuration of workload
// identity federation, which exchanges a projected token. The key of a Google service account is
// refused: it would have to be kept secret.
func tokensOf(file string, roots *x509.CertPool) (oauth2.TokenSource, error) {
	if file == "" {
		return google.ComputeTokenSource("", scope), nil
	}
	data, err := bounded.ReadFile(file, maxConfiguration)
	if err != nil {
		return nil, err
	}
	var configuration struct {
		Type             string `json:"type"`
		TokenURL         string `json:"token_url"`
		ImpersonationURL string `json:"service_account_impersonation_url"`
		Source           struct {
			File string `json:"file"`
		} `json:"credential_source"`
	}
	// The error of the parser may quote the file, and the file may be a key.
	if json.Unmarshal(data, &configuration) != nil || configuration.Type != string(google.ExternalAccount) || configuration.Source.File == "" {
		return nil, fmt.Errorf("%s is not a configuration of type %s with the file of a token", file, google.ExternalAccount)
	}
	if _, err := platformkit.ParseEndpoint(configuration.TokenURL); err != nil {
		return nil, fmt.Errorf("%s: token_url: %w", file, err)
	}
	if configuration.ImpersonationURL != "" {
		if _, err := platformkit.ParseEndpoint(configuration.ImpersonationURL); err != nil {
			return nil, fmt.Errorf("%s: service_account_impersonation_url: %w", file, err)
		}
	}
	client := platformkit.NewClient(roots, platformkit.NewBudget(1, 5))
	client.Transport, client.Timeout = onlyOK{client.Transport}, tokenTimeout
	ctx := context.WithValue(context.Background(), oauth2.HTTPClient, client)
	credentials, err := google.CredentialsFromJSONWithType(ctx, data, google.ExternalAccount, scope)
	if err != nil {
		return nil, fmt.Errorf("%s: it is not a valid configuration", file)
	}
	return credentials.TokenSource, nil
}

// onlyOK makes an error of each answer with another status than 200. Otherwise the error of package
// oauth2 would have the answer's text.
type onlyOK struct{ http.RoundTripper }

func (o onlyOK) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := o.RoundTripper.RoundTrip(r)
	if err == nil && response.StatusCode != http.StatusOK {
		_ = response.Body.Close()
		return nil, errors.New(response.Status)
	}
	return response, err
}

// api reads from the Compute Engine API.
type api struct {
	client *http.Client
	budget *platformkit.Budget
	root   *url.URL
	tokens oauth2.TokenSource
	// fetches has the call that gets a token, for which all calls wait.
	fetches singleflight.Group
}

func newAPI(c Config, budget *platformkit.Budget) (*api, error) {
	if c.Endpoint == "" {
		c.Endpoint = defaultEndpoint
	}
	endpoint, err := platformkit.ParseEndpoint(c.Endpoint)
	if err != nil {
		return nil, err
	}
	return &api{client: platformkit.NewClient(c.Roots, budget), budget: budget, root: endpoint.JoinPath("compute/v1"), tokens: c.Tokens}, nil
}

// authorize adds an access token to a request. A token source has no context: if the request's ends
// before there is a token, the call that gets one goes on.
func (a *api) authorize(request *http.Request) error {
	select {
	case fetched := <-a.fetches.DoChan("token", func() (any, error) { return a.tokens.Token() }):
		if fetched.Err != nil {
			return fmt.Errorf("token: %w", fetched.Err)
		}
		fetched.Val.(*oauth2.Token).SetAuthHeader(request)
		return nil
	case <-request.Context().Done():
		return fmt.Errorf("token: %w", request.Context().Err())
	}
}

// get reads a resource. The error is a *notFoundError if there is none.
func (a *api) get(ctx context.Context, path string, query url.Values, into any) error {
	u := a.root.JoinPath(path)
	u.RawQuery = query.Encode()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	if err := a.authorize(request); err != nil {
		return err
	}
	response, err := a.client.Do(request)
	if err != nil {
		return errors.Unwrap(err) // the caller names the resource
	}
	answer, err := a.read(response)
	if err != nil {
		return err
	}
	if json.Unmarshal(answer, into) != nil {
		return errors.New("the answer is not the JSON of Compute Engine")
	}
	return nil
}

// read returns the body of an answer. The error has the API's reason, and not its message: that is
// long.
func (a *api) read(response *http.Response) ([]byte, error) {
	err := platformkit.StatusError(response)
	if err == nil {
		return platformkit.ReadBody(response, maxAnswer)
	}
	body, unread := bounded.ReadAll(response.Body, maxErrorAnswer)
	_ = response.Body.Close()
	if unread != nil {
		return nil, err
	}
	var failure struct {
		Error struct {
			Errors []struct {
				Reason string `json:"reason"`
			} `json:"errors"`
		} `json:"error"`
	}
	malformed := json.Unmarshal(body, &failure)
	if malformed != nil || len(failure.Error.Errors) == 0 || !reasonForm.MatchString(failure.Error.Errors[0].Reason) {
		return nil, err
	}
	switch reason := failure.Error.Errors[0].Reason; {
	case response.StatusCode == http.StatusNotFound && reason == "notFound":
		return nil, &notFoundError{}
	case slices.Contains(throttled, reason):
		a.budget.Pause(0)
		return nil, fmt.Errorf("%w: %s", platformkit.ErrPaused, reason)
	default:
		return nil, fmt.Errorf("%w (%s)", err, reason)
	}
}
