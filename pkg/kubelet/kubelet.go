// SPDX-License-Identifier: Apache-2.0

// Package kubelet knows the files by which kubeadm and the kubelet find their credential, what each of them looks like in each state, and which
// of them this program writes (Prepare). It touches no network.
package kubelet

// Where kubeadm keeps its files.
const (
	// KubeconfigFile is the kubelet's kubeconfig.
	KubeconfigFile = "/etc/kubernetes/kubelet.conf"
	// BootstrapFile is the bootstrap kubeconfig that kubeadm writes and, once the kubelet is healthy, deletes.
	BootstrapFile = "/etc/kubernetes/bootstrap-kubelet.conf"
	// ManifestsDir holds the static pods: that of an API server makes a machine a control plane.
	ManifestsDir = "/etc/kubernetes/manifests"
	// ServerManifest is the file in it.
	ServerManifest = "kube-apiserver.yaml"
	// ConfigFile is the kubelet's configuration file, which kubeadm writes before it starts the kubelet.
	ConfigFile = "/var/lib/kubelet/config.yaml"
	// RotatedFile is the certificate that the kubelet fetches and rotates by itself.
	RotatedFile = "/var/lib/kubelet/pki/kubelet-client-current.pem"
)

// EnvFile is the environment file that the drop-in of the kubelet's unit names. Without it the kubelet starts as kubeadm has it.
const EnvFile = "/run/kubelet-authenticator/kubelet.env"

// EnvVariable is what kubeadm's own drop-in puts on the kubelet's command line.
const EnvVariable = "KUBELET_KUBECONFIG_ARGS"

// Environment returns the content of the EnvFile: the kubelet is to use its kubeconfig as it is, and neither bootstrap nor rotate a certificate
// by itself.
func Environment(kubeconfig string) []byte {
	return []byte(EnvVariable + "=--kubeconfig=" + kubeconfig + " --rotate-certificates=false\n")
}
