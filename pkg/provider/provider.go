// SPDX-License-Identifier: Apache-2.0

// Package provider is the node's half of an attestation provider: what the machine is, and the evidence for it. Each
// provider has a folder of its own below; a binary lists those it carries in one place.
package provider

import "context"

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

// Request is what evidence is asked for.
type Request struct {
	// PKCS10 is the certification request in DER. Its key is this node's.
	PKCS10 []byte
	// NodeName and ProviderID are what the request claims.
	NodeName, ProviderID string
	// Name is the CertificateSigningRequest's, SignerName the signer that it will ask.
	Name, SignerName string
	// ExpirationSeconds is the lifetime asked for, nil if that is left to the signer.
	ExpirationSeconds *int32
}

// Settings is what the operator may tell a provider. Each provider takes what concerns it.
type Settings struct {
	// TPMDevice is the path of the TPM: a character device, or the Unix socket of a software TPM. Empty lets the provider look.
	TPMDevice string
}

// Factory makes a provider by name.
type Factory struct {
	// Name is the provider's, as the operator writes it.
	Name string
	// Versions are those of the DATA document that it can write, the newest first.
	Versions []string
	// New makes it. It opens nothing: it also runs when a certificate is served from the directory. An error is one of the
	// settings.
	New func(Settings) (Provider, error)
}
