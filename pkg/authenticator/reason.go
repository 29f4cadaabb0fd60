// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"

	"crypto/tls"
	"crypto/x509"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// Reason is a class of failures. Each has an exit code of its own, which reaches the kubelet's metrics as
// rest_client_exec_plugin_call_total{code}. Names and codes are never changed or used again.
type Reason string

// Every reason for which the plugin does not print a credential.
const (
	Unexpected           Reason = "Unexpected"
	Usage                Reason = "Usage"
	Configuration        Reason = "Configuration"
	ExecAPI              Reason = "ExecAPI"
	DirectoryRefused     Reason = "DirectoryRefused"
	WorkerUnavailable    Reason = "WorkerUnavailable"
	TPMAbsent            Reason = "TPMAbsent"
	TPMError             Reason = "TPMError"
	AttestationFailed    Reason = "AttestationFailed"
	NoBootstrap          Reason = "NoBootstrapCredential"
	BootstrapRefused     Reason = "BootstrapCredentialRefused"
	APIUnreachable       Reason = "APIUnreachable"
	APIRefused           Reason = "APIRefused"
	RequestDenied        Reason = "RequestDenied"
	RequestFailed        Reason = "RequestFailed"
	WaitingForSigner     Reason = "WaitingForSigner"
	CertificateUnusable  Reason = "CertificateUnusable"
	ClockWrong           Reason = "ClockWrong"
	APIUntrusted         Reason = "APIUntrusted"
	DirectoryNotWritable Reason = "DirectoryNotWritable"
	ChallengeUnanswered  Reason = "ChallengeUnanswered"
	KubeconfigForeign    Reason = "KubeconfigForeign"
	KubeletNotPrepared   Reason = "KubeletNotPrepared"
	NodeUnhealthy        Reason = "NodeUnhealthy"
)

// ReasonInfo describes one Reason.
type ReasonInfo struct {
	Reason Reason
	// Code is the exit code. 2 is left to the Go runtime, which uses it for a crash.
	Code int
	// Meaning is one sentence for the operator.
	Meaning string

	backOff backOff
}

// Reasons lists every Reason by exit code.
func Reasons() []ReasonInfo {
	return []ReasonInfo{
		{Unexpected, 1, "Something this program has no name for.", soon},
		{Usage, 3, "The command line cannot be parsed.", soon},
		{Configuration, 10, "The configuration file, a flag's value, or the bootstrap kubeconfig is wrong.", soon},
		{ExecAPI, 11, "KUBERNETES_EXEC_INFO cannot be read, or asks for an API version other than client.authentication.k8s.io/v1 and v1beta1.", soon},
		{DirectoryRefused, 12, "The certificate directory cannot be trusted: it is another user's, others may write into it, or it cannot be read.", soon},
		{WorkerUnavailable, 13, "The worker could not be started, died, or another process holds its lock.", soon},
		{TPMAbsent, 14, "There is no TPM.", soon},
		{TPMError, 15, "The TPM refused a command.", soon},
		{AttestationFailed, 16, "The provider could not tell the machine's identity or make its evidence.", soon},
		{NoBootstrap, 17, "There is no usable certificate and no bootstrap credential to get one with.", soon},
		{BootstrapRefused, 18, "The API server does not know the credential (401): the bootstrap token has expired or was deleted.", soon},
		{APIUnreachable, 19, "The API server does not answer.", soon},
		{APIRefused, 20, "The API server refuses the request (403 or 422): RBAC or admission.", soon},
		{RequestDenied, 21, "An approver denied the CertificateSigningRequest.", later},
		{RequestFailed, 22, "The signer marked the CertificateSigningRequest as failed, or it was deleted each time.", later},
		{WaitingForSigner, 23, "The CertificateSigningRequest is pending: nobody has approved or signed it yet.", none},
		{CertificateUnusable, 24, "The certificate that was issued is not one for this node and key.", later},
		{ClockWrong, 25, "The issued certificate is valid at another time than this machine's clock shows.", later},
		{APIUntrusted, 26, "The API server's certificate is not one that the CA in the kubeconfig vouches for, or not at this time.", soon},
		{DirectoryNotWritable, 27, "The certificate directory cannot be written: the disk is full or read-only, or rights are missing.", soon},
		{ChallengeUnanswered, 28, "The controller's challenge ran out each time, or was not for this machine's TPM.", later},
		{KubeconfigForeign, 29, "A kubeconfig was to be written where there is one that is not this program's: it is left alone.", soon},
		{KubeletNotPrepared, 30, "The kubelet must not start, or not yet: its kubeconfig could not be read or written, or its environment file not written.", soon},
		{NodeUnhealthy, 31, "A check of the command doctor failed.", soon},
	}
}

func (r Reason) info() ReasonInfo {
	for _, info := range Reasons() {
		if info.Reason == r {
			return info
		}
	}
	return Reasons()[0]
}

// Code returns the exit code, 1 for a Reason that is not in Reasons.
func (r Reason) Code() int { return r.info().Code }

// Failure is an error with its class and what can be done about it.
type Failure struct {
	Reason Reason
	// Hint is one sentence, empty where there is nothing to say.
	Hint string
	Err  error
}

func (f *Failure) Error() string { return f.Err.Error() }
func (f *Failure) Unwrap() error { return f.Err }

// AsFailure returns the Failure in err, or makes one of the errors of this program's own packages.
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
		return &Failure{DirectoryRefused, "make it root's, with mode 0700, or name another with --cert-dir", err}
	case errors.As(err, &write):
		return &Failure{DirectoryNotWritable, "free space on the disk, mount it read-write, or name another directory with --cert-dir", err}
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

// apiFailure sorts what came of a call to the API server. credential says in words whose credential was shown.
func apiFailure(err error, credential string) *Failure {
	err = shown{bareURL(err)}
	var unknownAuthority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	var invalid x509.CertificateInvalidError
	var verification *tls.CertificateVerificationError
	switch {
	case apierrors.IsUnauthorized(err):
		return &Failure{BootstrapRefused, "make a new one (kubeadm token create), or check that the kubeconfig is for this cluster",
			fmt.Errorf("%w (credential: %s)", err, credential)}
	case apierrors.IsForbidden(err):
		return &Failure{APIRefused, "bind its group to the ClusterRole system:node-bootstrapper, or to one that may create, get, list and watch certificatesigningrequests",
			fmt.Errorf("%w (credential: %s)", err, credential)}
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), apierrors.IsRequestEntityTooLargeError(err):
		return &Failure{APIRefused, "see what the API server makes of the request with --dry-run", err}
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return &Failure{APIUntrusted, "check this machine's clock, and how long the API server's certificate lives", err}
	case errors.As(err, &unknownAuthority), errors.As(err, &hostname), errors.As(err, &invalid), errors.As(err, &verification):
		return &Failure{APIUntrusted, "check server and certificate-authority-data in the kubeconfig", err}
	}
	return &Failure{APIUnreachable, "check the network, the proxy settings and the server's address", err}
}

// shown is an error of which a peer wrote some of the text.
type shown struct{ error }

func (s shown) Error() string { return text.Line(s.error.Error(), maxMessage) }
func (s shown) Unwrap() error { return s.error }

// maxMessage bounds the text of a failure that a peer may have written some of, in bytes.
const maxMessage = 1024

// bareURL shortens a transport error: its URL repeats what the message says already.
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
