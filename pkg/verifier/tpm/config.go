// SPDX-License-Identifier: Apache-2.0

// Package tpm verifies the evidence of the TPM provider, version tpm/v1. A hello names the TPM of
// the requester. A proof shows that this TPM holds the attestation key (AK) that made a fresh
// quote. The package does no I/O and reads no clock.
//
// The controller calls it in this order:
//
//  1. ClaimedEK returns the endorsement key (EK) that a hello claims, so that the caller can look
//     it up.
//  2. VerifyHello verifies the hello, and Challenge answers it.
//  3. HelloReference returns the hello that a proof refers to. VerifyProof verifies the proof, and
//     the whole hello again, since the package keeps no state. If the hello is not found,
//     VerifyWithoutHello says whether the proof may wait for it.
//
// ParseHello parses a hello once for one decision. Its result has the methods ClaimedEK, Verify and
// VerifyProof.
//
// The rules (pkg/verifier) judge the rest: the machine of the EK, the requester, the PKCS#10
// request, and the boot counters.
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
	// defaultChallengeLifetime is the default of Config.ChallengeLifetime.
	defaultChallengeLifetime = 10 * time.Minute
	minChallengeLifetime     = 30 * time.Second
	maxChallengeLifetime     = time.Hour
	// maxSkew is the largest accepted difference between the clocks of two replicas.
	maxSkew = time.Minute
	// minKey is the minimum size of a controller's key in bytes, the size of the derived secrets.
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

// Keys are the controller's secrets, from which each challenge's secret is derived. All replicas
// share them.
type Keys struct {
	// Current is the ID of the key for new challenges.
	Current string
	// ByID has each key, of at least 32 random bytes, by its ID. Keep a replaced key for the
	// lifetime of a challenge.
	ByID map[string][]byte
}

// Config is a policy. Nothing in it comes from a node.
type Config struct {
	// Roots are the CAs that EK certificates must chain to. Intermediates are further CAs for the
	// chain, beside those that the node sends. The holder of the key of one of these CAs, or of a
	// CA below, can make any software pass for a TPM.
	Roots, Intermediates []*x509.Certificate
	// AllowedEKs are trusted without a certificate.
	AllowedEKs []Fingerprint
	// NamedEKs says that the caller names EKs in each call, from an authoritative source of its
	// own. Without it, the EKs that a call names are ignored. One of Roots, AllowedEKs and NamedEKs
	// must be set.
	NamedEKs bool
	// DeniedEKs are never trusted, even if another field allows them. If the fingerprint is a CA's,
	// no chain through that CA is accepted.
	DeniedEKs []Fingerprint
	// ChainTime is the time at which EK certificates and their CAs must be valid. Default: the time
	// of each call. Some manufacturers' CAs expire while their TPMs are in use, so the operator can
	// choose an earlier time.
	ChainTime time.Time

	// PCRs are the PCRs to be quoted. The machines' firmware must measure into their bank: root can
	// fill a bank that the firmware leaves empty.
	PCRs attestation.PCRSelection
	// PCRValues are the allowed values of PCRs. A PCR that is not listed may have any value.
	PCRValues map[int][][]byte
	// EventLog requires the firmware's event log. The operating system extends other PCRs than 0 to
	// 7, too, and does not write to that log.
	EventLog bool
	// EventLogPCRs are the PCRs to whose quoted values the log must lead, among 0 to 7 and PCRs.
	// Default: those of 1 to 7 that are in PCRs. PCR 0 is not among them, since some firmware does
	// not log the value that PCR 0 starts at. VerifiedProof has all PCRs that the log led to.
	EventLogPCRs []int
	// MinimumFirmware is the minimum firmwareVersion by manufacturer. A manufacturer is an ID such
	// as "IFX" (TCG TPM Vendor ID Registry), or eight hex digits if the ID is not ASCII. If it is
	// set, a TPM is refused unless a verified certificate names its manufacturer. A manufacturer
	// that is not listed has no minimum.
	MinimumFirmware map[string]uint64

	// Versions are all versions that the controller serves, the newest first. tpm/v1, which this
	// package verifies, must be among them. Default: tpm/v1 alone.
	Versions attestation.Versions
	// ClusterUID identifies the cluster. It must not come from the cluster's own API.
	ClusterUID string
	Keys       Keys
	// ChallengeLifetime is the time in which a challenge must be answered. Default:
	// defaultChallengeLifetime.
	ChallengeLifetime time.Duration
}

// Verifier verifies by one policy. It is immutable after New, and safe for concurrent use. The zero
// value refuses everything.
type Verifier struct {
	roots, intermediates *x509.CertPool
	// The same CAs without their dates distinguish an expired chain from an unknown one. No chain
	// is accepted because of them.
	timelessRoots, timelessIntermediates *x509.CertPool
	// The same CAs as lists, since a pool cannot be read. They only explain why a chain is refused.
	// No chain is accepted because of them. All these CAs have folded names.
	rootList, intermediateList []*x509.Certificate
	hasRoots, namedEKs         bool
	allowed, denied            map[Fingerprint]bool
	chainTime                  time.Time
	pcrs                       attestation.PCRSelection
	values                     map[int][][]byte
	eventLog                   bool
	eventLogPCRs               []int
	firmware                   map[string]uint64
	versions                   attestation.Versions
	clusterUID                 string
	current                    string
	keys                       map[string][]byte
	lifetime                   time.Duration
}

// New returns the verifier of a policy. It copies the policy. An error names the field at fault.
func New(c Config) (*Verifier, error) {
	v := &Verifier{
		roots: x509.NewCertPool(), intermediates: x509.NewCertPool(),
		timelessRoots: x509.NewCertPool(), timelessIntermediates: x509.NewCertPool(),
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

// Versions returns the versions that the controller serves. After ReasonVersion, the annotation
// attestation.AnnotationVersions lists them.
func (v *Verifier) Versions() attestation.Versions { return slices.Clone(v.versions) }

func set(list []Fingerprint) map[Fingerprint]bool {
	m := map[Fingerprint]bool{}
	for _, f := range list {
		m[f] = true
	}
	return m
}

// setTrust sets the sources of trust in an EK.
func (v *Verifier) setTrust(c Config) error {
	if len(c.Roots) == 0 && len(c.AllowedEKs) == 0 && !c.NamedEKs {
		return errors.New("no trust in any EK: one of Roots, AllowedEKs, NamedEKs is required")
	}
	if len(c.Roots) == 0 && len(c.Intermediates) > 0 {
		return errors.New("no Roots: Intermediates have no effect")
	}
	if v.allowed[Fingerprint{}] || v.denied[Fingerprint{}] {
		return errors.New("AllowedEKs, DeniedEKs: an empty fingerprint")
	}
	add := func(field string, list []*x509.Certificate, pool, timeless *x509.CertPool) (folded []*x509.Certificate, err error) {
		for i, ca := range list {
			if ca == nil || !ca.BasicConstraintsValid || !ca.IsCA || len(ca.Raw) == 0 {
				return nil, fmt.Errorf("%s[%d]: not a CA's certificate", field, i)
			}
			ca = withFoldedNames(ca)
			pool.AddCert(ca)
			timeless.AddCert(withoutDates(ca))
			folded = append(folded, ca)
		}
		return folded, nil
	}
	var err error
	if v.rootList, err = add("Roots", c.Roots, v.roots, v.timelessRoots); err != nil {
		return err
	}
	v.intermediateList, err = add("Intermediates", c.Intermediates, v.intermediates, v.timelessIntermediates)
	return err
}

// setMeasurements sets the measurements that the TPM must report.
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
	for _, index := range c.EventLogPCRs {
		switch {
		case !c.EventLog:
			return errors.New("EventLogPCRs: has no effect without EventLog")
		case !isFirmwarePCR(index) || !slices.Contains(v.pcrs.Indexes, index):
			return fmt.Errorf("EventLogPCRs: PCR %d is not one of 0 to 7 that is among PCRs", index)
		}
	}
	v.eventLogPCRs = slices.Clone(c.EventLogPCRs)
	if len(c.EventLogPCRs) == 0 {
		v.eventLogPCRs = slices.DeleteFunc(slices.Clone(v.pcrs.Indexes), func(index int) bool { return index == 0 || !isFirmwarePCR(index) })
	}
	for maker, least := range c.MinimumFirmware {
		if !isManufacturerID(maker) {
			return fmt.Errorf("MinimumFirmware: %.32q is not the id of a maker of TPMs", maker)
		}
		v.firmware[maker] = least
	}
	return nil
}

// setProtocol sets the inputs of challenges.
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
