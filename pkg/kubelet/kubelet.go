// SPDX-License-Identifier: Apache-2.0

// Package kubelet reads and writes the files through which kubeadm and the kubelet find their
// credential. Prepare decides which of them this program writes. The package uses no network.
package kubelet

// Where kubeadm keeps its files.
const (
	// KubeconfigFile is the kubelet's kubeconfig.
	KubeconfigFile = "/etc/kubernetes/kubelet.conf"
	// BootstrapFile is the bootstrap kubeconfig that kubeadm writes and, once the kubelet is
	// healthy, deletes.
	BootstrapFile = "/etc/kubernetes/bootstrap-kubelet.conf"
	// ManifestsDir has the static pods. The manifest of an API server makes a machine a control
	// plane.
	ManifestsDir = "/etc/kubernetes/manifests"
	// ServerManifest is the file in it.
	ServerManifest = "kube-apiserver.yaml"
	// ConfigFile is the kubelet's configuration file, which kubeadm writes before it starts the
	// kubelet.
	ConfigFile = "/var/lib/kubelet/config.yaml"
	// RotatedFile is the certificate that the kubelet requests and rotates itself.
	RotatedFile = "/var/lib/kubelet/pki/kubelet-client-current.pem"
)

// EnvFile is the environment file that the drop-in of the kubelet's unit names. Without it the
// kubelet starts as kubeadm configures it.
const EnvFile = "/run/kubelet-authenticator/kubelet.env"

// envVariable is what kubeadm's own drop-in puts on the kubelet's command line.
const envVariable = "KUBELET_KUBECONFIG_ARGS"

// Environment returns the content of the EnvFile: the kubelet uses its kubeconfig as it is, and
// does not bootstrap or rotate a certificate itself.
func Environment(kubeconfig string) []byte {
	return []byte(envVariable + "=--kubeconfig=" + kubeconfig + " --rotate-certificates=false\n")
}
