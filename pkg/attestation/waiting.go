// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"errors"
	"regexp"
)

// AnnotationWaiting says why a request waits. It holds a Waiting, and is valid only while the
// request has no challenge, no certificate and no condition Denied or Failed. Everybody who may
// list requests can read it.
const AnnotationWaiting = "attestation.cluster.x-k8s.io/waiting"

// MaxWaiting bounds the annotation, in bytes.
const MaxWaiting = 512

// Waiting says why a request waits: the controller's reason, and one line about its cause and its
// remedy. The line is the same for all requests with that reason. For a node it is a peer's text.
type Waiting struct{ Reason, Text string }

// String is the annotation.
func (w Waiting) String() string { return w.Reason + ": " + w.Text }

// waitingForm is a reason in CamelCase, and printable ASCII that neither begins nor ends with a
// blank.
var waitingForm = regexp.MustCompile(`^([A-Z][A-Za-z0-9]{0,63}): ([!-~](?:[ -~]*[!-~])?)$`)

var errWaiting = errors.New("the annotation is not a reason, a colon and one line of text")

// ParseWaiting reads the annotation. It accepts what String returns for a Waiting that fits, and
// nothing else.
func ParseWaiting(value string) (Waiting, error) {
	if len(value) > MaxWaiting {
		return Waiting{}, errWaiting
	}
	parts := waitingForm.FindStringSubmatch(value)
	if parts == nil {
		return Waiting{}, errWaiting
	}
	return Waiting{Reason: parts[1], Text: parts[2]}, nil
}
