// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
)

// Check examines one thing.
type Check struct {
	// Name is stable, since monitoring depends on it.
	Name string
	// Examines, Problems and Remedy are cells of the table in docs/node.md.
	Examines, Problems, Remedy string

	run func(context.Context, *examination) checkup.Result
}

// Checks lists all checks in the order of the report.
func Checks() []Check {
	return []Check{
		{"configuration", "the configuration file, with the flags given", "the file does not parse, a value is wrong, another user may write or replace it; the directory of metricsTextfile is missing (warning)", "see configuration.md", checkConfiguration},
		{"tpm", "whether the TPM can be opened and read: its identity and its keys", "no TPM, no right to open it, it is in use, a command is refused or hangs",
			"enable the TPM in the firmware, load its driver; `tpm selftest` tries each command", checkTPM},
		{"ek-certificate", "the certificates of the endorsement keys in the TPM", "no readable certificate (warning: an inventory can name the key instead); the TPM creates the key again each time (warning)",
			"put the fingerprint that `identify` prints into the inventory", checkEKCertificate},
		{"ek-template", "whether ekTemplate still selects the endorsement key that the node enrolled with", "another template is set: the next request has another key than the machine's record (warning)",
			"replace the old key with the new one in the source of endorsement keys, or restore ekTemplate", checkEKTemplate},
		{"metadata-service", "whether the cloud's metadata service answers this node, for a provider whose evidence comes from it", "no answer; EC2 answers without a token, so the hop limit keeps no pod away (warning). The message has the command that shows whether pods reach it, which the node cannot see",
			"let the node reach 169.254.169.254, and no pod: see clouds.md", checkMetadataService},
		{"certificate-directory", "owner and mode of the certificate directory, its files and its parent folders", "others may write into it or read a key; links and special files; files set aside (warning)",
			"`chown root`, `chmod 0700`, files 0600", checkDirectory},
		{"certificate", "the node's certificate, by this machine's clock", "none, damaged, expired, another node's; not yet valid, or renewal overdue (warning)",
			"the checks below say why there is no new one", checkCertificate},
		{"bootstrap-kubeconfig", "the bootstrap kubeconfig: owner, mode, content", "needed and missing (warning while the certificate is valid), others may read the credential, or write or replace the file, an exec user, no CA check; the only one is for another cluster",
			"write one with mode 0600 and a token or a client certificate", checkBootstrapFile},
		{"clock", "the difference between this machine's clock and the Date header of the API server's answer", "30 s off (warning), 5 min off, or the API server's certificate is valid at another time only",
			"set the clock with chrony or systemd-timesyncd", checkClock},
		{"api-server", "each API server that the plugin would talk to, TLS verified with the CA of the same kubeconfig", "no answer, another CA, another name, an expired certificate",
			"check address, network, proxy and certificate-authority-data", checkAPIServer},
		{"certificate-accepted", "which user the API server sees in the node's certificate (SelfSubjectReview)", "401: the API server does not trust the signer's CA; the user is not this node",
			"add the signer's CA to kube-apiserver's --client-ca-file", checkCertificateAccepted},
		{"certificate-writes", "whether the API server accepts a write with the node's certificate: an empty change of its own Node, or its creation, with dryRun=All", "403: the certificate was revoked, or the machine is suspended; 403 for another cause (warning)",
			"revoked: see last-result, the node attests to get a new certificate; suspended: ask the operator to run `kubectl attest resume`", checkCertificateWrites},
		{"bootstrap-credential", "which user the API server sees in the bootstrap credential, if the node needs one", "401: the token is unknown, deleted or expired; the client certificate has expired",
			"create a new token: `kubeadm token create`", checkBootstrapCredential},
		{"csr-create", "whether the node may create a request for each signer that the plugin uses, with dryRun=All", "403: RBAC; 422 or another refusal: admission", "bind its group to node-attestation-requester or system:node-bootstrapper", checkCreate},
		{"csr-watch", "whether the node may watch and get a request, tried with a random name", "403 to both; 403 to one of them (warning)", "bind its group to node-attestation-requester or system:node-bootstrapper", checkWatch},
		{"signer", "whether the signer has decided any request: this node's, by the state file, or another node's", "this node sees no request that the signer decided (warning)", "start node-attestation-controller, check signerName", checkSigner},
		{"last-result", "how the last worker ended, the pending request's age, why the controller waits, and whether the plugin answered the challenge", "the worker failed, or a request has waited long (both a warning while the certificate is valid); the controller says why it waits (warning)",
			"follow the worker's hint, or the controller's message in the request", checkLastResult},
		{"kubelet", "the running kubelet, found in /proc by name, and the times of its kubeconfig and configuration files. If several kubelets run, the checks below examine each and report the worst",
			"no kubelet runs, several run, or a file changed after the kubelet started (all warnings)", "`systemctl status kubelet`, `systemctl restart kubelet`", checkKubelet},
		{"kubelet-bootstrap", "the running kubelet's --bootstrap-kubeconfig", "the flag is set: the kubelet gets a certificate without attestation, and overwrites kubelet.conf",
			"enable the drop-in, restart the kubelet", checkKubeletBootstrap},
		{"kubelet-rotation", "the running kubelet's --rotate-certificates, else rotateCertificates in the files of --config and --config-dir", "rotation is on: the kubelet uses the plugin's certificate only to request another one without attestation",
			"enable the drop-in, restart the kubelet", checkKubeletRotation},
		{"kubelet-kubeconfig", "the running kubelet's --kubeconfig, else /etc/kubernetes/kubelet.conf: owner, mode, and which program wrote it", "the kubelet overwrote it after its own bootstrap; its user is not the plugin, or has a second credential; the file is missing",
			"remove it and the kubelet's own certificate, enable the drop-in, restart the kubelet", checkKubeconfig},
		{"kubelet-exec", "the exec user in the kubelet's kubeconfig", "command is relative, missing, not executable, not owned by root; another exec API; interactiveMode; no provideClusterInfo (warning)", "write the kubeconfig again with the command `kubeconfig`", checkExec},
		{"auto-approve-bindings", "ClusterRoleBindings that let kube-controller-manager approve without attestation", "such bindings exist (warning: an admission policy may stop them). Skipped if the node may not list them",
			"delete them: see cluster-setup.md", checkBindings},
	}
}
