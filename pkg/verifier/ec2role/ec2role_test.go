// SPDX-License-Identifier: Apache-2.0

package ec2role

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/stscall"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

const (
	clusterUID = "some-cluster"
	account    = "123456789012"
	instanceID = "i-0123456789abcdef0"
)

// created is when the requests of the tests are filed. They are signed a second before.
var created = time.Date(2026, 11, 28, 12, 0, 1, 0, time.UTC)

func someStatement() stscall.Statement {
	return stscall.Statement{
		Region: "eu-west-1", Date: "20261128T120000Z", AccessKeyID: "ASIAEXAMPLEEXAMPLE12", SecurityToken: "IQoJb3JpZ2luX2Vj",
		Signature: strings.Repeat("0a", 32),
	}
}

func someVerifier(t testing.TB) *Verifier {
	t.Helper()
	v, err := New(Config{ClusterUID: clusterUID, Regions: []string{"eu-west-1", "us-east-1", "cn-north-1"}, Accounts: []string{account}})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// attempt is a request and its evidence. A test changes one part of it.
type attempt struct {
	statement []byte
	identity  attestation.Identity
	request   attestation.Request
	filed     verifier.Filed
}

func (a *attempt) file(t testing.TB) verifier.Filed {
	t.Helper()
	if a.identity.Statement == nil {
		a.identity.Statement = a.statement
	}
	var err error
	if a.request.Data, err = a.identity.Marshal(); err != nil {
		t.Fatal(err)
	}
	if a.filed.Request, err = a.request.Marshal(); err != nil {
		t.Fatal(err)
	}
	return a.filed
}

func someAttempt(t testing.TB, s stscall.Statement) *attempt {
	t.Helper()
	statement, err := s.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return &attempt{
		statement: statement,
		identity:  attestation.Identity{Version: attestation.VersionEC2Role, ClusterUID: clusterUID},
		request:   attestation.Request{PKCS10: []byte("PKCS#10"), Provider: Name},
		filed: verifier.Filed{
			Name: "node-csr-a", UID: "u", SignerName: "cluster.x-k8s.io/kube-apiserver-client-kubelet-ec2-role", Created: created,
			Usages: []string{"client auth", "digital signature"},
		},
	}
}

func TestParse(t *testing.T) {
	a := someAttempt(t, someStatement())
	call, err := someVerifier(t).Parse(a.file(t))
	if err != nil {
		t.Fatal(err)
	}
	nonce := attestation.Binding{
		Version: attestation.VersionEC2Role, ClusterUID: clusterUID, SignerName: a.filed.SignerName, Name: "node-csr-a",
		PKCS10: []byte("PKCS#10"), Usages: a.filed.Usages,
	}.Hex()
	if call.Method != http.MethodPost || call.URL != "https://sts.eu-west-1.amazonaws.com/" || call.Body != stscall.Body || call.Header.Get(stscall.NonceHeader) != nonce {
		t.Errorf("%+v, want nonce %s", call, nonce)
	}

	for _, c := range []struct {
		name   string
		change func(*attempt, *stscall.Statement)
		want   verifier.Reason
	}{
		{"oldest", func(_ *attempt, s *stscall.Statement) { s.Date = "20261128T115001Z" }, ""},
		{"newest", func(_ *attempt, s *stscall.Statement) { s.Date = "20261128T120201Z" }, ""},
		{"without cluster", func(a *attempt, _ *stscall.Statement) { a.identity.ClusterUID = "" }, ""},
		{"another provider", func(a *attempt, _ *stscall.Statement) { a.request.Provider = "ec2" }, cloud.ReasonMalformed},
		{"another version", func(a *attempt, _ *stscall.Statement) { a.identity.Version = attestation.VersionEC2 }, cloud.ReasonMalformed},
		{"another cluster", func(a *attempt, _ *stscall.Statement) { a.identity.ClusterUID = "x" }, cloud.ReasonCluster},
		{"another encoding", func(a *attempt, _ *stscall.Statement) { a.identity.Statement = append(a.statement, '\n') }, cloud.ReasonMalformed},
		{"no statement", func(a *attempt, _ *stscall.Statement) { a.identity.Statement = []byte("{}") }, cloud.ReasonMalformed},
		{"too old", func(_ *attempt, s *stscall.Statement) { s.Date = "20261128T115000Z" }, cloud.ReasonAge},
		{"ahead", func(_ *attempt, s *stscall.Statement) { s.Date = "20261128T120202Z" }, cloud.ReasonAge},
		{"no creation time", func(a *attempt, _ *stscall.Statement) { a.filed.Created = time.Time{} }, cloud.ReasonAge},
		{"another region", func(_ *attempt, s *stscall.Statement) { s.Region = "eu-west-2" }, cloud.ReasonInstance},
	} {
		s := someStatement()
		a := someAttempt(t, s)
		c.change(a, &s)
		a.statement, err = s.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		_, err := someVerifier(t).Parse(a.file(t))
		expect(t, c.name, err, c.want)
	}
}

// expect checks the reason of an error. No reason means no error.
func expect(t *testing.T, name string, err error, want verifier.Reason) {
	t.Helper()
	refusals, refused := errors.AsType[verifier.Refusals](err)
	switch {
	case want == "" && err != nil:
		t.Errorf("%s: %v", name, err)
	case want == wait && (err == nil || refused):
		t.Errorf("%s: %v, want a plain error", name, err)
	case want != "" && want != wait && (!refused || len(refusals) != 1 || refusals[0].Reason != want):
		t.Errorf("%s: %v, want %s", name, err, want)
	}
}

// wait stands for a plain error.
const wait verifier.Reason = "wait"

func TestJudge(t *testing.T) {
	const userID = account + ":aws:ec2-instance:" + instanceID
	arn := func(middle string) string { return "arn:aws:sts::" + account + ":" + middle }
	good := aws.CallerIdentity(arn("assumed-role/aws:ec2-instance/"+instanceID), userID, account)
	as := func(arn, userID, account string) string { return aws.CallerIdentity(arn, userID, account) }
	edit := func(from, to string) string {
		if !strings.Contains(good, from) {
			t.Fatalf("the answer has no %q", from)
		}
		return strings.Replace(good, from, to, 1)
	}
	const declaration = `<?xml version="1.0" encoding="UTF-8"?>`
	denied := func(code string) string { return aws.Error(code, "for a person") }
	for _, c := range []struct {
		name   string
		status int
		body   string
		want   verifier.Reason
	}{
		{"good", 200, good, ""},
		{"with declaration", 200, declaration + "\n" + good, ""},

		{"ordinary role", 200, as(arn("assumed-role/some-role/"+instanceID), "AROAEXAMPLE:"+instanceID, account), cloud.ReasonInstance},
		{"ordinary role, user ID of an instance", 200, as(arn("assumed-role/some-role/"+instanceID), userID, account), cloud.ReasonInstance},
		{"role that ends alike", 200, as(arn("assumed-role/x/aws:ec2-instance/"+instanceID), userID, account), cloud.ReasonInstance},
		{"role that begins alike", 200, as(arn("assumed-role/aws:ec2-instance2/"+instanceID), userID, account), cloud.ReasonInstance},
		{"user", 200, as("arn:aws:iam::"+account+":user/"+instanceID, "AIDAEXAMPLE", account), cloud.ReasonInstance},
		{"root", 200, as("arn:aws:iam::"+account+":root", account, account), cloud.ReasonInstance},
		{"iam, not sts", 200, as("arn:aws:iam::"+account+":assumed-role/aws:ec2-instance/"+instanceID, userID, account), cloud.ReasonInstance},
		{"no ARN", 200, as("arn", userID, account), cloud.ReasonInstance},
		{"ARN in a region", 200, edit("arn:aws:sts::", "arn:aws:sts:eu-west-1:"), cloud.ReasonInstance},
		{"another partition", 200, edit("arn:aws:", "arn:aws-cn:"), cloud.ReasonInstance},
		{"session is no instance", 200, strings.ReplaceAll(good, instanceID, "worker"), cloud.ReasonInstance},
		{"session has more", 200, strings.ReplaceAll(good, instanceID, instanceID+"/x"), cloud.ReasonInstance},
		{"user ID of another instance", 200, edit("ec2-instance:"+instanceID, "ec2-instance:i-0123456789abcdef1"), cloud.ReasonInstance},
		{"user ID in another account", 200, edit("<UserId>"+account, "<UserId>210987654321"), cloud.ReasonInstance},
		{"ARN in another account", 200, edit("sts::"+account, "sts::210987654321"), cloud.ReasonInstance},
		{"another account", 200, edit("<Account>"+account, "<Account>210987654321"), cloud.ReasonInstance},
		{"account not listed", 200, strings.ReplaceAll(good, account, "210987654321"), cloud.ReasonInstance},
		{"account malformed", 200, strings.ReplaceAll(good, account, "12345"), cloud.ReasonInstance},

		{"empty", 200, "", wait},
		{"no XML", 200, "{}", wait},
		{"login page of a proxy", 200, "<html><body>log in</body></html>", wait},
		{"cut off", 200, good[:len(good)-20], wait},
		{"another namespace", 200, edit("https://sts", "https://sns"), wait},
		{"no namespace", 200, edit(` xmlns="https://sts.amazonaws.com/doc/2011-06-15/"`, ""), wait},
		{"another element", 200, strings.ReplaceAll(good, "GetCallerIdentityResponse", "GetSessionTokenResponse"), wait},
		{"two answers", 200, good + good, wait},
		{"text after", 200, good + "x", wait},
		{"text before", 200, "x" + good, wait},
		{"text beside elements", 200, edit("<UserId>", "x<UserId>"), wait},
		{"two ARNs", 200, edit("<UserId>", "<Arn>x</Arn><UserId>"), wait},
		{"two results", 200, edit("<ResponseMetadata>", "<GetCallerIdentityResult></GetCallerIdentityResult><ResponseMetadata>"), wait},
		{"ARN in an ARN", 200, edit("<Arn>", "<Arn><Arn>x</Arn>"), wait},
		{"no ARN element", 200, strings.ReplaceAll(good, "Arn>", "Urn>"), wait},
		{"no user ID element", 200, strings.ReplaceAll(good, "UserId>", "User>"), wait},
		{"no account element", 200, strings.ReplaceAll(good, "Account>", "Count>"), wait},
		{"comment", 200, edit(instanceID, "i-<!-- -->0123456789abcdef0"), wait},
		{"directive", 200, "<!DOCTYPE x>" + good, wait},
		{"processing instruction", 200, "<?x y?>" + good, wait},
		{"declaration inside", 200, edit("<UserId>", declaration+"<UserId>"), wait},
		{"attribute", 200, edit("<Arn>", `<Arn x="y">`), wait},
		{"namespace again", 200, edit("<Arn>", `<Arn xmlns="https://sts.amazonaws.com/doc/2011-06-15/">`), wait},
		{"attribute in another namespace", 200, edit("<GetCallerIdentityResponse", `<GetCallerIdentityResponse x:xmlns="y"`), wait},
		{"attribute of the root", 200, edit("<GetCallerIdentityResponse", `<GetCallerIdentityResponse x="y"`), wait},
		{"too long", 200, good + strings.Repeat(" ", MaxAnswer), wait},
		{"an error with status 200", 200, denied("SignatureDoesNotMatch"), wait},
		{"good, but another status", 201, good, wait},

		{"another signature", 403, denied("SignatureDoesNotMatch"), cloud.ReasonSignature},
		{"unknown key", 403, denied("InvalidClientTokenId"), cloud.ReasonSignature},
		{"expired", 403, denied("ExpiredToken"), cloud.ReasonSignature},
		{"expired, 400", 400, denied("ExpiredToken"), cloud.ReasonSignature},
		{"incomplete", 400, denied("IncompleteSignature"), cloud.ReasonSignature},
		{"access denied", 403, denied("AccessDenied"), wait},
		{"region disabled", 403, denied("RegionDisabledException"), wait},
		{"throttled", 400, denied("Throttling"), wait},
		{"too many", 429, denied("SignatureDoesNotMatch"), wait},
		{"unavailable", 503, denied("ServiceUnavailable"), wait},
		{"unavailable, code of a refusal", 503, denied("SignatureDoesNotMatch"), wait},
		{"forbidden by a proxy", 403, "<html>SignatureDoesNotMatch</html>", wait},
		{"two codes", 403, strings.Replace(denied("ExpiredToken"), "<Message>", "<Code>Throttling</Code><Message>", 1), wait},
		{"no code", 403, denied(""), wait},
	} {
		v := someVerifier(t)
		call, err := v.Parse(someAttempt(t, someStatement()).file(t))
		if err != nil {
			t.Fatal(err)
		}
		verified, err := v.Judge(call, c.status, []byte(c.body))
		expect(t, c.name, err, c.want)
		if c.want != "" {
			if verified != nil {
				t.Errorf("%s: %+v beside an error", c.name, verified)
			}
			continue
		}
		if want := (attestation.Instance{Platform: "ec2", ID: instanceID, Account: account}); verified.Instance != want {
			t.Errorf("%s: %+v, want %+v", c.name, verified.Instance, want)
		}
		if !verified.HasProviderID("aws:///eusc-de-east-1a/"+instanceID) || verified.HasProviderID("aws:///eu-west-1a/i-0123456789abcdef1") || verified.HasProviderID("aws:///zz-99-99/"+instanceID) {
			t.Errorf("%s: another provider ID", c.name)
		}
	}
}

// TestNoAccount is for a policy that accepts each account.
func TestNoAccount(t *testing.T) {
	v, err := New(Config{ClusterUID: clusterUID, Regions: []string{"eu-west-1"}})
	if err != nil {
		t.Fatal(err)
	}
	call, err := v.Parse(someAttempt(t, someStatement()).file(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, account := range []string{"12345", "aws", "12345678901x"} {
		answer := aws.CallerIdentity("arn:aws:sts::"+account+":assumed-role/aws:ec2-instance/"+instanceID, account+":aws:ec2-instance:"+instanceID, account)
		_, err := v.Judge(call, 200, []byte(answer))
		expect(t, account, err, cloud.ReasonInstance)
	}
}

func TestOrdinaryRoleIsExplained(t *testing.T) {
	v := someVerifier(t)
	call, err := v.Parse(someAttempt(t, someStatement()).file(t))
	if err != nil {
		t.Fatal(err)
	}
	_, err = v.Judge(call, 200, []byte(aws.CallerIdentity("arn:aws:sts::"+account+":assumed-role/some-role/"+instanceID, "AROAEXAMPLE:"+instanceID, account)))
	if err == nil || !strings.Contains(err.Error(), "chooses the session name") {
		t.Errorf("%v", err)
	}
}

func TestNew(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"no cluster":        func(c *Config) { c.ClusterUID = "" },
		"cluster malformed": func(c *Config) { c.ClusterUID = "a b" },
		"no region":         func(c *Config) { c.Regions = nil },
		"unknown region":    func(c *Config) { c.Regions = []string{"xx-west-1"} },
		"region twice":      func(c *Config) { c.Regions = []string{"eu-west-1", "eu-west-1"} },
		"account malformed": func(c *Config) { c.Accounts = []string{"12345"} },
		"account twice":     func(c *Config) { c.Accounts = []string{account, account} },
	} {
		c := Config{ClusterUID: clusterUID, Regions: []string{"eu-west-1"}}
		change(&c)
		if _, err := New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	c := Config{ClusterUID: clusterUID, Regions: []string{"eu-west-1"}, Accounts: []string{account}}
	v, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	c.Regions[0], c.Accounts[0] = "us-east-1", "210987654321"
	if v.regions[0] != "eu-west-1" || v.accounts[0] != account {
		t.Error("the policy is not copied")
	}
}

// STS's own time is not in it.
func BenchmarkVerify(b *testing.B) {
	v, filed := someVerifier(b), someAttempt(b, someStatement()).file(b)
	answer := []byte(aws.CallerIdentity("arn:aws:sts::"+account+":assumed-role/aws:ec2-instance/"+instanceID, account+":aws:ec2-instance:"+instanceID, account))
	for b.Loop() {
		call, err := v.Parse(filed)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := v.Judge(call, http.StatusOK, answer); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzJudge(f *testing.F) {
	f.Add(200, []byte(aws.CallerIdentity("arn:aws:sts::"+account+":assumed-role/aws:ec2-instance/"+instanceID, account+":aws:ec2-instance:"+instanceID, account)))
	f.Add(403, []byte(aws.Error("SignatureDoesNotMatch", "for a person")))
	v := someVerifier(f)
	call, err := v.Parse(someAttempt(f, someStatement()).file(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		verified, err := v.Judge(call, status, body)
		if (verified == nil) == (err == nil) {
			t.Fatalf("%v, %v", verified, err)
		}
		if err == nil && (status != 200 || verified.Instance.Account != account || !cloudname.IsEC2Instance(verified.Instance.ID)) {
			t.Fatalf("status %d: %+v", status, verified.Instance)
		}
	})
}

func FuzzParse(f *testing.F) {
	good := someAttempt(f, someStatement())
	f.Add(good.statement)
	v := someVerifier(f)
	f.Fuzz(func(t *testing.T, statement []byte) {
		if len(statement) == 0 || len(statement) > 32<<10 {
			return
		}
		a := someAttempt(t, someStatement())
		a.identity.Statement = statement
		call, err := v.Parse(a.file(t))
		if err == nil && call.URL != "https://sts.eu-west-1.amazonaws.com/" && call.URL != "https://sts.us-east-1.amazonaws.com/" && call.URL != "https://sts.cn-north-1.amazonaws.com.cn/" {
			t.Fatalf("%s", call.URL)
		}
	})
}

// An answer that nests elements, or has very many, costs the controller little.
func TestHostileAnswers(t *testing.T) {
	t.Parallel()
	const head = `<GetCallerIdentityResponse xmlns="` + namespace + `">`
	var many strings.Builder
	for i := range maxElements {
		fmt.Fprintf(&many, "<a%d/>", i)
	}
	for name, body := range map[string]string{
		"too deep": head + strings.Repeat("<a>", maxDepth), "too many": head + many.String(),
	} {
		if _, err := parseTexts([]byte(body), "GetCallerIdentityResponse"); err == nil || !strings.Contains(err.Error(), "too many elements") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
