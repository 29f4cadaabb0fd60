// SPDX-License-Identifier: Apache-2.0

// Package config is the configuration of node-attestation-controller: the file of kind NodeAttestationControllerConfiguration, and
// what becomes of it (docs/controller-configuration.md). It fails closed: what is missing is an error that names the field, never a
// rule that does not hold. An infrastructure provider that embeds the controller can use it, too.
package config

import (
	"errors"
	"fmt"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/strict"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// The kind of the file.
const (
	APIVersion = "controller.attestation.cluster.x-k8s.io/v1alpha1"
	Kind       = "NodeAttestationControllerConfiguration"
)

// Config is the configuration file. Nothing in it comes from a node, or from the API of the cluster that nodes join.
type Config struct {
	metav1.TypeMeta `json:",inline"`

	// ClusterUID tells the cluster from all others. A proof for one is worth nothing in another.
	ClusterUID string `json:"clusterUID,omitempty"`
	// ClusterAPI has the controller serve the workload clusters of a management cluster, each by the rest of this configuration. There is no
	// ClusterUID then.
	ClusterAPI *ClusterAPI `json:"clusterAPI,omitempty"`
	// Namespace is where the Lease, records, the challenge keys, and all that is named below are. With ClusterAPI, records and keys are with
	// their clusters.
	Namespace string `json:"namespace"`
	// Signers are those that are decided for.
	Signers []Signer `json:"signers,omitempty"`
	// SharedHello leaves the hellos of other providers to other controllers.
	SharedHello bool `json:"sharedHello,omitempty"`
	// InsecureSigner switches the always-allow signer on, by its full name.
	InsecureSigner string `json:"insecureSigner,omitempty"`
	// Serving is about kubelets' serving certificates.
	Serving Serving `json:"serving,omitzero"`
	// Signing is who issues.
	Signing Signing `json:"signing"`
	// Lifetimes bound certificates.
	Lifetimes Lifetimes `json:"lifetimes"`
	// Inventory has the machines, and with them the endorsement keys that select them.
	Inventory Inventory `json:"inventory"`
	// TPM is the policy for the evidence of the provider tpm.
	TPM *TPM `json:"tpm,omitempty"`
	// Bootstrappers may ask for first certificates, beside bootstrap tokens.
	Bootstrappers []Bootstrapper `json:"bootstrappers,omitempty"`
	// TokenGroup is a group that bootstrap tokens must have.
	TokenGroup string `json:"tokenGroup,omitempty"`
	// Token is whether a bootstrap token must have been made for the machine. Default: Required with ClusterAPI, otherwise Off, since most
	// inventories list no tokens.
	Token Mode `json:"token,omitempty"`
	// EKNotNamed is whether a machine is refused when the source that vouched for its endorsement
	// key names other keys: Required or Warn. Default: Warn for the source Platform, Required for
	// others.
	EKNotNamed Mode `json:"ekNotNamed,omitempty"`
	// Credential is whether a renewal must be asked for with a certificate in the record. Recover
	// is Required, but makes a record anew that was lost, for a machine whose endorsement key a
	// source names.
	Credential Mode `json:"credential"`
	// BootCounters is whether a TPM is refused whose boot counters went back.
	BootCounters Mode `json:"bootCounters"`
	// WaitDeadline is how long a request may wait before it is denied.
	WaitDeadline metav1.Duration `json:"waitDeadline"`
	// UnattestedNodes are names of nodes that are left alone: they need no record, and renew through
	// kubernetes.io/kube-apiserver-client-kubelet.
	UnattestedNodes []string `json:"unattestedNodes,omitempty"`
	// AutoApprovingBindings is what becomes of ClusterRoleBindings with which kube-controller-manager approves without attestation.
	AutoApprovingBindings BindingsMode `json:"autoApprovingBindings"`
	// Policies is about the admission policies that keep others from doing the controller's work.
	Policies Policies `json:"policies"`
	// Rates bound how much is decided.
	Rates Rates `json:"rates"`
	// Audit decides and reports, and touches no request.
	Audit bool `json:"audit,omitempty"`
	// ChallengeKeySecret is the Secret with the challenge keys. It is made where there is none.
	ChallengeKeySecret string `json:"challengeKeySecret"`
	// LeaderElection lets one of several replicas decide.
	LeaderElection LeaderElection `json:"leaderElection"`
	// MetricsBindAddress and HealthBindAddress are where to listen; "0" is nowhere.
	MetricsBindAddress string `json:"metricsBindAddress"`
	HealthBindAddress  string `json:"healthBindAddress"`
}

// Signer is a signer of CertificateSigningRequests.
type Signer struct {
	Name string `json:"name"`
	// Shared says that others use it too: what has no evidence of ours is left to them.
	Shared bool `json:"shared,omitempty"`
}

// Serving is which serving certificates are approved, by what a node's machine is said to have. They are issued by another signer.
type Serving struct {
	Signers []string `json:"signers,omitempty"`
	// ForbiddenAddresses are DNS names, IPs and CIDRs that no node serves under: the API server's, and the service range.
	ForbiddenAddresses []string `json:"forbiddenAddresses,omitempty"`
}

// SigningMode is who issues what is approved.
type SigningMode string

// The modes of signing. There is no default.
const (
	Sign        SigningMode = "Sign"
	ApproveOnly SigningMode = "ApproveOnly"
)

// Signing is who issues, and with which CA.
type Signing struct {
	Mode SigningMode `json:"mode"`
	// CAFile and KeyFile, or SecretName, are the CA in mode Sign.
	CAFile     string `json:"caFile,omitempty"`
	KeyFile    string `json:"keyFile,omitempty"`
	SecretName string `json:"secretName,omitempty"`
}

// Lifetimes are signing.Limits.
type Lifetimes struct {
	Default  metav1.Duration `json:"default"`
	Min      metav1.Duration `json:"min"`
	Max      metav1.Duration `json:"max"`
	Backdate metav1.Duration `json:"backdate"`
}

// ClusterAPI is about a management cluster.
type ClusterAPI struct {
	// Namespaces are those whose Clusters are served. Default: all.
	Namespaces []string `json:"namespaces,omitempty"`
	// WatchFilter is the value of the label cluster.x-k8s.io/watch-filter that Clusters must have. Default: any, or none.
	WatchFilter string `json:"watchFilter,omitempty"`
	// User is whose rights the controller has in workload clusters: a service account, which policies there name. It is impersonated. Default:
	// that of packaging/kubernetes.
	User string `json:"user,omitempty"`
	// EKSources are what names endorsement keys: Annotation, Inventory, by provider ID, and in an infrastructure provider's own binary Platform.
	EKSources []verifier.EKSource `json:"ekSources,omitempty"`
	// NodeNames are where node names come from, for each Machine the first that has any. Default: MachineName.
	NodeNames []verifier.NameSource `json:"nodeNames,omitempty"`
	// TrustOnFirstUse lets a new Machine's bootstrap token speak for the endorsement key that comes with it.
	// It needs TPM.RootsFile, TPM.AllowedEKs, or TrustAnyTPM.
	TrustOnFirstUse bool `json:"trustOnFirstUse,omitempty"`
	// TrustAnyTPM has TrustOnFirstUse accept every endorsement key, also that of a TPM in software.
	TrustAnyTPM bool `json:"trustAnyTPM,omitempty"`
	// ServingAddresses are the types of Machines' addresses for which nodes get serving certificates: those that the platform itself vouches for, and
	// no guest reports. They must be set with serving certificates, and only then.
	ServingAddresses []string `json:"servingAddresses,omitempty"`
	// UnattestedControlPlanes leaves the nodes of control plane Machines alone, as UnattestedNodes does.
	UnattestedControlPlanes bool `json:"unattestedControlPlanes,omitempty"`
}

// Inventory is where the inventory of machines is: one of the two.
type Inventory struct {
	File      string              `json:"file,omitempty"`
	ConfigMap *InventoryConfigMap `json:"configMap,omitempty"`
}

// InventoryConfigMap is an entry of a ConfigMap.
type InventoryConfigMap struct {
	Name string `json:"name"`
	Key  string `json:"key"`
}

// Bootstrapper is an identity.
type Bootstrapper struct {
	Username string `json:"username"`
	Group    string `json:"group"`
}

// Mode is how much a rule counts.
type Mode string

// The modes of a rule.
const (
	modeRequired Mode = "Required"
	modeWarn     Mode = "Warn"
	modeOff      Mode = "Off"
	// modeRecover is for credential alone.
	modeRecover Mode = "Recover"
)

// BindingsMode is what becomes of ClusterRoleBindings with which kube-controller-manager approves without attestation.
type BindingsMode string

// The modes of such bindings.
const (
	bindingsReport BindingsMode = "Report"
	bindingsRemove BindingsMode = "Remove"
)

// Policies is what the controller expects of the admission policies.
type Policies struct {
	// Mode is whether enforcement starts only where they are in force. It never stops for them.
	Mode Mode `json:"mode"`
	// Controllers are the users that they name beside this controller.
	Controllers []string `json:"controllers,omitempty"`
}

// Rates are controller.Rates.
type Rates struct {
	PerRequester Rate `json:"perRequester"`
	PerCluster   Rate `json:"perCluster"`
	PerMachine   Rate `json:"perMachine"`
}

// Rate is a controller.Rate.
type Rate struct {
	Every metav1.Duration `json:"every"`
	Burst int             `json:"burst"`
}

// TPM is the policy for TPMs, verifier/tpm.Config in words of a file.
type TPM struct {
	// RootsFile and IntermediatesFile hold CA certificates in PEM: the roots that EK certificates have to chain to, and CAs on the way.
	// Without roots, the inventory vouches for EKs by itself.
	RootsFile         string `json:"rootsFile,omitempty"`
	IntermediatesFile string `json:"intermediatesFile,omitempty"`
	// AllowedEKs are trusted without a certificate, DeniedEKs never; of DeniedEKs some may be CAs' keys.
	AllowedEKs []string `json:"allowedEKs,omitempty"`
	DeniedEKs  []string `json:"deniedEKs,omitempty"`
	// PCRs are those to be quoted.
	PCRs PCRs `json:"pcrs"`
	// EventLog asks for the firmware's event log, too.
	EventLog bool `json:"eventLog,omitempty"`
	// MinimumFirmware is the least firmware version by TPM maker: 16 hexadecimal digits, as TPM2_GetCapability reports its halves.
	MinimumFirmware map[string]string `json:"minimumFirmware,omitempty"`
	// ChainTime is when EK certificates must be valid; not set: now.
	ChainTime *metav1.Time `json:"chainTime,omitempty"`
	// ChallengeLifetime is how long a challenge may be answered.
	ChallengeLifetime metav1.Duration `json:"challengeLifetime,omitzero"`
}

// PCRs are a selection, and which values are allowed.
type PCRs struct {
	Bank    string `json:"bank"`
	Indexes []int  `json:"indexes"`
	// Values are digests in hex by PCR; a PCR that is not listed may have any value.
	Values map[string][]string `json:"values,omitempty"`
}

// LeaderElection is about replicas.
type LeaderElection struct {
	Enabled bool `json:"enabled"`
	// LeaseName is the Lease's, in Namespace.
	LeaseName string `json:"leaseName"`
}

// Default returns what holds where nothing is set. By itself it is no configuration: what must be set is not.
func Default() Config {
	limits, rates := signing.DefaultLimits(), controller.DefaultRates()
	duration := func(d time.Duration) metav1.Duration { return metav1.Duration{Duration: d} }
	rate := func(r controller.Rate) Rate { return Rate{Every: duration(r.Every), Burst: r.Burst} }
	return Config{
		Namespace: "node-attestation-system",
		Lifetimes: Lifetimes{
			Default: duration(limits.Default), Min: duration(limits.Min), Max: duration(limits.Max), Backdate: duration(limits.Backdate),
		},
		Credential:            modeRecover,
		BootCounters:          modeWarn,
		WaitDeadline:          duration(verifier.DefaultWaitDeadline),
		AutoApprovingBindings: bindingsReport,
		Policies:              Policies{Mode: modeRequired},
		Rates:                 Rates{PerRequester: rate(rates.Requester), PerCluster: rate(rates.Cluster), PerMachine: rate(rates.Machine)},
		ChallengeKeySecret:    "node-attestation-controller-key",
		LeaderElection:        LeaderElection{Enabled: true, LeaseName: "node-attestation-controller"},
		MetricsBindAddress:    ":8080",
		HealthBindAddress:     ":8081",
	}
}

// defaultSigners are those that are decided for where none is given.
func defaultSigners() []Signer {
	return []Signer{{Name: tpmSigner}}
}

// tpmSigner is the signer that the plugin's provider tpm asks.
const tpmSigner = "cluster.x-k8s.io/kube-apiserver-client-kubelet-" + tpm.Provider

// Load reads a file.
func Load(path string) (Config, error) {
	if path == "" {
		return Config{}, errors.New("configuration file: none is named")
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("configuration file: %w", err)
	}
	c, err := Parse(data)
	if err != nil {
		return Config{}, fmt.Errorf("configuration file %s: %w", path, err)
	}
	return c, nil
}

// Parse decodes one YAML document strictly over the defaults. Settings checks what it says.
func Parse(data []byte) (Config, error) {
	c := Default()
	if err := strict.Decode(data, &c); err != nil {
		return Config{}, err
	}
	if err := strict.CheckKind(c.TypeMeta, APIVersion, Kind); err != nil {
		return Config{}, err
	}
	return c, nil
}
