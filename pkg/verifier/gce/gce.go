// SPDX-License-Identifier: Apache-2.0

// Package gce verifies the evidence of provider gce: an instance identity token of Google Compute
// Engine. https://cloud.google.com/compute/docs/instances/verifying-instance-identity describes it.
//
// The token has what Google knows of the instance. It has no metadata attributes, labels or tags:
// the creator of an instance writes those, so they show no membership. The package has no access to
// them.
package gce

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

// Name is the provider's name in requests.
const Name = "gce"

const (
	// issuer is the claim iss of Google's tokens.
	issuer = "https://accounts.google.com"
	// algorithm is the only one that is accepted (RFC 7518, section 3.3).
	algorithm = "RS256"
)

// The forms of what a token names. A project may be scoped by a domain: example.com:project.
var (
	projectForm = regexp.MustCompile(`^([a-z0-9.-]{1,253}:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$`)
	labelForm   = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$`)
	idForm      = regexp.MustCompile(`^[1-9][0-9]{0,19}$`) // an unsigned number of 64 bits
)

// Config is the policy.
type Config struct {
	// ClusterUID is the UID of the controller's cluster.
	ClusterUID string
	// Projects are the IDs of the projects whose instances are accepted. If it is empty, each
	// project's are. An instance also needs a machine: its provider ID has the project, too.
	Projects []string
}

// Verifier verifies evidence. It does no I/O, and reads no clock.
type Verifier struct {
	clusterUID string
	projects   []string
}

// New copies and checks the policy.
func New(c Config) (*Verifier, error) {
	if err := cloud.CheckCluster(c.ClusterUID); err != nil {
		return nil, err
	}
	for i, project := range c.Projects {
		if !projectForm.MatchString(project) {
			return nil, fmt.Errorf("project %.64q: not the ID of a project", project)
		}
		if slices.Contains(c.Projects[:i], project) {
			return nil, fmt.Errorf("project %s: listed twice", project)
		}
	}
	return &Verifier{clusterUID: c.ClusterUID, projects: slices.Clone(c.Projects)}, nil
}

// UnknownKeyError means that the key set does not have the token's key. The set may be older than
// the token, so this is no verdict on the node.
type UnknownKeyError struct {
	// KeyID is the key ID in the token. The node chose it.
	KeyID string
}

func (e *UnknownKeyError) Error() string {
	return fmt.Sprintf("the key set has no key %.64q", e.KeyID)
}

// Verify verifies the evidence of a request with Google's keys. The error is a verifier.Refusals if
// the evidence is false, and an *UnknownKeyError if it cannot be judged with these keys.
func (v *Verifier) Verify(request verifier.Filed, keys KeySet) (*cloud.Verified, error) {
	// 1. The document is of this provider, for this cluster.
	statement, err := cloud.Open(request, Name, attestation.VersionGCE, v.clusterUID)
	if err != nil {
		return nil, err
	}

	// 2. Google signed the token. No claim is read before.
	keyID, err := parseHeader(statement.Bytes)
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonMalformed, "identity token: %v", err)
	}
	key := keys.find(keyID)
	if key == nil {
		return nil, &UnknownKeyError{keyID}
	}
	payload, err := open(statement.Bytes, key)
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonSignature, "identity token: not signed by the key that it names")
	}
	token, err := parseClaims(payload)
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonMalformed, "identity token: %v", err)
	}

	// 3. Google signed it for this request, just before it was filed.
	switch {
	case token.issuer != issuer:
		return nil, cloud.Refuse(cloud.ReasonSignature, "identity token: issued by %.64q, not %s", token.issuer, issuer)
	case !key.allows(token.issued, statement.Created):
		return nil, cloud.Refuse(cloud.ReasonSignature, "identity token: Google has withdrawn its key")
	case token.audience != statement.Binding.Audience():
		return nil, cloud.Refuse(cloud.ReasonRequest, "identity token: its audience is not this request")
	case statement.Created.After(token.expires):
		return nil, cloud.Refuse(cloud.ReasonAge, "identity token: expired before the request was filed")
	}
	if err := statement.CheckAge(token.issued); err != nil {
		return nil, err
	}

	// 4. It names an instance, in one of the projects.
	i, err := parseInstance(token.google)
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonInstance, "identity token: %v", err)
	}
	if len(v.projects) > 0 && !slices.Contains(v.projects, i.project) {
		return nil, cloud.Refuse(cloud.ReasonInstance, "the instance is in project %s, which is not listed", i.project)
	}
	return &cloud.Verified{
		// Names are reused after an instance is deleted. The ID is not.
		Instance:      attestation.Instance{Platform: Name, ID: i.id, Account: i.project},
		HasProviderID: func(providerID string) bool { return providerID == i.providerID() },
	}, nil
}

// parseHeader checks the form of a token, and returns the ID of the key that it names. A token is a
// JWS in compact serialization (RFC 7515, section 7.1), with the three header parameters of
// Google's tokens.
func parseHeader(token []byte) (keyID string, err error) {
	parts := bytes.Split(token, []byte("."))
	if len(parts) != 3 {
		return "", errors.New("not a JWS in compact serialization")
	}
	// Go's decoder ignores line breaks and, unless strict, the last bits: only the re-encoded text
	// shows that this is the one encoding.
	var header []byte
	for i, part := range parts {
		decoded, err := base64.RawURLEncoding.AppendDecode(nil, part)
		if err != nil || base64.RawURLEncoding.EncodeToString(decoded) != string(part) {
			return "", errors.New("not base64url without padding")
		}
		if i == 0 {
			header = decoded
		}
	}
	members, err := cloud.ParseObject(header)
	if err != nil {
		return "", fmt.Errorf("header: %w", err)
	}
	if len(members) != 3 {
		return "", errors.New("header: must have alg, kid and typ only")
	}
	for name, want := range map[string]string{"alg": algorithm, "typ": "JWT"} {
		if value, err := members.Text(name); err != nil || value != want {
			return "", fmt.Errorf("header: %s is not %s", name, want)
		}
	}
	if keyID, err = members.Text("kid"); err == nil {
		err = checkKeyID(keyID)
	}
	return keyID, err
}

// open returns the payload of a token that was signed with the key.
func open(token []byte, k *key) ([]byte, error) {
	signed, err := jose.ParseSignedCompact(string(token), []jose.SignatureAlgorithm{algorithm})
	if err != nil {
		return nil, err
	}
	return signed.Verify(k.public)
}

// claims are the claims of a token that count for each purpose (RFC 7519, section 4.1), and the
// member google, empty if the token does not have it.
type claims struct {
	issuer, audience string
	issued, expires  time.Time
	google           []byte
}

func parseClaims(payload []byte) (claims, error) {
	members, err := cloud.ParseObject(payload)
	if err != nil {
		return claims{}, err
	}
	by, noIssuer := members.Text("iss")
	audience, noAudience := members.Text("aud") // a list would have other readers, too
	issued, noIssued := members.Positive("iat")
	expires, noExpires := members.Positive("exp")
	if err := cmp.Or(noIssuer, noAudience, noIssued, noExpires); err != nil {
		return claims{}, err
	}
	return claims{by, audience, time.Unix(issued, 0), time.Unix(expires, 0), members["google"]}, nil
}

// instance is what a token says of the instance, in google.compute_engine.
type instance struct{ project, zone, name, id string }

// providerID is the spec.providerID of the instance's Node and Machine.
func (i instance) providerID() string {
	return fmt.Sprintf("gce://%s/%s/%s", i.project, i.zone, i.name)
}

var errNoInstance = errors.New("it does not name an instance of Compute Engine")

// parseInstance parses the member google of the claims. Other members, such as license_id, are
// ignored: they depend on what the creator of the instance chose.
func parseInstance(google []byte) (i instance, err error) {
	outer, err := cloud.ParseObject(google)
	if err != nil {
		return instance{}, errNoInstance
	}
	members, err := cloud.ParseObject(outer["compute_engine"])
	if err != nil {
		return instance{}, errNoInstance
	}
	for _, field := range []struct {
		name string
		form *regexp.Regexp
		into *string
	}{
		{"project_id", projectForm, &i.project},
		{"zone", labelForm, &i.zone},
		{"instance_name", labelForm, &i.name},
		{"instance_id", idForm, &i.id},
	} {
		value, err := members.Text(field.name)
		if err != nil {
			return instance{}, err
		}
		if !field.form.MatchString(value) {
			return instance{}, fmt.Errorf("%s is malformed", field.name)
		}
		*field.into = value
	}
	if _, err := strconv.ParseUint(i.id, 10, 64); err != nil {
		return instance{}, errors.New("instance_id is malformed")
	}
	_, err = members.Positive("project_number")
	return i, err
}
