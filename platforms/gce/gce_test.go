// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/oauth2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// fixture has an instance "a" with a vTPM, and an adapter that reads its keys with each call.
type fixture struct {
	*imitation
	trust clusterapi.EKTrust
	eks   []tpm.Fingerprint
}

func newFixture(t *testing.T) fixture {
	t.Helper()
	i := newImitation(t)
	eks, _ := i.Launch("a", platformkittest.TPM{Number: 1})
	return fixture{i, i.Trust(t, platformkit.Options{Refresh: time.Nanosecond}, platformkit.NewBudget(1000, 1000)), eks}
}

// change changes the instance "a" in Compute Engine's answers.
func (f fixture) change(change func(*google.ComputeInstance)) {
	instance, _ := f.compute.Get(location("a"))
	change(&instance)
	f.compute.Put(instance)
}

func (f fixture) ask(t *testing.T, m clusterapi.PlatformMachine) (clusterapi.PlatformAnswer, bool, error) {
	t.Helper()
	answers, err := f.trust.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{m})
	answer, ok := answers[m]
	return answer, ok && !answer.Unknown, err
}

// Which answers have the keys of an instance, and which are errors.
func TestKeys(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*google.ComputeInstance)
		before bool // the instance was asked about before
		keys   int  // in the answer, -1 for none
		want   string
	}{
		"both":               {func(*google.ComputeInstance) {}, false, 2, ""},
		"without ECC":        {func(i *google.ComputeInstance) { i.ECCP256 = "" }, false, 1, ""},
		"without RSA":        {func(i *google.ComputeInstance) { i.RSA2048 = "" }, false, 1, ""},
		"no longer ECC":      {func(i *google.ComputeInstance) { i.ECCP256 = "" }, true, 2, "had an eccP256EncryptionKey"},
		"signing keys alone": {func(i *google.ComputeInstance) { i.RSA2048, i.ECCP256 = "", "" }, false, -1, "no key"},
		"none any more":      {func(i *google.ComputeInstance) { i.RSA2048, i.ECCP256 = "", "" }, true, 2, "no key"},
		"vTPM off":           {func(i *google.ComputeInstance) { i.VTPM = new(false) }, false, 0, ""},
		"vTPM switched off":  {func(i *google.ComputeInstance) { i.VTPM = new(false) }, true, 0, ""},
		"vTPM not mentioned": {func(i *google.ComputeInstance) { i.VTPM = nil }, true, -1, "does not say"},
		"a certificate": {func(i *google.ComputeInstance) {
			i.RSA2048 = strings.ReplaceAll(i.RSA2048, "PUBLIC KEY", "CERTIFICATE")
		}, false, -1, "PUBLIC KEY"},
		"two keys in one field": {func(i *google.ComputeInstance) { i.RSA2048 += i.ECCP256 }, false, -1, "one PEM block"},
		"without ID":            {func(i *google.ComputeInstance) { i.ID = "0" }, false, -1, "has no ID"},
	} {
		f := newFixture(t)
		if c.before {
			if _, known, err := f.ask(t, f.Machine("a")); !known || err != nil {
				t.Fatalf("%s: answered %v, %v", name, known, err)
			}
		}
		f.change(c.change)
		answer, known, err := f.ask(t, f.Machine("a"))
		if c.want == "" != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
		if known != (c.keys >= 0) || known && len(answer.EKs) != c.keys {
			t.Errorf("%s: %v, %v, want %d keys", name, known, answer, c.keys)
		}
		for _, ek := range answer.EKs {
			if !slices.Contains(f.eks, ek) {
				t.Errorf("%s: the answer has another key", name)
			}
		}
	}
}

// A name is used again. Keys that were read of the old instance are not those of the new one.
func TestReplacedWhileItsKeysAreRead(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.compute.AfterRead(func(google.ComputeInstance) {
		f.compute.AfterRead(nil)
		f.eks, _ = f.Launch("a", platformkittest.TPM{Number: 2})
	})
	answer, known, err := f.ask(t, f.Machine("a"))
	if known || err == nil || !strings.Contains(err.Error(), "was replaced") {
		t.Errorf("answered %v, %v, %v", known, answer, err)
	}
	if answer, known, err := f.ask(t, f.Machine("a")); err != nil || !known || !slices.Equal(answer.EKs, f.eks) {
		t.Errorf("afterwards: %v, %v, %v, want %v", known, answer, err, f.eks)
	}
}

// The vTPM may be another one after a start.
func TestKeysAfterAStart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.trust = f.Trust(t, platformkit.Options{}, platformkit.NewBudget(1000, 1000))
	if _, known, err := f.ask(t, f.Machine("a")); !known || err != nil {
		t.Fatal(known, err)
	}
	eks, _ := f.Change("a", platformkittest.TPM{Number: 2})
	if answer, _, err := f.ask(t, f.Machine("a")); err != nil || slices.Equal(answer.EKs, eks) {
		t.Fatalf("the keys were read again without a start: %v, %v", answer, err)
	}
	f.change(func(i *google.ComputeInstance) { i.LastStart = i.LastStart.Add(time.Hour) })
	if answer, _, err := f.ask(t, f.Machine("a")); err != nil || !slices.Equal(answer.EKs, eks) {
		t.Errorf("after a start: %v, %v, want %v", answer, err, eks)
	}
}

// Instances of two zones and of another project, more than a page has, and others that are in the
// zone.
func TestLists(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	var machines []clusterapi.PlatformMachine
	for n := range 1200 {
		i := google.ComputeInstance{Project: projectID, Zone: zone, Name: "m" + string(rune('a'+n%26)) + strings.Repeat("x", n/26), VTPM: new(true)}
		i.RSA2048 = encode(platformkittest.RSAKey(1000 + n))
		if n%100 < 5 {
			m := f.Machine(i.Name)
			if i.Zone = "europe-west1-c"; n < 600 {
				i.Zone, i.Project = zone, "other-project"
			}
			m.ProviderID = "gce://" + i.Project + "/" + i.Zone + "/" + i.Name
			machines = append(machines, m)
		} else if n > 1100 {
			machines = append(machines, f.Machine(i.Name))
		}
		f.compute.Put(i)
	}
	f.Server().Calls()
	answers, err := f.trust.EndorsementKeys(t.Context(), machines)
	if err != nil || len(answers) != len(machines) {
		t.Fatalf("%d answers for %d machines, %v", len(answers), len(machines), err)
	}
	for m, answer := range answers {
		if len(answer.EKs) != 1 {
			t.Errorf("%s: %v", m.ProviderID, answer)
		}
	}
	if calls, want := f.Server().Calls(), 3+1+1+2*len(machines); calls != want {
		t.Errorf("%d calls, want %d", calls, want)
	}
}

// An instance that a list has twice has no answer: which of them is meant is not clear.
func TestListedTwice(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.change(func(i *google.ComputeInstance) { i.Twice = true })
	var machines []clusterapi.PlatformMachine
	for n, name := range []string{"a", "b", "c", "d", "e"} {
		if name != "a" {
			f.Launch(name, platformkittest.TPM{Number: n + 10})
		}
		machines = append(machines, f.Machine(name))
	}
	answers, err := f.trust.EndorsementKeys(t.Context(), machines)
	if err == nil || !strings.Contains(err.Error(), "more than once") || len(answers) != 4 {
		t.Errorf("%v, %v", answers, err)
	}
	if _, has := answers[machines[0]]; has {
		t.Error("the instance that is listed twice has an answer")
	}
}

// An answer of another kind is a failed read: it does not say that the instances are gone.
func TestAnswerOfAnotherKind(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{"empty": "{}", "error": `{"error":{"code":500}}`, "null": "null", "a list": `{"kind":"compute#instanceAggregatedList"}`} {
		i := &imitation{compute: &google.Compute{}}
		i.server = platformkittest.NewServer(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(answer)) }))
		trust := i.Trust(t, platformkit.Options{}, platformkit.NewBudget(1000, 1000))
		var machines []clusterapi.PlatformMachine
		for _, instance := range []string{"a", "b", "c", "d", "e"} {
			machines = append(machines, i.Machine(instance))
		}
		for _, few := range []int{1, 5} {
			answers, err := trust.EndorsementKeys(t.Context(), machines[:few])
			if err == nil || len(answers) > 0 {
				t.Errorf("%s, %d machines: %v, %v", name, few, answers, err)
			}
		}
	}
}

// A token service that does not answer does not keep a call beyond its context.
func TestTokenThatHangs(t *testing.T) {
	t.Parallel()
	i := newImitation(t)
	end := make(chan struct{})
	defer close(end)
	roots, err := platformkit.Roots(i.server.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	trust, err := New(Config{Projects: []string{projectID}, Endpoint: i.server.URL, Roots: roots, Tokens: hangingTokens(end)}, platformkit.Options{}, platformkit.NewBudget(1000, 1000))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	asked := make(chan error)
	go func() {
		_, err := trust.EndorsementKeys(ctx, []clusterapi.PlatformMachine{i.Machine("a")})
		asked <- err
	}()
	select {
	case err := <-asked:
		if err == nil || !strings.Contains(err.Error(), "token: context deadline exceeded") {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("the call does not end")
	}
}

// hangingTokens gives no token until it is closed.
type hangingTokens chan struct{}

func (h hangingTokens) Token() (*oauth2.Token, error) {
	<-h
	return nil, errors.New("ended")
}

// configuration is that of workload identity federation, as gcloud writes it.
func configuration(t *testing.T, i *imitation) (variables map[string]string, change func(string, any)) {
	t.Helper()
	i.compute.SubjectToken = "header.projected.signature"
	tokens := platformkittest.NewServer(t, i.compute.Tokens())
	dir := t.TempDir()
	ca, token, file := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token"), filepath.Join(dir, "credential.json")
	var bundle []byte
	for _, server := range []*platformkittest.Server{i.server, tokens} {
		pem, err := os.ReadFile(server.CAFile)
		if err != nil {
			t.Fatal(err)
		}
		bundle = append(bundle, pem...)
	}
	write := func(file string, content []byte) {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(ca, bundle)
	write(token, []byte(i.compute.SubjectToken))
	settings := map[string]any{
		"type": "external_account", "audience": "//iam.googleapis.com/projects/123456789012/locations/global/workloadIdentityPools/management/providers/cluster",
		"subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "token_url": tokens.URL + "/v1/token", "credential_source": map[string]any{"file": token},
	}
	change = func(name string, value any) {
		changed := maps.Clone(settings)
		changed[name] = value
		data, err := json.Marshal(changed)
		if err != nil {
			t.Fatal(err)
		}
		write(file, data)
	}
	change("type", "external_account")
	return map[string]string{"GCE_PROJECTS": projectID, "GCE_ENDPOINT": i.server.URL, "GCE_CA_FILE": ca, "GOOGLE_APPLICATION_CREDENTIALS": file}, change
}

func lookup(variables map[string]string) func(string) string {
	return func(name string) string { return variables[name] }
}

// The projected token is exchanged for an access token, which makes calls. No error shows a token.
func TestCredential(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	variables, _ := configuration(t, f.imitation)
	var err error
	if f.trust, err = open(lookup(variables)); err != nil {
		t.Fatal(err)
	}
	if answer, known, err := f.ask(t, f.Machine("a")); err != nil || !known || !slices.Equal(answer.EKs, f.eks) {
		t.Errorf("%v, %v, %v", known, answer, err)
	}
	variables, _ = configuration(t, f.imitation)
	f.compute.SubjectToken = "another"
	if f.trust, err = open(lookup(variables)); err != nil {
		t.Fatal(err)
	}
	_, known, err := f.ask(t, f.Machine("a"))
	if known || err == nil || !strings.Contains(err.Error(), "400 Bad Request") || strings.Contains(err.Error(), "projected") {
		t.Errorf("with a token that is not accepted: %v, %v", known, err)
	}
}

// A wrong setting is refused at the start, by the name of its variable.
func TestOpen(t *testing.T) {
	t.Parallel()
	good, change := configuration(t, newImitation(t))
	if _, err := open(lookup(good)); err != nil {
		t.Fatal(err)
	}
	refused := func(variables map[string]string, variable, value string) {
		t.Helper()
		if _, err := open(lookup(variables)); err == nil || !strings.Contains(err.Error(), variable) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s=%s: %v", variable, value, err)
		}
	}
	for variable, values := range map[string][]string{
		"GCE_PROJECTS": {"", ",", "Example-project", "example-project,*", "projects/example-project"}, "GCE_ENDPOINT": {"http://compute.example.com", "compute.example.com"},
		"GCE_CA_FILE": {"/nonexistent", "/dev/null"}, "GOOGLE_APPLICATION_CREDENTIALS": {"/nonexistent", "/dev/null"},
	} {
		for _, value := range values {
			variables := maps.Clone(good)
			variables[variable] = value
			refused(variables, variable, value)
		}
	}
	for name, values := range map[string][]any{
		"type":                              {"service_account", "authorized_user", "", 1},
		"token_url":                         {"http://sts.googleapis.com/v1/token", "", "https://user@sts.googleapis.com"},
		"service_account_impersonation_url": {"http://iamcredentials.googleapis.com"},
		"credential_source":                 {map[string]any{"executable": map[string]any{"command": "/secret"}}, map[string]any{"url": "http://169.254.169.254/secret"}},
	} {
		for _, value := range values {
			change(name, value)
			refused(good, "GOOGLE_APPLICATION_CREDENTIALS", name)
		}
	}
	delete(good, "GOOGLE_APPLICATION_CREDENTIALS")
	if _, err := open(lookup(good)); err != nil { // GKE's metadata server
		t.Error(err)
	}
}
