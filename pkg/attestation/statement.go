// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"errors"
	"regexp"
)

// The annotations that hold a Statement. Everybody who may list requests can read them.
const (
	// AnnotationWaiting says why a request waits. It is valid only while the request has no
	// challenge, no verdict, no certificate and no condition Denied or Failed.
	AnnotationWaiting = "attestation.cluster.x-k8s.io/waiting"
	// AnnotationVerdict ends a rehearsal (RehearsalSignerName): ReasonRehearsalPassed, or the
	// reason of the denial that a real request would get.
	AnnotationVerdict = "attestation.cluster.x-k8s.io/verdict"
)

// MaxStatement bounds a Statement in an annotation, in bytes.
const MaxStatement = 512

// Statement is what the controller says about a request: a reason, and one line about its cause and
// its remedy. A node must not trust it: it cannot know who wrote it.
type Statement struct{ Reason, Text string }

// String is the annotation.
func (s Statement) String() string { return s.Reason + ": " + s.Text }

// statementForm is a reason in CamelCase, and printable ASCII that neither begins nor ends with a
// blank.
var statementForm = regexp.MustCompile(`^([A-Z][A-Za-z0-9]{0,63}): ([!-~](?:[ -~]*[!-~])?)$`)

var errStatement = errors.New("the annotation is not a reason, a colon and one line of text")

// ParseStatement reads an annotation. It accepts what String returns for a Statement that fits, and
// nothing else.
func ParseStatement(value string) (Statement, error) {
	if len(value) > MaxStatement {
		return Statement{}, errStatement
	}
	parts := statementForm.FindStringSubmatch(value)
	if parts == nil {
		return Statement{}, errStatement
	}
	return Statement{Reason: parts[1], Text: parts[2]}, nil
}
