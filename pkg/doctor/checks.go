// SPDX-License-Identifier: Apache-2.0

package doctor

import "context"

// Check examines one thing.
type Check struct {
	// Name is stable: monitoring goes by it.
	Name string
	// Looks, Wrong and Remedy are the row of docs/doctor.md.
	Looks, Wrong, Remedy string

	run func(context.Context, *examination) finding
}

// Checks lists all checks in the order of the report.
func Checks() []Check {
	return []Check{
		{"configuration", "the configuration file, with the flags given", "it does not parse, a value is wrong, others may write it; the directory of metricsTextfile is missing (warning)", "see configuration.md", checkConfiguration},
		{"tpm", "the TPM: it is opened, and asked for its identity and its keys", "absent, no right to open it, in use, a command is refused or hangs",
			"enable the TPM in the firmware, load its driver; `tpm selftest` tries each command", checkTPM},
		{"ek-certificate", "the certificates of the endorsement keys in the TPM", "none, or none that can be read (warning: an inventory can name the key instead); the key is made anew each time (warning)",
			"put the fingerprint that `identify` prints into the inventory", checkEKCertificate},
		{"ek-template", "the endorsement key that the node enrolled with, against ekTemplate", "another template is set: the next request shows another key than the machine's record has (warning)",
			"have the source of endorsement keys name the new key and not the old one, or set ekTemplate back", checkEKTemplate},
		{"certificate-directory", "owner and mode of the certificate directory, of the folders above it and of its files", "others may write into it or read a key; links and special files; files set aside (warning)",
			"`chown root`, `chmod 0700`, files 0600", checkDirectory},
		{"certificate", "the node's certificate, by this machine's clock", "none, damaged, expired, another node's; not yet valid, or a renewal long due (warning)",
			"the checks below say why there is no other", checkCertificate},
		{"bootstrap-kubeconfig", "the bootstrap kubeconfig: owner, mode, content", "needed and missing (warning while the certificate lasts), others may read the credential, an exec user, no CA check; another cluster's, where there is no other",
			"write one, 0600, with a token or a client certificate", checkBootstrapFile},
		{"clock", "this machine's clock against the Date of the API server's answer", "30 s off (warning), 5 min off, or the API server's certificate is valid at another time only",
			"have the clock set by chrony or systemd-timesyncd", checkClock},
		{"api-server", "each API server that the plugin would talk to, TLS verified with the CA of the same kubeconfig", "no answer, another CA, another name, an expired certificate",
			"check address, network, proxy and certificate-authority-data", checkAPIServer},
		{"certificate-accepted", "whom the API server takes the node's certificate for (SelfSubjectReview)", "401: it does not trust the signer's CA; another user than the node",
			"give kube-apiserver the signer's CA in --client-ca-file", checkCertificateAccepted},
		{"certificate-writes", "whether the API server takes writes with the node's certificate: a change of the node's own Node that changes nothing, with dryRun=All", "403: the certificate was revoked, or the machine is suspended; 403 for another cause (warning). Skipped where there is no Node yet",
			"revoked: see last-result, the node gets another certificate by attestation; suspended: ask the operator, `kubectl attest resume` ends it", checkCertificateWrites},
		{"bootstrap-credential", "whom the API server takes the bootstrap credential for, where it is needed", "401: the token is unknown, deleted or expired; the client certificate has expired",
			"make a new token: `kubeadm token create`", checkBootstrapCredential},
		{"csr-create", "a well-formed request under each signer that is asked, with dryRun=All", "403: RBAC; 422 or another refusal: admission", "bind its group to node-attestation-requester or system:node-bootstrapper", checkCreate},
		{"csr-watch", "a watch and a get of a request of a random name", "403 to both; to one of them (warning)", "bind its group to node-attestation-requester or system:node-bootstrapper", checkWatch},
		{"signer", "whether the signer has decided a request: ours, as of the state file, or another's", "nothing that this node can see was decided by it (warning)", "start node-attestation-controller, check signerName", checkSigner},
		{"last-result", "how the last worker ended, the age of the pending request, what the controller says that it waits for, and whether the challenge was answered", "it failed, or a request waits for long (both a warning while the certificate lasts); the controller has a reason to wait (warning)",
			"as the worker's hint says, or the controller about the request", checkLastResult},
		{"kubelet", "the running kubelet, found in /proc by its name, and the times of its --kubeconfig and of its configuration files; of several, each is judged by the checks below, and the worst is reported",
			"none, several, or a file that was written after the kubelet was started, which does not know it yet (all warnings)", "`systemctl status kubelet`, `systemctl restart kubelet`", checkKubelet},
		{"kubelet-bootstrap", "the running kubelet's --bootstrap-kubeconfig", "it is given: the kubelet gets itself a certificate without attestation, and writes over kubelet.conf",
			"enable the drop-in, restart the kubelet", checkKubeletBootstrap},
		{"kubelet-rotation", "the running kubelet's --rotate-certificates, else rotateCertificates in the files of --config and --config-dir", "on: the kubelet uses the plugin's certificate only to ask for one without attestation",
			"enable the drop-in, restart the kubelet", checkKubeletRotation},
		{"kubelet-kubeconfig", "the running kubelet's --kubeconfig, else /etc/kubernetes/kubelet.conf: owner, mode, whose it is", "the kubelet has written over it after a bootstrap of its own; another user than the plugin, or another credential beside it; none",
			"remove it and the kubelet's own certificate, enable the drop-in, restart the kubelet", checkKubeconfig},
		{"kubelet-exec", "the exec user in it", "command relative, missing, not executable, not root's; another exec API; interactiveMode; no provideClusterInfo (warning)", "write it anew", checkExec},
		{"auto-approve-bindings", "ClusterRoleBindings that let kube-controller-manager approve without attestation", "there are some (warning: an admission policy may stop them). Skipped where the node may not look",
			"delete them: cluster-setup.md", checkBindings},
	}
}
