// SPDX-License-Identifier: Apache-2.0

package policyset

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// Suffix ends the names of policies and bindings that an API server reads from its disk. It refuses
// such names in the API.
const Suffix = ".static.k8s.io"

// Options say how the static form differs from the manifests of the release, as overlays do for the
// API. The lists beside Controllers extend those of the release.
type Options struct {
	Scope Scope
	// Controllers are the users that the policies name as controllers, at least one.
	Controllers []string
	// Signers are other client signers that only the controllers approve for. MachineSigners are
	// other signers that machines may ask.
	Signers, MachineSigners []string
	// Bootstrappers are other users that machines file their first request with. Movers may write
	// records as the controllers do. Upgraders may change our CustomResourceDefinitions.
	Bootstrappers, Movers, Upgraders []string
	// Revocation adds the policies that guard revocation.
	Revocation bool
}

var (
	// A user name is between quotes in an expression, and in the identity policy's message.
	userPattern   = regexp.MustCompile(`^[-!#$%&()*+./0-9:;<=>?@A-Z^_a-z{|}~]{1,512}$`)
	signerPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9._:]+$`)
)

// validate returns an error that names the first bad option.
func (o Options) validate() error {
	if len(o.Controllers) == 0 {
		return errors.New("no user is named as the controller")
	}
	for _, list := range []struct {
		what    string
		entries []string
		pattern *regexp.Regexp
	}{
		{"controller-user", o.Controllers, userPattern},
		{"signer", o.Signers, signerPattern},
		{"machine-signer", o.MachineSigners, signerPattern},
		{"bootstrapper", o.Bootstrappers, userPattern},
		{"mover", o.Movers, userPattern},
		{"upgrader", o.Upgraders, userPattern},
	} {
		for i, entry := range list.entries {
			if !list.pattern.MatchString(entry) {
				return fmt.Errorf("--%s %.128q: is not a name that a policy can have", list.what, entry)
			}
			if slices.Contains(list.entries[:i], entry) {
				return fmt.Errorf("--%s %q: is named twice", list.what, entry)
			}
		}
	}
	return nil
}

// source returns the policies and bindings of the release that the static form has.
func source(scope Scope, withRevocation bool) (*Set, error) {
	parts := []part{attestation, guards}
	if withRevocation {
		parts = append(parts, revocation, revocationGuards)
	}
	all := &Set{}
	for _, p := range parts {
		set, err := p.of(scope)
		if err != nil {
			return nil, err
		}
		filled := map[string]bool{}
		for _, policy := range set.Policies {
			if IsFilled(&policy) {
				filled[policy.Name] = true // it stays in the API
				continue
			}
			all.Policies = append(all.Policies, policy)
		}
		for _, binding := range set.Bindings {
			if !filled[binding.Spec.PolicyName] {
				all.Bindings = append(all.Bindings, binding)
			}
		}
	}
	return all, nil
}

// ReleaseDigest returns the SHA-256 of the policies of this release, as they are embedded, that the
// static form of that scope has, with or without revocation's.
func ReleaseDigest(scope Scope, withRevocation bool) (string, error) {
	digest := releaseDigests[release{scope, withRevocation}]
	if digest == nil {
		return "", errNoScope
	}
	return digest()
}

// release is what a static form has of the release.
type release struct {
	scope          Scope
	withRevocation bool
}

// releaseDigests are computed once: a controller compares them at each hello.
var releaseDigests = func() map[release]func() (string, error) {
	all := map[release]func() (string, error){}
	for scope := Alone; scope <= Management; scope++ {
		for _, withRevocation := range []bool{false, true} {
			all[release{scope, withRevocation}] = sync.OnceValues(func() (string, error) {
				set, err := source(scope, withRevocation)
				if err != nil {
					return "", err
				}
				return set.digest()
			})
		}
	}
	return all
}()

// signerLists has the policies whose list of signers an overlay extends, for Signers and for
// MachineSigners. node-attestation-certificates is not among them: another signer writes its own
// certificates.
var signerLists = map[string]func(Options) []string{
	"node-attestation-approval": func(o Options) []string { return o.Signers },
	"node-attestation-signers":  allSigners,
	"node-attestation-size":     allSigners,
	"node-attestation-metadata": allSigners,
}

func allSigners(o Options) []string { return slices.Concat(o.Signers, o.MachineSigners) }

// NewStatic returns the policies and bindings of the static form, without the identity policy.
// Their names end with Suffix. Only these, and the lists of the options, differ from the manifests.
func NewStatic(o Options) (*Set, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	release, err := source(o.Scope, o.Revocation)
	if err != nil {
		return nil, err
	}
	static := release.Clone()
	for i := range static.Policies {
		policy := &static.Policies[i]
		for v := range policy.Spec.Variables {
			o.apply(policy.Name, &policy.Spec.Variables[v])
		}
		policy.ObjectMeta = metav1.ObjectMeta{Name: policy.Name + Suffix}
	}
	for i := range static.Bindings {
		binding := &static.Bindings[i]
		binding.ObjectMeta = metav1.ObjectMeta{Name: binding.Name + Suffix}
		binding.Spec.PolicyName += Suffix
	}
	return static, nil
}

// apply changes a variable of a policy as the options say.
func (o Options) apply(policy string, variable *admissionv1.Variable) {
	shipped, ok := Literals(variable.Expression)
	if !ok {
		return
	}
	var more []string
	switch variable.Name {
	case listControllers:
		variable.Expression = listOf(o.Controllers)
		return
	case listSigners:
		if of := signerLists[policy]; of != nil {
			more = of(o)
		}
	case listBootstrappers:
		more = o.Bootstrappers
	case listMovers:
		more = o.Movers
	case listUpgraders:
		more = o.Upgraders
	}
	for _, name := range more {
		if !slices.Contains(shipped, name) {
			shipped = append(shipped, name)
			variable.Expression = listOf(shipped)
		}
	}
}

// header begins the file of the policies.
const header = Mark + `# An API server of Kubernetes 1.37 or later reads these policies from its disk. The identity policy
# is the last of them, so an API server that shows it has read them all.
`

// RenderStatic returns the file of the static form. Each policy is followed by its binding. The
// identity policy is last, so that a file that was cut off does not have it.
func RenderStatic(o Options) ([]byte, error) {
	static, err := NewStatic(o)
	if err != nil {
		return nil, err
	}
	release, err := ReleaseDigest(o.Scope, o.Revocation)
	if err != nil {
		return nil, err
	}
	content, err := static.render()
	if err != nil {
		return nil, err
	}
	// No document before the first policy: an API server takes one of comments alone for a mistake.
	content = append([]byte(header), content...)
	sum := sha256.Sum256(content)
	policy, binding, err := Identity{Digest: hex.EncodeToString(sum[:]), Release: release, Controllers: o.Controllers, Scope: o.Scope.String()}.policy()
	if err != nil {
		return nil, err
	}
	identity, err := (&Set{Policies: []admissionv1.ValidatingAdmissionPolicy{policy}, Bindings: []admissionv1.ValidatingAdmissionPolicyBinding{binding}}).render()
	return slices.Concat(content, []byte("---\n"), identity), err
}

// render returns the YAML of all policies, each with its bindings.
func (s *Set) render() ([]byte, error) {
	var out bytes.Buffer
	document := func(kind, name string, spec any) error {
		content, err := yaml.Marshal(map[string]any{
			"apiVersion": admissionv1.SchemeGroupVersion.String(), "kind": kind, "metadata": map[string]string{"name": name}, "spec": spec,
		})
		if out.Len() > 0 {
			out.WriteString("---\n")
		}
		out.Write(content)
		return err
	}
	for _, policy := range s.Policies {
		if err := document("ValidatingAdmissionPolicy", policy.Name, policy.Spec); err != nil {
			return nil, err
		}
		for _, binding := range s.Bindings {
			if binding.Spec.PolicyName != policy.Name {
				continue
			}
			if err := document("ValidatingAdmissionPolicyBinding", binding.Name, binding.Spec); err != nil {
				return nil, err
			}
		}
	}
	return out.Bytes(), nil
}
