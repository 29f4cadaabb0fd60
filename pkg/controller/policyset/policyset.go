// SPDX-License-Identifier: Apache-2.0

// Package policyset has the admission policies of a release, and renders the form of them that an
// API server reads from its own disk.
package policyset

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/packaging"
)

// Scope selects the policies of the release that a cluster must have.
type Scope int

// The kinds of clusters.
const (
	// Alone is for a cluster whose controller runs in it, packaging/kubernetes.
	Alone Scope = iota + 1
	// Workload is for a workload cluster, packaging/cluster-api/workload.
	Workload
	// Management is for a management cluster, packaging/cluster-api/management.
	Management
)

// scopes has the names of the scopes, in their order.
var scopes = []string{"alone", "workload", "management"}

// Scopes returns the names of all scopes.
func Scopes() []string { return slices.Clone(scopes) }

// ParseScope returns the scope of a name.
func ParseScope(name string) (Scope, error) {
	at := slices.Index(scopes, name)
	if at < 0 {
		return 0, fmt.Errorf("scope %.64q: must be one of %v", name, scopes)
	}
	return Scope(at + 1), nil
}

func (s Scope) String() string {
	if s < Alone || s > Management {
		return fmt.Sprintf("Scope(%d)", int(s))
	}
	return scopes[s-1]
}

// label returns the value of labelScope that selects the manifests of a scope. An empty value
// selects all.
func (s Scope) label() string {
	if s == Alone {
		return ""
	}
	return s.String()
}

const (
	// labelScope is a label of each manifest. Its value says which kinds of Cluster API clusters
	// have the manifest.
	labelScope = "attestation.cluster.x-k8s.io/cluster-api"
	// labelFilled is a label of the policies whose content the controller writes.
	labelFilled = "attestation.cluster.x-k8s.io/filled-by"
)

// Set has policies and their bindings, in the order of the manifests.
type Set struct {
	Policies []admissionv1.ValidatingAdmissionPolicy
	Bindings []admissionv1.ValidatingAdmissionPolicyBinding
}

// IsFilled reports whether the controller writes the content of a policy of the release.
func IsFilled(policy *admissionv1.ValidatingAdmissionPolicy) bool {
	return policy.Labels[labelFilled] != ""
}

// Has reports whether the set has a policy or a binding of that name. A nil Set has none.
func (s *Set) Has(name string) bool {
	return s != nil && (slices.ContainsFunc(s.Policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return p.Name == name }) ||
		slices.ContainsFunc(s.Bindings, func(b admissionv1.ValidatingAdmissionPolicyBinding) bool { return b.Name == name }))
}

// Clone returns a deep copy.
func (s *Set) Clone() *Set {
	c := &Set{}
	for i := range s.Policies {
		c.Policies = append(c.Policies, *s.Policies[i].DeepCopy())
	}
	for i := range s.Bindings {
		c.Bindings = append(c.Bindings, *s.Bindings[i].DeepCopy())
	}
	return c
}

// digest returns the SHA-256 of names and specs, in hexadecimal.
func (s *Set) digest() (string, error) {
	type object struct {
		Kind, Name string
		Spec       any
	}
	var all []object
	for i := range s.Policies {
		all = append(all, object{"ValidatingAdmissionPolicy", s.Policies[i].Name, s.Policies[i].Spec})
	}
	for i := range s.Bindings {
		all = append(all, object{"ValidatingAdmissionPolicyBinding", s.Bindings[i].Name, s.Bindings[i].Spec})
	}
	content, err := json.Marshal(all)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:]), nil
}

var errNoScope = errors.New("admission policies: the scope is not set")

// part is a group of manifests. Each is parsed once for each scope.
type part map[Scope]func() (*Set, error)

var (
	attestation = newPart(packaging.Policies, map[Scope][]byte{Management: packaging.ManagementPolicies})
	revocation  = newPart(slices.Concat(packaging.RevocationPolicies, []byte("\n---\n"), packaging.RevocationGuards), nil)
	// These have only the static form.
	guards           = newPart(packaging.StaticGuards, nil)
	revocationGuards = newPart(packaging.StaticRevocationGuards, nil)
)

// Release returns the policies of attestation. The result is shared: do not change it.
func Release(scope Scope) (*Set, error) { return attestation.of(scope) }

// Revocation returns the policies of packaging/kubernetes-revocation. The result is shared: do not
// change it.
func Revocation(scope Scope) (*Set, error) { return revocation.of(scope) }

// newPart returns manifests that are parsed for each scope, with more[scope] added.
func newPart(manifests []byte, more map[Scope][]byte) part {
	p := part{}
	for scope := Alone; scope <= Management; scope++ {
		p[scope] = sync.OnceValues(func() (*Set, error) { return parse(scope.label(), manifests, more[scope]) })
	}
	return p
}

func (p part) of(scope Scope) (*Set, error) {
	parsed := p[scope]
	if parsed == nil {
		return nil, errNoScope
	}
	return parsed()
}

// parse reads manifests, and keeps those with this value of the label, or "both". An empty value
// keeps all.
func parse(label string, manifests ...[]byte) (*Set, error) {
	set := &Set{}
	for _, manifest := range manifests {
		documents := utilyaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(manifest)))
		content := make([]byte, len(manifest)+1)
		for {
			n, err := documents.Read(content)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("policies of the release: %w", err)
			}
			if err := set.add(label, content[:n]); err != nil {
				return nil, fmt.Errorf("policies of the release: %w", err)
			}
		}
	}
	if len(set.Policies) == 0 || len(set.Bindings) == 0 {
		return nil, fmt.Errorf("policies of the release: there are none for %q", label)
	}
	return set, nil
}

func (s *Set) add(label string, document []byte) error {
	var of metav1.PartialObjectMetadata
	if err := yaml.Unmarshal(document, &of); err != nil {
		return err
	}
	if value := of.Labels[labelScope]; label != "" && value != label && value != "both" {
		return nil
	}
	switch of.Kind {
	case "ValidatingAdmissionPolicy":
		var policy admissionv1.ValidatingAdmissionPolicy
		if err := yaml.UnmarshalStrict(document, &policy); err != nil {
			return err
		}
		s.Policies = append(s.Policies, policy)
	case "ValidatingAdmissionPolicyBinding":
		var binding admissionv1.ValidatingAdmissionPolicyBinding
		if err := yaml.UnmarshalStrict(document, &binding); err != nil {
			return err
		}
		s.Bindings = append(s.Bindings, binding)
	case "": // comments alone
	default:
		return fmt.Errorf("unexpected kind %s", of.Kind)
	}
	return nil
}
