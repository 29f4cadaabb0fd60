// SPDX-License-Identifier: Apache-2.0

package aws

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"time"
)

// webIdentity is a token that a role trusts. Real tokens are JWTs of an issuer that IAM knows.
type webIdentity struct{ role, token string }

var roleForm = regexp.MustCompile(`^arn:(aws[a-z-]*):iam::([0-9]{12}):role/(.+)$`)

// Trust lets the bearer of a token assume a role, given by its ARN.
func (a *AWS) Trust(role, token string) {
	parts := roleForm.FindStringSubmatch(role)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.trusted[webIdentity{role, token}] = caller{
		arn: "arn:" + parts[1] + ":sts::" + parts[2] + ":assumed-role/" + parts[3] + "/", userID: "AROAEXAMPLEEXAMPLEEXA:", account: parts[2],
	}
}

// assumeRoleWithWebIdentity answers AssumeRoleWithWebIdentity, which is not signed.
func (a *AWS) assumeRoleWithWebIdentity(w http.ResponseWriter, r *http.Request, body string) {
	form, err := url.ParseQuery(body)
	session := form.Get("RoleSessionName")
	a.mu.Lock()
	who, known := a.trusted[webIdentity{form.Get("RoleArn"), form.Get("WebIdentityToken")}]
	a.mu.Unlock()
	switch {
	case err != nil || r.Method != http.MethodPost || form.Get("Version") != "2011-06-15" || len(session) < 2:
		writeError(w, http.StatusBadRequest, "ValidationError", "")
		return
	case r.Header.Get("Authorization") != "":
		writeError(w, http.StatusBadRequest, "InvalidAction", "")
		return
	case !known:
		writeError(w, http.StatusBadRequest, "InvalidIdentityToken", "Couldn't retrieve verification key from your identity provider")
		return
	}
	who.arn, who.userID = who.arn+session, who.userID+session
	c := a.issue(who)
	_, _ = io.WriteString(w, fmt.Sprintf(`<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <AssumeRoleWithWebIdentityResult>
    <SubjectFromWebIdentityToken>system:serviceaccount:node-attestation:node-attestation-controller</SubjectFromWebIdentityToken>
    <Audience>sts.amazonaws.com</Audience>
    <AssumedRoleUser>
      <Arn>%s</Arn>
      <AssumedRoleId>%s</AssumedRoleId>
    </AssumedRoleUser>
    <Credentials>
      <AccessKeyId>%s</AccessKeyId>
      <SecretAccessKey>%s</SecretAccessKey>
      <SessionToken>%s</SessionToken>
      <Expiration>%s</Expiration>
    </Credentials>
  </AssumeRoleWithWebIdentityResult>
  <ResponseMetadata>
    <RequestId>01234567-89ab-cdef-0123-456789abcdef</RequestId>
  </ResponseMetadata>
</AssumeRoleWithWebIdentityResponse>
`, escape(who.arn), escape(who.userID), c.AccessKeyID, c.SecretAccessKey, c.SessionToken, c.Expiration.Format(time.RFC3339)))
}

// PodIdentityAgent imitates the EKS Pod Identity Agent of a node, for one service account with a
// token. Real ones listen at http://169.254.170.23/v1/credentials.
func (a *AWS) PodIdentityAgent(role, token string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || r.URL.Path != "/v1/credentials" || r.Header.Get("Authorization") != token {
			http.Error(w, "Access Denied", http.StatusBadRequest)
			return
		}
		c := a.AssumeRole("aws", "123456789012", role, "eks-management-node-attes")
		_ = json.NewEncoder(w).Encode(map[string]string{ // the client may be gone
			"AccessKeyId": c.AccessKeyID, "SecretAccessKey": c.SecretAccessKey, "Token": c.SessionToken,
			"AccountId": "123456789012", "Expiration": c.Expiration.Format(time.RFC3339),
		})
	})
}
