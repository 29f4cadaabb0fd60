// SPDX-License-Identifier: Apache-2.0

// Package config reads and checks the configuration file of node-attestation-controller, and makes
// the controller's parts from it (docs/controller-configuration.md). It fails closed: an unset
// field that is required is an error that names the field. An infrastructure provider that embeds
// the controller can use it, too.
package config

import (
	"errors"
	"fmt"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/strict"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// The kind of the file.
const (
	APIVersion = "controller.attestation.cluster.x-k8s.io/v1alpha1"
	Kind       = "NodeAttestationControllerConfiguration"
)

// Config is the configuration file. Nothing in it comes from a node, or from the API of the cluster
// that nodes join.
type Config struct {
	metav1.TypeMeta `json:",inline"`

	// ClusterUID identifies the cluster. A proof for one cluster is worthless in another. It has 1 to
	// 128 printable ASCII characters, and no space. Required without ClusterAPI.
	ClusterUID string `json:"clusterUID,omitempty"`
	// ClusterAPI makes the controller serve the workload clusters of a management cluster, each by
	// the rest of this configuration. ClusterUID must be empty then.
	ClusterAPI *ClusterAPI `json:"clusterAPI,omitempty"`
	// Namespace is where the Lease, records, challenge keys and all named objects are. With
	// ClusterAPI, records and keys are beside their Clusters.
	Namespace string `json:"namespace"`
	// Signers are the signers of client certificates that the controller decides for. Default:
	// cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm. Required with ApproveOnly.
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
	// TokenGroup is a group that bootstrap tokens must have. Default: system:bootstrappers.
	TokenGroup string `json:"tokenGroup,omitempty"`
	// Token is how much it counts that a bootstrap token was made for the machine. Default:
	// Required with ClusterAPI. Otherwise Off, since most inventories list no tokens.
	Token Mode `json:"token,omitempty"`
	// EKNotNamed is how much it counts that the source which vouched for a machine's endorsement
	// key names other keys: Required or Warn. Default: Warn for the source Platform, Required for
	// others.
	EKNotNamed Mode `json:"ekNotNamed,omitempty"`
	// Credential is how much it counts that a renewal is asked for with a certificate in the
	// record: Recover, Required, Warn or Off. Recover is Required, but recreates a lost record for a
	// machine whose endorsement key a source names.
	Credential Mode `json:"credential"`
	// BootCounters is how much it counts that a TPM's boot counters went back: Required, Warn or
	// Off.
	BootCounters Mode `json:"bootCounters"`
	// WaitDeadline is how long a request may wait before it is denied, 1m to 23h.
	WaitDeadline metav1.Duration `json:"waitDeadline"`
	// UnattestedNodes are names of nodes without evidence. They need no record, and renew through
	// kubernetes.io/kube-apiserver-client-kubelet.
	UnattestedNodes []string `json:"unattestedNodes,omitempty"`
	// Revocation is about certificates that are revoked before they end.
	Revocation Revocation `json:"revocation,omitzero"`
	// AutoApprovingBindings says what to do with ClusterRoleBindings that make
	// kube-controller-manager approve without attestation: Report or Remove.
	AutoApprovingBindings BindingsMode `json:"autoApprovingBindings"`
	// Policies is about the admission policies that keep others from approving and signing.
	Policies Policies `json:"policies"`
	// Rates limit how much is decided.
	Rates Rates `json:"rates"`
	// DecisionLog is where the records of final decisions go.
	DecisionLog DecisionLog `json:"decisionLog,omitzero"`
	// Audit makes the controller decide and report, and change no request.
	Audit bool `json:"audit,omitempty"`
	// ChallengeKeySecret is the Secret with the challenge keys. The controller writes a key into it
	// if it is empty, and creates it only if it has that right. The manifests have it, empty.
	ChallengeKeySecret string `json:"challengeKeySecret"`
	// LeaderElection lets one of several replicas decide.
	LeaderElection LeaderElection `json:"leaderElection"`
	// MetricsBindAddress and HealthBindAddress are where to listen. "0" is nowhere.
	MetricsBindAddress string `json:"metricsBindAddress"`
	HealthBindAddress  string `json:"healthBindAddress"`
}

// Signer is a signer of CertificateSigningRequests.
type Signer struct {
	// Name is the signer's, domain/path. Required.
	Name string `json:"name"`
	// Shared says that others use the signer, too. Requests without evidence of ours are left to
	// them.
	Shared bool `json:"shared,omitempty"`
}

// Serving says which serving certificates are approved. kube-controller-manager issues those of
// kubernetes.io signers. In mode Sign, the controller issues the others.
type Serving struct {
	// Signers are those of serving certificates.
	Signers []string `json:"signers,omitempty"`
	// ForbiddenAddresses are DNS names, IPs and CIDRs that no node serves under: the API server's,
	// and the service range. Required with Signers.
	ForbiddenAddresses []string `json:"forbiddenAddresses,omitempty"`
}

// Revocation says whether certificates can be revoked and machines suspended.
type Revocation struct {
	// Enabled has the controller refuse revoked certificates in use, by admission policies. It needs
	// the manifests of packaging/kubernetes-revocation, and Kubernetes 1.32.
	Enabled bool `json:"enabled,omitempty"`
}

// SigningMode says who issues approved certificates.
type SigningMode string

// The modes of signing. There is no default.
const (
	Sign        SigningMode = "Sign"
	ApproveOnly SigningMode = "ApproveOnly"
)

// Signing is who issues, and with which CA.
type Signing struct {
	// Mode is Sign or ApproveOnly. Required.
	Mode SigningMode `json:"mode"`
	// CAFile and KeyFile, or SecretName, are the CA in mode Sign: absolute paths of files in PEM, or a
	// Secret with tls.crt and tls.key. With ClusterAPI none is set.
	CAFile     string `json:"caFile,omitempty"`
	KeyFile    string `json:"keyFile,omitempty"`
	SecretName string `json:"secretName,omitempty"`
}

// Lifetimes are signing.Limits.
type Lifetimes struct {
	// Default is the lifetime if a request asks for none.
	Default metav1.Duration `json:"default"`
	// Min is the shortest lifetime, 10m or more.
	Min metav1.Duration `json:"min"`
	// Max is the longest lifetime, 2160h or less.
	Max metav1.Duration `json:"max"`
	// Backdate is how far in the past a certificate begins, 1h or less.
	Backdate metav1.Duration `json:"backdate"`
}

// ClusterAPI configures a management cluster.
type ClusterAPI struct {
	// Namespaces are those whose Clusters are served. Default: all.
	Namespaces []string `json:"namespaces,omitempty"`
	// WatchFilter is the value of the label cluster.x-k8s.io/watch-filter on Clusters to serve.
	// Default: all Clusters, with or without the label.
	WatchFilter string `json:"watchFilter,omitempty"`
	// User is the service account that the controller impersonates in workload clusters. Policies
	// there name it. Default: that of packaging/kubernetes.
	User string `json:"user,omitempty"`
	// EKSources name endorsement keys: Annotation, Inventory (by provider ID), and in an
	// infrastructure provider's own binary Platform.
	EKSources []verifier.EKSource `json:"ekSources,omitempty"`
	// NodeNames are where node names come from. The first source with a name for a Machine decides.
	// Default: MachineName.
	NodeNames []verifier.NameSource `json:"nodeNames,omitempty"`
	// TrustOnFirstUse lets a new Machine's bootstrap token vouch for the endorsement key that comes
	// with it. It needs TPM.RootsFile, TPM.AllowedEKs, or TrustAnyTPM.
	TrustOnFirstUse bool `json:"trustOnFirstUse,omitempty"`
	// TrustAnyTPM lets TrustOnFirstUse accept every endorsement key, also that of a software TPM.
	TrustAnyTPM bool `json:"trustAnyTPM,omitempty"`
	// ServingAddresses are the types of Machines' addresses for which nodes get serving
	// certificates: those that the platform itself vouches for, and no guest reports. It must be
	// set with serving certificates, and only then.
	ServingAddresses []string `json:"servingAddresses,omitempty"`
	// UnattestedControlPlanes treats the nodes of control plane Machines as UnattestedNodes.
	UnattestedControlPlanes bool `json:"unattestedControlPlanes,omitempty"`
}

// Inventory is where the inventory of machines is: exactly one of these.
type Inventory struct {
	// File is the absolute path of a file with the inventory.
	File string `json:"file,omitempty"`
	// Files are the absolute paths of an inventory in several parts.
	Files []string `json:"files,omitempty"`
	// ConfigMap is an entry with the inventory.
	ConfigMap *InventoryConfigMap `json:"configMap,omitempty"`
	// ConfigMaps are the entries of an inventory in several parts.
	ConfigMaps []InventoryConfigMap `json:"configMaps,omitempty"`
}

// Paths returns the files of the inventory.
func (i Inventory) Paths() []string {
	if i.File != "" {
		return []string{i.File}
	}
	return i.Files
}

// Entries returns the entries of ConfigMaps that have the inventory.
func (i Inventory) Entries() []InventoryConfigMap {
	if i.ConfigMap != nil {
		return []InventoryConfigMap{*i.ConfigMap}
	}
	return i.ConfigMaps
}

// InventoryConfigMap is an entry of a ConfigMap.
type InventoryConfigMap struct {
	// Name is the ConfigMap's, in Namespace. Required.
	Name string `json:"name"`
	// Key is the entry's. Required.
	Key string `json:"key"`
}

// Bootstrapper is an identity.
type Bootstrapper struct {
	// Username is the user's name. Required.
	Username string `json:"username"`
	// Group is a group that the user must have. Required.
	Group string `json:"group"`
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

// BindingsMode says what to do with ClusterRoleBindings that make kube-controller-manager approve
// without attestation.
type BindingsMode string

// The modes of such bindings.
const (
	bindingsReport BindingsMode = "Report"
	bindingsRemove BindingsMode = "Remove"
)

// Policies is what the controller expects of the admission policies.
type Policies struct {
	// Mode is whether enforcement starts only if they are in force: Required or Warn. Enforcement
	// never stops because of them.
	Mode Mode `json:"mode"`
	// Controllers are the users that the policies name beside this controller.
	Controllers []string `json:"controllers,omitempty"`
}

// Rates are fairqueue.Rates.
type Rates struct {
	// PerRequester is how often evidence of one user is judged.
	PerRequester Rate `json:"perRequester"`
	// PerCluster is how often evidence of all users together is judged.
	PerCluster Rate `json:"perCluster"`
	// PerMachine is how often a machine that has attested gets a certificate.
	PerMachine Rate `json:"perMachine"`
}

// Rate is a fairqueue.Rate.
type Rate struct {
	// Every is the time between two, 1h or less. What is over the rate waits.
	Every metav1.Duration `json:"every"`
	// Burst is how many pass at once before that, 1 to 1000000.
	Burst int `json:"burst"`
}

// DecisionLog is where the records of final decisions go: to a file, to an endpoint, or to both.
// Default: each record is in the process log, in the line about its decision.
type DecisionLog struct {
	// File is the path of a file that is appended to, and opened again after it was renamed.
	File string `json:"file,omitempty"`
	// Endpoint is a server that gets them by POST.
	Endpoint *DecisionEndpoint `json:"endpoint,omitempty"`
	// Archive adds the CertificateSigningRequests to their records, so that verify can judge them
	// later.
	Archive bool `json:"archive,omitempty"`
}

// DecisionEndpoint is a decisionlog.EndpointConfig.
type DecisionEndpoint struct {
	// URL is an https URL. Required.
	URL string `json:"url"`
	// CAFile is the absolute path of the CAs in PEM that the server's certificate must chain to.
	// Default: the system's.
	CAFile string `json:"caFile,omitempty"`
	// TokenFile is the absolute path of a bearer token.
	TokenFile string `json:"tokenFile,omitempty"`
	// CertificateFile is the absolute path of a client certificate in PEM.
	CertificateFile string `json:"certificateFile,omitempty"`
	// KeyFile is the absolute path of its key. Required with CertificateFile.
	KeyFile string `json:"keyFile,omitempty"`
}

// TPM is the policy for TPMs: verifier/tpm.Config in the form of a file.
type TPM struct {
	// RootsFile and IntermediatesFile hold CA certificates in PEM: the roots that EK certificates
	// must chain to, and CAs on the way. Without roots, only the inventory vouches for EKs.
	RootsFile         string `json:"rootsFile,omitempty"`
	IntermediatesFile string `json:"intermediatesFile,omitempty"`
	// AllowedEKs are trusted without a certificate. DeniedEKs are never trusted, and may be keys of
	// CAs.
	AllowedEKs []string `json:"allowedEKs,omitempty"`
	DeniedEKs  []string `json:"deniedEKs,omitempty"`
	// PCRs are those to be quoted.
	PCRs PCRs `json:"pcrs"`
	// EventLog asks for the firmware's event log, too.
	EventLog bool `json:"eventLog,omitempty"`
	// MinimumFirmware is the minimum firmware version by TPM manufacturer: 16 hex digits, as
	// TPM2_GetCapability reports its halves.
	MinimumFirmware map[string]string `json:"minimumFirmware,omitempty"`
	// ChainTime is when EK certificates must be valid. Not set: now.
	ChainTime *metav1.Time `json:"chainTime,omitempty"`
	// ChallengeLifetime is how long a challenge may be answered, 30s to 1h. Default: 10m.
	ChallengeLifetime metav1.Duration `json:"challengeLifetime,omitzero"`
}

// PCRs are a selection, and the values that are allowed.
type PCRs struct {
	// Bank is sha256, sha384 or sha512. Required.
	Bank string `json:"bank"`
	// Indexes are the PCRs to be quoted, ascending. Required.
	Indexes []int `json:"indexes"`
	// Values are digests in hex by PCR. A PCR that is not listed may have any value.
	Values map[string][]string `json:"values,omitempty"`
}

// LeaderElection is about replicas.
type LeaderElection struct {
	// Enabled has one replica decide, and the others wait.
	Enabled bool `json:"enabled"`
	// LeaseName is the Lease's, in Namespace.
	LeaseName string `json:"leaseName"`
}

// Default returns the defaults. It is not a valid configuration, since required fields are not set.
func Default() Config {
	limits, rates := signing.DefaultLimits(), fairqueue.DefaultRates()
	duration := func(d time.Duration) metav1.Duration { return metav1.Duration{Duration: d} }
	rate := func(r fairqueue.Rate) Rate { return Rate{Every: duration(r.Every), Burst: r.Burst} }
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

// defaultSigners are the signers if none is set.
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

// Parse decodes one YAML document strictly over the defaults. New checks it.
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
