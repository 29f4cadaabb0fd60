// SPDX-License-Identifier: Apache-2.0

package authenticator

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
		return &Failure{kubeconfigForeign, "move it away if it is not needed any more, or name another file", err}
	case errors.As(err, &foreign):
		return &Failure{directoryRefused, "give the directory to root, with mode 0700, or set another one with --cert-dir", err}
	case errors.As(err, &write):
		return &Failure{directoryNotWritable, cmp.Or(oserror.Directory(err, "--cert-dir"),
			"free space on the disk, mount it read-write, or name another directory with --cert-dir"), err}
	case errors.Is(err, cache.ErrLocked):
		return &Failure{WorkerUnavailable, "find who holds it with: fuser -v <the lock file>", err}
	case errors.As(err, &unusable) && unusable.Clock:
		return &Failure{clockWrong, "check this machine's clock and the signer's", err}
	case errors.As(err, &unusable):
		return &Failure{certificateUnusable, "check that the signer issues what was asked for", err}
	default:
		return &Failure{Unexpected, "", err}
	}
}

// classifyProviderError returns the Failure for an error of the provider. what names the task.
func classifyProviderError(p provider.Provider, what string, err error) error {
	failure := &Failure{attestationFailed, "", fmt.Errorf("provider %s: %s: %w", p.Name(), what, err)}
	var known *provider.Error
	if errors.As(err, &known) {
		failure.Hint = known.Hint
		switch known.Class {
		case provider.NoDevice:
			failure.Reason = tpmAbsent
		case provider.DeviceFailed:
			failure.Reason = TPMError
		case provider.DirectoryRefused:
			failure.Reason = directoryRefused
		case provider.DirectoryNotWritable:
			failure.Reason = directoryNotWritable
		}
	}
	return failure
}

// classifyAPIError returns the Failure for an error of a call to the API server. credential
// describes the credential of that call.
func classifyAPIError(err error, credential string) *Failure {
	err = peerError{bareURL(err)}
	var unknownAuthority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	var invalid x509.CertificateInvalidError
	var verification *tls.CertificateVerificationError
	var answer apierrors.APIStatus
	if retryAfter, overloaded := csr.IsOverloaded(err); overloaded {
		if retryAfter > 0 {
			err = fmt.Errorf("%w (Retry-After: %s)", err, retryAfter)
		}
		return &Failure{apiOverloaded, "do nothing on this node: it tries again, with growing back-off; see the load of the API server", err}
	}
	switch {
	case apierrors.IsUnauthorized(err):
		return &Failure{bootstrapRefused, "create a new bootstrap token (kubeadm token create), or check that the kubeconfig is for this cluster",
			fmt.Errorf("%w (credential: %s)", err, credential)}
	case apierrors.IsForbidden(err):
		refusal, reason := nodeaccess.ClassifyRefusal(err.Error()), apiRefused
		switch refusal {
		case nodeaccess.Suspended:
			reason = MachineSuspended
		case nodeaccess.Revoked:
			reason = CertificateRevoked
		}
		return &Failure{reason, refusal.Remedy(), fmt.Errorf("%w (credential: %s)", err, credential)}
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), apierrors.IsRequestEntityTooLargeError(err):
		return &Failure{apiRefused, "run with --dry-run to see the API server's answer to the request", err}
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return &Failure{apiUntrusted, "check this machine's clock, and how long the API server's certificate lives", err}
	case errors.As(err, &unknownAuthority), errors.As(err, &hostname), errors.As(err, &invalid), errors.As(err, &verification):
		return &Failure{apiUntrusted, "check server and certificate-authority-data in the kubeconfig", err}
	}
	if errors.As(err, &answer) {
		return &Failure{APIUnreachable, "see the log of the API server, or of the load balancer before it", err}
	}
	return &Failure{APIUnreachable, "check the network, the proxy settings and the server's address", err}
}

// blameClock handles a call that failed because the API server's certificate is not valid now. If
// this machine's clock is evidently wrong, it returns a Failure about the clock. It returns any
// other Failure unchanged.
func (a *Authenticator) blameClock(failure *Failure) *Failure {
	var invalid x509.CertificateInvalidError
	if !a.now().Before(a.built) || !errors.As(failure, &invalid) || invalid.Reason != x509.Expired {
		return failure
	}
	return &Failure{clockWrong, "set this machine's clock",
		fmt.Errorf("%w; this machine's clock says %s, but this program was built at %s", failure.Err, a.now().UTC().Format(time.RFC3339), a.built.UTC().Format(time.RFC3339))}
}

// peerError is an error whose text a peer wrote in part.
type peerError struct{ error }

func (e peerError) Error() string { return text.Line(e.error.Error(), maxMessage) }
func (e peerError) Unwrap() error { return e.error }

// maxMessage bounds the text of a failure that a peer may have written in part, in bytes.
const maxMessage = 1024

// bareURL replaces the URL of a transport error by the server. The rest of the URL repeats the
// message.
func bareURL(err error) error {
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
