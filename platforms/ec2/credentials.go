// SPDX-License-Identifier: Apache-2.0

package ec2

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
)

const (
	// callsPerSecond and burst are the bucket that EC2 has for each account and region
	// ("Request throttling for the Amazon EC2 API").
	callsPerSecond, burst = 20, 100
	// credentialTimeout bounds a call that gets credentials.
	credentialTimeout = 10 * time.Second
	// expiryWindow is how long before their expiry credentials are replaced.
	expiryWindow = 5 * time.Minute
	// maxToken and maxCredentials bound a token's file, and an answer with credentials, in bytes.
	maxToken, maxCredentials = 16 << 10, 64 << 10
)

var (
	roleForm    = regexp.MustCompile(`^arn:aws[a-z-]*:iam::[0-9]{12}:role/[!-~]{1,512}$`)
	sessionForm = regexp.MustCompile(`^[\w+=,.@-]{2,64}$`)
	// podIdentityAgents are the addresses of the EKS Pod Identity Agent on each node. They are the
	// only ones that get a token without TLS: packets to them do not leave the node.
	podIdentityAgents = []netip.Addr{netip.MustParseAddr("169.254.170.23"), netip.MustParseAddr("fd00:ec2::23")}
)

// Open implements clusterapi.OpenPlatform. It reads environment variables of AWS's own tools, which
// docs/platforms/ec2.md lists.
func Open(context.Context, manager.Manager) (clusterapi.EKTrust, error) { return open(os.Getenv) }

func open(getenv func(string) string) (clusterapi.EKTrust, error) {
	c := Config{Region: getenv("AWS_REGION"), Endpoint: getenv("AWS_ENDPOINT_URL_EC2")}
	if file := getenv("AWS_CA_BUNDLE"); file != "" {
		roots, err := platformkit.Roots(file)
		if err != nil {
			return nil, fmt.Errorf("AWS_CA_BUNDLE: %w", err)
		}
		c.Roots = roots
	}
	var err error
	if c.Credentials, err = credentialsOf(getenv, c.Region, c.Roots); err != nil {
		return nil, err
	}
	trust, err := New(c, platformkit.Options{}, platformkit.NewBudget(callsPerSecond, burst))
	if err != nil {
		return nil, fmt.Errorf("AWS_REGION, AWS_ENDPOINT_URL_EC2: %w", err)
	}
	return trust, nil
}

// credentialsOf returns the credentials of a Kubernetes service account: by IAM roles for service
// accounts (IRSA), or by EKS Pod Identity. No other kind is looked for. A fallback to the node's
// own role would hide a mistake, and a static key would have to be kept secret.
func credentialsOf(getenv func(string) string, region string, roots *x509.CertPool) (aws.CredentialsProvider, error) {
	role, tokenFile, agent := getenv("AWS_ROLE_ARN"), getenv("AWS_WEB_IDENTITY_TOKEN_FILE"), getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
	client := platformkit.NewClient(roots, platformkit.NewBudget(1, 5))
	var provider aws.CredentialsProviderFunc
	switch {
	case agent != "" && (role != "" || tokenFile != ""):
		return nil, errors.New("AWS_WEB_IDENTITY_TOKEN_FILE and AWS_CONTAINER_CREDENTIALS_FULL_URI: only one may be set")
	case agent != "":
		if err := checkAgent(agent); err != nil {
			return nil, fmt.Errorf("AWS_CONTAINER_CREDENTIALS_FULL_URI: %w", err)
		}
		if tokenFile = getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); tokenFile == "" {
			return nil, errors.New("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE: must be set")
		}
		if strings.HasPrefix(agent, "http:") {
			client = &http.Client{Transport: &http.Transport{}, CheckRedirect: platformkit.NoRedirect} // no proxy
		}
		provider = podIdentity{client, agent, tokenFile}.retrieve
	case !roleForm.MatchString(role) || tokenFile == "":
		return nil, errors.New("AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE, or AWS_CONTAINER_CREDENTIALS_FULL_URI: must be set, as EKS does for a service account with a role")
	default:
		sts, err := endpointOf("sts", region, getenv("AWS_ENDPOINT_URL_STS"))
		if err != nil {
			return nil, fmt.Errorf("AWS_REGION, AWS_ENDPOINT_URL_STS: %w", err)
		}
		session := getenv("AWS_ROLE_SESSION_NAME")
		if session == "" {
			session = "node-attestation-controller"
		}
		if !sessionForm.MatchString(session) {
			return nil, fmt.Errorf("AWS_ROLE_SESSION_NAME: %.64q is not the name of a session", session)
		}
		provider = webIdentity{client, sts, role, session, tokenFile}.retrieve
	}
	return aws.NewCredentialsCache(provider, func(o *aws.CredentialsCacheOptions) { o.ExpiryWindow = expiryWindow }), nil
}

// checkAgent returns an error for a URL that must not get a token.
func checkAgent(agent string) error {
	u, err := url.Parse(agent)
	if err != nil || u.User != nil {
		return errors.New("it is not a URL without a user")
	}
	if address, err := netip.ParseAddr(u.Hostname()); err == nil && u.Scheme == "http" {
		for _, known := range podIdentityAgents {
			if address == known {
				return nil
			}
		}
	}
	_, err = platformkit.ParseEndpoint(agent)
	return err
}

// webIdentity exchanges the projected token of the service account for credentials of a role
// ("AssumeRoleWithWebIdentity" in the STS API Reference).
type webIdentity struct {
	client                        *http.Client
	sts, role, session, tokenFile string
}

func (w webIdentity) retrieve(ctx context.Context) (aws.Credentials, error) {
	token, err := readToken(w.tokenFile)
	if err != nil {
		return aws.Credentials{}, err
	}
	form := url.Values{
		"Action": {"AssumeRoleWithWebIdentity"}, "Version": {"2011-06-15"}, "RoleArn": {w.role}, "RoleSessionName": {w.session}, "WebIdentityToken": {token},
	}
	var answer struct {
		XMLName     xml.Name   `xml:"AssumeRoleWithWebIdentityResponse"`
		Credentials credential `xml:"AssumeRoleWithWebIdentityResult>Credentials"`
	}
	header := http.Header{"Content-Type": {"application/x-www-form-urlencoded; charset=utf-8"}}
	if err := fetch(ctx, w.client, http.MethodPost, w.sts, form.Encode(), header, xml.Unmarshal, &answer); err != nil {
		return aws.Credentials{}, fmt.Errorf("STS: %w", err)
	}
	return answer.Credentials.check("STS")
}

// podIdentity asks the EKS Pod Identity Agent for the credentials of the service account.
type podIdentity struct {
	client           *http.Client
	agent, tokenFile string
}

func (p podIdentity) retrieve(ctx context.Context) (aws.Credentials, error) {
	token, err := readToken(p.tokenFile)
	if err != nil {
		return aws.Credentials{}, err
	}
	var answer credential
	if err := fetch(ctx, p.client, http.MethodGet, p.agent, "", http.Header{"Authorization": {token}}, json.Unmarshal, &answer); err != nil {
		return aws.Credentials{}, fmt.Errorf("EKS Pod Identity Agent: %w", err)
	}
	return answer.check("EKS Pod Identity Agent")
}

// credential has the fields of both services' answers.
type credential struct {
	AccessKeyID     string `json:"AccessKeyId" xml:"AccessKeyId"`
	SecretAccessKey string
	SessionToken    string `json:"Token"`
	Expiration      time.Time
}

// check returns the credentials if they are complete and have not ended.
func (c credential) check(source string) (aws.Credentials, error) {
	if c.AccessKeyID == "" || c.SecretAccessKey == "" || c.SessionToken == "" || !time.Now().Before(c.Expiration) {
		return aws.Credentials{}, fmt.Errorf("%s: the answer has no temporary credentials that are valid now", source)
	}
	return aws.Credentials{
		AccessKeyID: c.AccessKeyID, SecretAccessKey: c.SecretAccessKey, SessionToken: c.SessionToken, Source: source, CanExpire: true, Expires: c.Expiration,
	}, nil
}

// readToken reads a projected token. It is read for each call, since the kubelet replaces it.
func readToken(file string) (string, error) {
	token, err := bounded.ReadFile(file, maxToken)
	if err != nil {
		return "", fmt.Errorf("service account token: %w", err)
	}
	text := strings.TrimSpace(string(token))
	if text == "" || strings.ContainsFunc(text, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return "", fmt.Errorf("service account token: %s has none", file)
	}
	return text, nil
}

// fetch makes a call that gets credentials. Errors have nothing of the answer: it may be a secret.
func fetch(ctx context.Context, client *http.Client, method, to, body string, header http.Header, parse func([]byte, any) error, into any) error {
	ctx, cancel := context.WithTimeout(ctx, credentialTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, to, strings.NewReader(body))
	if err != nil {
		return err
	}
	request.Header = header
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	answer, err := platformkit.ReadBody(response, maxCredentials)
	if err != nil {
		return err
	}
	if parse(answer, into) != nil {
		return errors.New("the answer has another form than credentials")
	}
	return nil
}
