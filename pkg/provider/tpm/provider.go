// SPDX-License-Identifier: Apache-2.0

// Package tpm is the provider whose evidence comes from the machine's TPM 2.0. A hello names the
// TPM. A quote by the TPM answers the controller's challenge (docs/spec.md).
package tpm

import (
	"cmp"
	"context"
	"crypto/fips140"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-tpm/tpm2"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// Name is the provider's name in requests and configuration.
const Name = "tpm"

// SignerName is the signer of node-attestation-controller that takes this provider's evidence.
const SignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"

// autoEKTemplate is the setting that leaves the choice of the EK to the TPM.
const autoEKTemplate = "auto"

// Factory makes the provider. Its settings are the device, the directory for the lock, and the
// scheme of a provider ID.
func Factory() provider.Factory {
	return provider.Factory{
		Name:     Name,
		Versions: []string{string(attestation.VersionTPM)},
		Inspects: true,
		New: func(s provider.Settings) (provider.Provider, error) {
			if fips140.Enforced() {
				// crypto/cipher would panic in the middle of a proof.
				return nil, &provider.Error{Class: provider.FIPSEnforced, Hint: "run it with GODEBUG=fips140=on: that uses Go's FIPS 140-3 module, and forbids nothing",
					Err: errors.New("GODEBUG=fips140=only forbids AES-CFB, which TPM 2.0 prescribes for a session that encrypts")}
			}
			if s.ProviderIDScheme != "" && !isScheme(s.ProviderIDScheme) {
				return nil, fmt.Errorf("providerIDScheme %.64q: must be a URI's scheme (RFC 3986, section 3.1) in lower case", s.ProviderIDScheme)
			}
			ekTemplate := s.EKTemplate
			if ekTemplate == autoEKTemplate {
				ekTemplate = ""
			}
			if ekTemplate != "" && !slices.Contains(template.Names(), ekTemplate) {
				return nil, fmt.Errorf("ekTemplate %.64q: must be %s, or one of %s", ekTemplate, autoEKTemplate, strings.Join(template.Names(), ", "))
			}
			field := cmp.Or(s.SystemUUIDFrom, productUUID)
			if !slices.Contains(SystemUUIDFields(), field) {
				return nil, fmt.Errorf("systemUUIDFrom %.64q: must be one of %s", field, strings.Join(SystemUUIDFields(), ", "))
			}
			return &Provider{
				ekTemplate: ekTemplate,
				options:    tpm.Options{Device: s.TPMDevice, LockDir: s.RuntimeDir},
				scheme:     s.ProviderIDScheme,
				uuidFile:   filepath.Join(dmiDir, field),
				now:        time.Now,
				readEvent:  tpm.EventLog,
			}, nil
		},
	}
}

// Provider implements provider.Challenger and provider.Inspector. Each call opens the TPM and
// closes it again.
type Provider struct {
	options tpm.Options
	// ekTemplate is the template that the operator set, or empty.
	ekTemplate string
	scheme     string
	uuidFile   string
	now        func() time.Time
	readEvent  func() ([]byte, error)
}

var (
	_ provider.Chooser    = (*Provider)(nil)
	_ provider.EKNamer    = (*Provider)(nil)
	_ provider.Inspector  = (*Provider)(nil)
	_ provider.Originator = (*Provider)(nil)
)

// Name returns "tpm".
func (*Provider) Name() string { return Name }

// SignerName returns the default signer.
func (*Provider) SignerName() string { return SignerName }

// Renews returns true: each renewal has new evidence.
func (*Provider) Renews() bool { return true }

// Caution says nothing.
func (*Provider) Caution() string { return "" }

// Versions returns the versions of the documents that this package writes.
func (*Provider) Versions() attestation.Versions {
	return attestation.Versions{attestation.VersionTPM}
}

// EKTemplates returns the values of the setting ekTemplate.
func EKTemplates() []string { return append([]string{autoEKTemplate}, template.Names()...) }

// EKTemplate returns the name of the template in what Hello returned as remember.
func (*Provider) EKTemplate(remember string) string { return tpm.RememberedTemplate(remember) }

// Allows reports whether the remembered EK is of the template that the operator set.
func (p *Provider) Allows(remember string) bool {
	return p.ekTemplate == "" || remember == "" || tpm.RememberedTemplate(remember) == p.ekTemplate
}

// Hello names this TPM by an EK: that of the template that the operator set, else the remembered
// one if the TPM still makes it. A machine's record pins its EK. So a certificate that a firmware
// update adds must not change the choice.
func (p *Provider) Hello(ctx context.Context, request provider.Request) (document []byte, remember string, err error) {
	if request.Version != attestation.VersionTPM {
		return nil, "", fmt.Errorf("version %q is not one that this provider writes", request.Version)
	}
	type chosen struct {
		attestation.Hello
		remember string
	}
	hello, err := tpm.Run(ctx, p.options, func(t *tpm.TPM) (chosen, error) {
		ek, err := t.ChooseEK(p.ekTemplate, request.Remembered)
		if err != nil {
			return chosen{}, err
		}
		if !p.Allows(request.Remembered) {
			klog.FromContext(ctx).Info("the set EK template replaces the one that the node enrolled with", "template", ek.Template, "before", request.Remembered)
		}
		if ek.Slow || ek.Problem != "" {
			klog.FromContext(ctx).Info("the endorsement key is slow to make, or its certificate is left out", "template", ek.Template, "slow", ek.Slow, "problem", ek.Problem)
		}
		ak, err := t.AK()
		return chosen{attestation.Hello{
			Version: attestation.VersionTPM, Versions: p.Versions(), SignerName: request.SignerName,
			EKTemplate: ek.Template, EKPublic: ek.Public, AKPublic: ak,
			// The EK's own certificate comes first. If its issuers do not fit, the
			// verifier has to have them.
			EKCertificates: ek.Certificates[:min(len(ek.Certificates), attestation.MaxCertificates)],
		}, ek.Remember()}, err
	})
	if err != nil {
		return nil, "", classifyError(err)
	}
	document, err = hello.Marshal()
	return document, hello.remember, err
}

// Evidence answers the challenge. The TPM opens the credential, which gives a secret. It quotes the
// wanted PCRs, with a MAC under the secret over the whole request.
func (p *Provider) Evidence(ctx context.Context, request provider.Request) ([]byte, error) {
	challenge, hello, err := p.read(request.Challenge)
	if err != nil {
		return nil, err
	}
	transcript := attestation.Transcript{
		Version: attestation.VersionTPM, SignerName: request.SignerName,
		HelloName: request.Challenge.HelloName, HelloUID: request.Challenge.HelloUID, HelloRequest: request.Challenge.HelloRequest,
		ProofName: request.Name, PKCS10: request.PKCS10, Usages: request.Usages, ExpirationSeconds: request.ExpirationSeconds,
		KeyID: challenge.KeyID, PCRs: challenge.PCRs,
	}
	proof := attestation.Proof{
		Version: attestation.VersionTPM, HelloName: transcript.HelloName, HelloUID: transcript.HelloUID,
		KeyID: challenge.KeyID, Expires: challenge.Expires, PCRBank: challenge.PCRs.Bank,
	}
	if challenge.EventLog {
		if proof.EventLog, err = p.eventLog(); err != nil {
			return nil, err
		}
	}
	quote, err := tpm.Run(ctx, p.options, func(t *tpm.TPM) (tpm.Quote, error) {
		return t.Prove(tpm.Challenge{
			EKTemplate: hello.EKTemplate, EKPublic: hello.EKPublic, AKPublic: hello.AKPublic,
			CredentialBlob: challenge.CredentialBlob, EncryptedSecret: challenge.EncryptedSecret,
			PCRBank: banks[challenge.PCRs.Bank], PCRs: challenge.PCRs.Indexes,
		}, transcript.MAC)
	})
	if err != nil {
		return nil, classifyError(err)
	}
	proof.Quote, proof.Signature = quote.Attest, quote.Signature
	for i, index := range challenge.PCRs.Indexes {
		proof.PCRs = append(proof.PCRs, attestation.PCR{Index: index, Value: quote.PCRs[i]})
	}
	return proof.Marshal()
}

// Origin implements provider.Originator with a quote over the name and the request.
func (p *Provider) Origin(ctx context.Context, name string, request []byte) (string, error) {
	origin, err := tpm.Run(ctx, p.options, func(t *tpm.TPM) (attestation.Origin, error) {
		akPublic, quote, err := t.Origin(attestation.OriginData(name, request))
		return attestation.Origin{Version: attestation.VersionTPM, AKPublic: akPublic, Quote: quote.Attest, Signature: quote.Signature}, err
	})
	if err != nil {
		return "", classifyError(err)
	}
	value, err := origin.Marshal()
	return string(value), err
}

// eventLog returns the measured-boot log if a request can hold it.
func (p *Provider) eventLog() ([]byte, error) {
	log, err := p.readEvent()
	if err != nil {
		return nil, err
	}
	if len(log) > attestation.MaxEventLog {
		return nil, &provider.Error{
			Hint: "have the controller's policy not ask for the event log of such machines",
			Err:  fmt.Errorf("the event log has %d bytes, more than the %d that a request can hold", len(log), attestation.MaxEventLog),
		}
	}
	return log, nil
}

// banks are the PCR banks that a challenge can ask for.
var banks = map[string]tpm2.TPMAlgID{"sha256": tpm2.TPMAlgSHA256, "sha384": tpm2.TPMAlgSHA384, "sha512": tpm2.TPMAlgSHA512}

// read parses the challenge and its hello. A challenge that cannot be answered is stale: a new
// hello may get a better one.
func (p *Provider) read(c *provider.Challenge) (*attestation.Challenge, *attestation.Hello, error) {
	stale := func(hint string, err error) error {
		return &provider.Error{Class: provider.Stale, Hint: hint, Err: err}
	}
	if c == nil {
		return nil, nil, errors.New("there is no challenge to answer")
	}
	request, err := attestation.Parse(c.HelloRequest)
	if err != nil {
		return nil, nil, err
	}
	hello, err := attestation.ParseHello(request.Data)
	if err != nil {
		return nil, nil, stale("", err)
	}
	challenge, err := attestation.ParseChallenge(c.Answer)
	if err != nil {
		return nil, nil, stale("find out who writes the annotation "+attestation.AnnotationChallenge, err)
	}
	if expires := time.Unix(challenge.Expires, 0); !c.Fresh && p.now().After(expires) {
		return nil, nil, stale("", fmt.Errorf("the challenge expired at %s", expires.UTC().Format(time.RFC3339)))
	}
	return challenge, hello, nil
}
