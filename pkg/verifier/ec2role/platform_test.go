// SPDX-License-Identifier: Apache-2.0

package ec2role_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	awstest "github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/stscall"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sts"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	node "github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/ec2role"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2role"
)

const (
	clusterUID = "some-cluster"
	account    = "123456789012"
	instanceID = "i-0123456789abcdef0"
)

// enrolment is one request, from the metadata service to the verdict. A test changes one part.
type enrolment struct {
	platform *awstest.AWS
	instance *awstest.Instance
	// node is the request as the node signs it.
	node provider.Request
	// sign replaces the evidence of the provider.
	sign func(nonce string) stscall.Statement
	// file changes the request as it is filed.
	file func(*attestation.Request, *verifier.Filed)
	// call changes what the controller sends.
	call     func(*ec2role.Call)
	accounts []string
}

func someEnrolment(t *testing.T) *enrolment {
	t.Helper()
	platform := awstest.New(t)
	return &enrolment{
		platform: platform,
		instance: &awstest.Instance{AWS: platform, Partition: "aws", Account: account, Region: "eu-west-1", Zone: "eu-west-1a", ID: instanceID},
		node: provider.Request{
			PKCS10: []byte("PKCS#10"), Name: "node-csr-a", SignerName: node.SignerName, Usages: []string{"client auth", "digital signature"},
		},
		accounts: []string{account},
	}
}

// filed returns the request with its evidence.
func (e *enrolment) filed(t *testing.T) verifier.Filed {
	t.Helper()
	imds := httptest.NewServer(e.instance)
	defer imds.Close()
	p := node.Provider{Metadata: metadata.Client{Address: imds.Listener.Addr().String()}, ClusterUID: clusterUID}
	data, err := p.Evidence(t.Context(), e.node)
	if err != nil {
		t.Fatal(err)
	}
	if e.sign != nil {
		nonce := attestation.Binding{
			Version: attestation.VersionEC2Role, ClusterUID: clusterUID, SignerName: e.node.SignerName, Name: e.node.Name,
			PKCS10: e.node.PKCS10, Usages: e.node.Usages,
		}.Hex()
		statement, err := e.sign(nonce).Marshal()
		if err != nil {
			t.Fatal(err)
		}
		data, err = attestation.Identity{Version: attestation.VersionEC2Role, ClusterUID: clusterUID, Statement: statement}.Marshal()
		if err != nil {
			t.Fatal(err)
		}
	}
	request := attestation.Request{PKCS10: e.node.PKCS10, Provider: node.Name, Data: data}
	filed := verifier.Filed{Name: e.node.Name, UID: "u", SignerName: e.node.SignerName, Usages: e.node.Usages, Created: time.Now()}
	if e.file != nil {
		e.file(&request, &filed)
	}
	if filed.Request, err = request.Marshal(); err != nil {
		t.Fatal(err)
	}
	return filed
}

// judge is what the controller does.
func (e *enrolment) judge(ctx context.Context, t *testing.T, filed verifier.Filed) (*cloud.Verified, error) {
	t.Helper()
	v, err := ec2role.New(ec2role.Config{ClusterUID: clusterUID, Regions: []string{"eu-west-1", "us-east-1", "cn-north-1", "us-gov-west-1"}, Accounts: e.accounts})
	if err != nil {
		t.Fatal(err)
	}
	call, err := v.Parse(filed)
	if err != nil {
		return nil, err
	}
	if e.call != nil {
		e.call(call)
	}
	status, body, err := sts.Client{Transport: e.platform.Transport()}.Send(ctx, call)
	if err != nil {
		return nil, err
	}
	return v.Judge(call, status, body)
}

// signed signs like the provider, except for what a test changes.
func signed(c awstest.Credentials, nonce, region, service, url string, change func(*http.Request)) stscall.Statement {
	r, err := http.NewRequest(http.MethodPost, url, strings.NewReader(stscall.Body))
	if err != nil {
		panic(err)
	}
	r.Header = stscall.Unsigned(nonce)
	if change != nil {
		change(r)
	}
	now := time.Now().UTC()
	key := aws.Credentials{AccessKeyID: c.AccessKeyID, SecretAccessKey: c.SecretAccessKey, SessionToken: c.SessionToken}
	if err := v4.NewSigner().SignHTTP(context.Background(), key, r, stscall.BodySHA256, service, region, now); err != nil {
		panic(err)
	}
	authorization := r.Header.Get("Authorization")
	return stscall.Statement{
		Region: "eu-west-1", Date: now.Format(stscall.DateFormat), AccessKeyID: c.AccessKeyID, SecurityToken: c.SessionToken,
		Signature: authorization[len(authorization)-64:],
	}
}

const url = "https://sts.eu-west-1.amazonaws.com/"

func TestEnrolment(t *testing.T) {
	for _, partition := range []struct{ name, region, zone string }{
		{"aws", "eu-west-1", "eu-west-1a"}, {"aws-cn", "cn-north-1", "cn-north-1a"}, {"aws-us-gov", "us-gov-west-1", "us-gov-west-1a"},
	} {
		e := someEnrolment(t)
		e.instance.Partition, e.instance.Region, e.instance.Zone = partition.name, partition.region, partition.zone
		filed := e.filed(t)
		verified, err := e.judge(t.Context(), t, filed)
		if err != nil {
			t.Fatalf("%s: %v", partition.name, err)
		}
		if want := (attestation.Instance{Platform: "ec2", ID: instanceID, Account: account}); verified.Instance != want {
			t.Errorf("%s: %+v", partition.name, verified.Instance)
		}
		// The controller judges again before it signs, and after a restart.
		if _, err := e.judge(t.Context(), t, filed); err != nil {
			t.Errorf("%s: again: %v", partition.name, err)
		}
	}
}

func TestFalseEvidence(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		change func(*enrolment)
		want   verifier.Reason
	}{
		{"signed as the provider does", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				return signed(e.instance.Credentials(), nonce, "eu-west-1", "sts", url, nil)
			}
		}, ""},
		// Evidence that was copied from another request, or replayed.
		{"another name", func(e *enrolment) { e.file = func(_ *attestation.Request, f *verifier.Filed) { f.Name = "node-csr-b" } }, cloud.ReasonSignature},
		{"another key", func(e *enrolment) {
			e.file = func(r *attestation.Request, _ *verifier.Filed) { r.PKCS10 = []byte("another") }
		}, cloud.ReasonSignature},
		{"another signer", func(e *enrolment) { e.file = func(_ *attestation.Request, f *verifier.Filed) { f.SignerName += "x" } }, cloud.ReasonSignature},
		{"other usages", func(e *enrolment) {
			e.file = func(_ *attestation.Request, f *verifier.Filed) { f.Usages = f.Usages[:1] }
		}, cloud.ReasonSignature},
		{"another lifetime", func(e *enrolment) {
			e.file = func(_ *attestation.Request, f *verifier.Filed) { f.ExpirationSeconds = new(int32) }
		}, cloud.ReasonSignature},
		{"replayed later", func(e *enrolment) {
			e.file = func(_ *attestation.Request, f *verifier.Filed) { f.Created = f.Created.Add(11 * time.Minute) }
		}, cloud.ReasonAge},
		// Other callers.
		{"instance in another account", func(e *enrolment) { e.instance.Account = "210987654321" }, cloud.ReasonInstance},
		{"instance in another partition", func(e *enrolment) { e.instance.Partition = "aws-cn" }, cloud.ReasonInstance},
		{"ordinary role with the instance as session name", func(e *enrolment) {
			role := e.platform.AssumeRole("aws", account, "some-role", instanceID)
			e.sign = func(nonce string) stscall.Statement { return signed(role, nonce, "eu-west-1", "sts", url, nil) }
		}, cloud.ReasonInstance},
		{"user", func(e *enrolment) {
			user := e.platform.UserSession("aws", account, instanceID)
			e.sign = func(nonce string) stscall.Statement { return signed(user, nonce, "eu-west-1", "sts", url, nil) }
		}, cloud.ReasonInstance},
		// Other signatures.
		{"nonce not signed", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				return signed(e.instance.Credentials(), nonce, "eu-west-1", "sts", url, func(r *http.Request) { r.Header.Del(stscall.NonceHeader) })
			}
		}, cloud.ReasonSignature},
		{"another host signed", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				return signed(e.instance.Credentials(), nonce, "eu-west-1", "sts", "https://sts.us-east-1.amazonaws.com/", nil)
			}
		}, cloud.ReasonSignature},
		{"another path signed", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				return signed(e.instance.Credentials(), nonce, "eu-west-1", "sts", url+"x", nil)
			}
		}, cloud.ReasonSignature},
		{"another region in the scope", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				return signed(e.instance.Credentials(), nonce, "us-east-1", "sts", url, nil)
			}
		}, cloud.ReasonSignature},
		{"another region in the statement", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				s := signed(e.instance.Credentials(), nonce, "eu-west-1", "sts", url, nil)
				s.Region = "us-east-1"
				return s
			}
		}, cloud.ReasonSignature},
		{"another service", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				return signed(e.instance.Credentials(), nonce, "eu-west-1", "ec2", url, nil)
			}
		}, cloud.ReasonSignature},
		{"another date in the statement", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				s := signed(e.instance.Credentials(), nonce, "eu-west-1", "sts", url, nil)
				s.Date = time.Now().UTC().Add(-time.Minute).Format(stscall.DateFormat)
				return s
			}
		}, cloud.ReasonSignature},
		{"token of other credentials", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				s := signed(e.instance.Credentials(), nonce, "eu-west-1", "sts", url, nil)
				s.SecurityToken = e.instance.Credentials().SessionToken
				return s
			}
		}, cloud.ReasonSignature},
		{"another secret key", func(e *enrolment) {
			e.sign = func(nonce string) stscall.Statement {
				c := e.instance.Credentials()
				c.SecretAccessKey = "guessed"
				return signed(c, nonce, "eu-west-1", "sts", url, nil)
			}
		}, cloud.ReasonSignature},
		// The controller was away for longer than the signature or the credentials last.
		{"signature expired", func(e *enrolment) { e.platform.SetClock(20 * time.Minute) }, cloud.ReasonSignature},
		{"signature ahead", func(e *enrolment) { e.platform.SetClock(-20 * time.Minute) }, cloud.ReasonSignature},
		{"credentials expired", func(e *enrolment) { e.platform.SetClock(7 * time.Hour) }, cloud.ReasonSignature},
		// STS would refuse the call of a controller that forgot a check.
		{"body changed", func(e *enrolment) { e.call = func(c *ec2role.Call) { c.Body += "&x=y" } }, cloud.ReasonSignature},
		{"nonce left out", func(e *enrolment) { e.call = func(c *ec2role.Call) { c.Header.Del(stscall.NonceHeader) } }, cloud.ReasonSignature},
		{"token left out", func(e *enrolment) { e.call = func(c *ec2role.Call) { c.Header.Del(stscall.TokenHeader) } }, cloud.ReasonSignature},
		// STS is not itself.
		{"down", func(e *enrolment) { e.platform.SetFault(awstest.Down) }, wait},
		{"redirecting", func(e *enrolment) { e.platform.SetFault(awstest.Redirecting) }, wait},
		{"internal error", func(e *enrolment) { e.platform.SetFault(awstest.InternalError) }, wait},
		{"throttled", func(e *enrolment) { e.platform.SetFault(awstest.Throttled) }, wait},
		{"too long", func(e *enrolment) { e.platform.SetFault(awstest.TooLong) }, wait},
		{"plain HTTP", func(e *enrolment) {
			e.call = func(c *ec2role.Call) { c.URL = "http" + strings.TrimPrefix(c.URL, "https") }
		}, wait},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := someEnrolment(t)
			c.change(e)
			verified, err := e.judge(t.Context(), t, e.filed(t))
			refusals, refused := errors.AsType[verifier.Refusals](err)
			switch {
			case c.want == "" && err != nil:
				t.Error(err)
			case c.want != "" && verified != nil:
				t.Errorf("accepted as %+v", verified.Instance)
			case c.want == wait && (err == nil || refused):
				t.Errorf("%v, want a plain error", err)
			case c.want != "" && c.want != wait && (!refused || len(refusals) != 1 || refusals[0].Reason != c.want):
				t.Errorf("%v, want %s", err, c.want)
			}
		})
	}
}

// wait stands for a plain error: the request stays pending, and is judged later.
const wait verifier.Reason = "wait"

// TestLater shows that a request which waited for STS is accepted once STS is back.
func TestLater(t *testing.T) {
	e := someEnrolment(t)
	filed := e.filed(t)
	e.platform.SetFault(awstest.InternalError)
	if _, err := e.judge(t.Context(), t, filed); err == nil {
		t.Fatal("accepted without STS")
	}
	e.platform.SetFault(awstest.None)
	e.platform.SetClock(14 * time.Minute)
	if _, err := e.judge(t.Context(), t, filed); err != nil {
		t.Fatal(err)
	}
}

// TestLying shows what a lying STS can do: name another instance. It gets no further, because the
// machine has another provider ID.
func TestLying(t *testing.T) {
	e := someEnrolment(t)
	e.platform.SetFault(awstest.Lying)
	verified, err := e.judge(t.Context(), t, e.filed(t))
	if err != nil {
		t.Fatal(err)
	}
	if verified.Instance.ID != awstest.LiedInstance || verified.HasProviderID("aws:///eu-west-1a/"+instanceID) {
		t.Errorf("%+v", verified.Instance)
	}
}

// TestAnyAccount shows that an empty list accepts each account.
func TestAnyAccount(t *testing.T) {
	e := someEnrolment(t)
	e.accounts, e.instance.Account = nil, "210987654321"
	if verified, err := e.judge(t.Context(), t, e.filed(t)); err != nil || verified.Instance.Account != "210987654321" {
		t.Errorf("%v, %v", verified, err)
	}
}

// TestNoCallForOtherHosts shows that STS is not asked for what can be refused without it.
func TestNoCallForOtherHosts(t *testing.T) {
	e := someEnrolment(t)
	e.instance.Region, e.instance.Zone = "eu-west-2", "eu-west-2a"
	if _, err := e.judge(t.Context(), t, e.filed(t)); err == nil {
		t.Error("a region that is not listed is accepted")
	}
	if calls := e.platform.Calls(); calls != 0 {
		t.Errorf("%d calls", calls)
	}
}
