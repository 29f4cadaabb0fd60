// SPDX-License-Identifier: Apache-2.0

// Package cloud is what the verifiers of the clouds' instance identities share: the document, what
// it is bound to, its age, and the reasons to refuse it. Each verifier is pure: bytes, time and
// policy. It judges at the time at which the request was filed, by the API server's clock. So it
// gives the same verdict while the request waits, and before it is signed.
package cloud

import (
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Names are the names of the clouds' providers, the strongest first. Evidence of ec2 is signed for
// a TPM that only root can use. Any process that reaches the metadata service from a node can make
// that of the others.
var Names = []string{"ec2", "ec2-role", "gce", "azure"}

// The reasons for which evidence of clouds is refused.
const (
	// ReasonMalformed: the document, or what the platform signed, is not in its one encoding, is of
	// another provider or version, or is too long.
	ReasonMalformed verifier.Reason = "AttestationIdentityMalformed"
	// ReasonCluster: the document is for another cluster.
	ReasonCluster verifier.Reason = "AttestationIdentityCluster"
	// ReasonSignature: the platform did not sign it, or by a certificate or key that is not valid.
	ReasonSignature verifier.Reason = "AttestationIdentitySignature"
	// ReasonRequest: the platform signed it for another request, or another purpose. It was copied.
	ReasonRequest verifier.Reason = "AttestationIdentityRequest"
	// ReasonAge: it was signed too long before the request was filed, or after.
	ReasonAge verifier.Reason = "AttestationIdentityAge"
	// ReasonInstance: it is not of an instance, or of one in another account, project or
	// subscription than the policy lists.
	ReasonInstance verifier.Reason = "AttestationIdentityInstance"
	// ReasonPCR: a PCR has another value than those of the policy.
	ReasonPCR verifier.Reason = "AttestationIdentityPCR"
)

// A document is signed just before the request is filed. If the API server is away, the node files
// the same request later.
const (
	// MaxAge is the longest time between signing and filing.
	MaxAge = 10 * time.Minute
	// MaxAhead is how far the platform's clock may be ahead of the API server's.
	MaxAhead = 2 * time.Minute
)

// Statement is what a platform signed for a request. Nothing in it is verified yet.
type Statement struct {
	// Bytes are in the platform's own encoding.
	Bytes []byte
	// Binding has the nonce that the platform must have signed.
	Binding attestation.Binding
	// Created is when the request was filed.
	Created time.Time
}

// Verified is what a platform vouches for.
type Verified struct {
	// Instance filed the request. Its key is in the request.
	Instance attestation.Instance
	// HasProviderID reports whether a machine's spec.providerID is this instance's.
	HasProviderID func(providerID string) bool
	// PCRBank and PCRs are the PCRs that the platform vouches for, in the order of their indexes.
	// They are empty if it vouches for none.
	PCRBank string
	PCRs    []attestation.PCR
}

// Open parses the document of a request. provider is the one that the document must be of, version
// its version, and cluster the controller's cluster. The document has the node's clusterUID
// setting, empty if unset. The error is a verifier.Refusals.
func Open(request verifier.Filed, provider string, version attestation.Version, cluster string) (*Statement, error) {
	content, err := attestation.Parse(request.Request)
	if err != nil {
		return nil, Refuse(ReasonMalformed, "%v", err)
	}
	if content.Provider != provider {
		return nil, Refuse(ReasonMalformed, "the document is of provider %.64q, not %s", content.Provider, provider)
	}
	identity, err := attestation.ParseIdentity(version, content.Data)
	if err != nil {
		return nil, Refuse(ReasonMalformed, "%v", err)
	}
	if identity.ClusterUID != "" && identity.ClusterUID != cluster {
		return nil, Refuse(ReasonCluster, "the document is for another cluster")
	}
	if request.Created.IsZero() {
		return nil, Refuse(ReasonAge, "the request has no creation time")
	}
	return &Statement{
		Bytes: identity.Statement, Created: request.Created,
		Binding: attestation.Binding{
			Version: version, ClusterUID: identity.ClusterUID, SignerName: request.SignerName, Name: request.Name,
			PKCS10: content.PKCS10, Usages: request.Usages, ExpirationSeconds: request.ExpirationSeconds,
		},
	}, nil
}

// CheckCluster returns an error unless uid may be the controller's cluster. A node's setting may be
// empty, and the controller's may not.
func CheckCluster(uid string) error {
	if uid == "" {
		return errors.New("cluster UID: must not be empty")
	}
	if err := attestation.CheckClusterUID(uid); err != nil {
		return fmt.Errorf("cluster UID: %w", err)
	}
	return nil
}

// CheckAge refuses a statement that was not signed just before the request was filed.
func (s *Statement) CheckAge(signed time.Time) error {
	switch age := s.Created.Sub(signed); {
	case age > MaxAge:
		return Refuse(ReasonAge, "signed %s before the request was filed, more than %s", age.Round(time.Second), MaxAge)
	case age < -MaxAhead:
		return Refuse(ReasonAge, "signed %s after the request was filed, more than %s", (-age).Round(time.Second), MaxAhead)
	}
	return nil
}

// Refuse returns an error for which the request is denied. The node reads it.
func Refuse(reason verifier.Reason, format string, arguments ...any) error {
	var refusals verifier.Refusals
	refusals.Add(reason, format, arguments...)
	return refusals
}
