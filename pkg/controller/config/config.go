// SPDX-License-Identifier: Apache-2.0

// Package config reads and checks the configuration file of node-attestation-controller, and makes
// the controller's parts from it (docs/controller-configuration.md). It fails closed: an unset
// field that is required is an error that names the field. An infrastructure provider that embeds
// the controller can use it, too.
package config

import (
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/strict"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
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

	// ClusterUID identifies the cluster. A proof for one cluster is worthless in another. It has 1
	// to 128 printable ASCII characters, and no space. Required without ClusterAPI.
	ClusterUID string `json:"clusterUID,omitempty"`
	// ClusterAPI makes the controller serve the workload clusters of a management cluster, each by
	// the rest of this configuration. ClusterUID must be empty then.
	ClusterAPI *ClusterAPI `json:"clusterAPI,omitempty"`
	// Namespace has the Lease, the records, the challenge keys and all named objects. With
	// ClusterAPI, records and keys are in the namespaces of their Clusters.
	Namespace string `json:"namespace"`
	// Signers are the signers of client certificates that the controller decides for. Default:
	// cluster.x-k8s.io/kube-apiserver-client-kubelet-<provider> for each provider that is set.
	// Required with ApproveOnly.
	Signers []Signer `json:"signers,omitempty"`
	// SharedHello leaves the hellos of other providers to other controllers.
	SharedHello bool `json:"sharedHello,omitempty"`
	// InsecureSigner switches the always-allow signer on, by its full name.
	InsecureSigner string `json:"insecureSigner,omitempty"`
	// Serving configures kubelets' serving certificates.
	Serving Serving `json:"serving,omitzero"`
	// Signing configures who issues certificates.
	Signing Signing `json:"signing"`
	// Lifetimes bound certificates.
	Lifetimes Lifetimes `json:"lifetimes"`
	// Inventory is the source of the machines and their endorsement keys.
	Inventory Inventory `json:"inventory"`
	// TPM is the policy for the evidence of the provider tpm. At least one provider must be set.
	TPM *TPM `json:"tpm,omitempty"`
	// EC2, EC2Role, GCE and Azure are the policies for the evidence of the providers ec2, ec2-role,
	// gce and azure.
	EC2     *EC2     `json:"ec2,omitempty"`
	EC2Role *EC2Role `json:"ec2Role,omitempty"`
	GCE     *GCE     `json:"gce,omitempty"`
	Azure   *Azure   `json:"azure,omitempty"`
	// Bootstrappers may ask for first certificates, beside bootstrap tokens.
	Bootstrappers []Bootstrapper `json:"bootstrappers,omitempty"`
	// TokenGroup is a group that bootstrap tokens must have. Default: system:bootstrappers.
	TokenGroup string `json:"tokenGroup,omitempty"`
	// Token says whether a bootstrap token must have been made for the machine: Required, Warn or
	// Off. Default: Required with ClusterAPI. Otherwise Off, since most inventories list no tokens.
	Token Mode `json:"token,omitempty"`
	// EKNotNamed says whether a machine is refused if the source that vouched for its endorsement
	// key now names other keys: Required or Warn. If none vouched for it, as in trust on first use,
	// each source counts. Default: Warn for the source Platform, Required for others.
	EKNotNamed Mode `json:"ekNotNamed,omitempty"`
	// Credential says whether a renewal must be requested with a certificate in the record:
	// Recover, Required, Warn or Off. Recover is like Required, but recreates a lost record for a
	// machine whose endorsement key a source names.
	Credential Mode `json:"credential"`
	// BootCounters says whether a TPM's boot counters must not go back: Required, Warn or Off.
	BootCounters Mode `json:"bootCounters"`
	// WaitDeadline is the age at which a waiting request is denied, 1m to 23h.
	WaitDeadline metav1.Duration `json:"waitDeadline"`
	// UnattestedNodes are names of nodes without evidence. They need no record, and renew through
	// kubernetes.io/kube-apiserver-client-kubelet. A change needs no restart.
	UnattestedNodes []string `json:"unattestedNodes,omitempty"`
	// Revocation configures the revocation of certificates and the suspension of machines.
	Revocation Revocation `json:"revocation,omitzero"`
	// Policies configures the check of the admission policies that keep others from approving and
	// signing.
	Policies Policies `json:"policies"`
	// Rates limit how often requests are decided on.
	Rates Rates `json:"rates"`
	// DecisionLog configures where decision records go.
	DecisionLog DecisionLog `json:"decisionLog,omitzero"`
	// Audit makes the controller decide and report, and change no request.
	Audit bool `json:"audit,omitempty"`
	// ChallengeKeySecret is the Secret with the challenge keys. The controller writes a key into it
	// if it is empty, and creates it only if it has that right. The manifests have it, empty.
	ChallengeKeySecret string `json:"challengeKeySecret"`
	// LeaderElection lets one of several replicas decide.
	LeaderElection LeaderElection `json:"leaderElection"`
	// MetricsBindAddress and HealthBindAddress are the addresses to listen on, host:port. "0"
	// switches the listener off.
	MetricsBindAddress string `json:"metricsBindAddress"`
	HealthBindAddress  string `json:"healthBindAddress"`
}

// Signer is a signer of CertificateSigningRequests.
type Signer struct {
	// Name is the signer's name, domain/path. Required.
	Name string `json:"name"`
	// Shared says that others use the signer, too. The controller ignores requests without its
	// evidence.
	Shared bool `json:"shared,omitempty"`
	// Provider is the provider whose evidence the signer accepts. Default: the one in the signer's
	// name; for a shared signer all that are set; else tpm, or the only one that is set.
	Provider string `json:"provider,omitempty"`
}

// Serving says which serving certificates are approved. kube-controller-manager issues those of
// kubernetes.io signers. In mode Sign, the controller issues the others.
type Serving struct {
	// Signers are the signers of serving certificates.
	Signers []string `json:"signers,omitempty"`
	// ForbiddenAddresses are DNS names, IPs and CIDRs that no serving certificate may have: the API
	// server's, and the service range. Required with Signers.
	ForbiddenAddresses []string `json:"forbiddenAddresses,omitempty"`
}

// Revocation says whether certificates can be revoked and machines suspended.
type Revocation struct {
	// Enabled makes API servers refuse writes with revoked certificates, by admission policies. It
	// needs the manifests of packaging/kubernetes-revocation, and Kubernetes 1.32 or later.
	Enabled bool `json:"enabled,omitempty"`
}

// SigningMode says who issues approved certificates.
type SigningMode string

// The modes of signing. There is no default.
const (
	Sign        SigningMode = "Sign"
	ApproveOnly SigningMode = "ApproveOnly"
)

// Signing configures who issues certificates, and with which CA.
type Signing struct {
	// Mode is Sign or ApproveOnly. Required.
	Mode SigningMode `json:"mode"`
	// CAFile and KeyFile, or SecretName, are the CA in mode Sign: absolute paths of files in PEM,
	// or a Secret with tls.crt and tls.key. With ClusterAPI all must be empty.
	CAFile     string `json:"caFile,omitempty"`
	KeyFile    string `json:"keyFile,omitempty"`
	SecretName string `json:"secretName,omitempty"`
}

// Lifetimes is the file's form of signing.Limits.
type Lifetimes struct {
	// Default is the lifetime if a request wishes none.
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
	// Namespaces are the namespaces whose Clusters are served. Default: all.
	Namespaces []string `json:"namespaces,omitempty"`
	// WatchFilter is the value of the label cluster.x-k8s.io/watch-filter on Clusters to serve.
	// Default: all Clusters, with or without the label.
	WatchFilter string `json:"watchFilter,omitempty"`
	// User is the service account that the controller impersonates in workload clusters. Policies
	// there name it. Default: that of packaging/kubernetes.
	User string `json:"user,omitempty"`
	// EKSources name endorsement keys: Annotation, Inventory (by provider ID), and Platform.
	EKSources []verifier.EKSource `json:"ekSources,omitempty"`
	// Platform is the platform that the source Platform asks. The released program knows metal3.
	// Other platforms have a program of their own. It must be set with that source, and only then.
	Platform string `json:"platform,omitempty"`
	// NodeNames are the sources of node names. The first source with a name for a Machine decides.
	// Default: MachineName.
	NodeNames []verifier.NameSource `json:"nodeNames,omitempty"`
	// TrustOnFirstUse lets a new Machine's bootstrap token vouch for the endorsement key in its
	// first request. It needs TPM.RootsFile, TPM.AllowedEKs, or TrustAnyTPM.
	TrustOnFirstUse bool `json:"trustOnFirstUse,omitempty"`
	// TrustAnyTPM lets TrustOnFirstUse accept every endorsement key, even that of a software TPM.
	TrustAnyTPM bool `json:"trustAnyTPM,omitempty"`
	// ServingAddresses are the types of Machines' addresses for which nodes get serving
	// certificates: those that the platform itself vouches for, and no guest reports. It must be
	// set with serving certificates, and only then.
	ServingAddresses []string `json:"servingAddresses,omitempty"`
	// UnattestedControlPlanes treats the nodes of control plane Machines as UnattestedNodes.
	UnattestedControlPlanes bool `json:"unattestedControlPlanes,omitempty"`
}

// Inventory says where the inventory of machines is. Exactly one field must be set.
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
	// Name is the name of the ConfigMap, in Namespace. Required.
	Name string `json:"name"`
	// Key is the key of the entry. Required.
	Key string `json:"key"`
}

// Bootstrapper is a user that may request first certificates.
type Bootstrapper struct {
	// Username is the user's name. Required.
	Username string `json:"username"`
	// Group is a group that the user must have. Required.
	Group string `json:"group"`
}

// Mode says whether a failed rule refuses a request.
type Mode string

// The modes of a rule.
const (
	modeRequired Mode = "Required"
	modeWarn     Mode = "Warn"
	modeOff      Mode = "Off"
	// modeRecover is only for the field credential.
	modeRecover Mode = "Recover"
)

// Policies says what the controller expects of the admission policies.
type Policies struct {
	// Mode is Required or Warn. With Required, enforcement starts only if the policies are in
	// force. It never stops because of them.
	Mode Mode `json:"mode"`
	// Controllers are other users that the policies name as controllers.
	Controllers []string `json:"controllers,omitempty"`
}

// Rates is the file's form of fairqueue.Rates.
type Rates struct {
	// PerRequester limits how often evidence of one user is verified.
	PerRequester Rate `json:"perRequester"`
	// PerCluster limits how often evidence of all users together is verified.
	PerCluster Rate `json:"perCluster"`
	// PerMachine limits how often an attested machine gets a certificate.
	PerMachine Rate `json:"perMachine"`
}

// Rate is the file's form of fairqueue.Rate.
type Rate struct {
	// Every is the time between two, 1h or less. Requests over the rate wait.
	Every metav1.Duration `json:"every"`
	// Burst is the number that may pass at once, 1 to 1000000.
	Burst int `json:"burst"`
}

// DecisionLog writes decision records to a file. Default: each decision record is in the
// process log, in the line about its decision.
type DecisionLog struct {
	// File is the absolute path of a file to append to. The controller opens it again after
	// somebody renamed it.
	File string `json:"file,omitempty"`
	// Archive adds the requests to their decision records, so that verify can judge them
	// later. It needs File.
	Archive bool `json:"archive,omitempty"`
}

// TPM is the policy for TPMs, the file's form of verifier/tpm.Config.
type TPM struct {
	// RootsFile and IntermediatesFile hold CA certificates in PEM: the roots that EK certificates
	// must chain to, and CAs on the way. Without roots, an EK needs another authority: AllowedEKs,
	// a source that names it, or trust on first use.
	RootsFile         string `json:"rootsFile,omitempty"`
	IntermediatesFile string `json:"intermediatesFile,omitempty"`
	// AllowedEKs are trusted without a certificate. DeniedEKs are never trusted. They may also be
	// keys of CAs.
	AllowedEKs []string `json:"allowedEKs,omitempty"`
	DeniedEKs  []string `json:"deniedEKs,omitempty"`
	// PCRs selects the PCRs to be quoted, and their allowed values.
	PCRs PCRs `json:"pcrs"`
	// EventLog requires the firmware's event log, too.
	EventLog bool `json:"eventLog,omitempty"`
	// EventLogPCRs are the PCRs to whose quoted values the log must lead, among 0 to 7 and
	// PCRs.Indexes. Default: those of 1 to 7 in PCRs.Indexes.
	EventLogPCRs []int `json:"eventLogPCRs,omitempty"`
	// MinimumFirmware is the minimum firmware version by TPM manufacturer: 16 hex digits, as
	// TPM2_GetCapability reports its halves.
	MinimumFirmware map[string]string `json:"minimumFirmware,omitempty"`
	// ChainTime is the time at which EK certificates must be valid. Default: now.
	ChainTime *metav1.Time `json:"chainTime,omitempty"`
	// ChallengeLifetime is the time in which a challenge must be answered, 30s to 1h. Default: 10m.
	ChallengeLifetime metav1.Duration `json:"challengeLifetime,omitzero"`
}

// PCRs are a selection of PCRs, and their allowed values.
type PCRs struct {
	// Bank is sha256, sha384 or sha512. Required.
	Bank string `json:"bank"`
	// Indexes are the PCRs to be quoted, ascending. Required.
	Indexes []int `json:"indexes"`
	// Values are digests in hex by PCR. A PCR that is not listed may have any value.
	Values map[string][]string `json:"values,omitempty"`
}

// LeaderElection configures several replicas.
type LeaderElection struct {
	// Enabled lets only one replica decide. The others stand by.
	Enabled bool `json:"enabled"`
	// LeaseName is the name of the Lease, in Namespace.
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
		Credential:         modeRecover,
		BootCounters:       modeWarn,
		WaitDeadline:       duration(verifier.DefaultWaitDeadline),
		Policies:           Policies{Mode: modeRequired},
		Rates:              Rates{PerRequester: rate(rates.Requester), PerCluster: rate(rates.Cluster), PerMachine: rate(rates.Machine)},
		ChallengeKeySecret: "node-attestation-controller-key",
		LeaderElection:     LeaderElection{Enabled: true, LeaseName: "node-attestation-controller"},
		MetricsBindAddress: ":8080",
		HealthBindAddress:  ":8081",
	}
}

// defaultSigners returns the signers if none is set.
func (c *Config) defaultSigners() (all []Signer) {
	for _, provider := range c.providers() {
		all = append(all, Signer{Name: signerPrefix + provider})
	}
	return all
}

// Load reads a file.
func Load(path string) (Config, error) {
	if path == "" {
		return Config{}, errors.New("configuration file: none is named")
	}
	data, err := bounded.ReadFile(path, maxConfigSize)
	if err != nil {
		return Config{}, fmt.Errorf("configuration file: %w", err)
	}
	c, err := Parse(data)
	if err != nil {
		return Config{}, fmt.Errorf("configuration file %s: %w", path, err)
	}
	return c, nil
}

// decoder has the fields of earlier versions, each with what to do instead.
var decoder = strict.Decoder{Removed: map[string]string{
	"autoApprovingBindings": "remove it: the controller reports these bindings, and you delete them with kubectl delete clusterrolebinding",
	"decisionLog.endpoint":  "set decisionLog.file, and let a log shipper send its lines",
}}

// Parse decodes one YAML document strictly over the defaults. New checks it.
func Parse(data []byte) (Config, error) {
	c := Default()
	if err := decoder.Decode(data, &c); err != nil {
		return Config{}, err
	}
	if err := strict.CheckKind(c.TypeMeta, APIVersion, Kind); err != nil {
		return Config{}, err
	}
	return c, nil
}
