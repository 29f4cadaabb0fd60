// SPDX-License-Identifier: Apache-2.0

package ec2

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/stscall"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
)

const (
	// apiVersion is that of the EC2 Query API.
	apiVersion = "2016-11-15"
	// maxAnswer and maxErrorAnswer bound answers, in bytes. 200 instances with many network
	// interfaces and tags have some MiB.
	maxAnswer, maxErrorAnswer = 16 << 20, 16 << 10
)

// throttled are EC2's error codes for too many calls. Their status is 503 or 400 ("Error codes for
// the Amazon EC2 API").
var throttled = []string{"RequestLimitExceeded", "Throttling", "ThrottlingException"}

var codeForm = regexp.MustCompile(`^[A-Za-z.]{1,64}$`)

// Config says which EC2 is asked, and as whom.
type Config struct {
	// Region is the one whose instances are asked about.
	Region string
	// Endpoint is the https URL of EC2. Default: that of the region.
	Endpoint string
	// Credentials sign the calls.
	Credentials aws.CredentialsProvider
	// Roots are the CAs of EC2. Default: those of the system.
	Roots *x509.CertPool
}

// api makes calls of the EC2 Query API. The package service/ec2 of AWS's SDK has all 700 of them,
// and takes minutes to compile.
type api struct {
	client      *http.Client
	budget      *platformkit.Budget
	endpoint    string
	region      string
	credentials aws.CredentialsProvider
	signer      *v4.Signer
}

func newAPI(c Config, budget *platformkit.Budget) (*api, error) {
	endpoint, err := endpointOf("ec2", c.Region, c.Endpoint)
	if err != nil {
		return nil, err
	}
	return &api{platformkit.NewClient(c.Roots, budget), budget, endpoint, c.Region, c.Credentials, v4.NewSigner()}, nil
}

// endpointOf returns the URL of a service in a region, unless another is configured.
func endpointOf(service, region, configured string) (string, error) {
	partition, err := stscall.PartitionOf(region)
	if err != nil {
		return "", err
	}
	if configured == "" {
		return partition.ServiceURL(service, region), nil
	}
	u, err := platformkit.ParseEndpoint(configured)
	if err != nil {
		return "", err
	}
	return u.JoinPath("/").String(), nil
}

// call makes a signed call, and parses the answer.
func (a *api) call(ctx context.Context, action string, parameters url.Values, into any) error {
	body := "Action=" + action + "&Version=" + apiVersion + "&" + parameters.Encode()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, a.endpoint, strings.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded; charset=utf-8")
	credentials, err := a.credentials.Retrieve(ctx)
	if err != nil {
		return fmt.Errorf("credentials: %w", err)
	}
	hash := sha256.Sum256([]byte(body))
	if err := a.signer.SignHTTP(ctx, credentials, request, hex.EncodeToString(hash[:]), "ec2", a.region, time.Now()); err != nil {
		return fmt.Errorf("%s: sign: %w", action, err)
	}
	// net/http does not send this header. With it, net/http may send the call again on a new
	// connection if EC2 has closed the old one. That is safe, because the call only reads.
	request.Header["Idempotency-Key"] = nil
	response, err := a.client.Do(request)
	if err != nil {
		return fmt.Errorf("%s: %w", action, err)
	}
	answer, err := a.read(response)
	if err != nil {
		return fmt.Errorf("%s: %w", action, err)
	}
	if err := xml.Unmarshal(answer, into); err != nil {
		return fmt.Errorf("%s: the answer is not the XML of EC2", action)
	}
	return nil
}

// read returns the body of an answer. The error has EC2's code, and not its message: that is long.
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
		XMLName xml.Name `xml:"Response"`
		Code    string   `xml:"Errors>Error>Code"`
	}
	switch malformed := xml.Unmarshal(body, &failure); {
	case malformed != nil || !codeForm.MatchString(failure.Code):
		return nil, err
	case slices.Contains(throttled, failure.Code):
		a.budget.Pause(0)
		return nil, fmt.Errorf("%w: %s", platformkit.ErrPaused, failure.Code)
	}
	return nil, fmt.Errorf("%w (%s)", err, failure.Code)
}
