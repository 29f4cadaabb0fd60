// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	shippedNamespace = "node-attestation-system"
	shippedAccount   = "system:serviceaccount:" + shippedNamespace + ":node-attestation-controller"
	manifests        = "../../packaging/kubernetes/"
	approvalPolicy   = "node-attestation-approval"
)

// apply has kubectl apply manifests as the documentation says.
func (b *bed) apply(t *testing.T, names ...string) {
	t.Helper()
	args := []string{"apply", "--server-side", "--force-conflicts", "--validate=strict"}
	for _, name := range names {
		args = append(args, "--filename="+manifests+name)
	}
	if out, err := b.RunKubectl(t.Context(), b.adminConfig, args...); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// policed applies namespace, policies and rights, and takes policies and rights away when the test
// ends: other tests need a cluster without them.
func (b *bed) policed(t *testing.T) {
	t.Helper()
	b.apply(t, "namespace.yaml", "policies.yaml", "rbac.yaml")
	// An earlier test may have left the condition.
	patch := client.RawPatch(types.MergePatchType, []byte(`{"status": {"conditions": null}}`))
	if err := b.client.Status().Patch(t.Context(), namespace(shippedNamespace), patch); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if out, err := b.RunKubectl(ctx, b.adminConfig, "delete", "--ignore-not-found", "--wait=false", "--filename="+manifests+"policies.yaml", "--filename="+manifests+"rbac.yaml"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		request := b.bareHello(t)
		harness.Eventually(t, harness.Soon, "the policies are gone", func() bool { return b.approvesDry(ctx, request) == nil })
		if err := b.client.Delete(ctx, request); err != nil {
			t.Error(err)
		}
	})
}

// bareHello files a hello that no controller of this package answers.
func (b *bed) bareHello(t *testing.T) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	request, err := b.Client().CertificatesV1().CertificateSigningRequests().Create(context.WithoutCancel(t.Context()), csrObject(t, attestation.HelloSignerName, "bare"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return request
}

// csrObject is a request as a kubelet files it.
func csrObject(t *testing.T, signer, node string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}}
	if signer == certificatesv1.KubeletServingSignerName {
		template.DNSNames = []string{node}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return csr.Object(csr.NewName(), signer, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), key.Public(), nil)
}

func (b *bed) approvesDry(ctx context.Context, request *certificatesv1.CertificateSigningRequest) error {
	approved := request.DeepCopy()
	approved.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test"}}
	return b.client.SubResource("approval").Update(ctx, approved, client.DryRunAll)
}

// asShipped returns the controller's own user, with the rights in the manifests.
func (b *bed) asShipped() *rest.Config {
	c := b.AdminConfig()
	c.Impersonate = rest.ImpersonationConfig{UserName: shippedAccount, Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + shippedNamespace, "system:authenticated"}}
	return c
}

// watchPolicies runs a watch until the test ends.
func (b *bed) watchPolicies(t *testing.T, as *rest.Config, change func(*preflight.WatchConfig)) (*preflight.PolicyWatch, *journal) {
	t.Helper()
	gauges, err := clusterMetrics()
	if err != nil {
		t.Fatal(err)
	}
	var p *preflight.PolicyWatch
	said := runManager(t, as, func(m ctrl.Manager) error {
		c := preflight.WatchConfig{Namespace: shippedNamespace, Metrics: gauges.For("policed")}
		api, err := client.New(as, client.Options{Scheme: newScheme()})
		if err != nil {
			return err
		}
		c.Check = &preflight.PolicyCheck{Scope: policyset.Alone, Client: api, Static: &preflight.StaticProber{Config: as, Namespace: shippedNamespace}}
		if change != nil {
			change(&c)
		}
		p, err = preflight.AddPolicyWatch(m, c)
		return err
	})
	t.Cleanup(gauges.For("policed").Forget)
	return p, said
}

// inForce returns the condition.
func (b *bed) inForce(t *testing.T) corev1.NamespaceCondition {
	t.Helper()
	namespace := &corev1.Namespace{}
	if err := b.client.Get(t.Context(), client.ObjectKey{Name: shippedNamespace}, namespace); err != nil {
		t.Fatal(err)
	}
	for _, c := range namespace.Status.Conditions {
		if c.Type == preflight.ConditionPolicies {
			return c
		}
	}
	return corev1.NamespaceCondition{}
}

func (b *bed) becomes(t *testing.T, status corev1.ConditionStatus, reason, says string) corev1.NamespaceCondition {
	t.Helper()
	var c corev1.NamespaceCondition
	harness.Eventually(t, harness.Soon, fmt.Sprintf("the condition is %s, %s, %q", status, reason, says), func() bool {
		c = b.inForce(t)
		return c.Status == status && c.Reason == reason && strings.Contains(c.Message, says)
	})
	return c
}

// eventsAbout returns the notes of Events about an object.
func (b *bed) eventsAbout(t *testing.T, name, reason string) (notes []string) {
	t.Helper()
	list := &eventsv1.EventList{}
	if err := b.client.List(t.Context(), list, client.InNamespace(corev1.NamespaceDefault)); err != nil {
		t.Fatal(err)
	}
	for _, e := range list.Items {
		if e.Regarding.Name == name && e.Reason == reason {
			notes = append(notes, e.Note)
		}
	}
	return notes
}

// sampled returns the sum of a metric's samples that have these labels.
func sampled(t *testing.T, name string, labels map[string]string) (sum float64) {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
	samples:
		for _, metric := range family.GetMetric() {
			got := map[string]string{}
			for _, pair := range metric.GetLabel() {
				got[pair.GetName()] = pair.GetValue()
			}
			for label, value := range labels {
				if got[label] != value {
					continue samples
				}
			}
			sum += metric.GetGauge().GetValue() + metric.GetCounter().GetValue()
		}
	}
	return sum
}

// With revocation on, its policies are watched too. A deleted policy is reported until it is
// applied again. An altered one is reported if the controller does not repair it. The gate asks for
// none of them. TestPoliciesAreWatched runs without them.
func TestRevocationPoliciesAreWatched(t *testing.T) {
	const revoked, component = "node-attestation-revoked-07", "../kubernetes-revocation/component/"
	b := shared
	b.policed(t)
	b.apply(t, component+"policies.yaml", component+"guards.yaml")
	t.Cleanup(func() {
		if out, err := b.RunKubectl(context.WithoutCancel(t.Context()), b.adminConfig, "delete", "--ignore-not-found", "--filename="+manifests+component+"policies.yaml", "--filename="+manifests+component+"guards.yaml"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	var rendered atomic.Pointer[admissionv1.ValidatingAdmissionPolicySpec]
	_, said := b.watchPolicies(t, b.asShipped(), func(c *preflight.WatchConfig) {
		c.Check.Rendered = func(name string) *admissionv1.ValidatingAdmissionPolicySpec {
			if name != revoked {
				return nil
			}
			return rendered.Load()
		}
	})
	b.becomes(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, "")
	policies := b.Client().AdmissionregistrationV1().ValidatingAdmissionPolicies()
	if err := policies.Delete(t.Context(), revoked, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.becomes(t, corev1.ConditionFalse, preflight.ReasonPoliciesNotInForce, revoked+": "+preflight.PolicyMissing+": the policy is not there. Revoked certificates may be accepted")
	if sampled(t, "node_attestation_policy_problems", map[string]string{"cluster": "policed", "policy": revoked, "problem": preflight.PolicyMissing}) != 1 || !said.says("Revoked certificates may be accepted") {
		t.Error("it is not in gauge and log")
	}
	api, err := client.New(b.asShipped(), client.Options{Scheme: newScheme()})
	if err != nil {
		t.Fatal(err)
	}
	gate := &preflight.PolicyCheck{Scope: policyset.Alone, Client: api, Rendered: func(string) *admissionv1.ValidatingAdmissionPolicySpec { return nil }}
	if state, err := gate.Check(t.Context()); err != nil || len(state.Problems) > 0 {
		t.Errorf("enforcement does not start: %v, %v", state, err)
	}
	b.apply(t, component+"policies.yaml")
	b.becomes(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, "")

	// The controller fills it, and somebody empties it.
	spec, err := revocation.RenderPolicy(v1alpha1.RevocationSliceSpec{Certificates: []v1alpha1.RevokedCertificate{{SHA256: strings.Repeat("0", 64), NodeName: "revoked"}}}, []string{attestation.HelloSignerName})
	if err != nil {
		t.Fatal(err)
	}
	shipped, err := policies.Get(t.Context(), revoked, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	filled := shipped.DeepCopy()
	filled.Spec = spec
	rendered.Store(&spec)
	if filled, err = policies.Update(t.Context(), filled, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	filled.Spec = shipped.Spec
	if filled, err = policies.Update(t.Context(), filled, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.becomes(t, corev1.ConditionFalse, preflight.ReasonPoliciesNotInForce, revoked+": "+preflight.PolicyAltered)
	filled.Spec = spec
	if _, err = policies.Update(t.Context(), filled, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.becomes(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, "")
}

// policyNames are those of the release.
func (b *bed) policyNames(t *testing.T) (names []string) {
	t.Helper()
	list := &admissionv1.ValidatingAdmissionPolicyBindingList{}
	if err := b.client.List(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	for _, item := range list.Items {
		if strings.HasPrefix(item.Name, "node-attestation-") {
			names = append(names, item.Name)
		}
	}
	return names
}

// The controller notices when a policy is not in force, for each possible cause. It reports that in
// the condition, an Event, the log and a gauge. The report ends once the release is applied again.
func TestPoliciesAreWatched(t *testing.T) {
	b := shared
	b.policed(t)
	_, said := b.watchPolicies(t, b.asShipped(), nil)
	b.becomes(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, "")
	api := b.Client().AdmissionregistrationV1()
	policy := func(change func(*admissionv1.ValidatingAdmissionPolicySpec)) func() error {
		return func() error {
			p, err := api.ValidatingAdmissionPolicies().Get(t.Context(), approvalPolicy, metav1.GetOptions{})
			if err != nil {
				return err
			}
			change(&p.Spec)
			_, err = api.ValidatingAdmissionPolicies().Update(t.Context(), p, metav1.UpdateOptions{})
			return err
		}
	}
	binding := func(change func(*admissionv1.ValidatingAdmissionPolicyBindingSpec)) func() error {
		return func() error {
			p, err := api.ValidatingAdmissionPolicyBindings().Get(t.Context(), approvalPolicy, metav1.GetOptions{})
			if err != nil {
				return err
			}
			change(&p.Spec)
			_, err = api.ValidatingAdmissionPolicyBindings().Update(t.Context(), p, metav1.UpdateOptions{})
			return err
		}
	}
	list := func(variable int, old, replacement string) func() error {
		return policy(func(p *admissionv1.ValidatingAdmissionPolicySpec) {
			if !strings.Contains(p.Variables[variable].Expression, old) {
				t.Errorf("variable %d has no %s", variable, old)
			}
			p.Variables[variable].Expression = strings.Replace(p.Variables[variable].Expression, old, replacement, 1)
		})
	}
	type spec = *admissionv1.ValidatingAdmissionPolicySpec
	type bindingSpec = *admissionv1.ValidatingAdmissionPolicyBindingSpec
	for _, c := range []struct {
		title, problem, says string
		change               func() error
	}{
		{"all bindings are deleted", preflight.PolicyMissing, approvalPolicy, func() (err error) {
			for _, name := range b.policyNames(t) {
				err = errors.Join(err, api.ValidatingAdmissionPolicyBindings().Delete(t.Context(), name, metav1.DeleteOptions{}))
			}
			return err
		}},
		{"a policy is deleted", preflight.PolicyMissing, "the policy is not there", func() error {
			return api.ValidatingAdmissionPolicies().Delete(t.Context(), approvalPolicy, metav1.DeleteOptions{})
		}},
		{"a binding only audits", preflight.PolicyNotDenying, "validationActions", binding(func(p bindingSpec) { p.ValidationActions = []admissionv1.ValidationAction{admissionv1.Audit} })},
		{"a binding is narrowed", preflight.PolicyAltered, "matchResources", binding(func(p bindingSpec) {
			p.MatchResources = &admissionv1.MatchResources{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}
		})},
		{"an expression is altered", preflight.PolicyAltered, "validations", policy(func(p spec) { p.Validations[1].Expression = "true || " + p.Validations[1].Expression })},
		{"failurePolicy is Ignore", preflight.PolicyAltered, "failurePolicy", policy(func(p spec) { p.FailurePolicy = new(admissionv1.Ignore) })},
		{"a resource is left out", preflight.PolicyAltered, "matchConstraints", policy(func(p spec) {
			r := &p.MatchConstraints.ResourceRules[0]
			r.Resources = r.Resources[:1]
		})},
		{"a signer is left out", preflight.PolicyAltered, "kube-apiserver-client-kubelet", list(1, "'kubernetes.io/kube-apiserver-client-kubelet'", "'example.com/none'")},
		{"a controller is added", preflight.PolicyAltered, "kubernetes-admin", list(0, "[", "['kubernetes-admin', ")},
	} {
		t.Run(c.title, func(t *testing.T) {
			if err := c.change(); err != nil {
				t.Fatal(err)
			}
			condition := b.becomes(t, corev1.ConditionFalse, preflight.ReasonPoliciesNotInForce, c.says)
			if !strings.Contains(condition.Message, c.problem) || condition.LastTransitionTime.IsZero() {
				t.Errorf("the condition is %+v", condition)
			}
			harness.Eventually(t, harness.Soon, "an Event says so", func() bool {
				for _, note := range b.eventsAbout(t, shippedNamespace, preflight.ReasonPoliciesNotInForce) {
					if strings.Contains(note, c.says) {
						return true
					}
				}
				return false
			})
			if !said.says(c.says) || !said.says("the admission policies are not in force") {
				t.Error("the log does not say so")
			}
			if sampled(t, "node_attestation_policy_problems", map[string]string{"cluster": "policed", "policy": approvalPolicy, "problem": c.problem}) != 1 {
				t.Error("it is not in the gauge")
			}
			// an apply leaves a field that is not in the manifests to the client that added it
			if c.says == "matchResources" {
				if out, err := b.RunKubectl(t.Context(), b.adminConfig, "replace", "--filename="+manifests+"policies.yaml"); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			} else {
				b.apply(t, "policies.yaml")
			}
			b.becomes(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, "")
			if sampled(t, "node_attestation_policy_problems", map[string]string{"cluster": "policed"}) != 0 {
				t.Error("it is still in the gauge")
			}
		})
	}
	t.Run("a signer is added", func(t *testing.T) {
		mark := b.inForce(t)
		if err := list(1, "[", "['example.com/another', ")(); err != nil {
			t.Fatal(err)
		}
		// The next change is seen after this one, and is the only one that is said.
		if err := binding(func(p bindingSpec) { p.ValidationActions = []admissionv1.ValidationAction{admissionv1.Warn} })(); err != nil {
			t.Fatal(err)
		}
		condition := b.becomes(t, corev1.ConditionFalse, preflight.ReasonPoliciesNotInForce, "validationActions")
		if strings.Contains(condition.Message, "signers") || condition.LastTransitionTime.Before(&mark.LastTransitionTime) {
			t.Errorf("the condition is %+v", condition)
		}
	})
}

// In audit mode nothing depends on the policies: what is missing is no error, and no Event.
func TestPoliciesInAuditMode(t *testing.T) {
	b := shared
	b.policed(t)
	if err := b.client.Delete(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: approvalPolicy}}); err != nil {
		t.Fatal(err)
	}
	before := len(b.eventsAbout(t, shippedNamespace, preflight.ReasonPoliciesNotInForce))
	_, said := b.watchPolicies(t, b.asShipped(), func(c *preflight.WatchConfig) { c.Check.Audit = true })
	b.becomes(t, corev1.ConditionUnknown, preflight.ReasonPoliciesAudit, approvalPolicy+": "+preflight.PolicyMissing)
	if len(b.eventsAbout(t, shippedNamespace, preflight.ReasonPoliciesNotInForce)) != before || said.says("the admission policies are not in force") {
		t.Error("in audit mode it is an error")
	}
}

// Without the right to watch policies it is not known whether they are in force. That is said, and
// over once the right is there.
func TestPoliciesMayNotBeWatched(t *testing.T) {
	b := shared
	b.policed(t)
	status := rule("", "namespaces/status", "get,patch")
	as := b.may(t, "blind", "blind-writes", status)
	_, said := b.watchPolicies(t, as, func(c *preflight.WatchConfig) { c.Check.User = shippedAccount })
	b.becomes(t, corev1.ConditionUnknown, preflight.ReasonPoliciesUnwatched, "validatingadmissionpolicybindings")
	if !said.says("packaging/kubernetes/rbac.yaml") {
		t.Error("the log does not say what is missing")
	}
	if sampled(t, "node_attestation_policy_problems", map[string]string{"cluster": "policed", "problem": preflight.ReasonPoliciesUnwatched}) != 1 {
		t.Error("it is not in the gauge")
	}
	b.may(t, "blind", "blind-sees", rbacv1.PolicyRule{
		APIGroups: []string{admissionv1.GroupName}, Resources: []string{"validatingadmissionpolicies", "validatingadmissionpolicybindings"}, Verbs: []string{"list", "watch"},
	})
	harness.Eventually(t, time.Minute, "the policies are in force", func() bool { return b.inForce(t).Status == corev1.ConditionTrue })
}

// tries counts approvals in a dry run, and those that the policy on approvals refused: RBAC refuses
// with 403, too.
type tries struct{ all, refused atomic.Int32 }

func (n *tries) wrap(next http.RoundTripper) http.RoundTripper { return triedTrip{n, next} }

type triedTrip struct {
	*tries
	next http.RoundTripper
}

func (n triedTrip) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := n.next.RoundTrip(request)
	if err == nil && request.URL.Query().Get("dryRun") != "" && strings.HasSuffix(request.URL.Path, "/approval") {
		n.all.Add(1)
		body, err := io.ReadAll(response.Body)
		if err != nil {
			return nil, err
		}
		_ = response.Body.Close()
		response.Body = io.NopCloser(bytes.NewReader(body))
		if response.StatusCode == http.StatusForbidden && bytes.Contains(body, []byte("node-attestation-approval")) {
			n.refused.Add(1)
		}
	}
	return response, err
}

// A policy is proven on a hello that is open, seldom, and machines enrol and renew meanwhile as
// they do while the policies are gone.
func TestPolicyIsProven(t *testing.T) {
	b := shared
	b.policed(t)
	if err := controllerprocess.AwaitPolicies(t.Context(), b.ControlPlane); err != nil {
		t.Fatal(err)
	}
	tried, as := &tries{}, b.asShipped()
	as.Wrap(tried.wrap)
	p, _ := b.watchPolicies(t, as, func(c *preflight.WatchConfig) { c.Prove = time.Second })
	b.becomes(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, "")
	time.Sleep(1100 * time.Millisecond) // the policies have been right for that long
	hello, began := b.bareHello(t), time.Now()
	harness.Eventually(t, harness.Soon, "a policy is proven, and again", func() bool {
		p.Challenged(hello.Name)
		return tried.refused.Load() > 1
	})
	if n := tried.all.Load(); n != tried.refused.Load() || float64(n) > 1+time.Since(began).Seconds() {
		t.Errorf("%d dry runs within %s, of which %d were refused", n, time.Since(began), tried.refused.Load())
	}
	if c := b.inForce(t); c.Status != corev1.ConditionTrue {
		t.Errorf("the condition is %+v", c)
	}
	if got := b.get(t, hello.Name); len(got.Status.Conditions) > 0 {
		t.Errorf("the dry run left %+v", got.Status)
	}
}

// An API server that stores policies and does not evaluate them is found out by a hello.
func TestPolicyIsNotEffective(t *testing.T) {
	cp, err := testbed.Start(t.Context(), testbed.Options{Etcd: shared.ControlPlane, APIServerArgs: []string{"--disable-admission-plugins=ValidatingAdmissionPolicy"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	b := &bed{ControlPlane: cp, adminConfig: t.TempDir() + "/admin.kubeconfig"}
	if err := b.WriteKubeconfig(b.adminConfig, b.AdminUser()); err != nil {
		t.Fatal(err)
	}
	if b.client, err = client.New(b.AdminConfig(), client.Options{Scheme: newScheme()}); err != nil {
		t.Fatal(err)
	}
	b.apply(t, "namespace.yaml", "policies.yaml", "rbac.yaml")
	p, _ := b.watchPolicies(t, b.asShipped(), func(c *preflight.WatchConfig) { c.Prove = time.Second })
	b.becomes(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, "")
	hello := b.bareHello(t)
	harness.Eventually(t, harness.Soon, "it is found out", func() bool {
		p.Challenged(hello.Name)
		c := b.inForce(t)
		return c.Status == corev1.ConditionFalse && strings.Contains(c.Message, approvalPolicy+": "+preflight.PolicyNotEffective)
	})
}

// Without the policies nothing is enforced, unless the configuration says so. Once it is, it stays:
// renewals do not stop for them.
func TestEnforcementNeedsPolicies(t *testing.T) {
	b, g := shared, newGated(t)
	b.policed(t)
	check := &preflight.PolicyCheck{Scope: policyset.Alone, Client: g.client, User: shippedAccount}
	open := func(policies ...*preflight.PolicyCheck) error {
		gate := &preflight.Preflight{Keys: g.store(g.client), Records: g.client, Cluster: gateCluster, Namespace: g.secret.Namespace, Policies: policies, Log: logr.Discard()}
		return gate.Await(t.Context())
	}
	unbind := func() {
		if err := b.client.Delete(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: approvalPolicy}}); err != nil {
			t.Fatal(err)
		}
	}
	unbind()
	var refused *preflight.Error
	if err := open(check); !errors.As(err, &refused) || len(refused.Policies) != 1 || refused.Policies[0].Policy != approvalPolicy || !strings.Contains(refused.Hint, "policies.yaml") {
		t.Errorf("without a binding: %v", err)
	}
	if since, _ := g.since(t); since != "" {
		t.Errorf("refused, and since %s", since)
	}
	blind, err := client.New(g.may(t, "policy-blind", "policy-blind", rule("", "secrets", "get,update"), rule("", "nodes", "list")), client.Options{Scheme: newScheme()})
	if err != nil {
		t.Fatal(err)
	}
	if err := open(&preflight.PolicyCheck{Scope: policyset.Alone, Client: blind, User: shippedAccount}); !errors.As(err, &refused) || !strings.Contains(refused.Hint, "rbac.yaml") {
		t.Errorf("without the right to look: %v", err)
	}
	b.apply(t, "policies.yaml")
	if err := open(check); err != nil {
		t.Error(err)
	}
	unbind()
	if err := open(check); err != nil {
		t.Errorf("enforcement had started: %v", err)
	}
	other := newGated(t)
	gate := &preflight.Preflight{Keys: other.store(g.client), Records: g.client, Cluster: gateCluster, Namespace: other.secret.Namespace, Log: logr.Discard()}
	if err := gate.Await(t.Context()); err != nil {
		t.Errorf("the configuration does not ask for them: %v", err)
	}
}

// While the policies are gone machines enrol, and renew.
func TestRenewalWithoutPolicies(t *testing.T) {
	b := shared
	b.policed(t)
	p, _ := b.watchPolicies(t, b.asShipped(), nil)
	if err := b.client.DeleteAllOf(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{}); err != nil {
		t.Fatal(err)
	}
	b.becomes(t, corev1.ConditionFalse, preflight.ReasonPoliciesNotInForce, approvalPolicy)
	f := newFleet(t, nil)
	f.stop()
	f.config.Challenged = p.Challenged
	f.start(t)
	m := f.newMachine(t, "unpoliced")
	f.inventoried(t, m)
	renews := m.attested(t)
	_, proof := renews.attests(t)
	if len(f.issued(t, proof, m.name)) == 0 {
		t.Error("no certificate")
	}
}

// The policies of each flavour are the release's after they went through the API server.
func TestShippedPoliciesCompareAsEqual(t *testing.T) {
	b := shared
	b.policed(t) // the others are variations of these
	for _, c := range []struct {
		title, kustomization string
		check                *preflight.PolicyCheck
	}{
		{"packaging/kubernetes", "../../packaging/kubernetes", &preflight.PolicyCheck{Scope: policyset.Alone}},
		{"the example of a provider", "../../docs/examples/node-attestation-controller-acme/kubernetes", &preflight.PolicyCheck{
			Scope: policyset.Alone, Others: []string{"system:serviceaccount:node-attestation-acme-system:node-attestation-controller-acme"},
		}},
		{"packaging/cluster-api/workload", "../../packaging/cluster-api/workload", &preflight.PolicyCheck{Scope: policyset.Workload}},
		{"packaging/cluster-api/management", "../../packaging/cluster-api/management", &preflight.PolicyCheck{Scope: policyset.Management}},
		{"the example of a management cluster", "../../docs/examples/cluster-api/management", &preflight.PolicyCheck{Scope: policyset.Management}},
	} {
		t.Run(c.title, func(t *testing.T) {
			built, err := b.RunKubectl(t.Context(), b.adminConfig, "kustomize", c.kustomization)
			if err != nil {
				t.Fatal(err)
			}
			var policies bytes.Buffer
			for document := range strings.SplitSeq(built, "\n---\n") {
				if strings.Contains(document, "\nkind: ValidatingAdmissionPolicy") {
					policies.WriteString("---\n" + document + "\n")
				}
			}
			file := t.TempDir() + "/policies.yaml"
			if err := os.WriteFile(file, policies.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
			apply := []string{"apply", "--server-side", "--force-conflicts", "--validate=strict", "--filename=" + file}
			if out, err := b.RunKubectl(t.Context(), b.adminConfig, apply...); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			c.check.Client, c.check.User = b.client, shippedAccount
			if state, err := c.check.Check(t.Context()); err != nil || len(state.Problems) > 0 {
				t.Errorf("%v, %v", state, err)
			}
			if c.check.Scope == policyset.Management {
				err := b.Client().AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(t.Context(), "node-attestation-secrets", metav1.DeleteOptions{})
				if err != nil {
					t.Error(err)
				}
				if state, err := c.check.Check(t.Context()); err != nil || len(state.Problems) != 1 {
					t.Errorf("without a binding: %v, %v", state, err)
				}
			}
		})
	}
	if err := b.Client().AdmissionregistrationV1().ValidatingAdmissionPolicies().Delete(t.Context(), "node-attestation-secrets", metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}
