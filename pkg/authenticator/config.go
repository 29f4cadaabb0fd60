// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/strict"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// DefaultConfigFile is read where it exists.
const DefaultConfigFile = "/etc/kubelet-authenticator/config.yaml"

// defaultRuntimeDir has the note about the last answer, which need not survive a reboot.
const defaultRuntimeDir = "/run/kubelet-authenticator"

const (
	configAPIVersion = "authenticator.cluster.x-k8s.io/v1alpha1"
	configKind       = "KubeletAuthenticatorConfiguration"
)

// Config has the operator's settings: the configuration file of kind
// KubeletAuthenticatorConfiguration, authenticator.cluster.x-k8s.io/v1alpha1. Each field is also a
// flag, and the flag takes precedence.
type Config struct {
	metav1.TypeMeta `json:",inline"`

	// Provider names the attestation provider.
	Provider string `json:"provider,omitempty"`
	// NodeName is the Node's name. If it is empty, it is computed as the kubelet does.
	NodeName string `json:"nodeName,omitempty"`
	// ProviderID is the machine's spec.providerID. If it is empty, the provider looks for it.
	ProviderID string `json:"providerID,omitempty"`
	// ProviderIDScheme makes a provider ID of the machine's system UUID, as <scheme>://<uuid>,
	// if there is no ProviderID.
	ProviderIDScheme string `json:"providerIDScheme,omitempty"`
	// SystemUUIDFrom is the field of the firmware that has this UUID: product_uuid, the default, or
	// product_serial, which has the UUID of a vSphere machine in the platform's spelling.
	SystemUUIDFrom string `json:"systemUUIDFrom,omitempty"`
	// CertDir is the certificate directory.
	CertDir string `json:"certDir,omitempty"`
	// RuntimeDir has the TPM's lock, and a note about the certificate that a run printed last, from
	// which the next run notices a rejected certificate. All runs must use the same directory.
	RuntimeDir string `json:"runtimeDir,omitempty"`
	// BootstrapKubeconfig is a kubeconfig file with the credential for the first certificate,
	// used in place. If it is empty, bootstrap.kubeconfig in CertDir is used, then
	// KubeletBootstrapKubeconfig.
	BootstrapKubeconfig string `json:"bootstrapKubeconfig,omitempty"`
	// KeepBootstrapCredential keeps bootstrap.kubeconfig, the copy that "prepare" makes, beyond
	// the first certificate.
	KeepBootstrapCredential bool `json:"keepBootstrapCredential,omitempty"`
	// KubeletKubeconfig is the kubelet's kubeconfig, which "prepare" writes.
	KubeletKubeconfig string `json:"kubeletKubeconfig,omitempty"`
	// KubeletBootstrapKubeconfig is the bootstrap kubeconfig that kubeadm writes for the
	// kubelet, and deletes.
	KubeletBootstrapKubeconfig string `json:"kubeletBootstrapKubeconfig,omitempty"`
	// PrepareWait is the longest wait of "prepare" for the node's first certificate.
	PrepareWait metav1.Duration `json:"prepareWait,omitzero"`
	// SignerName is the signer to request from. If it is empty, it is the provider's.
	SignerName string `json:"signerName,omitempty"`
	// Expiration is the lifetime to request, 10 minutes to 10 years. 0 leaves it to the signer.
	Expiration metav1.Duration `json:"expiration,omitzero"`
	// WaitTimeout is the longest wait of a run that has no certificate to print.
	WaitTimeout metav1.Duration `json:"waitTimeout,omitzero"`
	// RenewalWait is how long a run waits at most for a new certificate if the old one is unusable.
	// It is unusable if it ends within 2 s, is rejected by the API server, or is another cluster's.
	// Otherwise a run prints the old one at once.
	RenewalWait metav1.Duration `json:"renewalWait,omitzero"`
	// CheckInterval is how often a worker checks whether the cluster has announced that nodes are
	// to renew their certificates, 10 seconds to 24 hours. 0 switches these checks off. A check
	// takes place up to a quarter of it earlier.
	CheckInterval metav1.Duration `json:"checkInterval,omitzero"`
	// TPMDevice is the path of the TPM device, or of a software TPM's socket. If it is empty,
	// the provider looks for one.
	TPMDevice string `json:"tpmDevice,omitempty"`
	// EKTemplate names the template of the TPM's endorsement key that the node uses. "auto"
	// leaves the choice to the provider.
	EKTemplate string `json:"ekTemplate,omitempty"`
	// ClusterUID is the UID of the cluster that the node joins. The evidence of a cloud's instance
	// is then bound to it: the controller of another cluster refuses the evidence. If it is empty,
	// the evidence is not bound to a cluster.
	ClusterUID string `json:"clusterUID,omitempty"`
	// MetricsTextfile is the file into which each worker writes metrics, for node-exporter's
	// textfile collector. If it is empty, there is none.
	MetricsTextfile string `json:"metricsTextfile,omitempty"`
}

// DefaultConfig returns the default settings.
func DefaultConfig() Config {
	return Config{
		CertDir:     cache.DefaultPath,
		RuntimeDir:  defaultRuntimeDir,
		WaitTimeout: metav1.Duration{Duration: 30 * time.Second},
		RenewalWait: metav1.Duration{Duration: time.Second},

		CheckInterval: metav1.Duration{Duration: 15 * time.Minute},

		KubeletKubeconfig:          kubelet.KubeconfigFile,
		KubeletBootstrapKubeconfig: kubelet.BootstrapFile,
		// Below the 4 minutes that kubeadm waits for the kubelet.
		PrepareWait: metav1.Duration{Duration: 210 * time.Second},
		EKTemplate:  "auto",
	}
}

// LoadConfig reads a configuration file over the defaults. A missing file is an error unless it is
// optional. On an error the Config has the defaults, except for the certificate directory and the
// kubelet's files. These are still read from the file, even if another user may write it, since a
// valid certificate there must be printed. The certificate directory has its own check (cache.Dir).
func LoadConfig(path string, optional bool) (Config, error) {
	c := DefaultConfig()
	data, err := trustedfile.Read(path)
	var untrusted *trustedfile.Error
	switch {
	case optional && errors.Is(err, os.ErrNotExist):
		return c, nil
	case errors.As(err, &untrusted):
		findPaths(trustedfile.ReadUntrusted(path), &c)
		return c, reason.Configuration.Failure(untrusted.Hint, fmt.Errorf("configuration file %s: %w", path, err))
	case err != nil:
		return c, reason.Configuration.Failure("name an existing file with --config", fmt.Errorf("configuration file: %w", err))
	}
	if err := ParseConfig(data, &c); err != nil {
		c = DefaultConfig()
		findPaths(data, &c)
		return c, reason.Configuration.Failure("see kubelet-authenticator-config(5), docs/configuration.md, for the fields of "+configKind, fmt.Errorf("configuration file %s: %w", path, err))
	}
	return c, nil
}

// findPaths searches an invalid file for paths: with a lenient parser, and if that fails line by
// line.
func findPaths(data []byte, c *Config) {
	var lenient map[string]any
	_ = yaml.Unmarshal(data, &lenient) // findLine is used if this fails
	for name, path := range map[string]*string{
		"certDir": &c.CertDir, "kubeletKubeconfig": &c.KubeletKubeconfig, "kubeletBootstrapKubeconfig": &c.KubeletBootstrapKubeconfig,
	} {
		value, ok := lenient[name].(string)
		if !ok || !filepath.IsAbs(value) {
			value = findLine(string(data), name+":")
		}
		if filepath.IsAbs(value) {
			*path = value
		}
	}
}

// findLine returns the first absolute path that follows a field's name in a line of its own.
func findLine(data, field string) string {
	for line := range strings.Lines(data) {
		value, ok := strings.CutPrefix(strings.TrimSpace(line), field)
		value, _, _ = strings.Cut(strings.ReplaceAll(value, "\t", " "), " #")
		if value = strings.Trim(strings.TrimSpace(value), `"'`); ok && filepath.IsAbs(value) {
			return value
		}
	}
	return ""
}

// ParseConfig decodes one YAML document strictly: unknown, doubled and differently-cased fields are
// errors.
func ParseConfig(data []byte, into *Config) error {
	if err := (strict.Decoder{}).Decode(data, into); err != nil {
		return err
	}
	return strict.CheckKind(into.TypeMeta, configAPIVersion, configKind)
}
