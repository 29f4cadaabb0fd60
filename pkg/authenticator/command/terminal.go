// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

// explain says what to run instead of a bare call, which would print the private key. It returns a
// Failure, since exit code 0 means that a credential is on standard output.
func (i *invocation) explain() error {
	_, _ = fmt.Fprintf(i.Stderr, `%[1]s is run by the kubelet. It prints this node's certificate and private key,
so it does not print them on a terminal. Run one of these instead:

  %[1]s status      the certificate, its renewal, and the last attempt
  %[1]s doctor      what keeps this node from its certificate
  %[1]s --dry-run   what a run would send, and whether the API server accepts it
  %[1]s --help      all commands and flags

`, i.Name)
	return &reason.Failure{
		Reason: reason.Usage, Hint: "to get the credential all the same, send it through a pipe",
		Err: errors.New("standard output is a terminal: no credential is printed"),
	}
}
