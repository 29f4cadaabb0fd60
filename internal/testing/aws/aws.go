// SPDX-License-Identifier: Apache-2.0

// Package aws imitates the parts of AWS that vouch for EC2 instances: the metadata service of each
// instance, and STS behind TLS, which checks Signature Version 4. No real service was reached to
// make it: it follows AWS's documentation. A hop limit cannot be imitated.
package aws

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// Fault is what is wrong with STS.
type Fault int

// The faults. Lying names another instance than the one that signed.
const (
	None Fault = iota
	Down
	Slow
	Lying
	Redirecting
	InternalError
	Throttled
	TooLong
)

// LiedInstance is the instance that a lying STS names, in the caller's account.
const LiedInstance = "i-0badbadbadbadbad0"

// maxSkew is how far the date of a signature may be from the clock of AWS.
const maxSkew = 15 * time.Minute

// AWS is all of AWS. It may be used concurrently.
type AWS struct {
	listener net.Listener
	roots    *x509.CertPool

	mu sync.Mutex
	// clock is added to the time of STS.
	clock    time.Duration
	fault    Fault
	calls    int
	callers  map[string]caller // by access key ID
	sessions map[string]bool   // of IMDSv2
	trusted  map[webIdentity]caller
}

// Credentials are temporary ones.
type Credentials struct {
	AccessKeyID, SecretAccessKey, SessionToken string
	Expiration                                 time.Time
}

// caller is whom credentials belong to.
type caller struct {
	Credentials
	arn, userID, account string
}

// hosts are the names under which STS answers, with their region.
var hosts = map[string]string{
	"sts.eu-west-1.amazonaws.com": "eu-west-1", "sts.us-east-1.amazonaws.com": "us-east-1",
	"sts.cn-north-1.amazonaws.com.cn": "cn-north-1", "sts.us-gov-west-1.amazonaws.com": "us-gov-west-1",
}

// Unserved returns AWS whose STS the caller serves.
func Unserved() *AWS {
	return &AWS{roots: x509.NewCertPool(), callers: map[string]caller{}, sessions: map[string]bool{}, trusted: map[webIdentity]caller{}}
}

// STS is the service.
func (a *AWS) STS() http.Handler { return http.HandlerFunc(a.serveSTS) }

// New starts STS. The test ends it.
func New(t testing.TB) *AWS {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	for host := range hosts {
		template.DNSNames = append(template.DNSNames, host)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	a := Unserved()
	a.roots.AddCert(certificate)
	server := httptest.NewUnstartedServer(a.STS())
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	server.Config.ErrorLog = nil
	server.StartTLS()
	t.Cleanup(server.Close)
	a.listener = server.Listener
	return a
}

// Transport returns a transport to STS that trusts its CA, and reaches nothing else. Each name of
// STS leads to the one server.
func (a *AWS) Transport() *http.Transport {
	return &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: a.roots}, DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			host, port, _ := net.SplitHostPort(address)
			a.mu.Lock()
			down := a.fault == Down
			a.mu.Unlock()
			if _, known := hosts[host]; !known || port != "443" || down {
				return nil, &net.OpError{Op: "dial", Net: network, Err: fmt.Errorf("%s: no route to host", address)}
			}
			return (&net.Dialer{}).DialContext(ctx, network, a.listener.Addr().String())
		},
	}
}

// SetFault breaks STS, or mends it.
func (a *AWS) SetFault(f Fault) { a.mu.Lock(); defer a.mu.Unlock(); a.fault = f }

// SetClock sets how far STS's clock is ahead of ours.
func (a *AWS) SetClock(ahead time.Duration) { a.mu.Lock(); defer a.mu.Unlock(); a.clock = ahead }

// Calls returns how often STS was asked.
func (a *AWS) Calls() int { a.mu.Lock(); defer a.mu.Unlock(); return a.calls }

// AssumeRole returns credentials of an ordinary role. A principal that may assume it chooses the
// session name.
func (a *AWS) AssumeRole(partition, account, role, session string) Credentials {
	return a.issue(caller{
		arn:    "arn:" + partition + ":sts::" + account + ":assumed-role/" + role + "/" + session,
		userID: "AROAEXAMPLEEXAMPLEEXA:" + session, account: account,
	})
}

// UserSession returns credentials of a user, as GetSessionToken does.
func (a *AWS) UserSession(partition, account, user string) Credentials {
	return a.issue(caller{arn: "arn:" + partition + ":iam::" + account + ":user/" + user, userID: "AIDAEXAMPLEEXAMPLEEXA", account: account})
}

func (a *AWS) issue(c caller) Credentials {
	c.Credentials = Credentials{
		AccessKeyID: "ASIA" + strings.ToUpper(random(8)), SecretAccessKey: random(20), SessionToken: "IQoJb3JpZ2luX2Vj" + random(300) + "==",
		Expiration: time.Now().Add(6 * time.Hour).UTC().Truncate(time.Second),
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.callers[c.AccessKeyID] = c
	return c.Credentials
}

// Instance is an EC2 instance. It serves its metadata.
type Instance struct {
	AWS                                  *AWS
	Partition, Account, Region, Zone, ID string
	// Override replaces answers by path.
	Override map[string]string
}

// Credentials returns new credentials of the instance identity role.
func (i *Instance) Credentials() Credentials {
	return i.AWS.issue(caller{
		arn:    "arn:" + i.Partition + ":sts::" + i.Account + ":assumed-role/aws:ec2-instance/" + i.ID,
		userID: i.Account + ":aws:ec2-instance:" + i.ID, account: i.Account,
	})
}

// ServeHTTP is the metadata service, which requires IMDSv2.
func (i *Instance) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const session, ttl = "X-Aws-Ec2-Metadata-Token", "X-Aws-Ec2-Metadata-Token-Ttl-Seconds"
	a := i.AWS
	if r.URL.Path == "/latest/api/token" {
		// A request that came through a proxy gets no session ("How Instance Metadata Service
		// Version 2 works").
		if r.Method != http.MethodPut || r.Header.Get(ttl) == "" || r.Header.Get("X-Forwarded-For") != "" {
			http.Error(w, "Bad Request", http.StatusBadRequest)
			return
		}
		token := random(28) + "=="
		a.mu.Lock()
		a.sessions[token] = true
		a.mu.Unlock()
		_, _ = io.WriteString(w, token)
		return
	}
	a.mu.Lock()
	known := a.sessions[r.Header.Get(session)]
	a.mu.Unlock()
	if !known || r.Method != http.MethodGet {
		http.Error(w, "Unauthorized", http.StatusUnauthorized)
		return
	}
	answer, overridden := i.Override[r.URL.Path]
	if !overridden {
		switch r.URL.Path {
		case "/latest/meta-data/instance-id":
			answer = i.ID
		case "/latest/meta-data/placement/region":
			answer = i.Region
		case "/latest/meta-data/placement/availability-zone":
			answer = i.Zone
		case "/latest/meta-data/identity-credentials/ec2/security-credentials/ec2-instance":
			answer = i.Credentials().Metadata()
		default:
			http.NotFound(w, r)
			return
		}
	}
	_, _ = io.WriteString(w, answer)
}

// Metadata returns the credentials as the metadata service does.
func (c Credentials) Metadata() string {
	document, err := json.MarshalIndent(map[string]any{
		"Code": "Success", "LastUpdated": time.Now().UTC().Format(time.RFC3339), "Type": "AWS-HMAC",
		"AccessKeyId": c.AccessKeyID, "SecretAccessKey": c.SecretAccessKey, "Token": c.SessionToken,
		"Expiration": c.Expiration.Format(time.RFC3339),
	}, "", "  ")
	if err != nil {
		panic(err)
	}
	return string(document)
}

// serveSTS answers GetCallerIdentity ("GetCallerIdentity" and "Common errors" in the STS API
// Reference).
func (a *AWS) serveSTS(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	a.calls++
	fault, now := a.fault, time.Now().Add(a.clock)
	a.mu.Unlock()
	body, err := io.ReadAll(io.LimitReader(r.Body, 64<<10))
	if err != nil {
		writeError(w, http.StatusBadRequest, "InvalidAction", "")
		return
	}
	switch fault {
	case Slow:
		<-r.Context().Done()
		return
	case Redirecting:
		http.Redirect(w, r, "https://sts.us-east-1.amazonaws.com/", http.StatusTemporaryRedirect)
		return
	case InternalError:
		writeError(w, http.StatusInternalServerError, "InternalFailure", "")
		return
	case Throttled:
		writeError(w, http.StatusBadRequest, "Throttling", "Rate exceeded")
		return
	case TooLong:
		_, _ = io.WriteString(w, strings.Repeat(" ", 1<<20))
		return
	}
	if strings.HasPrefix(string(body), "Action=AssumeRoleWithWebIdentity&") {
		a.assumeRoleWithWebIdentity(w, r, string(body))
		return
	}
	who, code, message := a.authenticate(r, body, now, "sts", hosts[r.Host])
	switch {
	case code == "IncompleteSignature":
		writeError(w, http.StatusBadRequest, code, message)
	case code != "":
		writeError(w, http.StatusForbidden, code, message)
	case r.Method != http.MethodPost || r.URL.Path != "/" || string(body) != "Action=GetCallerIdentity&Version=2011-06-15":
		writeError(w, http.StatusBadRequest, "InvalidAction", "")
	default:
		if fault == Lying {
			who.arn = who.arn[:strings.LastIndexByte(who.arn, '/')+1] + LiedInstance
			who.userID = who.account + ":aws:ec2-instance:" + LiedInstance
		}
		_, _ = io.WriteString(w, CallerIdentity(who.arn, who.userID, who.account))
	}
}

// authenticate returns who signed a request to a service in a region, or the code and message of an
// error.
func (a *AWS) authenticate(r *http.Request, body []byte, now time.Time, service, region string) (who caller, code, message string) {
	if r.Header.Get("Authorization") == "" {
		return who, "MissingAuthenticationToken", "Request is missing Authentication Token"
	}
	signed, ok := parseAuthorization(r.Header.Get("Authorization"))
	if !ok || !signed.covers(r) {
		return who, "IncompleteSignature", ""
	}
	a.mu.Lock()
	who, known := a.callers[signed.accessKeyID]
	a.mu.Unlock()
	date, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
	switch {
	case !known || r.Header.Get("X-Amz-Security-Token") != who.SessionToken:
		return who, "InvalidClientTokenId", "The security token included in the request is invalid."
	case now.After(who.Expiration):
		return who, "ExpiredToken", "The security token included in the request is expired"
	case err != nil || date.Format("20060102") != signed.day || signed.service != service || signed.region != region:
		return who, "SignatureDoesNotMatch", "Credential should be scoped to a valid region."
	case now.Sub(date) > maxSkew:
		return who, "SignatureDoesNotMatch", "Signature expired"
	case date.Sub(now) > maxSkew:
		return who, "SignatureDoesNotMatch", "Signature not yet current"
	case !hmac.Equal([]byte(signed.expected(r, body, who.SecretAccessKey)), []byte(signed.signature)):
		return who, "SignatureDoesNotMatch", "The request signature we calculated does not match the signature you provided."
	}
	return who, "", ""
}

// CallerIdentity returns an answer to GetCallerIdentity.
func CallerIdentity(arn, userID, account string) string {
	return fmt.Sprintf(`<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <GetCallerIdentityResult>
    <Arn>%s</Arn>
    <UserId>%s</UserId>
    <Account>%s</Account>
  </GetCallerIdentityResult>
  <ResponseMetadata>
    <RequestId>01234567-89ab-cdef-0123-456789abcdef</RequestId>
  </ResponseMetadata>
</GetCallerIdentityResponse>
`, escape(arn), escape(userID), escape(account))
}

// Error returns an error of STS.
func Error(code, message string) string {
	return fmt.Sprintf(`<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <Error>
    <Type>Sender</Type>
    <Code>%s</Code>
    <Message>%s</Message>
  </Error>
  <RequestId>01234567-89ab-cdef-0123-456789abcdef</RequestId>
</ErrorResponse>
`, escape(code), escape(message))
}

func writeError(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "text/xml")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, Error(code, message))
}

func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a Builder does not fail
	return b.String()
}

// random returns n random bytes in hex.
func random(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}
