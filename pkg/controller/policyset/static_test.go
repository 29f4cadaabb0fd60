// SPDX-License-Identifier: Apache-2.0

package policyset

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

const shipped = "system:serviceaccount:node-attestation-system:node-attestation-controller"

// The static form and the manifests have the same specs. Only names differ, and the spelling of the
// list of controllers.
func TestStaticFormEqualsTheAPIs(t *testing.T) {
	for _, scope := range []Scope{Alone, Workload, Management} {
		content, err := RenderStatic(Options{Scope: scope, Controllers: []string{shipped}, Revocation: true})
		if err != nil {
			t.Fatal(err)
		}
		static, err := parse("", content)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{IdentityName: true}
		for _, part := range []part{attestation, revocation, guards, revocationGuards} {
			set, err := part.of(scope)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range set.Policies {
				name := want.Name + Suffix
				policy, binding := static.find(name)
				if IsFilled(&want) {
					if policy != nil || binding != nil {
						t.Errorf("%s: %s is static, and the controller writes it", scope, want.Name)
					}
					continue
				}
				if policy == nil || binding == nil {
					t.Errorf("%s: %s has no static form", scope, want.Name)
					continue
				}
				for i := range policy.Spec.Variables {
					if names, ok := Literals(policy.Spec.Variables[i].Expression); ok && IsControllers(policy.Spec.Variables[i].Name) && slices.Equal(names, []string{shipped}) {
						policy.Spec.Variables[i].Expression = want.Spec.Variables[i].Expression
					}
				}
				_, wantBinding := set.find(want.Name)
				binding.Spec.PolicyName = strings.TrimSuffix(binding.Spec.PolicyName, Suffix)
				if !equality.Semantic.DeepEqual(policy.Spec, want.Spec) || !equality.Semantic.DeepEqual(binding.Spec, wantBinding.Spec) {
					t.Errorf("%s: the static form of %s differs", scope, want.Name)
				}
				seen[name] = true
			}
		}
		for _, policy := range static.Policies {
			if !seen[policy.Name] {
				t.Errorf("%s: %s is not in the manifests", scope, policy.Name)
			}
		}
	}
}

func (s *Set) find(name string) (policy *admissionv1.ValidatingAdmissionPolicy, binding *admissionv1.ValidatingAdmissionPolicyBinding) {
	for i := range s.Policies {
		if s.Policies[i].Name == name {
			policy = &s.Policies[i]
		}
	}
	for i := range s.Bindings {
		if s.Bindings[i].Name == name {
			binding = &s.Bindings[i]
		}
	}
	return policy, binding
}

// Each option changes the lists that an overlay changes, and no other.
func TestOptionsExtendLists(t *testing.T) {
	set, err := NewStatic(Options{
		Scope: Alone, Controllers: []string{"one", "two"}, Signers: []string{"example.com/own"}, MachineSigners: []string{"example.com/network"},
		Bootstrappers: []string{"boot"}, Movers: []string{"mover"}, Upgraders: []string{"upgrader"}, Revocation: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	has := map[string][]string{}
	for _, policy := range set.Policies {
		for _, v := range policy.Spec.Variables {
			names, ok := Literals(v.Expression)
			if IsControllers(v.Name) && !slices.Equal(names, []string{"one", "two"}) {
				t.Errorf("%s: controllers are %v", policy.Name, names)
			}
			for _, name := range []string{"example.com/own", "example.com/network", "boot", "mover", "upgrader"} {
				if ok && slices.Contains(names, name) {
					has[name] = append(has[name], strings.TrimSuffix(policy.Name, Suffix)+"/"+v.Name)
				}
			}
		}
	}
	for name, want := range map[string][]string{
		"example.com/own":     {"node-attestation-approval/signers", "node-attestation-metadata/signers", "node-attestation-signers/signers", "node-attestation-size/signers"},
		"example.com/network": {"node-attestation-metadata/signers", "node-attestation-signers/signers", "node-attestation-size/signers"},
		"boot":                {"node-attestation-metadata/bootstrappers", "node-attestation-signers/bootstrappers", "node-attestation-size/bootstrappers"},
		"mover":               {"node-attestation-guard-slices/movers", "node-attestation-records/movers", "node-attestation-revocation-slices/movers"},
		"upgrader":            {"node-attestation-guard-definitions/upgraders"},
	} {
		if got := slices.Sorted(slices.Values(has[name])); !slices.Equal(got, want) {
			t.Errorf("%s is in %v", name, got)
		}
	}
}

func TestBadOptions(t *testing.T) {
	good := Options{Scope: Alone, Controllers: []string{shipped}}
	for says, change := range map[string]func(*Options){
		"scope":                      func(o *Options) { o.Scope = 0 },
		"no user":                    func(o *Options) { o.Controllers = nil },
		"--controller-user \"\"":     func(o *Options) { o.Controllers = []string{""} },
		"--controller-user \"a'":     func(o *Options) { o.Controllers = []string{"a', 'system:admin"} },
		"is named twice":             func(o *Options) { o.Controllers = []string{shipped, shipped} },
		"signer \"kubelet\"":         func(o *Options) { o.Signers = []string{"kubelet"} },
		"signer \"example.com/a b\"": func(o *Options) { o.MachineSigners = []string{"example.com/a b"} },
		"bootstrapper \"\\\\\"":      func(o *Options) { o.Bootstrappers = []string{`\`} },
		"mover \"a\\nb\"":            func(o *Options) { o.Movers = []string{"a\nb"} },
		"upgrader \"a b\"":           func(o *Options) { o.Upgraders = []string{"a b"} },
	} {
		o := good
		change(&o)
		if _, err := RenderStatic(o); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("want %s, got %v", says, err)
		}
	}
}

// The identity policy of a file names its digest, its release and its controllers. Anything
// else that an API server answers is no identity.
func TestIdentity(t *testing.T) {
	o := Options{Scope: Workload, Controllers: []string{"b", shipped}}
	content, err := RenderStatic(o)
	if err != nil {
		t.Fatal(err)
	}
	set, err := parse("", content)
	if err != nil {
		t.Fatal(err)
	}
	policy, binding := set.find(IdentityName)
	if policy == nil || binding == nil || !bytes.HasSuffix(content, []byte("validationActions:\n  - Deny\n")) {
		t.Fatal("the identity policy is not the last")
	}
	refusal := func(policy, message string) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "namespaces"}, "node-attestation-system",
			fmt.Errorf("ValidatingAdmissionPolicy '%[1]s' with binding '%[1]s' denied request: %[2]s", policy, message))
	}
	message := policy.Spec.Validations[0].Message
	identity, ok := ParseRefusal(refusal(IdentityName, message))
	file, _, _ := bytes.Cut(content, []byte("---\napiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingAdmissionPolicy\nmetadata:\n  name: "+IdentityName))
	sum := sha256.Sum256(file)
	release, err := ReleaseDigest(Workload, false)
	if err != nil || !ok || identity.Digest != hex.EncodeToString(sum[:]) || identity.Release != release || identity.Scope != "workload" || !slices.Equal(identity.Controllers, o.Controllers) {
		t.Errorf("%+v, %v, %v", identity, ok, err)
	}
	for title, err := range map[string]error{
		"accepted":         nil,
		"another policy":   refusal("mine", message),
		"quoted by one":    refusal("mine", "ValidatingAdmissionPolicy '"+IdentityName+"' with binding '"+IdentityName+"' denied request: "+message),
		"quoted in a name": refusal("mine", refusal(IdentityName, message).Error()),
		"no right":         apierrors.NewForbidden(schema.GroupResource{Resource: "namespaces"}, "a", fmt.Errorf("User \"a\" cannot patch: %s", message)),
		"another message":  refusal(IdentityName, "static policies"),
		"no document":      refusal(IdentityName, identityPrefix+"{"),
		"another answer":   apierrors.NewBadRequest(refusal(IdentityName, message).Error()),
	} {
		if _, ok := ParseRefusal(err); ok {
			t.Errorf("%s is taken for the identity policy", title)
		}
	}
}

// Each digest of a release is its own.
func TestReleaseDigests(t *testing.T) {
	seen := map[string]string{}
	for _, scope := range []Scope{Alone, Workload, Management} {
		for _, withRevocation := range []bool{false, true} {
			digest, err := ReleaseDigest(scope, withRevocation)
			if err != nil {
				t.Fatal(err)
			}
			if before, ok := seen[digest]; ok {
				t.Errorf("%s, %v has the digest of %s", scope, withRevocation, before)
			}
			seen[digest] = fmt.Sprint(scope, withRevocation)
		}
	}
}
