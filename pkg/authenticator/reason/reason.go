// SPDX-License-Identifier: Apache-2.0

// Package reason has the reasons for which the plugin prints no certificate. Each has an exit code,
// one sentence for the operator, and the kind of back-off that follows it. failure.go finds the
// reason of an error.
package reason

// Reason is a class of failures. Each has its own exit code, which the kubelet's metrics show as
// rest_client_exec_plugin_call_total{code}. Names and codes are never changed or reused.
type Reason string

// The reasons why the plugin prints no credential.
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
	APIOverloaded        Reason = "APIOverloaded"
	CertificateRevoked   Reason = "CertificateRevoked"
	MachineSuspended     Reason = "MachineSuspended"
	FIPSEnforced         Reason = "FIPSEnforced"
	CertificateDue       Reason = "CertificateDue"
	RenewalFailing       Reason = "RenewalFailing"
	CertificateExpired   Reason = "CertificateExpired"
	NoCertificate        Reason = "NoCertificate"
	NotConfirmed         Reason = "NotConfirmed"
)

// Info describes one Reason.
type Info struct {
	Reason Reason
	// Code is the exit code. 2 is reserved for a crash, by the Go runtime.
	Code int
	// Meaning is one sentence for the operator.
	Meaning string
	// BackOff follows a worker that failed for this Reason.
	BackOff BackOff
}

// All lists every Reason by exit code.
func All() []Info {
	return []Info{
		{Unexpected, 1, "An error that has no reason of its own.", BackOffSoon},
		{Usage, 3, "The command line cannot be parsed.", BackOffSoon},
		{Configuration, 10, "The configuration file, a flag's value, or the bootstrap kubeconfig is wrong, or another user may write such a file.", BackOffSoon},
		{ExecAPI, 11, "KUBERNETES_EXEC_INFO cannot be read, or asks for an API version other than client.authentication.k8s.io/v1 and v1beta1.", BackOffSoon},
		{DirectoryRefused, 12, "The certificate directory or the runtime directory cannot be trusted: another user owns it, others may write into it, or it cannot be read.", BackOffSoon},
		{WorkerUnavailable, 13, "The worker could not be started, the worker died, or another process holds its lock.", BackOffSoon},
		{TPMAbsent, 14, "There is no TPM, or nothing listens at the socket of a software TPM.", BackOffSoon},
		{TPMError, 15, "The TPM refused a command, did not answer, or could not be opened: it is in use, rights are missing, or too many files are open.", BackOffSoon},
		{AttestationFailed, 16, "The provider could not identify the machine, or could not create its evidence.", BackOffSoon},
		{NoBootstrap, 17, "There is no usable certificate, and no bootstrap credential to request one with.", BackOffSoon},
		{BootstrapRefused, 18, "The API server does not know the credential (401): the bootstrap token has expired or was deleted.", BackOffSoon},
		{APIUnreachable, 19, "The API server does not answer.", BackOffSoon},
		{APIRefused, 20, "The API server refuses the request (403 or 422): RBAC or admission.", BackOffSoon},
		{RequestDenied, 21, "An approver denied the CertificateSigningRequest. With rehearse: a real request would be denied.", BackOffLater},
		{RequestFailed, 22, "The signer marked the CertificateSigningRequest as failed, or each request was deleted before it was decided.", BackOffLater},
		{WaitingForSigner, 23, "The CertificateSigningRequest is pending: nobody has approved or signed it yet. The message says why the controller waits, and the hint says what to do.", BackOffNone},
		{CertificateUnusable, 24, "The issued certificate cannot be used, or certificates were issued too often.", BackOffLater},
		{ClockWrong, 25, "By this machine's clock, the node's, the issued or the API server's certificate is not valid yet, or has expired.", BackOffLater},
		{APIUntrusted, 26, "The CA in the kubeconfig did not issue the API server's certificate, or that certificate is not valid now.", BackOffSoon},
		{DirectoryNotWritable, 27, "The certificate directory or the runtime directory cannot be written or locked: it is full or read-only, its file system has no locks, or rights are missing.", BackOffSoon},
		{ChallengeUnanswered, 28, "Each challenge of the controller expired before the answer, or was for another TPM.", BackOffLater},
		{KubeconfigForeign, 29, "The kubeconfig to write already exists, and this program did not write it. The program does not change that file.", BackOffSoon},
		{KubeletNotPrepared, 30, "The kubelet must not start yet: its kubeconfig could not be read or written, or its environment file could not be written. For example, /run is full.", BackOffSoon},
		{NodeUnhealthy, 31, "A check of the command doctor failed.", BackOffSoon},
		{APIOverloaded, 32, "The API server sheds load (429 or 503). The next attempt waits for its Retry-After, at most 10 minutes, plus up to half of that.", BackOffBusy},
		{CertificateRevoked, 33, "The API server refuses writes with the node's certificate (403): it was revoked, and the node must attest to get a new one.", BackOffLater},
		{MachineSuspended, 34, "An operator has suspended this machine: it gets no certificate, and the API server refuses its writes.", BackOffLater},
		{FIPSEnforced, 35, "GODEBUG=fips140=only forbids an algorithm that the provider needs: the provider tpm needs AES-CFB, as TPM 2.0 prescribes it.", BackOffSoon},
		// Only the command status has these codes. 36 to 39 are reserved for failures of a run.
		{CertificateDue, 40, "The command status: the certificate is valid and used, and its renewal is due.", BackOffSoon},
		{RenewalFailing, 41, "The command status: the certificate is valid and used, but its renewal fails, the API server rejects it, or the configuration is wrong.", BackOffSoon},
		{CertificateExpired, 42, "The command status: the certificate has expired.", BackOffSoon},
		{NoCertificate, 43, "The command status: there is no usable certificate, for a cause other than expiry.", BackOffSoon},
		{NotConfirmed, 44, "The command reset: nobody confirmed it, a kubelet runs with the kubelet's kubeconfig, or the search for kubelets failed. Nothing was removed.", BackOffSoon},
	}
}

// Info describes the Reason. For an unknown one it describes Unexpected.
func (r Reason) Info() Info {
	for _, info := range All() {
		if info.Reason == r {
			return info
		}
	}
	return All()[0]
}

// Code returns the exit code, 1 for a Reason that is not in All.
func (r Reason) Code() int { return r.Info().Code }
