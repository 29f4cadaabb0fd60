// SPDX-License-Identifier: Apache-2.0

// Package provider is the node's half of an attestation provider: what the machine is, and the evidence for it. Each
// provider has a folder of its own below; a binary lists those it carries in one place.
package provider

import (
	"context"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Provider says which machine this is, and proves it.
//
// Only the worker calls the methods that take a context; they may be slow, may be called again after a crash, and must return soon after
// their context ends. None of them may write to standard output. Errors name the device or service that failed; no
// secret goes into them.
type Provider interface {
	// Name is the name in the request's PROVIDER block: a lower-case DNS label.
	Name() string
	// SignerName is the signer that is asked unless the operator names another.
	SignerName() string
	// Renews reports whether the node's own certificate may ask for the next one. Otherwise a certificate is served to its end,
	// and then a first request is made again, with the bootstrap credential.
	Renews() bool
	// Caution is told to the operator each time a certificate is asked for: one sentence on what this provider does not protect from. Empty
	// means nothing is to be said.
	Caution() string
	// ProviderID returns the machine's spec.providerID, empty where the machine does not know it. It is not called when the operator
	// gave one.
	ProviderID(ctx context.Context) (string, error)
	// Evidence returns the document of the request's DATA block: not empty, version first. It must be bound to request so
	// that it convinces nobody under another one.
	Evidence(ctx context.Context, request Request) ([]byte, error)
}

// Challenger is a Provider whose evidence answers a challenge: a hello is filed first, as a request of its own, and Evidence is asked
// for once the hello has been answered (docs/spec.md).
type Challenger interface {
	Provider
	// Versions are those of the documents that it accepts, the newest first.
	Versions() attestation.Versions
	// Hello returns the document of the hello's DATA block, in request.Version, and what is to be remembered once a certificate
	// came of it: the next hello gets that back as request.Remembered.
	Hello(ctx context.Context, request Request) (document []byte, remember string, err error)
}

// Inspector is a Provider that can show a person what it sees. What it returns holds no secret.
type Inspector interface {
	Provider
	// Identify returns what an inventory needs to know of this machine; it is printed as JSON or YAML.
	Identify(ctx context.Context) (any, error)
	// Explain says in words what is in a document that Hello or Evidence returned.
	Explain(document []byte) []Fact
	// SelfTest tries each thing that the provider needs of the device, and reports it as it ends. Its error says what failed.
	SelfTest(ctx context.Context, report func(Check)) error
}

// Fact is one line for a person.
type Fact struct{ Name, Value string }

// Check is one step of a self-test.
type Check struct {
	Name string
	Took time.Duration
	// Err is nil if it passed.
	Err error
}

// Request is what evidence is asked for.
type Request struct {
	// PKCS10 is the certification request in DER. Its key is this node's.
	PKCS10 []byte
	// NodeName and ProviderID are what the request claims.
	NodeName, ProviderID string
	// Name is the CertificateSigningRequest's that the evidence goes into; SignerName the signer that is asked for the certificate, which
	// is not the one that a hello is filed under.
	Name, SignerName string
	// Usages and ExpirationSeconds are those of the CertificateSigningRequest, the latter nil if it is left to the signer.
	Usages            []string
	ExpirationSeconds *int32

	// The rest is for a Challenger.

	// Version is the one to write.
	Version attestation.Version
	// Remembered is what the Hello returned that led to the last certificate, empty where there was none.
	Remembered string
	// Challenge is the answer to the hello. It is set for Evidence.
	Challenge *Challenge
}

// Challenge is a hello and its answer.
type Challenge struct {
	// HelloName, HelloUID and HelloRequest are the hello's name, UID and spec.request. Name and request are this node's own; the
	// UID is the API server's.
	HelloName, HelloUID string
	HelloRequest        []byte
	// Answer is the annotation as it came: a peer wrote it.
	Answer []byte
	// Fresh is set if the answer came while this process waited for it. A wrong clock does not make such an answer old.
	Fresh bool
}

// Error is an error of a provider that says what kind of failure it is. Any other error counts as one of the provider itself.
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
	// NoDevice is when there is nothing to make evidence with.
	NoDevice Class = iota + 1
	// DeviceFailed is when the device refused, or did not answer.
	DeviceFailed
	// Stale is when the challenge can no longer be answered; that to a new hello may be.
	Stale
)

// Settings is what the operator may tell a provider. Each provider takes what concerns it.
type Settings struct {
	// TPMDevice is the path of the TPM: a character device, or the Unix socket of a software TPM. Empty lets the provider look.
	TPMDevice string
	// ProviderIDScheme is the scheme of a provider ID made of the machine's system UUID. Empty means that none is made.
	ProviderIDScheme string
	// RuntimeDir is a directory that only root can write, for locks. It need not outlive a boot.
	RuntimeDir string
}

// Factory makes a provider by name.
type Factory struct {
	// Name is the provider's, as the operator writes it.
	Name string
	// Versions are those of the DATA document that it can write, the newest first.
	Versions []string
	// Inspects is set if the provider is an Inspector: the command line then has "<name> selftest".
	Inspects bool
	// New makes it. It opens nothing: it also runs when a certificate is served from the directory. An error is one of the
	// settings.
	New func(Settings) (Provider, error)
}
