// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// Identity is what an inventory needs to know about a TPM. The TPM reports all of it about itself.
// Trust it only as far as the path from this machine to the inventory.
type Identity struct {
	// Manufacturer is the TCG vendor ID ("IFX"). Vendor is the maker's own text.
	Manufacturer string `json:"manufacturer"`
	Vendor       string `json:"vendor,omitempty"`
	// Firmware is the firmware's version.
	Firmware string `json:"firmware"`
	// AKName is the Name of the attestation key, in hex.
	AKName string `json:"akName"`
	// EKs are the endorsement key of the template that the operator set, if any, and all that
	// have a certificate. If there is none of these, it is the one key that the node uses.
	EKs []EKIdentity `json:"eks"`
}

// EKFingerprints returns the fingerprints of EKs.
func (i *Identity) EKFingerprints() []string {
	fingerprints := make([]string, 0, len(i.EKs))
	for _, ek := range i.EKs {
		fingerprints = append(fingerprints, ek.Fingerprint)
	}
	return fingerprints
}

// HasUsableEK reports whether a source of endorsement keys can vouch for the TPM: a certificate in
// the TPM is for its endorsement key, or the operator named the template of a key.
func (i *Identity) HasUsableEK(ekTemplate string) bool {
	if ekTemplate != "" && ekTemplate != autoEKTemplate {
		return true
	}
	return slices.ContainsFunc(i.EKs, func(ek EKIdentity) bool { return ek.Certificate != nil && ek.Certificate.Problem == "" })
}

// EKIdentity is one endorsement key.
type EKIdentity struct {
	Template string `json:"template"`
	// Fingerprint is the SHA-256 of the SubjectPublicKeyInfo, in hex. Inventories name the EK
	// by it.
	Fingerprint string `json:"fingerprint"`
	// Certificate is the one from the TPM, nil if it has none.
	Certificate *CertificateIdentity `json:"certificate,omitempty"`
	// Problem says why a certificate for this template in the TPM is ignored.
	Problem string `json:"problem,omitempty"`
	// Slow is set if the key has to be made each time, which takes seconds.
	Slow bool `json:"slow,omitempty"`
}

// CertificateIdentity is the content of a certificate. It is not verified.
type CertificateIdentity struct {
	// Fingerprint is the SHA-256 of the certificate, in hex.
	Fingerprint string `json:"fingerprint"`
	// Subject is the distinguished name; makers leave it empty and name the TPM in the subject
	// alternative name.
	Subject string `json:"subject,omitempty"`
	// SubjectAltName names maker, model and version of the TPM (EK Credential Profile, section
	// 3.1.2).
	SubjectAltName string `json:"subjectAltName,omitempty"`
	Issuer         string `json:"issuer,omitempty"`
	Serial         string `json:"serial,omitempty"`
	NotAfter       string `json:"notAfter,omitempty"`
	// Problem says why the rest is missing.
	Problem string `json:"problem,omitempty"`
}

// Identify returns an Identity.
func (p *Provider) Identify(ctx context.Context) (any, error) {
	identity, err := tpm.Run(ctx, p.options, func(t *tpm.TPM) (*Identity, error) {
		info, err := t.Info()
		if err != nil {
			return nil, err
		}
		identity := &Identity{Manufacturer: info.Manufacturer, Vendor: info.Vendor, Firmware: info.FirmwareString()}
		ak, err := t.AK()
		if err != nil {
			return nil, err
		}
		if identity.AKName, err = hexName(ak); err != nil {
			return nil, err
		}
		eks, err := t.EKs(p.ekTemplate)
		if err != nil {
			return nil, err
		}
		for _, ek := range eks {
			found, err := describe(ek.Template, ek.Public, ek.Certificates)
			if err != nil {
				return nil, err
			}
			found.Problem, found.Slow = text.Line(ek.Problem, 256), ek.Slow
			identity.EKs = append(identity.EKs, found)
		}
		return identity, nil
	})
	if err != nil {
		return nil, classifyError(err)
	}
	return identity, nil
}

func hexName(public []byte) (string, error) {
	name, err := template.Name(public)
	return hex.EncodeToString(name), err
}

// describe describes an EK.
func describe(name string, public []byte, certificates [][]byte) (EKIdentity, error) {
	_, key, err := template.CheckEK(public)
	if err != nil {
		return EKIdentity{}, err
	}
	spki, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return EKIdentity{}, err
	}
	ek := EKIdentity{Template: name, Fingerprint: fingerprint(spki)}
	if len(certificates) == 0 {
		return ek, nil
	}
	ek.Certificate = &CertificateIdentity{Fingerprint: fingerprint(certificates[0])}
	leaf, err := x509.ParseCertificate(certificates[0])
	if err != nil {
		ek.Certificate.Problem = "it does not parse"
		return ek, nil //nolint:nilerr // said in Problem
	}
	ek.Certificate.Subject, ek.Certificate.Issuer = text.Line(leaf.Subject.String(), 256), text.Line(leaf.Issuer.String(), 256)
	ek.Certificate.SubjectAltName = text.Line(subjectAltName(leaf), 256)
	ek.Certificate.Serial, ek.Certificate.NotAfter = leaf.SerialNumber.Text(16), leaf.NotAfter.UTC().Format(time.RFC3339)
	return ek, nil
}

func fingerprint(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// subjectAltName returns the directoryName in the extension of that name (RFC 5280, section
// 4.2.1.6), empty if there is none.
func subjectAltName(c *x509.Certificate) string {
	var parts []string
	for _, extension := range c.Extensions {
		var names []asn1.RawValue
		if !extension.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 17}) {
			continue
		}
		if _, err := asn1.Unmarshal(extension.Value, &names); err != nil {
			continue
		}
		for _, name := range names {
			var sequence pkix.RDNSequence
			if name.Tag != 4 {
				continue
			}
			if _, err := asn1.Unmarshal(name.Bytes, &sequence); err != nil {
				continue
			}
			for _, attribute := range slices.Concat(sequence...) {
				parts = append(parts, fmt.Sprintf("%s=%v", tpmAttribute(attribute.Type), attribute.Value))
			}
		}
	}
	return strings.Join(parts, ",")
}

// tpmAttribute returns the name of an attribute (EK Credential Profile, section 4).
func tpmAttribute(oid asn1.ObjectIdentifier) string {
	switch {
	case oid.Equal(asn1.ObjectIdentifier{2, 23, 133, 2, 1}):
		return "TPMManufacturer"
	case oid.Equal(asn1.ObjectIdentifier{2, 23, 133, 2, 2}):
		return "TPMModel"
	case oid.Equal(asn1.ObjectIdentifier{2, 23, 133, 2, 3}):
		return "TPMVersion"
	}
	return oid.String()
}

// Explain describes the content of a hello or a proof.
func (p *Provider) Explain(document []byte) []provider.Fact {
	if hello, err := attestation.ParseHello(document); err == nil {
		return explainHello(hello)
	}
	if proof, err := attestation.ParseProof(document); err == nil {
		return []provider.Fact{
			{Name: "document", Value: fmt.Sprintf("%s of %s, a quote over %d PCRs of bank %s", attestation.KindProof, proof.Version, len(proof.PCRs), proof.PCRBank)},
			{Name: "answers", Value: proof.HelloName},
		}
	}
	return nil
}

func explainHello(hello *attestation.Hello) []provider.Fact {
	facts := []provider.Fact{
		{Name: "document", Value: fmt.Sprintf("%s of %s; accepts %s", attestation.KindHello, hello.Version, hello.Versions)},
		{Name: provider.FactEKTemplate, Value: hello.EKTemplate},
	}
	ek, err := describe(hello.EKTemplate, hello.EKPublic, hello.EKCertificates)
	if err != nil {
		return append(facts, provider.Fact{Name: "EK", Value: err.Error()})
	}
	facts = append(facts, provider.Fact{Name: provider.FactEKFingerprint, Value: ek.Fingerprint})
	if c := ek.Certificate; c == nil {
		facts = append(facts, provider.Fact{Name: "EK certificate", Value: "none: an inventory has to name the fingerprint"})
	} else {
		facts = append(facts, provider.Fact{
			Name:  "EK certificate",
			Value: strings.TrimSpace(fmt.Sprintf("%s %s serial %s by %s, to %s %s", c.Subject, c.SubjectAltName, c.Serial, c.Issuer, c.NotAfter, c.Problem)),
		}, provider.Fact{Name: "EK issuers", Value: text.Count(len(hello.EKCertificates)-1, "certificate") + " from the TPM"})
	}
	name, err := hexName(hello.AKPublic)
	if err != nil {
		name = err.Error()
	}
	return append(facts, provider.Fact{Name: "AK name", Value: name})
}

// SelfTest goes through each TPM command that the protocol uses.
func (p *Provider) SelfTest(ctx context.Context, report func(provider.Check)) error {
	_, err := tpm.Run(ctx, p.options, func(t *tpm.TPM) (struct{}, error) {
		return struct{}{}, t.SelfTest(p.ekTemplate, func(r tpm.SelfTestResult) {
			name := r.Command
			if r.EK != "" {
				name = r.EK + " " + name
			}
			report(provider.Check{Name: name, Took: r.Took, Err: r.Err})
		})
	})
	if errors.Is(err, tpm.ErrOtherKeys) {
		// The challenge was valid, even if the TPM refused it.
		return &provider.Error{Class: provider.DeviceFailed, Hint: updateFirmware, Err: err}
	}
	return classify(err, updateFirmware)
}

const updateFirmware = "look for an update of the TPM's firmware, or ask its maker"
