// SPDX-License-Identifier: Apache-2.0

// Package ec2role is the node's half of provider ec2-role. Its evidence is a request to AWS STS
// that asks who signed it. The node signs it with the credentials of the instance identity role,
// which each EC2 instance has from its metadata service, and the controller sends it. A nonce in a
// signed header binds it to the CertificateSigningRequest.
//
// See "Instance identity roles" in the Amazon EC2 User Guide.
package ec2role

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/stscall"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
)

const (
	// Name is the provider's name in requests and in the configuration.
	Name = "ec2-role"
	// SignerName is the signer to request from.
	SignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-ec2-role"
)

// The categories of the metadata service ("Instance metadata categories" in the EC2 User Guide).
const (
	credentialsCategory = "identity-credentials/ec2/security-credentials/ec2-instance"
	regionCategory      = "placement/region"
)

// Factory makes the provider.
func Factory() provider.Factory {
	return provider.Factory{
		Name:     Name,
		Versions: []string{attestation.VersionEC2Role},
		New: func(s provider.Settings) (provider.Provider, error) {
			if err := attestation.CheckClusterUID(s.ClusterUID); err != nil {
				return nil, fmt.Errorf("cluster UID: %w", err)
			}
			return Provider{ClusterUID: s.ClusterUID}, nil
		},
	}
}

// Provider implements provider.Provider.
type Provider struct {
	// Metadata asks the metadata service of the instance.
	Metadata metadata.Client
	// ClusterUID is the node's clusterUID setting, empty if unset.
	ClusterUID string
}

var _ provider.Provider = Provider{}

// Name returns "ec2-role".
func (Provider) Name() string { return Name }

// SignerName returns the default signer.
func (Provider) SignerName() string { return SignerName }

// Renews is true: each renewal comes with evidence of its own.
func (Provider) Renews() bool { return true }

// Caution says who else can make this evidence.
func (Provider) Caution() string {
	return "provider ec2-role proves what the metadata service says: any process that reaches 169.254.169.254 from this machine can make the same evidence, and so can pods if the hop limit of the instance is above 1"
}

// ProviderID returns aws:///<zone>/<instance ID>, as AWS's cloud provider sets it.
func (p Provider) ProviderID(ctx context.Context) (string, error) {
	session, err := p.Metadata.EC2(ctx)
	if err != nil {
		return "", err
	}
	return session.ProviderID(ctx)
}

// Evidence signs a request to STS for this CertificateSigningRequest, and no other: every node can
// read it there. The secret key stays in this function.
func (p Provider) Evidence(ctx context.Context, request provider.Request) ([]byte, error) {
	// 1. The instance's credentials and region.
	session, err := p.Metadata.EC2(ctx)
	if err != nil {
		return nil, err
	}
	credentials, err := credentialsOf(ctx, session)
	if err != nil {
		return nil, err
	}
	answer, err := session.Get(ctx, regionCategory)
	if err != nil {
		return nil, err
	}
	region := string(answer)
	partition, err := stscall.PartitionOf(region)
	if err != nil {
		return nil, failure("", err)
	}

	// 2. The request to STS, with the nonce.
	nonce := request.Binding(attestation.VersionEC2Role, p.ClusterUID).Hex()
	call, err := http.NewRequestWithContext(ctx, http.MethodPost, partition.URL(region), strings.NewReader(stscall.Body))
	if err != nil {
		return nil, err
	}
	call.Header = stscall.Unsigned(nonce)

	// 3. Its signature.
	now := time.Now().UTC()
	key := aws.Credentials{AccessKeyID: credentials.AccessKeyID, SecretAccessKey: credentials.SecretAccessKey, SessionToken: credentials.Token}
	if err := v4.NewSigner().SignHTTP(ctx, key, call, stscall.BodySHA256, stscall.Service, region, now); err != nil {
		return nil, failure("", fmt.Errorf("sign for STS: %w", err))
	}
	statement := stscall.Statement{
		Region: region, Date: now.Format(stscall.DateFormat), AccessKeyID: credentials.AccessKeyID, SecurityToken: credentials.Token,
	}
	if err := statement.SetSignature(call.Header.Get("Authorization")); err != nil {
		return nil, failure("", fmt.Errorf("sign for STS: %w", err))
	}
	signed, err := statement.Marshal() // refuses malformed credentials before they are filed
	if err != nil {
		return nil, failure("is this an instance of EC2?", fmt.Errorf("credentials of the instance identity role: %w", err))
	}
	return attestation.Identity{Version: attestation.VersionEC2Role, ClusterUID: p.ClusterUID, Statement: signed}.Marshal()
}

// roleCredentials are those of the instance identity role. They are a secret.
type roleCredentials struct {
	Code                                string
	AccessKeyID, SecretAccessKey, Token string
	Expiration                          time.Time
}

func credentialsOf(ctx context.Context, session metadata.EC2) (roleCredentials, error) {
	answer, err := session.Get(ctx, credentialsCategory)
	if err != nil {
		return roleCredentials{}, err
	}
	var c roleCredentials
	switch err := json.Unmarshal(answer, &c); { // the error could quote the secret
	case err != nil:
		return roleCredentials{}, failure("", errors.New("credentials of the instance identity role: not the JSON of credentials"))
	case c.Code != "Success" || c.SecretAccessKey == "":
		return roleCredentials{}, failure("", errors.New("credentials of the instance identity role: the metadata service has none"))
	case !time.Now().Before(c.Expiration):
		return roleCredentials{}, failure("is the clock of this machine right?", errors.New("credentials of the instance identity role: expired"))
	}
	return c, nil
}

func failure(hint string, err error) error {
	return &provider.Error{Class: provider.DeviceFailed, Hint: hint, Err: err}
}
