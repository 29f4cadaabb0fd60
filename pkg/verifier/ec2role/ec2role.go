// SPDX-License-Identifier: Apache-2.0

// Package ec2role verifies the evidence of provider ec2-role: a signed request to AWS STS. Parse
// makes the request, the caller sends it, and Judge judges the answer. The package does no I/O, and
// reads no clock.
//
// The instance identity role is the role of EC2 itself. It has no trust policy, so nobody can
// assume it under a session name of their choice ("Instance identity roles" in the Amazon EC2 User
// Guide).
package ec2role

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/stscall"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

// Name is the provider's name in requests.
const Name = "ec2-role"

// platform is that of the instance. Provider ec2 vouches for the same instances, so it is the same.
const platform = "ec2"

// role is the name of the instance identity role in ARNs.
const role = "aws:ec2-instance"

// Config is the policy.
type Config struct {
	// ClusterUID is the UID of the controller's cluster.
	ClusterUID string
	// Regions are those of the instances. STS is only asked there, so it must not be empty.
	Regions []string
	// Accounts are the IDs of the accounts whose instances are accepted. If it is empty, each
	// account's are: then the machine alone decides.
	Accounts []string
}

// Verifier verifies evidence.
type Verifier struct {
	clusterUID        string
	regions, accounts []string
}

// New copies and checks the policy.
func New(c Config) (*Verifier, error) {
	if err := cloud.CheckCluster(c.ClusterUID); err != nil {
		return nil, err
	}
	if len(c.Regions) == 0 {
		return nil, errors.New("regions: must not be empty")
	}
	for i, region := range c.Regions {
		if _, err := stscall.PartitionOf(region); err != nil {
			return nil, err
		}
		if slices.Contains(c.Regions[:i], region) {
			return nil, fmt.Errorf("region %s: listed twice", region)
		}
	}
	for i, account := range c.Accounts {
		if !cloudname.IsAWSAccount(account) {
			return nil, fmt.Errorf("account %.64q: not the ID of an account", account)
		}
		if slices.Contains(c.Accounts[:i], account) {
			return nil, fmt.Errorf("account %s: listed twice", account)
		}
	}
	return &Verifier{clusterUID: c.ClusterUID, regions: slices.Clone(c.Regions), accounts: slices.Clone(c.Accounts)}, nil
}

// Call is a request to STS that a node signed. Nothing in it is verified before STS answers.
type Call struct {
	// Method is POST. URL is https, with a host of AWS in one of the policy's regions.
	Method, URL string
	// Header has all headers but Host and Content-Length. The nonce is the controller's own.
	Header http.Header
	// Body is the same for each request.
	Body string

	partition *stscall.Partition
}

// Parse returns the request to STS that shows which instance filed a CertificateSigningRequest. The
// error is a verifier.Refusals.
func (v *Verifier) Parse(request verifier.Filed) (*Call, error) {
	// 1. The document is of this provider, for this cluster.
	opened, err := cloud.Open(request, Name, attestation.VersionEC2Role, v.clusterUID)
	if err != nil {
		return nil, err
	}
	statement, err := stscall.Parse(opened.Bytes)
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonMalformed, "signed request to STS: %v", err)
	}

	// 2. The node signed it just before it filed the request. STS checks the date again.
	signed, err := statement.Time()
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonMalformed, "signed request to STS: %v", err)
	}
	if err := opened.CheckAge(signed); err != nil {
		return nil, err
	}

	// 3. It goes to a region of the policy. The host is AWS's, whatever the node says.
	if !slices.Contains(v.regions, statement.Region) {
		return nil, cloud.Refuse(cloud.ReasonInstance, "the instance is in region %s, which is not listed", statement.Region)
	}
	partition, err := stscall.PartitionOf(statement.Region)
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonMalformed, "signed request to STS: %v", err)
	}

	// 4. The nonce is made from the request as it was filed. If the node signed another one, STS
	// finds that the signature does not match.
	return &Call{
		Method: http.MethodPost, URL: partition.URL(statement.Region), Header: statement.Header(opened.Binding.Hex()),
		Body: stscall.Body, partition: partition,
	}, nil
}

// Judge returns the instance that STS names. The error is a verifier.Refusals if STS says that the
// evidence is false, and a plain error if the answer is no verdict on the node.
//
// A request may wait so long that STS no longer accepts its signature or credentials. Then it can
// never be accepted, so it is refused, and not left pending: the node files a new request after a
// short pause, long before its certificate ends.
func (v *Verifier) Judge(call *Call, status int, body []byte) (*cloud.Verified, error) {
	// 1. STS accepted the signature, and so the nonce.
	if status != http.StatusOK {
		return nil, judgeFailure(status, body)
	}
	caller, err := parseCaller(body)
	if err != nil {
		return nil, fmt.Errorf("STS: status 200: %w", err)
	}

	// 2. The caller is the instance identity role. Its session is the instance.
	if !cloudname.IsAWSAccount(caller.account) {
		return nil, cloud.Refuse(cloud.ReasonInstance, "STS names no account, but %.64q", caller.account)
	}
	prefix := "arn:" + call.partition.Name + ":sts::" + caller.account + ":assumed-role/" + role + "/"
	id, isInstance := strings.CutPrefix(caller.arn, prefix)
	if !isInstance {
		return nil, cloud.Refuse(cloud.ReasonInstance,
			"the caller %.160q is not the instance identity role of account %s in partition %s: an ordinary role is no evidence, because whoever may assume it chooses the session name",
			caller.arn, caller.account, call.partition.Name)
	}
	if !cloudname.IsEC2Instance(id) || caller.userID != caller.account+":"+role+":"+id {
		return nil, cloud.Refuse(cloud.ReasonInstance, "STS does not name one instance: ARN %.160q, user ID %.160q", caller.arn, caller.userID)
	}

	// 3. It is in one of the accounts.
	if len(v.accounts) > 0 && !slices.Contains(v.accounts, caller.account) {
		return nil, cloud.Refuse(cloud.ReasonInstance, "the instance is in account %s, which is not listed", caller.account)
	}
	return &cloud.Verified{
		Instance: attestation.Instance{Platform: platform, ID: id, Account: caller.account},
		// STS does not name the zone. The ID alone names the instance.
		HasProviderID: func(providerID string) bool {
			_, instance, ok := cloudname.ParseEC2ProviderID(providerID)
			return ok && instance == id
		},
	}, nil
}

// falseCodes are the error codes of STS that say that this request will never be accepted ("Common
// errors" in the STS API Reference). AccessDenied is not one: the policy of a VPC endpoint on the
// controller's way to STS gives it for each node, and the operator can mend that.
var falseCodes = map[string]string{
	"SignatureDoesNotMatch": "it was signed for another request, too long ago, or ahead of time",
	"InvalidClientTokenId":  "its credentials are not AWS's",
	"ExpiredToken":          "its credentials have expired",
	"ExpiredTokenException": "its credentials have expired",
	"RequestExpired":        "it was signed too long ago, or ahead of time",
	"IncompleteSignature":   "the signature is incomplete",
}

// judgeFailure returns the error for an answer that names no caller.
func judgeFailure(status int, body []byte) error {
	code, err := parseErrorCode(body)
	if err != nil { // perhaps a proxy's
		return fmt.Errorf("STS: status %d, without an error code of STS", status)
	}
	if meaning, ok := falseCodes[code]; ok && (status == http.StatusForbidden || status == http.StatusBadRequest) {
		// The message of STS is not repeated: it can quote the whole request.
		return cloud.Refuse(cloud.ReasonSignature, "STS refuses the signed request with %s: %s", code, meaning)
	}
	return fmt.Errorf("STS: status %d, error code %.64q", status, code)
}
