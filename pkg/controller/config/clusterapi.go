// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// DefaultUser is the controller's identity in workload clusters: the service account of
// packaging/kubernetes.
const DefaultUser = userServiceAccount + "node-attestation-system:node-attestation-controller"

const userServiceAccount = "system:serviceaccount:"

// checkClusterAPI checks the fields of clusterAPI. It also sets defaults.
func (s *Settings) checkClusterAPI() error {
	if s.config.Token == "" {
		s.config.Token = modeOff
		if s.config.ClusterAPI != nil {
			s.config.Token = modeRequired
		}
	}
	if s.config.ClusterAPI == nil {
		return nil
	}
	m := *s.config.ClusterAPI // a copy, so that the caller's value does not change
	s.config.ClusterAPI = &m
	if m.User == "" {
		m.User = DefaultUser
	}
	if len(m.NodeNames) == 0 {
		m.NodeNames = []verifier.NameSource{verifier.NameMachine}
	}
	if slices.Contains(m.EKSources, verifier.EKInventory) && !slices.Contains(m.NodeNames, verifier.NameInventory) {
		// instances of MachinePools have no other source of names
		m.NodeNames = append(slices.Clone(m.NodeNames), verifier.NameInventory)
	}
	namespace, name, _ := strings.Cut(strings.TrimPrefix(m.User, userServiceAccount), ":")
	switch {
	case s.config.ClusterUID != "":
		return errors.New("clusterUID: is each Cluster's own with clusterAPI")
	case len(s.config.UnattestedNodes) > 0:
		return errors.New("unattestedNodes: with clusterAPI they are in an annotation of each Cluster")
	case len(m.EKSources) == 0 && !m.TrustOnFirstUse && s.config.TPM != nil:
		return errors.New("clusterAPI.ekSources: must be set, Annotation, Inventory or Platform: without a source of endorsement keys no machine would be found")
	case slices.Contains(m.EKSources, verifier.EKPlatform) != (m.Platform != ""):
		return errors.New("clusterAPI.platform: must be set if Platform is one of clusterAPI.ekSources, and only then")
	case slices.Contains(m.NodeNames, verifier.NameInventory) && !slices.Contains(m.EKSources, verifier.EKInventory):
		return errors.New("clusterAPI.nodeNames: Inventory is asked only if it is one of clusterAPI.ekSources")
	case !strings.HasPrefix(m.User, userServiceAccount) || len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Subdomain(name)) > 0:
		return fmt.Errorf("clusterAPI.user: %.128q is not %s<namespace>:<name>", m.User, userServiceAccount)
	case len(validation.IsValidLabelValue(m.WatchFilter)) > 0:
		return fmt.Errorf("clusterAPI.watchFilter: %.64q is not the value of a label", m.WatchFilter)
	}
	for i, namespace := range m.Namespaces {
		if len(validation.IsDNS1123Label(namespace)) > 0 || slices.Contains(m.Namespaces[:i], namespace) {
			return fmt.Errorf("clusterAPI.namespaces: %.64q is not the name of one, or is listed twice", namespace)
		}
	}
	if err := s.checkFirstUse(); err != nil {
		return err
	}
	return s.checkServingAddresses()
}

// checkFirstUse requires something that distinguishes a TPM from software. Trust on first use pins
// the first endorsement key, and software can make any number of such keys. A cloud's evidence is
// never trusted on first use: the provider ID says which machine it is.
func (s *Settings) checkFirstUse() error {
	m, t := s.config.ClusterAPI, s.config.TPM
	switch {
	case m.TrustOnFirstUse && len(s.config.cloudPolicies()) > 0:
		return errors.New("clusterAPI.trustOnFirstUse: not together with a cloud, whose machines need no trust: any accepted TPM could become one of them")
	case t == nil && (m.TrustOnFirstUse || m.TrustAnyTPM):
		return errors.New("clusterAPI.trustOnFirstUse: is for the provider tpm, which is not set")
	case t == nil:
		return nil
	}
	vouched := t.RootsFile != "" || len(t.AllowedEKs) > 0
	switch {
	case m.TrustAnyTPM && !m.TrustOnFirstUse:
		return errors.New("clusterAPI.trustAnyTPM: is for clusterAPI.trustOnFirstUse, which is not set: remove it")
	case m.TrustAnyTPM && vouched:
		return errors.New("clusterAPI.trustAnyTPM: contradicts tpm.rootsFile and tpm.allowedEKs, which limit the TPMs that are trusted: remove one of them")
	case m.TrustOnFirstUse && !m.TrustAnyTPM && !vouched:
		return errors.New("clusterAPI.trustOnFirstUse: needs tpm.rootsFile with the CAs of the TPMs' makers, since software would pass for a TPM: " +
			"set it, or clusterAPI.trustAnyTPM: true to accept any TPM, software TPMs too")
	}
	return nil
}

// checkServingAddresses requires the operator to list the address types that no guest reports. No
// default would suit every platform.
func (s *Settings) checkServingAddresses() error {
	types := s.config.ClusterAPI.ServingAddresses
	switch serving := len(s.config.Serving.Signers) > 0; {
	case serving && len(types) == 0:
		return errors.New("clusterAPI.servingAddresses: must be set with serving.signers, to the types of Machines' addresses that the platform itself vouches for: " +
			"of what a guest reports, root on a node would get certificates for any address")
	case !serving && len(types) > 0:
		return errors.New("clusterAPI.servingAddresses: is for serving certificates, and serving.signers is not set")
	}
	for i, t := range types {
		if !slices.Contains([]string{"Hostname", "InternalIP", "ExternalIP", "InternalDNS", "ExternalDNS"}, t) || slices.Contains(types[:i], t) {
			return fmt.Errorf("clusterAPI.servingAddresses: %.64q is not Hostname, InternalIP, ExternalIP, InternalDNS or ExternalDNS, or is listed twice", t)
		}
	}
	return nil
}

// userNamespace returns the namespace of ClusterAPI.User.
func (m *ClusterAPI) userNamespace() string {
	namespace, _, _ := strings.Cut(strings.TrimPrefix(m.User, userServiceAccount), ":")
	return namespace
}

// Workload is the part of the settings that differs between workload clusters.
type Workload struct {
	// UID identifies the cluster.
	UID string
	// Namespace has its records. KeySecret is the Secret in Namespace with its challenge keys.
	Namespace, KeySecret string
	// ApproveOnly says that the CA key is not available. It does not depend on signing.mode.
	ApproveOnly bool
	// ForbiddenAddresses are forbidden in addition to those of the configuration.
	ForbiddenAddresses []string
	// UnattestedNodes are nodes without evidence.
	UnattestedNodes []string
}

// ForWorkload returns the settings of one workload cluster.
func (s *Settings) ForWorkload(w Workload) (*Settings, error) {
	copied := *s
	copied.config.ClusterUID, copied.config.Namespace, copied.config.ChallengeKeySecret = w.UID, w.Namespace, w.KeySecret
	copied.config.UnattestedNodes = w.UnattestedNodes
	if len(copied.config.Serving.Signers) > 0 {
		copied.config.Serving.ForbiddenAddresses = slices.Concat(s.config.Serving.ForbiddenAddresses, w.ForbiddenAddresses)
	}
	if w.ApproveOnly {
		copied.config.Signing = Signing{Mode: ApproveOnly}
	}
	copied.tpm.ClusterUID = w.UID
	if err := copied.makeRules(); err != nil {
		return nil, err
	}
	return &copied, nil
}

// placeholderWorkload replaces the workload clusters when a configuration is checked.
var placeholderWorkload = Workload{UID: "any", ForbiddenAddresses: []string{"127.0.0.1"}}
