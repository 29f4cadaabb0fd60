// SPDX-License-Identifier: Apache-2.0

package authenticator

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
