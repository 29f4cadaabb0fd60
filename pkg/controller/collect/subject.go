// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Subject identifies the machine of a decision, for log lines, Events and `verify`. A field is
// empty if the request does not have it, or does not parse that far. The fields are the requester's
// own claims, unless the outcome lets the request pass. Each field is one line of printable
// characters of bounded length.
type Subject struct {
	// Node and ProviderID are the claimed node name and provider ID.
	Node, ProviderID string
	// EK is the fingerprint of the endorsement key, as inventories list it. For a proof it is the
	// EK in its hello. EKTemplate is the name of its template.
	EK, EKTemplate string
	// AK is the Name of the attestation key in hex, if the evidence was accepted.
	AK string
	// Class is the class that the rules gave the request.
	Class verifier.Class
}

// Bounds of a Subject's fields in bytes, without the mark that text.Line adds to a cut text. The
// name of an object has at most 253 bytes, a SHA-256 in hex 64, and the Name of an AK 132. A
// provider ID may have 1024 bytes, but all fields and part of the message must fit into an Event's
// note.
const (
	MaxName       = 253
	maxProviderID = 128
	maxKey        = 132
	maxTemplate   = 32
)

// MaxNote bounds an Event's note in bytes, including the mark of text.Line. The API server accepts
// 1 KiB.
const MaxNote = telemetry.MaxMessage - 4

// Describe returns the Subject of a request. hello is the hello that a proof refers to, nil if it
// is not found. p is nil for a request without evidence.
func Describe(p evidence.Provider, request, hello *certificatesv1.CertificateSigningRequest, claim verifier.Claim, judged verifier.Evidence, class verifier.Class) Subject {
	ek, template := judged.EK, ""
	if challenger, ok := p.(evidence.Challenger); ok && !claim.Serving {
		if ek == "" {
			ek = challenger.EK(request, hello)
		}
		if t, ok := p.(evidence.EKTemplater); ok {
			template = t.EKTemplate(request, hello)
		}
	}
	return Subject{
		Node: text.Line(claim.NodeName, MaxName), ProviderID: text.Line(claim.ProviderID, maxProviderID),
		EK: text.Line(ek, maxKey), EKTemplate: text.Line(template, maxTemplate), AK: text.Line(judged.AK, maxKey),
		Class: class,
	}
}

// SubjectOf describes the request of a decision.
func SubjectOf(in *Inputs, d verifier.Decision) Subject {
	about := in.subject()
	about.Class = d.Class
	return about
}

// Fields are the Subject as keys and values of a log line. All keys are always there.
func (s Subject) Fields() []any {
	return []any{"node", s.Node, "providerID", s.ProviderID, "ek", s.EK, "ekTemplate", s.EKTemplate, "ak", s.AK, "class", s.Class.String()}
}

// Note returns an Event's note: a message and the Subject. If the note is too long, the message is
// cut. The note leaves room for the request's name, which an Event on a Node has before it.
func (s Subject) Note(message string) string {
	suffix := " (" + s.String() + ")"
	return text.Line(message, MaxNote-len(suffix)-MaxName-len(": ")) + suffix
}

// String returns the fields that are not empty, without the AK, for people.
func (s Subject) String() string {
	var parts []string
	for _, part := range [][2]string{{"node", s.Node}, {"provider ID", s.ProviderID}, {"EK", s.EK}, {"template", s.EKTemplate}, {"class", s.Class.String()}} {
		if part[1] != "" {
			parts = append(parts, part[0]+" "+part[1])
		}
	}
	return strings.Join(parts, ", ")
}
