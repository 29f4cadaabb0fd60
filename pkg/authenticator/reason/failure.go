// SPDX-License-Identifier: Apache-2.0

package reason

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/oserror"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Failure is an error with its class and a hint.
type Failure struct {
	Reason Reason
	// Hint is one sentence that says what to do, "" if there is none.
	Hint string
	Err  error
}

// Failure returns a Failure with this Reason.
func (r Reason) Failure(hint string, err error) *Failure { return &Failure{r, hint, err} }

func (f *Failure) Error() string { return f.Err.Error() }
func (f *Failure) Unwrap() error { return f.Err }

// AsFailure returns the Failure in err, or makes one from the errors of this program's own
// packages.
func AsFailure(err error) *Failure {
	var failure *Failure
	if errors.As(err, &failure) {
		return failure
	}
	var access *nodeaccess.Error
	var kubeconfig *kubelet.ForeignError
	var foreign *cache.ForeignDirError
	var write *cache.WriteError
	var unusable *cache.UnusableError
	switch {
	case errors.As(err, &access) && access.Problem == nodeaccess.Misconfigured:
		return &Failure{Configuration, access.Hint, err}
	case errors.As(err, &access):
		return &Failure{NoBootstrap, access.Hint, err}
	case errors.As(err, &kubeconfig):
		return &Failure{KubeconfigForeign, "move it away if it is not needed any more, or name another file", err}
	case errors.As(err, &foreign):
		return &Failure{DirectoryRefused, "give the directory to root, with mode 0700, or set another one with --cert-dir", err}
	case errors.As(err, &write):
		return &Failure{DirectoryNotWritable, cmp.Or(oserror.Directory(err, "--cert-dir"),
			"free space on the disk, mount it read-write, or name another directory with --cert-dir"), err}
	case errors.Is(err, cache.ErrLocked):
		return &Failure{WorkerUnavailable, "find who holds it with: fuser -v <the lock file>", err}
	case errors.As(err, &unusable) && unusable.Clock:
		return &Failure{ClockWrong, "check this machine's clock and the signer's", err}
	case errors.As(err, &unusable):
		return &Failure{CertificateUnusable, "check that the signer issues what was asked for", err}
	default:
		return &Failure{Unexpected, "", err}
	}
}

// ClassifyProviderError returns the Failure for an error of the provider. what names the task.
func ClassifyProviderError(p provider.Provider, what string, err error) error {
	failure := &Failure{AttestationFailed, "", fmt.Errorf("provider %s: %s: %w", p.Name(), what, err)}
	var known *provider.Error
	if errors.As(err, &known) {
		failure.Hint = known.Hint
		switch known.Class {
		case provider.NoDevice:
			failure.Reason = TPMAbsent
		case provider.DeviceFailed:
			failure.Reason = TPMError
		case provider.DirectoryRefused:
			failure.Reason = DirectoryRefused
		case provider.DirectoryNotWritable:
			failure.Reason = DirectoryNotWritable
		}
	}
	return failure
}

// ClassifyAPIError returns the Failure for an error of a call to the API server. credential
// describes the credential of that call.
func ClassifyAPIError(err error, credential string) *Failure {
	err = peerError{BareURL(err)}
	var unknownAuthority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	var invalid x509.CertificateInvalidError
	var verification *tls.CertificateVerificationError
	var answer apierrors.APIStatus
	if retryAfter, overloaded := csr.IsOverloaded(err); overloaded {
		if retryAfter > 0 {
			err = fmt.Errorf("%w (Retry-After: %s)", err, retryAfter)
		}
		return &Failure{APIOverloaded, "do nothing on this node: it tries again, with growing back-off; see the load of the API server", err}
	}
	switch {
	case apierrors.IsUnauthorized(err):
		return &Failure{BootstrapRefused, "create a new bootstrap token (kubeadm token create), or check that the kubeconfig is for this cluster",
			fmt.Errorf("%w (credential: %s)", err, credential)}
	case apierrors.IsForbidden(err):
		refusal, reason := nodeaccess.ClassifyRefusal(err.Error()), APIRefused
		switch refusal {
		case nodeaccess.Suspended:
			reason = MachineSuspended
		case nodeaccess.Revoked:
			reason = CertificateRevoked
		}
		return &Failure{reason, refusal.Remedy(), fmt.Errorf("%w (credential: %s)", err, credential)}
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), apierrors.IsRequestEntityTooLargeError(err):
		return &Failure{APIRefused, "run with --dry-run to see the API server's answer to the request", err}
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return &Failure{APIUntrusted, "check this machine's clock, and how long the API server's certificate lives", err}
	case errors.As(err, &unknownAuthority), errors.As(err, &hostname), errors.As(err, &invalid), errors.As(err, &verification):
		return &Failure{APIUntrusted, "check server and certificate-authority-data in the kubeconfig", err}
	}
	if errors.As(err, &answer) {
		return &Failure{APIUnreachable, "see the log of the API server, or of the load balancer before it", err}
	}
	return &Failure{APIUnreachable, "check the network, the proxy settings and the server's address", err}
}

// BlameClock handles a call that failed because the API server's certificate is not valid now. If
// now is before the program was built, this machine's clock is wrong, and BlameClock returns a
// Failure about the clock. It returns any other Failure unchanged.
func BlameClock(failure *Failure, now, built time.Time) *Failure {
	var invalid x509.CertificateInvalidError
	if !now.Before(built) || !errors.As(failure, &invalid) || invalid.Reason != x509.Expired {
		return failure
	}
	return &Failure{ClockWrong, "set this machine's clock",
		fmt.Errorf("%w; this machine's clock says %s, but this program was built at %s", failure.Err, now.UTC().Format(time.RFC3339), built.UTC().Format(time.RFC3339))}
}

// peerError is an error whose text a peer wrote in part.
type peerError struct{ error }

func (e peerError) Error() string { return text.Line(e.error.Error(), MaxMessage) }
func (e peerError) Unwrap() error { return e.error }

// MaxMessage bounds the text of a failure that a peer may have written in part, in bytes.
const MaxMessage = 1024

// BareURL replaces the URL of a transport error by the server. The rest of the URL repeats the
// message.
func BareURL(err error) error {
	var wrapped *url.Error
	if !errors.As(err, &wrapped) {
		return err
	}
	var timeout net.Error
	if errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("%s: no answer in time", serverOf(wrapped.URL))
	}
	return fmt.Errorf("%s: %w", serverOf(wrapped.URL), wrapped.Err)
}

func serverOf(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return "API server"
	}
	return u.Scheme + "://" + u.Host
}
