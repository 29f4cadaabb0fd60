// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

func policies(t *testing.T) []admissionv1.ValidatingAdmissionPolicy {
	t.Helper()
	list, err := shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(list.Items, func(p admissionv1.ValidatingAdmissionPolicy) bool {
		return !strings.HasPrefix(p.Name, "node-attestation-")
	})
}

var (
	quoted      = regexp.MustCompile(`'([^']*)'`)
	signerLists = map[string][]string{
		approvalPolicy: guarded, certificatesPolicy: signed, sizePolicy: forMachines, metadataPolicy: forMachines, signersPolicy: forMachines,
	}
)

// The lists stand in several policies: they have to say the same, and at the place where overlays
// patch them.
func TestListsAgree(t *testing.T) {
	all := policies(t)
	if len(all) != 7 {
		t.Fatalf("%d policies", len(all))
	}
	list := func(expression string) (found []string) {
		for _, match := range quoted.FindAllStringSubmatch(expression, -1) {
			found = append(found, match[1])
		}
		slices.Sort(found)
		return found
	}
	for _, p := range all {
		if v := p.Spec.Variables[0]; v.Name != "controllers" || !slices.Equal(list(v.Expression), []string{controllerUser}) {
			t.Errorf("%s: variable 0 is %+v", p.Name, v)
		}
		if want, v := signerLists[p.Name], p.Spec.Variables[1]; want != nil && (v.Name != "signers" || !slices.Equal(list(v.Expression), slices.Sorted(slices.Values(want)))) {
			t.Errorf("%s: variable 1 is %+v", p.Name, v)
		}
		if v := p.Spec.Variables[2]; len(signerLists[p.Name]) == len(forMachines) && (v.Name != "bootstrappers" || v.Expression != "[]") {
			t.Errorf("%s: variable 2 is %+v", p.Name, v)
		}
		binding, err := shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Get(t.Context(), p.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if *p.Spec.FailurePolicy != admissionv1.Fail || len(p.Spec.MatchConditions) > 0 || binding.Spec.MatchResources != nil || p.Spec.MatchConstraints.ObjectSelector.Size() > 0 ||
			!slices.Contains(binding.Spec.ValidationActions, admissionv1.Deny) {
			t.Errorf("%s does not hold for everything: %+v, %+v", p.Name, p.Spec, binding.Spec)
		}
	}
}

// documentedOverlay writes the overlay with a title in docs/cluster-setup.md into a folder, with
// replacements in pairs, each of which has to be there once.
func documentedOverlay(t *testing.T, title string, replacements ...string) (dir string) {
	t.Helper()
	document, err := os.ReadFile("../../docs/cluster-setup.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(document), "```yaml\n# "+title+"\n")
	content, _, closed := strings.Cut(rest, "```")
	if !ok || !closed {
		t.Fatalf("docs/cluster-setup.md has no overlay %q", title)
	}
	base, err := filepath.Abs(manifests)
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	relative, err := filepath.Rel(dir, base)
	if err != nil {
		t.Fatal(err)
	}
	replacements = append(replacements, "../kubernetes", relative)
	for i := 0; i < len(replacements); i += 2 {
		if strings.Count(content, replacements[i]) != 1 {
			t.Fatalf("another overlay than the test knows, without %q:\n%s", replacements[i], content)
		}
	}
	content = strings.NewReplacer(replacements...).Replace(content)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// overlay applies the overlay in docs/cluster-setup.md, with another replacement of the
// controllers, and undoes it afterwards.
func overlay(t *testing.T, controllers string) error {
	t.Helper()
	const documented = "['system:serviceaccount:node-attestation-system:node-attestation-controller', 'system:serviceaccount:capi-acme-system:manager']"
	dir := documentedOverlay(t, "overlay", documented, controllers)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := shared.apply(ctx, "-k", manifests); err != nil {
			t.Fatal(err)
		}
		// The other tests need the base again, in effect in each policy. The one on sizes has no
		// use for controllers.
		name, err := file(ctx, shared.bootstrapper, tpmSigner)
		if err != nil {
			t.Fatal(err)
		}
		certificate, err := anyCertificate()
		if err != nil {
			t.Fatal(err)
		}
		other := as(t, "system:serviceaccount:capi-acme-system:manager", "system:masters")
		inEffect := func(policy string, try func(kubernetes.Interface) error) {
			harness.Eventually(t, patience, policy+" is in effect", func() bool { return try(shared.controller) == nil && refusedBy(try(other), policy) })
		}
		inEffect(annotationPolicy, func(client kubernetes.Interface) error {
			annotation := []byte(`{"metadata":{"annotations":{"` + reserved[0] + `":"x"}}}`)
			_, err := client.CertificatesV1().CertificateSigningRequests().Patch(ctx, name, types.MergePatchType, annotation, metav1.PatchOptions{DryRun: dryRun})
			return err
		})
		inEffect(metadataPolicy, func(client kubernetes.Interface) error {
			labels, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": annotations(maxLabels + 1)}})
			if err != nil {
				return err
			}
			_, err = client.CertificatesV1().CertificateSigningRequests().Patch(ctx, name, types.MergePatchType, labels, metav1.PatchOptions{DryRun: dryRun})
			return err
		})
		record, err := fullRecordJSON(t)
		if err != nil {
			t.Fatal(err)
		}
		inEffect(recordsPolicy, func(client kubernetes.Interface) error {
			return client.CertificatesV1().RESTClient().Post().AbsPath(recordsPath(namespace)).Param("dryRun", metav1.DryRunAll).Body(record).Do(ctx).Error()
		})
		inEffect(approvalPolicy, func(client kubernetes.Interface) error { return decide(ctx, client, name, "Approved", dryRun) })
		// for only then it may be issued
		if err := decide(ctx, shared.controller, name, "Approved", nil); err != nil {
			t.Fatal(err)
		}
		inEffect(certificatesPolicy, func(client kubernetes.Interface) error { return certify(ctx, client, name, certificate, dryRun) })
	})
	return shared.apply(t.Context(), "-k", dir)
}

// An infrastructure provider that embeds the controller has another identity.
func TestAnotherControllersIdentity(t *testing.T) {
	other := as(t, "system:serviceaccount:capi-acme-system:manager", "system:masters")
	name := filed(t, tpmSigner)
	wantRefusedBy(t, approve(t, other, name), approvalPolicy)
	want(t, overlay(t, "['system:serviceaccount:node-attestation-system:node-attestation-controller', 'system:serviceaccount:capi-acme-system:manager']"))
	harness.Eventually(t, patience, "the other controller approves", func() bool { return approve(t, other, name) == nil })
	harness.Eventually(t, patience, "the other controller issues", func() bool { return issue(t, other, name) == nil })
	want(t, approve(t, shared.controller, filed(t, tpmSigner)))
	wantRefusedBy(t, approve(t, shared.admin, filed(t, tpmSigner)), approvalPolicy)
}

// Without any controller in the parameters, no user may approve.
func TestNoControllersFailsClosed(t *testing.T) {
	want(t, overlay(t, "[]"))
	name := filed(t, tpmSigner)
	harness.Eventually(t, patience, "the controller is refused", func() bool {
		return refusedBy(decide(t.Context(), shared.controller, name, "Approved", dryRun), approvalPolicy)
	})
	wantRefusedBy(t, approve(t, shared.admin, name), approvalPolicy)
	want(t, decide(t.Context(), shared.admin, name, "Denied", nil))
}

// What is no list of names at all is not stored, or refuses everybody.
func TestBrokenParametersFailClosed(t *testing.T) {
	for _, broken := range []string{"", "[", "unknown", "params.controllers"} {
		err := overlay(t, broken)
		if err == nil {
			t.Errorf("controllers %q were taken", broken)
		}
		wantRefusedBy(t, approve(t, shared.admin, filed(t, tpmSigner)), approvalPolicy)
	}
	for _, p := range policies(t) {
		if p.Name == sizePolicy || p.Name == signersPolicy { // they have no use for them
			continue
		}
		p.Spec.Variables = p.Spec.Variables[1:]
		if _, err := shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().Update(t.Context(), &p, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("%s without controllers: %v", p.Name, err)
		}
	}
}

// The reason why the lists are no ConfigMap: while one is missing, requests of every signer are
// refused, for any matchConditions.
func TestMissingConfigMapWouldStopEverySigner(t *testing.T) {
	ctx := t.Context()
	api := shared.admin.AdmissionregistrationV1()
	const name = "by-configmap"
	policy := &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			ParamKind: &admissionv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"},
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Update},
				Rule:       admissionv1.Rule{APIGroups: []string{certs}, APIVersions: []string{"v1"}, Resources: []string{requests + "/approval"}},
			}}}},
			MatchConditions: []admissionv1.MatchCondition{{Name: "ours", Expression: "object.spec.signerName == '" + tpmSigner + "'"}},
			Validations:     []admissionv1.Validation{{Expression: "request.userInfo.username in params.data"}},
		},
	}
	if _, err := api.ValidatingAdmissionPolicies().Create(ctx, policy, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = api.ValidatingAdmissionPolicies().Delete(context.WithoutCancel(ctx), name, metav1.DeleteOptions{})
	})
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
			ParamRef: &admissionv1.ParamRef{Name: "missing", Namespace: namespace, ParameterNotFoundAction: new(admissionv1.DenyAction)},
		},
	}
	if _, err := api.ValidatingAdmissionPolicyBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	foreign, err := file(ctx, shared.admin, "example.com/x")
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, patience, "another signer's request is refused", func() bool {
		err := decide(ctx, shared.admin, foreign, "Approved", dryRun)
		return err != nil && strings.Contains(err.Error(), "no params found")
	})
	if err := api.ValidatingAdmissionPolicyBindings().Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, patience, "and is not, without that binding", func() bool { return decide(ctx, shared.admin, foreign, "Approved", dryRun) == nil })
}

// What no policy of this kind can stop: it sees whom a request is in the name of, and none sees
// changes to policies.
func TestWhatPoliciesCannotStop(t *testing.T) {
	impersonated := as(t, controllerUser, "system:masters")
	if err := approve(t, impersonated, filed(t, tpmSigner)); err != nil {
		t.Errorf("system:masters in the controller's name is refused; say so in docs/cluster-setup.md: %v", err)
	}
	err := shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().Delete(t.Context(), approvalPolicy, metav1.DeleteOptions{DryRun: dryRun})
	if err != nil {
		t.Errorf("system:masters cannot delete a policy; say so in docs/cluster-setup.md: %v", err)
	}
}
