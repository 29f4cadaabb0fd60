// SPDX-License-Identifier: Apache-2.0

package ec2

import (
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
)

const (
	role  = "arn:aws:iam::123456789012:role/node-attestation"
	token = "header.secret.signature"
)

// environment starts STS and a Pod Identity Agent, and returns the variables of both kinds of
// credentials, of which one may be set.
func environment(t *testing.T, i *imitation) (irsa, podIdentity map[string]string) {
	t.Helper()
	sts := platformkittest.NewServer(t, i.ec2.AWS.STS())
	agent := platformkittest.NewServer(t, i.ec2.AWS.PodIdentityAgent("node-attestation", token))
	dir := t.TempDir()
	var bundle []byte
	for _, server := range []*platformkittest.Server{i.server, sts, agent} {
		pem, err := os.ReadFile(server.CAFile)
		if err != nil {
			t.Fatal(err)
		}
		bundle = append(bundle, pem...)
	}
	ca, tokenFile := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token")
	for file, content := range map[string][]byte{ca: bundle, tokenFile: []byte(token + "\n")} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	both := map[string]string{"AWS_REGION": region, "AWS_ENDPOINT_URL_EC2": i.server.URL, "AWS_CA_BUNDLE": ca}
	irsa, podIdentity = maps.Clone(both), maps.Clone(both)
	maps.Copy(irsa, map[string]string{"AWS_ROLE_ARN": role, "AWS_WEB_IDENTITY_TOKEN_FILE": tokenFile, "AWS_ENDPOINT_URL_STS": sts.URL})
	maps.Copy(podIdentity, map[string]string{
		"AWS_CONTAINER_CREDENTIALS_FULL_URI": agent.URL + "/v1/credentials", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": tokenFile,
	})
	return irsa, podIdentity
}

func lookup(variables map[string]string) func(string) string {
	return func(name string) string { return variables[name] }
}

// Both kinds of credentials sign calls. A wrong token is refused, and no error shows it.
func TestCredentials(t *testing.T) {
	t.Parallel()
	i := newImitation(t)
	i.Launch("a", platformkittest.TPM{Number: 1})
	i.ec2.AWS.Trust(role, token)
	irsa, podIdentity := environment(t, i)
	for name, variables := range map[string]map[string]string{"IRSA": irsa, "Pod Identity": podIdentity} {
		trust, err := open(lookup(variables))
		if err != nil {
			t.Fatal(err)
		}
		m := i.Machine("a")
		for range 2 { // the second time with the same credentials
			if answers, err := trust.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{m}); err != nil || len(answers[m].EKs) != 2 {
				t.Errorf("%s: %v, %v", name, answers, err)
			}
		}

		wrong := filepath.Join(t.TempDir(), "token")
		for content, says := range map[string]string{"other-secret": "400 Bad Request", "": "has none", "other secret": "has none", "other-secret\nother": "has none"} {
			if err := os.WriteFile(wrong, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, variable := range []string{"AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"} {
				if variables[variable] != "" {
					variables[variable] = wrong
				}
			}
			if trust, err = open(lookup(variables)); err != nil {
				t.Fatal(err)
			}
			_, err = trust.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{m})
			if err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s with the token %q: %v", name, content, err)
			}
		}
	}
}

// An answer without credentials that are valid now is refused.
func TestCredentialAnswers(t *testing.T) {
	t.Parallel()
	i := newImitation(t)
	_, podIdentity := environment(t, i)
	var answer string
	agent := platformkittest.NewServer(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(answer)) }))
	podIdentity["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = agent.URL
	for _, answer = range []string{
		`{}`, `secret`, `{"AccessKeyId":"A","SecretAccessKey":"secret","Token":"secret","Expiration":"2001-01-01T00:00:00Z"}`,
		`{"AccessKeyId":"A","SecretAccessKey":"secret","Expiration":"2999-01-01T00:00:00Z"}`, `{"AccessKeyId":"A","SecretAccessKey":["secret"]}`,
	} {
		roots, err := platformkit.Roots(agent.CAFile)
		if err != nil {
			t.Fatal(err)
		}
		credentials, err := credentialsOf(lookup(podIdentity), region, roots)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := credentials.Retrieve(t.Context()); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", answer, err)
		}
	}
}

// A wrong setting is refused at the start, by the name of its variable.
func TestOpen(t *testing.T) {
	t.Parallel()
	irsa, podIdentity := environment(t, newImitation(t))
	if _, err := open(lookup(irsa)); err != nil {
		t.Fatal(err)
	}
	if _, err := open(lookup(podIdentity)); err != nil {
		t.Fatal(err)
	}
	for _, agent := range []string{"http://169.254.170.23/v1/credentials", "http://[fd00:ec2::23]/v1/credentials"} {
		if err := checkAgent(agent); err != nil {
			t.Errorf("%s: %v", agent, err)
		}
	}
	for _, c := range []struct {
		from     map[string]string
		variable string
		values   []string
	}{
		{irsa, "AWS_REGION", []string{"", "eu-west", "mars-west-1", "eu-west-1a", "eu-west-1.example.com"}},
		{irsa, "AWS_ENDPOINT_URL_EC2", []string{"http://ec2.example.com", "ec2.example.com", "https://user@ec2.example.com", "https://ec2.example.com?a"}},
		{irsa, "AWS_ENDPOINT_URL_STS", []string{"http://sts.example.com"}},
		{irsa, "AWS_CA_BUNDLE", []string{"/nonexistent", "/dev/null"}},
		{irsa, "AWS_ROLE_ARN", []string{"", "arn:aws:iam::1:role/a", "arn:aws:sts::123456789012:assumed-role/a/b", role + "\n"}},
		{irsa, "AWS_WEB_IDENTITY_TOKEN_FILE", []string{""}},
		{irsa, "AWS_CONTAINER_CREDENTIALS_FULL_URI", []string{"https://127.0.0.1"}},
		{irsa, "AWS_ROLE_SESSION_NAME", []string{"a b", "a"}},
		{podIdentity, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", []string{""}},
		{podIdentity, "AWS_CONTAINER_CREDENTIALS_FULL_URI", []string{
			"", "http://127.0.0.1/v1/credentials", "http://169.254.169.254/v1/credentials", "http://agent.example.com", "http://user@169.254.170.23/", "file:///etc/passwd",
		}},
	} {
		for _, value := range c.values {
			variables := maps.Clone(c.from)
			variables[c.variable] = value
			if _, err := open(lookup(variables)); err == nil || !strings.Contains(err.Error(), c.variable) || strings.ContainsAny(err.Error(), "\n") {
				t.Errorf("%s=%q: %v", c.variable, value, err)
			}
		}
	}
}
