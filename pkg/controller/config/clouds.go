// SPDX-License-Identifier: Apache-2.0

package config

import (
	"crypto/x509"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/azurevm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/cloudprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/googlekeys"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sts"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2role"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/gce"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// GCE is the policy for the provider gce: identity tokens of instances of Google Compute Engine.
type GCE struct {
	// Projects are the IDs of the projects whose instances are accepted. Default: all. An instance
	// also needs a machine.
	Projects []string `json:"projects,omitempty"`
	// KeysFile is the absolute path of a file with Google's keys, for a controller that cannot
	// reach Google. KeysURL is where the keys are fetched. At most one of both may be set. Default:
	// KeysURL https://www.googleapis.com/oauth2/v3/certs.
	KeysFile string `json:"keysFile,omitempty"`
	KeysURL  string `json:"keysURL,omitempty"`
}

// EC2 is the policy for the provider ec2: attestation documents of the NitroTPM.
type EC2 struct {
	// RootsFile is a file with CA certificates in PEM in place of AWS's root. A holder of one of
	// their keys can make any machine pass for any instance.
	RootsFile string `json:"rootsFile,omitempty"`
	// PCRValues are digests in hex by PCR, 0 to 23, in bank sha384. A PCR that is not listed may
	// have any value.
	PCRValues map[string][]string `json:"pcrValues,omitempty"`
}

// EC2Role is the policy for the provider ec2-role: calls of AWS STS with the instance identity
// role.
type EC2Role struct {
	// Regions are those of the instances. STS is asked there, and nowhere else. Required.
	Regions []string `json:"regions"`
	// Accounts are the IDs of the accounts whose instances are accepted. Default: all. An instance
	// also needs a machine.
	Accounts []string `json:"accounts,omitempty"`
}

// Azure is the policy for the provider azure: attested documents of Azure's metadata service.
type Azure struct {
	// Cloud is Public, USGovernment or China. Default: Public.
	Cloud azure.Cloud `json:"cloud,omitempty"`
	// RootsFile replaces the root CAs of this release, and IntermediatesFile adds intermediate CAs.
	// Both are files with certificates in PEM.
	RootsFile         string `json:"rootsFile,omitempty"`
	IntermediatesFile string `json:"intermediatesFile,omitempty"`
	// Subscriptions are the IDs of the subscriptions whose VMs are accepted. Default: all. A VM
	// also needs a machine.
	Subscriptions []string `json:"subscriptions,omitempty"`
	// Lookup reads the vmIds of machines from Azure Resource Manager. Default: an inventory names
	// instances.
	Lookup *AzureLookup `json:"lookup,omitempty"`
}

// AzureLookup is an identity that may read VMs, with a federated credential.
type AzureLookup struct {
	// TenantID and ClientID are the identity's, GUIDs in lower case.
	TenantID string `json:"tenantID"`
	ClientID string `json:"clientID"`
	// TokenFile is the absolute path of a projected service account token with the audience
	// api://AzureADTokenExchange.
	TokenFile string `json:"tokenFile"`
}

// judge makes the Judge of a cloud for a cluster.
type judge func(clusterUID string) (cloudprovider.Judge, error)

// cloudPolicy is the policy for a cloud's provider.
type cloudPolicy struct {
	provider string
	// prepare checks the policy, and makes what the Judges of all clusters share, such as a cache.
	// It does no I/O beyond reading files.
	prepare func(metrics *telemetry.LookupMetrics) (judge, error)
}

// cloudPolicies returns the policies that are set, in the order of their strength.
func (c *Config) cloudPolicies() (set []cloudPolicy) {
	if c.EC2 != nil {
		set = append(set, cloudPolicy{ec2.Name, c.EC2.prepare})
	}
	if c.EC2Role != nil {
		set = append(set, cloudPolicy{ec2role.Name, c.EC2Role.prepare})
	}
	if c.GCE != nil {
		set = append(set, cloudPolicy{gce.Name, c.GCE.prepare})
	}
	if c.Azure != nil {
		set = append(set, cloudPolicy{azure.Name, c.Azure.prepare})
	}
	return set
}

// providers returns the names of the providers that are set, in the order of their strength. tpm is
// the strongest: it has a challenge, and a key that a source names.
func (c *Config) providers() (names []string) {
	if c.TPM != nil {
		names = append(names, tpm.Provider)
	}
	for _, p := range c.cloudPolicies() {
		names = append(names, p.provider)
	}
	return names
}

// signerPrefix begins the names of the signers that the plugin's providers use by default. The
// name of the provider follows.
const signerPrefix = "cluster.x-k8s.io/kube-apiserver-client-kubelet-"

// providersOf returns the providers whose evidence a signer accepts.
func (c *Config) providersOf(s Signer) ([]string, error) {
	set := c.providers()
	own := strings.TrimPrefix(s.Name, signerPrefix)
	switch {
	case s.Provider != "" && !slices.Contains(set, s.Provider):
		return nil, fmt.Errorf("signers: provider %.64q of %.128q is not configured", s.Provider, s.Name)
	case s.Provider != "":
		return []string{s.Provider}, nil
	case own != s.Name && slices.Contains(set, own):
		return []string{own}, nil
	case own != s.Name && slices.Contains(append([]string{tpm.Provider}, cloud.Names...), own):
		return nil, fmt.Errorf("signers: %.128q is for provider %s, which is not configured", s.Name, own)
	case s.Shared, len(set) == 1:
		return set, nil
	case slices.Contains(set, tpm.Provider):
		return []string{tpm.Provider}, nil
	}
	return nil, fmt.Errorf("signers: %.128q needs a provider", s.Name)
}

// makeClouds prepares the policies of the clouds.
func (s *Settings) makeClouds() error {
	if len(s.config.providers()) == 0 {
		return errors.New("tpm: must be set, or ec2, ec2Role, gce or azure: there is no default policy for evidence")
	}
	return s.prepareClouds(nil)
}

func (s *Settings) prepareClouds(metrics *telemetry.LookupMetrics) error {
	s.judges = map[string]judge{}
	for _, p := range s.config.cloudPolicies() {
		prepared, err := p.prepare(metrics)
		if err == nil {
			_, err = prepared(placeholderWorkload.UID)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", fieldOf(p.provider), err)
		}
		s.judges[p.provider] = prepared
	}
	return nil
}

// fieldOf returns the field with the policy of a provider.
func fieldOf(provider string) string {
	if provider == ec2role.Name {
		return "ec2Role"
	}
	return provider
}

// CountLookups counts the calls of the clouds' services. Call it before Controller and Assemble.
func (s *Settings) CountLookups(metrics *telemetry.LookupMetrics) error {
	return s.prepareClouds(metrics)
}

// CloudProviders returns the providers of the clouds for the cluster, in the order of their
// strength.
func (s *Settings) CloudProviders(machines evidence.MachineSource) (all []cloudprovider.Provider) {
	for _, p := range s.config.cloudPolicies() {
		judge, err := s.judges[p.provider](s.config.ClusterUID)
		if err != nil {
			panic(err) // New tried it, and checked the UID
		}
		all = append(all, cloudprovider.Provider{Cloud: p.provider, Judge: judge, Machines: machines, Rules: s.rules})
	}
	return all
}

// OfflineProviders returns the same providers for a program that calls no service. Evidence that
// only a service can judge gets an error that says so.
func (s *Settings) OfflineProviders(machines evidence.MachineSource) ([]cloudprovider.Provider, error) {
	offline := *s
	if a := s.config.Azure; a != nil {
		withoutLookup := *a
		withoutLookup.Lookup = nil
		offline.config.Azure = &withoutLookup
	}
	if err := offline.prepareClouds(nil); err != nil {
		return nil, err
	}
	all := offline.CloudProviders(machines)
	for i := range all {
		why := ""
		switch {
		case all[i].Cloud == ec2role.Name:
			why = "only AWS STS can judge evidence of ec2-role, within minutes after it was made: it cannot be judged offline"
		case all[i].Cloud == gce.Name && s.config.GCE.KeysFile == "":
			why = "set gce.keysFile to a file with Google's keys of that time"
		default:
			continue
		}
		all[i].Judge = cloudprovider.WithoutService(func(verifier.Filed) (*cloud.Verified, error) { return nil, errors.New(why) })
	}
	return all, nil
}

// checkPath returns an error unless a path is absolute or empty.
func checkPath(field, path string) error {
	if path != "" && !filepath.IsAbs(path) {
		return fmt.Errorf("%s: must be an absolute path", field)
	}
	return nil
}

func (e *EC2) prepare(*telemetry.LookupMetrics) (judge, error) {
	policy := ec2.Config{}
	var err error
	if policy.Roots, err = readOptionalCAs("rootsFile", e.RootsFile); err != nil {
		return nil, err
	}
	if policy.PCRValues, err = parseValues("pcrValues", e.PCRValues); err != nil {
		return nil, err
	}
	return func(clusterUID string) (cloudprovider.Judge, error) {
		policy := policy
		policy.ClusterUID = clusterUID
		v, err := ec2.New(policy)
		if err != nil {
			return nil, err
		}
		return cloudprovider.WithoutService(v.Verify), nil
	}, nil
}

func (e *EC2Role) prepare(metrics *telemetry.LookupMetrics) (judge, error) {
	answers := cloudprovider.NewSTS(sts.NewClient().Send, metrics)
	return func(clusterUID string) (cloudprovider.Judge, error) {
		v, err := ec2role.New(ec2role.Config{ClusterUID: clusterUID, Regions: e.Regions, Accounts: e.Accounts})
		if err != nil {
			return nil, err
		}
		return cloudprovider.EC2Role(v, answers), nil
	}, nil
}

func (a *Azure) prepare(metrics *telemetry.LookupMetrics) (judge, error) {
	policy := azure.Config{Cloud: a.Cloud, Subscriptions: a.Subscriptions}
	var err error
	if policy.Roots, err = readOptionalCAs("rootsFile", a.RootsFile); err != nil {
		return nil, err
	}
	if policy.Intermediates, err = readOptionalCAs("intermediatesFile", a.IntermediatesFile); err != nil {
		return nil, err
	}
	var ids *cloudprovider.VMIDs
	if l := a.Lookup; l != nil {
		if err := checkPath("lookup.tokenFile", l.TokenFile); err != nil {
			return nil, err
		}
		client, err := azurevm.New(azurevm.Config{Cloud: a.Cloud, TenantID: l.TenantID, ClientID: l.ClientID, TokenFile: l.TokenFile})
		if err != nil {
			return nil, fmt.Errorf("lookup: %w", err)
		}
		ids = cloudprovider.NewVMIDs(client, metrics)
	}
	return func(clusterUID string) (cloudprovider.Judge, error) {
		policy := policy
		policy.ClusterUID = clusterUID
		v, err := azure.New(policy)
		if err != nil {
			return nil, err
		}
		return cloudprovider.Azure(v, ids), nil
	}, nil
}

// readOptionalCAs reads a file of CA certificates, if one is set.
func readOptionalCAs(field, path string) ([]*x509.Certificate, error) {
	if path == "" {
		return nil, nil
	}
	all, err := readCAs(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return all, nil
}

func (g *GCE) prepare(metrics *telemetry.LookupMetrics) (judge, error) {
	if g.KeysFile != "" && g.KeysURL != "" {
		return nil, errors.New("keysFile and keysURL: set one of them")
	}
	if err := checkPath("keysFile", g.KeysFile); err != nil {
		return nil, err
	}
	keys := cloudprovider.NewGoogleKeysFile(g.KeysFile)
	if g.KeysFile == "" {
		client, err := googlekeys.New(googlekeys.Config{URL: g.KeysURL})
		if err != nil {
			return nil, fmt.Errorf("keysURL: %w", err)
		}
		keys = cloudprovider.NewGoogleKeys(client, metrics)
	}
	return func(clusterUID string) (cloudprovider.Judge, error) {
		v, err := gce.New(gce.Config{ClusterUID: clusterUID, Projects: g.Projects})
		if err != nil {
			return nil, err
		}
		return cloudprovider.GCE(v, keys), nil
	}, nil
}

// makeProviders returns the providers of the rules.
func (c *Config) makeProviders() (all []verifier.Provider) {
	for _, name := range c.providers() {
		all = append(all, verifier.Provider{Name: name, Challenges: name == tpm.Provider})
	}
	return all
}
