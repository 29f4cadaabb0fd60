// SPDX-License-Identifier: Apache-2.0

// Package ec2 verifies the evidence of provider ec2: an attestation document of the NitroTPM of an
// EC2 instance. "Validate a NitroTPM Attestation Document" in the EC2 User Guide describes it.
//
// The document names the instance, but not its account. So an instance is accepted only for a
// machine with its instance ID, which nobody can choose.
package ec2

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha512"
	"crypto/x509"
	_ "embed" // for rootPEM
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/nitrotpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

const (
	// Name is the provider's name in requests.
	Name = "ec2"
	// PCRBank is the bank of the PCRs in a document.
	PCRBank = "sha384"
)

// rootPEM is the root of AWS for NitroTPM and Nitro Enclaves, valid to 2049. AWS publishes the
// SHA-256 of its DER: 641a0321a3e244efe456463195d606317ed7cdcc3c1756e09893f3c68f79bb5b.
//
//go:embed root.pem
var rootPEM []byte

// moduleForm is the form of a NitroTPM's module ID. The first group is the instance ID.
var moduleForm = regexp.MustCompile(`^(i-[0-9a-f]+)-tpm[0-9a-f]{16}$`)

// Config is the policy.
type Config struct {
	// ClusterUID is the UID of the controller's cluster.
	ClusterUID string
	// Roots replace AWS's root. The holder of the key of one of them, or of a CA below, can make
	// any machine pass for any instance.
	Roots []*x509.Certificate
	// PCRValues are the allowed values of PCRs 0 to 23, in bank sha384. A PCR that is not listed
	// may have any value.
	PCRValues map[int][][]byte
}

// Verifier verifies evidence. It does no I/O, and reads no clock.
type Verifier struct {
	clusterUID string
	roots      *x509.CertPool
	pcrs       map[int][][]byte
}

// New copies and checks the policy.
func New(c Config) (*Verifier, error) {
	if err := cloud.CheckCluster(c.ClusterUID); err != nil {
		return nil, err
	}
	v := &Verifier{clusterUID: c.ClusterUID, roots: x509.NewCertPool(), pcrs: map[int][][]byte{}}
	roots := c.Roots
	if len(roots) == 0 {
		block, _ := pem.Decode(rootPEM)
		root, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("AWS's root: %w", err)
		}
		roots = []*x509.Certificate{root}
	}
	for i, root := range roots {
		if root == nil || len(root.Raw) == 0 || !root.BasicConstraintsValid || !root.IsCA {
			return nil, fmt.Errorf("root %d: not a CA's certificate", i)
		}
		v.roots.AddCert(root)
	}
	for index, values := range c.PCRValues {
		if index < 0 || index >= nitrotpm.PCRCount {
			return nil, fmt.Errorf("PCR %d: does not exist", index)
		}
		if len(values) == 0 {
			return nil, fmt.Errorf("PCR %d: no value is allowed", index)
		}
		for _, value := range values {
			if len(value) != nitrotpm.DigestSize {
				return nil, fmt.Errorf("PCR %d: a value has not %d bytes", index, nitrotpm.DigestSize)
			}
			v.pcrs[index] = append(v.pcrs[index], bytes.Clone(value))
		}
	}
	return v, nil
}

// Verify verifies the evidence of a request. The error is a verifier.Refusals.
func (v *Verifier) Verify(request verifier.Filed) (*cloud.Verified, error) {
	// 1. The document is of this provider, for this cluster.
	statement, err := cloud.Open(request, Name, attestation.VersionEC2, v.clusterUID)
	if err != nil {
		return nil, err
	}

	// 2. AWS signed it, by an instance's key.
	document, instance, err := v.open(statement.Bytes)
	if err != nil {
		return nil, err
	}

	// 3. AWS signed it for this request, just before it was filed. The provider sends neither user
	// data nor a public key. So a document with one was made by something else, for another
	// purpose.
	nonce := statement.Binding.Nonce()
	switch {
	case !bytes.Equal(document.Nonce, nonce[:]):
		return nil, cloud.Refuse(cloud.ReasonRequest, "NitroTPM document: its nonce is not this request's")
	case document.UserData != nil:
		return nil, cloud.Refuse(cloud.ReasonRequest, "NitroTPM document: it has user data")
	case document.PublicKey != nil:
		return nil, cloud.Refuse(cloud.ReasonRequest, "NitroTPM document: it has a public key")
	}
	if err := statement.CheckAge(timeOf(document.Document)); err != nil {
		return nil, err
	}

	// 4. The instance booted what the policy allows.
	verified := &cloud.Verified{
		Instance:      attestation.Instance{Platform: Name, ID: instance.id},
		HasProviderID: instance.hasProviderID, PCRBank: PCRBank,
	}
	for index, value := range document.PCRs {
		if allowed, ok := v.pcrs[index]; ok && !slices.ContainsFunc(allowed, func(v []byte) bool { return bytes.Equal(v, value) }) {
			return nil, cloud.Refuse(cloud.ReasonPCR, "PCR %d has a value that the policy does not allow", index)
		}
		verified.PCRs = append(verified.PCRs, attestation.PCR{Index: index, Value: value})
	}
	return verified, nil
}

// instance is an instance that AWS names.
type instance struct{ id, region string }

// open parses a document, and verifies that AWS signed it for an instance. Each certificate must be
// valid at the document's own time, since they live for hours only. AWS's signature covers that
// time.
func (v *Verifier) open(data []byte) (*nitrotpm.Signed, instance, error) {
	signed, err := nitrotpm.Parse(data)
	if err != nil {
		return nil, instance{}, cloud.Refuse(cloud.ReasonMalformed, "NitroTPM document: %v", err)
	}
	if signed.Timestamp > maxTimestamp {
		return nil, instance{}, cloud.Refuse(cloud.ReasonMalformed, "NitroTPM document: it has no usable time")
	}
	leaf, err := v.verifyChain(&signed.Document)
	if err != nil {
		return nil, instance{}, cloud.Refuse(cloud.ReasonSignature, "NitroTPM document: %v", err)
	}
	digest := sha512.Sum384(nitrotpm.ToBeSigned(signed.Payload))
	r, s := signed.Signature[:nitrotpm.SignatureSize/2], signed.Signature[nitrotpm.SignatureSize/2:]
	if !ecdsa.Verify(leaf.PublicKey.(*ecdsa.PublicKey), digest[:], new(big.Int).SetBytes(r), new(big.Int).SetBytes(s)) {
		return nil, instance{}, cloud.Refuse(cloud.ReasonSignature, "NitroTPM document: its signature is wrong")
	}
	parts := moduleForm.FindStringSubmatch(signed.ModuleID)
	if parts == nil || !cloudname.IsEC2Instance(parts[1]) {
		return nil, instance{}, cloud.Refuse(cloud.ReasonInstance, "NitroTPM document: its module ID is not that of an instance's NitroTPM")
	}
	// The signing certificate is issued to the module: <module ID>.<region>.aws
	suffix, ok := strings.CutPrefix(leaf.Subject.CommonName, signed.ModuleID+".")
	region, _, _ := strings.Cut(suffix, ".")
	if !ok || !cloudname.IsEC2Region(region) {
		return nil, instance{}, cloud.Refuse(cloud.ReasonInstance, "NitroTPM document: signed with the certificate of another module")
	}
	return signed, instance{parts[1], region}, nil
}

// maxTimestamp is the end of year 9999 in milliseconds, the last time of a certificate (RFC 5280,
// section 4.1.2.5).
const maxTimestamp = 253402300799999

// timeOf returns the time of a document.
func timeOf(d nitrotpm.Document) time.Time {
	return time.UnixMilli(int64(d.Timestamp)) //nolint:gosec // G115: open bounds it
}

// verifyChain returns the certificate that signs, with a key of P-384.
func (v *Verifier) verifyChain(d *nitrotpm.Document) (*x509.Certificate, error) {
	leaf, err := x509.ParseCertificate(d.Certificate)
	if err != nil {
		return nil, errors.New("the certificate cannot be parsed")
	}
	intermediates := x509.NewCertPool()
	for i, der := range d.CABundle[1:] { // the first is the root, which is ours to know
		ca, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("certificate %d of the CA bundle cannot be parsed", i+1)
		}
		// An RSA key of a peer's choice could cost seconds.
		if !isP384(ca.PublicKey) {
			return nil, fmt.Errorf("certificate %d of the CA bundle has no key of P-384", i+1)
		}
		intermediates.AddCert(ca)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots: v.roots, Intermediates: intermediates, CurrentTime: timeOf(*d),
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	}); err != nil {
		// The text of err has names that a peer wrote.
		if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
			return nil, errors.New("a certificate was not valid at the document's time")
		}
		return nil, errors.New("the certificate has no valid chain to the root")
	}
	switch {
	case !isP384(leaf.PublicKey):
		return nil, errors.New("the certificate's key is not of P-384")
	case leaf.IsCA || leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return nil, errors.New("the certificate is not for signing documents")
	}
	return leaf, nil
}

func isP384(key any) bool {
	k, ok := key.(*ecdsa.PublicKey)
	return ok && k.Curve == elliptic.P384()
}

// hasProviderID reports whether providerID is aws:///<zone>/<instance ID>, as the cloud provider's
// controller sets it. The zone must be of the instance's region.
func (i instance) hasProviderID(providerID string) bool {
	region, id, ok := cloudname.ParseEC2ProviderID(providerID)
	return ok && id == i.id && region == i.region
}
