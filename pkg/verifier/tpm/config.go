// SPDX-License-Identifier: Apache-2.0

// Package tpm judges the evidence of the TPM provider, version tpm/v1: the hello, which says which TPM asks, and the proof, which
// shows that this TPM holds the attestation key (AK) that made a fresh quote. It is pure.
//
// The order is the controller's:
//
//  1. ClaimedEK says which endorsement key (EK) a hello names, so that an authoritative source can be asked about it.
//  2. VerifyHello judges the hello, and Challenge answers it.
//  3. HelloReference says which hello a proof refers to. VerifyProof judges the proof, and the hello
//     entirely again: nothing is remembered in between.
//
// For one decision, ParseHello reads a hello once: what it returns has ClaimedEK, Verify and
// VerifyProof.
//
// Which machine the EK stands for, who may ask, what the certification request says, and whether boot counters went back since the
// last time is for the controller to judge.
package tpm

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Provider is the name in the PROVIDER block of a request that this package judges.
const Provider = "tpm"

// Limits of a Config.
const (
	// defaultChallengeLifetime is how long a challenge may be answered.
	defaultChallengeLifetime = 10 * time.Minute
	minChallengeLifetime     = 30 * time.Second
	maxChallengeLifetime     = time.Hour
	// maxSkew is how much the clocks of two replicas may differ.
	maxSkew = time.Minute
	// minKey is the least size of a controller's key in bytes: that of what is derived from it.
	minKey = 32
)

// Fingerprint is the SHA-256 of a public key's SubjectPublicKeyInfo in DER.
type Fingerprint [sha256.Size]byte

// FingerprintOf returns the fingerprint of a SubjectPublicKeyInfo.
func FingerprintOf(publicKey []byte) Fingerprint { return sha256.Sum256(publicKey) }

// String returns 64 lower-case hexadecimal digits.
func (f Fingerprint) String() string { return hex.EncodeToString(f[:]) }

// ParseFingerprint accepts exactly what String returns.
func ParseFingerprint(s string) (Fingerprint, error) {
	var f Fingerprint
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(f) || hex.EncodeToString(b) != s {
		return Fingerprint{}, errors.New("a fingerprint is 64 lower-case hexadecimal digits")
	}
	copy(f[:], b)
	return f, nil
}

// Keys are the controller's secrets, from which the secret of each challenge is derived. All replicas share them.
type Keys struct {
	// Current is the key id that new challenges are made with.
	Current string
	// ByID holds each key, of 32 random bytes or more, under its id. One that is replaced stays for a challenge's lifetime.
	ByID map[string][]byte
}

// Config is a policy. Nothing in it comes from a node.
type Config struct {
	// Roots are the CAs that EK certificates must chain to, and Intermediates CAs on the way there, beside those that the node
	// shows. Whoever holds the key of one of them, or of a CA below, can make any software pass for a TPM.
	Roots, Intermediates []*x509.Certificate
	// AllowedEKs are trusted without a certificate.
	AllowedEKs []Fingerprint
	// NamedEKs says that the caller names EKs with each call, from an authoritative source of its own; without it what a call names
	// does not count. One of Roots, AllowedEKs and NamedEKs must be given.
	NamedEKs bool
	// DeniedEKs are never trusted, whatever vouches for them. Where the fingerprint is a CA's, no chain through that CA counts.
	DeniedEKs []Fingerprint
	// ChainTime is when EK certificates and their CAs must be valid. Zero: at the time of each call. Makers let CAs expire whose
	// TPMs are in use, and so that is for the operator to decide.
	ChainTime time.Time

	// PCRs are those to be quoted, from a bank that the machines' firmware measures into: one that it leaves empty, root can fill.
	PCRs attestation.PCRSelection
	// PCRValues are the values that are allowed for a PCR among PCRs. One that is not listed may have any.
	PCRValues map[int][][]byte
	// EventLog asks for the firmware's event log, which must then lead to the values of PCRs 0 to 7 that are quoted. Other PCRs are
	// extended by the operating system too, which does not write to that log.
	EventLog bool
	// MinimumFirmware is the least firmwareVersion for a maker of TPMs: "IFX" and so on (TCG TPM Vendor ID Registry), eight hexadecimal
	// digits where the id is not ASCII. If it is not empty, a TPM whose maker no verified certificate names is refused; one whose
	// maker is not listed is not.
	MinimumFirmware map[string]uint64

	// Versions are all that the controller serves, the newest first; this package judges tpm/v1, which must be among them. Default:
	// that alone.
	Versions attestation.Versions
	// ClusterUID is the cluster's. It must not come from the cluster's own API.
	ClusterUID string
	Keys       Keys
	// ChallengeLifetime is how long a challenge may be answered. Default: DefaultChallengeLifetime.
	ChallengeLifetime time.Duration
}

// Verifier judges by one policy. It does not change after New, and may be used concurrently. The zero value refuses everything.
type Verifier struct {
	roots, intermediates *x509.CertPool
	// timeless are the same CAs without their dates: they tell an expired chain from an unknown one, and never make a chain count.
	timelessRoots, timelessIntermediates *x509.CertPool
	// The same CAs as lists, since a pool cannot be read: they explain why a chain does not
	// count, and never make one count.
	rootList, intermediateList []*x509.Certificate
	hasRoots, namedEKs         bool
	allowed, denied            map[Fingerprint]bool
	chainTime                  time.Time
	pcrs                       attestation.PCRSelection
	values                     map[int][][]byte
	eventLog                   bool
	firmware                   map[string]uint64
	versions                   attestation.Versions
	clusterUID                 string
	current                    string
	keys                       map[string][]byte
	lifetime                   time.Duration
}

// New returns the verifier of a policy, which it copies, or an error that names the field at fault.
func New(c Config) (*Verifier, error) {
	v := &Verifier{
		roots: x509.NewCertPool(), intermediates: x509.NewCertPool(),
		timelessRoots: x509.NewCertPool(), timelessIntermediates: x509.NewCertPool(),
		rootList: slices.Clone(c.Roots), intermediateList: slices.Clone(c.Intermediates),
		hasRoots: len(c.Roots) > 0, namedEKs: c.NamedEKs,
		allowed: set(c.AllowedEKs), denied: set(c.DeniedEKs),
		chainTime: c.ChainTime, eventLog: c.EventLog, clusterUID: c.ClusterUID, lifetime: c.ChallengeLifetime,
		pcrs:   attestation.PCRSelection{Bank: c.PCRs.Bank, Indexes: slices.Clone(c.PCRs.Indexes)},
		values: map[int][][]byte{}, firmware: map[string]uint64{}, keys: map[string][]byte{},
		versions: slices.Clone(c.Versions), current: c.Keys.Current,
	}
	for _, step := range []func(Config) error{v.setTrust, v.setMeasurements, v.setProtocol} {
		if err := step(c); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// Versions returns those that the controller serves: what the annotation attestation.AnnotationVersions lists after ReasonVersion.
func (v *Verifier) Versions() attestation.Versions { return slices.Clone(v.versions) }

func set(list []Fingerprint) map[Fingerprint]bool {
	m := map[Fingerprint]bool{}
	for _, f := range list {
		m[f] = true
	}
	return m
}

// setTrust fills what vouches for an EK.
func (v *Verifier) setTrust(c Config) error {
	if len(c.Roots) == 0 && len(c.AllowedEKs) == 0 && !c.NamedEKs {
		return errors.New("no trust in any EK: one of Roots, AllowedEKs, NamedEKs is required")
	}
	if len(c.Roots) == 0 && len(c.Intermediates) > 0 {
		return errors.New("without Roots, Intermediates lead nowhere")
	}
	if v.allowed[Fingerprint{}] || v.denied[Fingerprint{}] {
		return errors.New("AllowedEKs, DeniedEKs: an empty fingerprint")
	}
	add := func(field string, list []*x509.Certificate, pool, timeless *x509.CertPool) error {
		for i, ca := range list {
			if ca == nil || !ca.BasicConstraintsValid || !ca.IsCA || len(ca.Raw) == 0 {
				return fmt.Errorf("%s[%d]: not a CA's certificate", field, i)
			}
			pool.AddCert(ca)
			timeless.AddCert(withoutDates(ca))
		}
		return nil
	}
	if err := add("Roots", c.Roots, v.roots, v.timelessRoots); err != nil {
		return err
	}
	return add("Intermediates", c.Intermediates, v.intermediates, v.timelessIntermediates)
}

// setMeasurements fills what the TPM must say of its platform.
func (v *Verifier) setMeasurements(c Config) error {
	if err := v.pcrs.Check(); err != nil {
		return fmt.Errorf("PCRs: %w", err)
	}
	for index, values := range c.PCRValues {
		if !slices.Contains(v.pcrs.Indexes, index) {
			return fmt.Errorf("PCRValues: PCR %d is not among PCRs", index)
		}
		if len(values) == 0 {
			return fmt.Errorf("PCRValues: PCR %d has no value that is allowed", index)
		}
		for _, value := range values {
			if len(value) != attestation.BankSize(v.pcrs.Bank) {
				return fmt.Errorf("PCRValues: a value of PCR %d is no digest of bank %s", index, v.pcrs.Bank)
			}
			v.values[index] = append(v.values[index], bytes.Clone(value))
		}
	}
	if c.EventLog && !slices.ContainsFunc(v.pcrs.Indexes, isFirmwarePCR) {
		return errors.New("EventLog: none of PCRs 0 to 7 is among PCRs")
	}
	for maker, least := range c.MinimumFirmware {
		if !isManufacturerID(maker) {
			return fmt.Errorf("MinimumFirmware: %.32q is not the id of a maker of TPMs", maker)
		}
		v.firmware[maker] = least
	}
	return nil
}

// setProtocol fills what challenges are made of.
func (v *Verifier) setProtocol(c Config) error {
	if len(v.versions) == 0 {
		v.versions = attestation.Versions{attestation.VersionTPM}
	}
	if err := v.versions.Check(); err != nil {
		return fmt.Errorf("Versions: %w", err)
	}
	if !slices.Contains(v.versions, attestation.VersionTPM) {
		return fmt.Errorf("Versions: %s is not among them", attestation.VersionTPM)
	}
	if v.clusterUID == "" {
		return errors.New("ClusterUID: required")
	}
	for id, key := range c.Keys.ByID {
		if !attestation.IsKeyID(id) {
			return fmt.Errorf("Keys: %.64q is no key id", id)
		}
		if len(key) < minKey {
			return fmt.Errorf("Keys: %.64q has less than %d bytes", id, minKey)
		}
		if bytes.Count(key, key[:1]) == len(key) {
			return fmt.Errorf("Keys: %.64q is not random", id)
		}
		v.keys[id] = bytes.Clone(key)
	}
	if v.keys[v.current] == nil {
		return fmt.Errorf("Keys: the current one, %.64q, is not among them", v.current)
	}
	if v.lifetime == 0 {
		v.lifetime = defaultChallengeLifetime
	}
	if v.lifetime < minChallengeLifetime || v.lifetime > maxChallengeLifetime {
		return fmt.Errorf("ChallengeLifetime: from %s to %s", minChallengeLifetime, maxChallengeLifetime)
	}
	return nil
}
