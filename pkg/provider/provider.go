// SPDX-License-Identifier: Apache-2.0

// Package provider is the interface of an attestation provider on the node: it identifies the
// machine and makes the evidence. Each provider is a package below this one. A binary lists the
// providers that it includes.
package provider

import (
	"context"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Provider identifies this machine, and proves it.
//
// Only the worker calls the methods that take a context. They may be slow, may be called again
// after a crash, and must return soon after their context ends. No method may write to standard
// output. Errors name the device or service that failed, and hold no secret.
type Provider interface {
	// Name is the name in the request's PROVIDER block: a lower-case DNS label.
	Name() string
	// SignerName is the signer to request from, unless the operator names another.
	SignerName() string
	// Renews reports whether the node's own certificate may ask for the next one. If not, a
	// certificate is served to its end. Then the bootstrap credential asks for the next one.
	Renews() bool
	// Caution is one sentence on what this provider does not protect against, or empty. The
	// operator sees it with each request.
	Caution() string
	// ProviderID returns the machine's spec.providerID, empty if the machine does not know it.
	// It is not called if the operator set one.
	ProviderID(ctx context.Context) (string, error)
	// Evidence returns the document of the request's DATA block: not empty, version first. It
	// must be bound to request, so that it proves nothing under another one.
	Evidence(ctx context.Context, request Request) ([]byte, error)
}

// Challenger is a Provider with evidence that answers a challenge. A hello is filed first, as a
// request of its own. Evidence is called once the hello is answered (docs/spec.md).
type Challenger interface {
	Provider
	// Versions are the versions of the documents that it accepts, the newest first.
	Versions() attestation.Versions
	// Hello returns the document of the hello's DATA block, in request.Version. It also returns a
	// value to remember if a certificate is issued: the next hello gets it as request.Remembered.
	Hello(ctx context.Context, request Request) (document []byte, remember string, err error)
}

// Chooser is a Challenger whose settings can rule out what a Hello returned as remember. Then a
// pending request is given up, and the doctor warns.
type Chooser interface {
	// Allows reports whether the settings allow what a Hello returned as remember. It opens
	// nothing.
	Allows(remember string) bool
}

// EKNamer is a Challenger that proves the machine's identity by an endorsement key.
type EKNamer interface {
	// EKTemplate returns the name of the EK's template in what a Hello returned as remember. It
	// opens nothing.
	EKTemplate(remember string) string
}

// Originator is a Challenger whose device can show that a request is this machine's, without a
// challenge. Then requests of others with the node's credential do not delay this one in the
// controller's queue.
type Originator interface {
	// Origin returns the annotation attestation.AnnotationOrigin for the object of this name with
	// this spec.request.
	Origin(ctx context.Context, name string, request []byte) (string, error)
}

// Inspector is a Provider that can show a person what it sees. Its results hold no secret.
type Inspector interface {
	Provider
	// Identify returns what an inventory needs to know about this machine. It is printed as
	// JSON or YAML.
	Identify(ctx context.Context) (any, error)
	// Explain describes a document that Hello or Evidence returned.
	Explain(document []byte) []Fact
	// SelfTest tries all that the provider needs of the device, and reports each step. Its
	// error says what failed.
	SelfTest(ctx context.Context, report func(Check)) error
}

// EKDevice is what Identify returns of a device with endorsement keys.
type EKDevice interface {
	// EKFingerprints returns the SHA-256 of each key's SubjectPublicKeyInfo, in lower-case hex.
	EKFingerprints() []string
}

// The names of facts of a provider with a TPM. The Overview looks for them.
const (
	// FactEKTemplate is the name of the EK's template.
	FactEKTemplate = "EK template"
	// FactEKFingerprint is the SHA-256 of the EK's SubjectPublicKeyInfo, in lower-case hex.
	FactEKFingerprint = "EK fingerprint"
)

// Fact is one line for a person.
type Fact struct{ Name, Value string }

// Check is one step of a self-test.
type Check struct {
	Name string
	Took time.Duration
	// Err is nil if it passed.
	Err error
}

// Request is a request that needs evidence.
type Request struct {
	// PKCS10 is the certification request in DER. Its key is this node's.
	PKCS10 []byte
	// NodeName and ProviderID are what the request claims.
	NodeName, ProviderID string
	// Name is the name of the CertificateSigningRequest with the evidence. SignerName is the
	// signer of the certificate. A hello is filed under another signer.
	Name, SignerName string
	// Usages and ExpirationSeconds are those of the CertificateSigningRequest.
	// ExpirationSeconds is nil if the signer decides.
	Usages            []string
	ExpirationSeconds *int32

	// The fields below are for a Challenger.

	// Version is the version to write.
	Version attestation.Version
	// Remembered is what the Hello returned that led to the last certificate, empty if there
	// was none.
	Remembered string
	// Challenge is the answer to the hello. It is set for Evidence.
	Challenge *Challenge
}

// Binding returns what the attestation.Identity of this request is bound to. version is the
// Identity's. clusterUID is the node's clusterUID setting, empty if unset.
func (r Request) Binding(version attestation.Version, clusterUID string) attestation.Binding {
	return attestation.Binding{
		Version: version, ClusterUID: clusterUID, SignerName: r.SignerName, Name: r.Name,
		PKCS10: r.PKCS10, Usages: r.Usages, ExpirationSeconds: r.ExpirationSeconds,
	}
}

// Challenge is a hello and its answer.
type Challenge struct {
	// HelloName, HelloUID and HelloRequest are the hello's name, UID and spec.request. The node
	// chose name and request, the API server the UID.
	HelloName, HelloUID string
	HelloRequest        []byte
	// Answer is the annotation, unchecked: a peer wrote it.
	Answer []byte
	// Fresh is set if the answer came while this process waited for it. Such an answer is fresh,
	// even if the clock is wrong.
	Fresh bool
}

// Error is an error of a provider with its class. Any other error counts as the provider's own.
type Error struct {
	Class Class
	// Hint is one sentence for the operator, or empty.
	Hint string
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Class is a kind of failure.
type Class int

const (
	// NoDevice means that there is no device to make evidence with.
	NoDevice Class = iota + 1
	// DeviceFailed means that the device refused, or did not answer.
	DeviceFailed
	// Stale means that this challenge can no longer be answered. A new hello may get another.
	Stale
	// DirectoryRefused means that Settings.RuntimeDir cannot be trusted: another user may write
	// into it.
	DirectoryRefused
	// DirectoryNotWritable means that a lock in Settings.RuntimeDir cannot be made or taken.
	DirectoryNotWritable
	// FIPSEnforced means that GODEBUG=fips140=only forbids an algorithm that the provider needs.
	FIPSEnforced
)

// Auto is the setting that leaves the choice of the provider to the program. It is no provider's
// name.
const Auto = "auto"

// Settings are the operator's settings. Each provider uses those that apply to it.
type Settings struct {
	// TPMDevice is the path of the TPM: a character device, or the Unix socket of a software
	// TPM. If it is empty, the provider looks for one.
	TPMDevice string
	// EKTemplate names the template of the endorsement key to use. If it is empty or "auto", the
	// provider chooses one.
	EKTemplate string
	// ProviderIDScheme is the scheme of a provider ID made of the machine's system UUID. If it
	// is empty, none is made.
	ProviderIDScheme string
	// SystemUUIDFrom is the field of the firmware that the system UUID is read from, as Linux names
	// it. If it is empty, the provider chooses one.
	SystemUUIDFrom string
	// RuntimeDir is a directory that only root can write, for locks. It need not survive a reboot.
	RuntimeDir string
	// ClusterUID is the UID of the cluster, as its controller knows it. A cloud's statement is
	// bound to it. If it is empty, the statement is not bound to a cluster.
	ClusterUID string
}

// Factory makes a provider by name.
type Factory struct {
	// Name is the provider's name in the configuration.
	Name string
	// Versions are the versions of the DATA document that it can write, the newest first.
	Versions []string
	// Inspects is set if the provider is an Inspector. Then the command line has "<name>
	// selftest".
	Inspects bool
	// New makes it. It opens nothing: it also runs if a certificate on disk is served. An error
	// is about the settings.
	New func(Settings) (Provider, error)
}
