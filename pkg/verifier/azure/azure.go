// SPDX-License-Identifier: Apache-2.0

// Package azure verifies the evidence of provider azure: an attested document of Azure's instance
// metadata service. https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service
// describes it under "Attested data".
//
// The document names a VM by its vmId, a Machine by its resource ID. Azure signs nothing that has
// both. So the controller reads the vmId of a resource from Azure Resource Manager, with an
// identity of its own, and Verify gets the answer. A second token of the node, such as one of its
// managed identity, would not do: it has no nonce, so a stolen one could be filed with the thief's
// own document. No such token is accepted.
package azure

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

// Name is the provider's name in requests.
const Name = "azure"

// Cloud is one of Azure's clouds. They share no accounts, and have domains of their own.
type Cloud string

// Azure's clouds. The zero value is Public.
const (
	Public       Cloud = "Public"
	USGovernment Cloud = "USGovernment"
	China        Cloud = "China"
)

// domain returns the domain in the certificates that sign the cloud's documents, empty if there is
// no such cloud.
func (c Cloud) domain() string {
	switch c {
	case "", Public:
		return "metadata.azure.com"
	case USGovernment:
		return "metadata.azure.us"
	case China:
		return "metadata.azure.cn"
	}
	return ""
}

// Config is the policy.
type Config struct {
	// ClusterUID is the UID of the controller's cluster.
	ClusterUID string
	// Cloud is the cloud that the nodes run in. Default: Public.
	Cloud Cloud
	// Subscriptions are the IDs of the subscriptions whose VMs are accepted, in lower case. If it
	// is empty, each subscription's are. A VM also needs a machine.
	Subscriptions []string
	// Roots are the root CAs of the certificates that sign documents. Default: Roots().
	Roots []*x509.Certificate
	// Intermediates are intermediate CAs in addition to Intermediates(). A document has the
	// certificate of its signer alone. Microsoft replaces its intermediate CAs every few years.
	Intermediates []*x509.Certificate
}

// Verifier verifies evidence. It does no I/O, and reads no clock.
type Verifier struct {
	clusterUID, domain string
	subscriptions      []string
	// authorities are the roots and the intermediates.
	roots, intermediates *x509.CertPool
	authorities          []*x509.Certificate
}

// New copies and checks the policy.
func New(c Config) (*Verifier, error) {
	if err := cloud.CheckCluster(c.ClusterUID); err != nil {
		return nil, err
	}
	v := &Verifier{
		clusterUID: c.ClusterUID, domain: c.Cloud.domain(), subscriptions: slices.Clone(c.Subscriptions),
		roots: x509.NewCertPool(), intermediates: x509.NewCertPool(),
	}
	if v.domain == "" {
		return nil, fmt.Errorf("cloud %.64q: must be %s, %s or %s", c.Cloud, Public, USGovernment, China)
	}
	for i, id := range c.Subscriptions {
		if !cloudname.IsGUID(id) {
			return nil, fmt.Errorf("subscription %.64q: not a GUID in lower case", id)
		}
		if slices.Contains(c.Subscriptions[:i], id) {
			return nil, fmt.Errorf("subscription %s: listed twice", id)
		}
	}
	roots := c.Roots
	if len(roots) == 0 {
		roots = Roots()
	}
	intermediates := slices.Concat(Intermediates(), c.Intermediates)
	v.authorities = slices.Concat(roots, intermediates)
	for _, ca := range v.authorities {
		if ca == nil || !ca.BasicConstraintsValid || !ca.IsCA {
			return nil, errors.New("roots and intermediates: a certificate is not a CA's")
		}
	}
	for _, ca := range roots {
		v.roots.AddCert(ca)
	}
	for _, ca := range intermediates {
		v.intermediates.AddCert(ca)
	}
	return v, nil
}

// UnknownIssuerError means that no configured CA has issued the signer's certificate. Azure may use
// a CA that is newer than the configuration, so this is no verdict on the node.
type UnknownIssuerError struct {
	// Issuer is the issuer in the signer's certificate. The node chose it.
	Issuer string
}

func (e *UnknownIssuerError) Error() string {
	return fmt.Sprintf("attested document: no configured CA is its signer's issuer, %.128q", e.Issuer)
}

// Verify verifies the evidence of a request. The VM has no provider ID before Connect, and then an
// inventory must list it. The error is a verifier.Refusals if the evidence is false, and an
// *UnknownIssuerError if it cannot be judged with these CAs.
func (v *Verifier) Verify(request verifier.Filed) (*cloud.Verified, error) {
	// 1. The document is of this provider, for this cluster.
	statement, err := cloud.Open(request, Name, attestation.VersionAzure, v.clusterUID)
	if err != nil {
		return nil, err
	}

	// 2. The signer signed the content. Who the signer is comes third.
	signed, err := parseSignedData(statement.Bytes)
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonMalformed, "attested document: %v", err)
	}
	if err := signed.verify(); err != nil {
		return nil, cloud.Refuse(cloud.ReasonSignature, "attested document: not signed by the certificate that it names")
	}
	says, err := parseContent(signed.content)
	if err != nil {
		return nil, cloud.Refuse(cloud.ReasonMalformed, "attested document: %v", err)
	}

	// 3. At the time that the document has, the signer was Azure's metadata service.
	if err := v.checkSigner(signed, says); err != nil {
		return nil, err
	}

	// 4. It signed for this request, just before it was filed.
	switch {
	case says.nonce != statement.Binding.Alphanumeric():
		return nil, cloud.Refuse(cloud.ReasonRequest, "attested document: its nonce is not this request's")
	case statement.Created.After(says.expires.Add(cloud.MaxAhead)):
		return nil, cloud.Refuse(cloud.ReasonAge, "attested document: expired before the request was filed")
	}
	if err := statement.CheckAge(says.created); err != nil {
		return nil, err
	}

	// 5. The VM is in one of the subscriptions.
	if len(v.subscriptions) > 0 && !slices.Contains(v.subscriptions, says.subscription) {
		return nil, cloud.Refuse(cloud.ReasonInstance, "the VM is in subscription %s, which is not listed", says.subscription)
	}
	return &cloud.Verified{
		// Names are reused after a VM is deleted. The vmId is not.
		Instance:      attestation.Instance{Platform: Name, ID: says.vmID, Account: says.subscription},
		HasProviderID: func(string) bool { return false },
	}, nil
}

// Connect gives a VM that Verify returned the provider ID of a resource, if vmID, which Azure
// Resource Manager has for the resource, is the VM's.
func Connect(verified *cloud.Verified, resource ResourceID, vmID string) {
	if vmID != verified.Instance.ID || resource.Subscription != verified.Instance.Account {
		return
	}
	verified.HasProviderID = func(providerID string) bool {
		id, err := ParseProviderID(providerID)
		return err == nil && id == resource
	}
}

// checkSigner verifies the signer's certificate. The other certificates of the document can only be
// intermediate CAs: the node that files a document chooses them, and their order.
func (v *Verifier) checkSigner(signed *signedData, says content) error {
	if !slices.ContainsFunc(signed.signer.DNSNames, v.isMetadataService) {
		return cloud.Refuse(cloud.ReasonSignature, "attested document: its signer's certificate is not for %s", v.domain)
	}
	intermediates := v.intermediates.Clone()
	for _, other := range signed.others {
		intermediates.AddCert(other)
	}
	_, err := signed.signer.Verify(x509.VerifyOptions{
		Roots: v.roots, Intermediates: intermediates, CurrentTime: says.created,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, // as Azure's certificates have
	})
	switch {
	case err == nil:
		return nil
	case !slices.ContainsFunc(v.authorities, func(ca *x509.Certificate) bool {
		return string(ca.RawSubject) == string(signed.signer.RawIssuer) && !says.created.After(ca.NotAfter)
	}):
		return &UnknownIssuerError{signed.signer.Issuer.String()}
	}
	return cloud.Refuse(cloud.ReasonSignature, "attested document: its signer's certificate is not valid: %.128q", err.Error())
}

// isMetadataService reports whether a DNS name is the domain of the metadata service, or one label
// below. Regions have names such as eastus.metadata.azure.com.
func (v *Verifier) isMetadataService(name string) bool {
	region, below := strings.CutSuffix(name, "."+v.domain)
	return name == v.domain || below && region != "" && !strings.Contains(region, ".")
}
