// SPDX-License-Identifier: Apache-2.0

package static

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	admission    = "/apis/admissionregistration.k8s.io/v1/"
	vaps         = admission + "validatingadmissionpolicies"
	vapBindings  = admission + "validatingadmissionpolicybindings"
	crds         = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	apiServices  = "/apis/apiregistration.k8s.io/v1/apiservices"
	lists        = "/apis/attestation.cluster.x-k8s.io/v1alpha1/namespaces/" + namespace + "/revocationslices"
	records      = "/apis/attestation.cluster.x-k8s.io/v1alpha1/namespaces/" + namespace + "/nodeattestations"
	requests     = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
	announcement = "/api/v1/namespaces/kube-public/configmaps/node-attestation-renewal"

	group   = "attestation.cluster.x-k8s.io"
	revoked = "node-attestation-revoked-01"
	ours    = "labelSelector=attestation.cluster.x-k8s.io/filled-by"
)

// call is a request as it goes over the wire. A PATCH is a merge patch.
type call struct{ verb, path, body string }

func (c call) do(t *testing.T, api kubernetes.Interface) error {
	t.Helper()
	request := api.CoreV1().RESTClient().Verb(c.verb).RequestURI(c.path)
	if c.body != "" {
		contentType := "application/json"
		switch {
		case c.verb == http.MethodPatch && strings.Contains(c.path, "fieldManager="):
			contentType = "application/apply-patch+yaml"
		case c.verb == http.MethodPatch:
			contentType = "application/merge-patch+json"
		}
		request = request.SetHeader("Content-Type", contentType).Body([]byte(c.body))
	}
	return request.MaxRetries(0).Do(t.Context()).Error()
}

// object returns a manifest in JSON.
func object(apiVersion, kind, name, fields string) string {
	return fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q},%s}`, apiVersion, kind, name, fields)
}

func policyNamed(name, fields string) string {
	return object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", name, `"spec":{`+fields+`}`)
}

func bindingNamed(name, fields string) string {
	return object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", name, `"spec":{`+fields+`}`)
}

func webhook(name, resource string) string { return webhookOf(name, "*", resource) }

func webhookOf(name, group, resource string) string {
	return object("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", name, `"webhooks":[{"name":"a.example.com","admissionReviewVersions":["v1"],"sideEffects":"None",
		"failurePolicy":"Ignore","clientConfig":{"url":"https://localhost:1/"},"rules":[`+rule(group, resource)+`]}]`)
}

// validating is webhook for a check.
func validating(name, group string) string {
	return strings.NewReplacer("MutatingWebhook", "ValidatingWebhook", `"Ignore"`, `"Fail"`).Replace(webhookOf(name, group, "*"))
}

func mutatingPolicy(name, rule string) string {
	return object("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicy", name, `"spec":{"reinvocationPolicy":"Never","matchConstraints":{"resourceRules":[`+rule+`]},
		"mutations":[{"patchType":"ApplyConfiguration","applyConfiguration":{"expression":"Object{}"}}]}`)
}

func rule(group, resource string) string {
	return `{"apiGroups":["` + group + `"],"apiVersions":["*"],"operations":["UPDATE"],"resources":["` + resource + `"]}`
}

const (
	// nothing has no check at all.
	nothing    = `"matchConstraints":{"resourceRules":[{"apiGroups":["a"],"apiVersions":["*"],"operations":["CREATE"],"resources":["b"]}]},"validations":[{"expression":"true"}]`
	preserving = `"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}`
	elsewhere  = `"service":{"name":"a","namespace":"default"},"insecureSkipTLSVerify":true,"groupPriorityMinimum":20000,"versionPriority":100`
)

// newGuarded starts a cluster with the static form alone, and with what revocation keeps in the
// API, filled.
func newGuarded(t *testing.T) (c *cluster, controller kubernetes.Interface) {
	t.Helper()
	dir := newFolder(t)
	policies(t, dir, "--revocation", "--upgrader=upgrader")
	c = newCluster(t, dir, testbed.Options{APIServerArgs: []string{readsFrom(dir)}})
	c.apply(t, "kubernetes/namespace.yaml", "kubernetes/crd.yaml", "kubernetes/rbac.yaml",
		"kubernetes-revocation/component/crd.yaml", "kubernetes-revocation/component/policies.yaml", "kubernetes-revocation/component/rbac.yaml",
		"kubernetes-revocation/component/announcement.yaml", "kubernetes-revocation/optional/suspended-tokens.yaml")
	_, err := c.RunKubectl(t.Context(), c.kubeconfig, "wait", "--for=condition=Established", "crd/nodeattestations.attestation.cluster.x-k8s.io", "crd/revocationslices.attestation.cluster.x-k8s.io")
	harness.Must(t, err)
	controller = as(t, c.AdminConfig(), controllerUser)
	list := v1alpha1.RevocationSliceSpec{Cluster: "a", Number: 1, Certificates: []v1alpha1.RevokedCertificate{{NodeName: "node-1", SHA256: strings.Repeat("a", 64)}}}
	spec, err := revocation.RenderPolicy(list, []string{tpmSigner})
	harness.Must(t, err)
	filled, err := json.Marshal(map[string]any{"spec": spec})
	harness.Must(t, err)
	harness.Must(t, call{http.MethodPatch, vaps + "/" + revoked, string(filled)}.do(t, controller))
	harness.Must(t, call{http.MethodPost, lists, object("attestation.cluster.x-k8s.io/v1alpha1", "RevocationSlice", "a-1",
		`"spec":{"cluster":"a","number":1}`)}.do(t, controller))
	return c, controller
}

// On one cluster with the static form alone.
func TestStaticPolicies(t *testing.T) {
	t.Parallel()
	c, controller := newGuarded(t)
	t.Run("Attacks", func(t *testing.T) { nobodyUndoesThem(t, c, controller) })
	t.Run("Work", func(t *testing.T) { administratorsWorkOn(t, c, controller) })
	t.Run("Impersonation", func(t *testing.T) { impersonationIsNotSeen(t, c) })
}

// What a member of system:masters tries. Each is refused, by the policy that is named, or else by
// the API server with these words.
func nobodyUndoesThem(t *testing.T, c *cluster, controller kubernetes.Interface) {
	request := newRequest(t, c.admin)
	static := isStatic(approvalPolicy)
	const (
		guardPolicies, guardBindings   = "node-attestation-guard-policies", "node-attestation-guard-bindings"
		guardSlices, guardAnnouncement = "node-attestation-guard-slices", "node-attestation-guard-announcement"
		guardDefinitions               = "node-attestation-guard-definitions"
		guardNamespace, guardServers   = "node-attestation-guard-namespace", "node-attestation-guard-servers"
		guardMutation, guardWebhooks   = "node-attestation-guard-mutation", "node-attestation-guard-webhooks"
		proper                         = `"policyName":"` + revoked + `","validationActions":["Deny"]`
	)
	empty := `"failurePolicy":"Fail",` + nothing
	tried := map[string]bool{"node-attestation-signers": true} // by a node, below
	for _, attack := range []struct {
		title  string
		call   call
		policy string
		says   string
	}{
		// The static policies are not in the API.
		{"delete a static policy", call{"DELETE", vaps + "/" + static, ""}, "", "not found"},
		{"delete a static binding", call{"DELETE", vapBindings + "/" + static, ""}, "", "not found"},
		{"weaken a static policy", call{"PATCH", vaps + "/" + static, `{"spec":{"failurePolicy":"Ignore"}}`}, "", "not found"},
		{"rebind a static policy", call{"PATCH", vapBindings + "/" + static, `{"spec":{"validationActions":["Audit"]}}`}, "", "not found"},
		{"shadow a static policy", call{"POST", vaps, policyNamed(static, nothing)}, "", "reserved"},
		{"shadow a static binding", call{"POST", vapBindings, bindingNamed(static, `"policyName":"`+static+`","validationActions":["Audit"]`)}, "", "reserved"},
		{"forge the identity policy", call{"POST", vaps, policyNamed("node-attestation-static.static.k8s.io", nothing)}, "", "reserved"},
		{"write the condition of the identity policy", call{"PATCH", "/api/v1/namespaces/default/status", `{"status":{"conditions":[{"type":"NodeAttestationStaticPolicies","status":"True"}]}}`}, "node-attestation-static", ""},
		{"approve", call{"PATCH", requests + "/" + request + "/approval", `{"status":{"conditions":[{"type":"Approved","status":"True","reason":"a"}]}}`}, approvalPolicy, ""},
		{"issue", call{"PATCH", requests + "/" + request + "/status", `{"status":{"certificate":"` + certificate(t) + `"}}`}, "node-attestation-certificates", ""},
		{"file a huge request", call{"POST", requests, requestWith(pkcs10(t), 131073, "")}, "node-attestation-size", ""},
		{"file a request with many labels", call{"POST", requests, requestWith(pkcs10(t), 0, manyLabels)}, "node-attestation-metadata", ""},
		{"forge a challenge", call{"PATCH", requests + "/" + request, `{"metadata":{"annotations":{"attestation.cluster.x-k8s.io/challenge":"a"}}}`}, "node-attestation-annotations", ""},
		{"write a record", call{"POST", records, object("attestation.cluster.x-k8s.io/v1alpha1", "NodeAttestation", "a",
			`"spec":{"cluster":"a","nodeName":"a","machine":{"source":"inventory","name":"a","uid":"a"},"provider":"tpm","ek":{"fingerprint":"`+strings.Repeat("a", 64)+`"}}`)}, "node-attestation-records", ""},
		// Something else in front of the policies.
		{"serve requests elsewhere", call{"PATCH", apiServices + "/v1.certificates.k8s.io", `{"spec":{` + elsewhere + `}}`}, guardServers, ""},
		{"serve policies elsewhere", call{"PATCH", apiServices + "/v1.admissionregistration.k8s.io", `{"spec":{` + elsewhere + `}}`}, guardServers, ""},
		{"serve namespaces elsewhere", call{"PATCH", apiServices + "/v1.", `{"spec":{` + elsewhere + `}}`}, guardServers, ""},
		{"serve records elsewhere", call{"POST", apiServices, object("apiregistration.k8s.io/v1", "APIService", "v2.attestation.cluster.x-k8s.io", `"spec":{"group":"attestation.cluster.x-k8s.io","version":"v2",`+elsewhere+`}`)}, guardServers, ""},
		{"change approvals by a webhook", call{"POST", admission + "mutatingwebhookconfigurations", webhook("a", "certificatesigningrequests/approval")}, guardMutation, ""},
		{"change everything by a webhook", call{"POST", admission + "mutatingwebhookconfigurations", webhook("a", "*/*")}, guardMutation, ""},
		{"change certificates by a policy", call{"POST", admission + "mutatingadmissionpolicies", mutatingPolicy("a", rule("*", "*/status"))}, guardMutation, ""},
		{"change records by a webhook", call{"POST", admission + "mutatingwebhookconfigurations", webhookOf("a", group, "*")}, guardWebhooks, ""},
		{"change records by a policy", call{"POST", admission + "mutatingadmissionpolicies", mutatingPolicy("a", rule(group, "nodeattestations"))}, guardWebhooks, ""},
		{"refuse revocations by a webhook", call{"POST", admission + "validatingwebhookconfigurations", validating("a", group)}, guardWebhooks, ""},
		{"say elsewhere who a token is of", call{"PATCH", apiServices + "/v1.authentication.k8s.io", `{"spec":{` + elsewhere + `}}`}, guardServers, ""},
		{"say elsewhere who may what", call{"PATCH", apiServices + "/v1.authorization.k8s.io", `{"spec":{` + elsewhere + `}}`}, guardServers, ""},
		// The policies that stay in the API.
		{"delete a list's policy", call{"DELETE", vaps + "/" + revoked, ""}, guardPolicies, ""},
		{"delete them all", call{"DELETE", vaps + "?" + ours, ""}, guardPolicies, ""},
		{"delete the tokens' policy", call{"DELETE", vaps + "/node-attestation-suspended-tokens", ""}, guardPolicies, ""},
		{"apply the shipped one again", call{"PATCH", vaps + "/" + revoked + "?fieldManager=a&force=true", policyNamed(revoked, empty)}, guardPolicies, ""},
		{"replace it", replaced(t, c, vaps+"/"+revoked, func(policy map[string]any) {
			policy["spec"].(map[string]any)["validations"] = []any{map[string]any{"expression": "true"}}
		}), guardPolicies, ""},
		{"ignore its failures", call{"PATCH", vaps + "/" + revoked, `{"spec":{"failurePolicy":"Ignore"}}`}, guardPolicies, ""},
		{"exempt a node", call{"PATCH", vaps + "/" + revoked, `{"spec":{"matchConditions":[{"name":"revoked","expression":"false"}]}}`}, guardPolicies, ""},
		{"exclude a namespace", call{"PATCH", vaps + "/" + revoked, `{"spec":{"matchConstraints":{"namespaceSelector":{"matchLabels":{"a":"b"}}}}}`}, guardPolicies, ""},
		{"take a check away", call{"PATCH", vaps + "/" + revoked, `{"spec":{"validations":[{"expression":"true"}]}}`}, guardPolicies, ""},
		{"give it a parameter", call{"PATCH", vaps + "/" + revoked, `{"spec":{"paramKind":{"apiVersion":"v1","kind":"ConfigMap"}}}`}, guardPolicies, ""},
		{"delete a binding", call{"DELETE", vapBindings + "/" + revoked, ""}, guardBindings, ""},
		{"delete all bindings", call{"DELETE", vapBindings + "?" + ours, ""}, guardBindings, ""},
		{"only audit", call{"PATCH", vapBindings + "/" + revoked, `{"spec":{"validationActions":["Audit"]}}`}, guardBindings, ""},
		{"bind another policy", call{"PATCH", vapBindings + "/" + revoked, `{"spec":{"policyName":"node-attestation-revoked-02"}}`}, guardBindings, ""},
		{"narrow the binding", call{"PATCH", vapBindings + "/" + revoked, `{"spec":{"matchResources":{"objectSelector":{"matchLabels":{"a":"b"}}}}}`}, guardBindings, ""},
		{"give the binding a parameter", call{"PATCH", vapBindings + "/" + revoked, `{"spec":{"paramRef":{"name":"a","parameterNotFoundAction":"Allow"}}}`}, guardBindings, ""},
		{"create a weak binding", call{"POST", vapBindings, bindingNamed("node-attestation-revoked-11", `"policyName":"node-attestation-revoked-11","validationActions":["Warn"]`)}, guardBindings, ""},
		{"create a narrow binding", call{"POST", vapBindings, bindingNamed("node-attestation-revoked-11", proper+`,"matchResources":{"matchPolicy":"Exact"}`)}, guardBindings, ""},
		// The lists and the announcement.
		{"delete a list", call{"DELETE", lists + "/a-1", ""}, guardSlices, ""},
		{"delete all lists", call{"DELETE", lists, ""}, guardSlices, ""},
		{"empty a list", call{"PATCH", lists + "/a-1", `{"spec":{"current":[{"sha256":"` + strings.Repeat("b", 64) + `","nodeName":"node-1","notAfter":"2030-01-01T00:00:00Z"}]}}`}, "node-attestation-revocation-slices", ""},
		{"give a list an owner", call{"PATCH", lists + "/a-1", `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"a","uid":"a"}]}}`}, "node-attestation-revocation-slices", ""},
		{"delete the announcement", call{"DELETE", announcement, ""}, guardAnnouncement, ""},
		{"delete it with the others", call{"DELETE", "/api/v1/namespaces/kube-public/configmaps", ""}, guardAnnouncement, ""},
		{"announce a renewal", call{"PATCH", announcement, `{"data":{"a":"b"}}`}, "node-attestation-announcement", ""},
		// Their kinds and their namespace.
		{"delete the lists' kind", call{"DELETE", crds + "/revocationslices.attestation.cluster.x-k8s.io", ""}, guardDefinitions, ""},
		{"delete the records' kind", call{"DELETE", crds + "/nodeattestations.attestation.cluster.x-k8s.io", ""}, guardDefinitions, ""},
		{"delete all kinds", call{"DELETE", crds, ""}, guardDefinitions, ""},
		{"stop to serve a kind", definition(t, c, "revocationslices", func(version map[string]any) { version["served"] = false }), guardDefinitions, ""},
		{"forget a list's certificates", definition(t, c, "revocationslices", func(version map[string]any) {
			delete(properties(version, "spec"), "certificates")
		}), guardDefinitions, ""},
		{"forget the nodes in a list", definition(t, c, "revocationslices", func(version map[string]any) {
			items := properties(version, "spec")["certificates"].(map[string]any)["items"].(map[string]any)
			delete(items["properties"].(map[string]any), "nodeName")
			items["required"] = []any{"sha256"}
			delete(items, "x-kubernetes-validations")
		}), guardDefinitions, ""},
		{"serve a version without the certificates", definitionSpec(t, c, "revocationslices", func(spec map[string]any) {
			spec["versions"] = append(spec["versions"].([]any), map[string]any{"name": "v1alpha2", "served": true, "storage": false, "schema": map[string]any{
				"openAPIV3Schema": map[string]any{"type": "object", "properties": map[string]any{"spec": map[string]any{
					"type": "object", "properties": map[string]any{"cluster": map[string]any{"type": "string"}, "number": map[string]any{"type": "integer"}},
				}}},
			}})
		}), guardDefinitions, ""},
		{"convert by a webhook", definitionSpec(t, c, "revocationslices", func(spec map[string]any) {
			spec["conversion"] = map[string]any{"strategy": "Webhook", "webhook": map[string]any{
				"conversionReviewVersions": []any{"v1"}, "clientConfig": map[string]any{"url": "https://localhost:1/"},
			}}
		}), guardDefinitions, ""},
		{"accept no list", definition(t, c, "revocationslices", func(version map[string]any) {
			schemaOf(version)["x-kubernetes-validations"] = []any{map[string]any{"rule": "false"}}
		}), guardDefinitions, ""},
		{"accept no record, by a new field", definition(t, c, "nodeattestations", func(version map[string]any) {
			properties(version, "spec")["added"] = map[string]any{"type": "string", "default": "a"}
			spec := schemaOf(version)["properties"].(map[string]any)["spec"].(map[string]any)
			spec["x-kubernetes-validations"] = []any{map[string]any{"rule": "!has(self.added)"}}
		}), guardDefinitions, ""},
		{"fill in a value", definition(t, c, "revocationslices", func(version map[string]any) {
			properties(version, "spec")["certificates"].(map[string]any)["default"] = []any{}
		}), guardDefinitions, ""},
		{"require a field", definition(t, c, "revocationslices", func(version map[string]any) {
			spec := schemaOf(version)["properties"].(map[string]any)["spec"].(map[string]any)
			spec["required"] = append(spec["required"].([]any), "current")
		}), guardDefinitions, ""},
		{"shorten a list", definition(t, c, "revocationslices", func(version map[string]any) {
			properties(version, "spec")["certificates"].(map[string]any)["maxItems"] = 1
		}), guardDefinitions, ""},
		{"let nobody select lists", definition(t, c, "revocationslices", func(version map[string]any) { delete(version, "selectableFields") }), guardDefinitions, ""},
		{"take the status away", definition(t, c, "noderevocations", func(version map[string]any) { delete(version, "subresources") }), guardDefinitions, ""},
		{"mark a kind as deleted", marked(t, c, "revocationslices", "Terminating"), guardDefinitions, ""},
		{"delete the namespace", call{"DELETE", "/api/v1/namespaces/" + namespace, ""}, guardNamespace, ""},
	} {
		tried[attack.policy] = true
		t.Run(attack.title, func(t *testing.T) {
			err := attack.call.do(t, c.admin)
			switch {
			case err == nil:
				t.Error("it was accepted")
			case attack.policy == "" && attack.says == "":
				t.Error("the case does not say who refuses")
			case attack.policy != "" && !refusedBy(err, isStatic(attack.policy)):
				t.Errorf("not refused by %s: %v", attack.policy, err)
			case !strings.Contains(err.Error(), attack.says):
				t.Errorf("not refused with %q: %v", attack.says, err)
			}
		})
	}
	node := as(t, c.AdminConfig(), "system:node:node-1", "system:nodes")
	if err := (call{"POST", requests, strings.ReplaceAll(requestWith(pkcs10(t), 0, ""), tpmSigner, "kubernetes.io/kube-apiserver-client")}).do(t, node); !refusedBy(err, isStatic("node-attestation-signers")) {
		t.Errorf("a node asks another signer: %v", err)
	}
	all, err := policyset.NewStatic(policyset.Options{Scope: policyset.Alone, Controllers: []string{controllerUser}, Revocation: true})
	harness.Must(t, err)
	for _, policy := range all.Policies {
		if !tried[strings.TrimSuffix(policy.Name, policyset.Suffix)] {
			t.Errorf("no case tries %s", policy.Name)
		}
	}
	// What is accepted changes nothing. The API server keeps the label of a selector, and the spec
	// when a status is written. Policies and bindings of the API only refuse more. A policy with an
	// owner is not collected with it.
	before := read(t, c, vaps+"/"+revoked)["spec"]
	for _, harmless := range []call{
		{"PATCH", "/api/v1/namespaces/kube-public", `{"metadata":{"labels":{"kubernetes.io/metadata.name":"a"}}}`},
		{"POST", vapBindings, bindingNamed("mine", `"policyName":"`+static+`","validationActions":["Audit"]`)},
		{"POST", vaps, policyNamed(approvalPolicy, nothing)},
		{"POST", vapBindings, bindingNamed(approvalPolicy, `"policyName":"`+approvalPolicy+`","validationActions":["Warn"]`)},
		{"PATCH", vaps + "/" + revoked + "/status", `{"spec":{"failurePolicy":"Ignore","validations":[{"expression":"true"}]}}`},
		{"PATCH", vaps + "/" + revoked, `{"metadata":{"ownerReferences":[{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRole","name":"a","uid":"a"}]}}`},
	} {
		harness.Must(t, harmless.do(t, c.admin))
	}
	if err := (call{"PATCH", announcement, `{"data":{"a":"b"}}`}).do(t, c.admin); !refusedBy(err, isStatic("node-attestation-announcement")) {
		t.Errorf("a label leads around a selector: %v", err)
	}
	if after := read(t, c, vaps+"/"+revoked)["spec"]; !reflect.DeepEqual(after, before) {
		t.Error("a status changes a spec")
	}
	collector := as(t, c.AdminConfig(), "system:serviceaccount:kube-system:generic-garbage-collector")
	if err := (call{"DELETE", vaps + "/" + revoked, ""}).do(t, collector); !refusedBy(err, isStatic(guardPolicies)) {
		t.Errorf("the garbage collector deletes a policy: %v", err)
	}
	if err := approve(t.Context(), c.admin, request); !refusedBy(err, static) {
		t.Errorf("after all this an approval is not refused: %v", err)
	}
	harness.Must(t, approve(t.Context(), controller, request))
}

// What administrators do every day passes.
func administratorsWorkOn(t *testing.T, c *cluster, controller kubernetes.Interface) {
	for _, work := range []struct {
		title string
		call  call
	}{
		{"write a policy again as it is, as a storage version migration does", replaced(t, c, vaps+"/"+revoked, func(map[string]any) {})},
		{"label a policy", call{"PATCH", vaps + "/" + revoked, `{"metadata":{"labels":{"a":"b"}}}`}},
		{"create a policy that is missing", call{"POST", vaps, policyNamed("node-attestation-revoked-11", nothing)}},
		{"create its binding", call{"POST", vapBindings, bindingNamed("node-attestation-revoked-11", `"policyName":"node-attestation-revoked-11","validationActions":["Deny","Audit"]`)}},
		{"make a binding refuse more loudly", call{"PATCH", vapBindings + "/" + revoked, `{"spec":{"validationActions":["Deny"]}}`}},
		{"delete a policy of others", call{"DELETE", vaps + "/others", ""}},
		{"delete a binding of others", call{"DELETE", vapBindings + "/others", ""}},
		{"let a webhook default pods", call{"POST", admission + "mutatingwebhookconfigurations", webhook("pods", "pods")}},
		{"let a webhook change all main resources", call{"POST", admission + "mutatingwebhookconfigurations", webhook("all", "*")}},
		{"serve an API of their own", call{"POST", apiServices, object("apiregistration.k8s.io/v1", "APIService", "v1.example.com", `"spec":{"group":"example.com","version":"v1",`+elsewhere+`}`)}},
		{"apply a kind again as it is", definition(t, c, "revocationslices", func(map[string]any) {})},
		{"mark a kind otherwise", marked(t, c, "revocationslices", "Other")},
		{"create a kind of others", call{"POST", crds, object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "others.example.com",
			`"spec":{"group":"example.com","names":{"plural":"others","kind":"Other"},"scope":"Cluster","versions":[{"name":"v1","served":true,"storage":true,`+preserving+`}]}`)}},
		{"add a version to it", call{"PATCH", crds + "/others.example.com", `{"spec":{"versions":[{"name":"v1","served":true,"storage":true,` + preserving + `},{"name":"v2","served":true,"storage":false,` + preserving + `}]}}`}},
		{"let a webhook change all kinds", call{"POST", admission + "mutatingwebhookconfigurations", webhookOf("groups", "*", "*")}},
		{"let a webhook check all kinds", call{"POST", admission + "validatingwebhookconfigurations", validating("groups", "example.com")}},
		{"configure a webhook without rules", call{"POST", admission + "validatingwebhookconfigurations", withoutRules("Validating")}},
		{"configure a mutating webhook without rules", call{"POST", admission + "mutatingwebhookconfigurations", withoutRules("Mutating")}},
		{"configure no webhook", call{"POST", admission + "mutatingwebhookconfigurations", object("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "none", `"webhooks":[]`)}},
		{"then configure one", call{"PATCH", admission + "mutatingwebhookconfigurations/none", `{"webhooks":` + hooksWithoutRules + `}`}},
		{"change others' objects by a policy", call{"POST", admission + "mutatingadmissionpolicies", mutatingPolicy("others", rule("example.com", "*"))}},
		{"label the core APIService, which has no group", call{"PATCH", apiServices + "/v1.", `{"metadata":{"labels":{"a":"b"}}}`}},
		{"label a kind", call{"PATCH", crds + "/nodeattestations.attestation.cluster.x-k8s.io", `{"metadata":{"labels":{"a":"b"}}}`}},
		{"delete a kind of others", call{"DELETE", crds + "/others.example.com", ""}},
		{"label the namespace", call{"PATCH", "/api/v1/namespaces/" + namespace, `{"metadata":{"labels":{"a":"b"}}}`}},
		{"delete another namespace", call{"DELETE", "/api/v1/namespaces/others", ""}},
		{"delete another ConfigMap", call{"DELETE", "/api/v1/namespaces/kube-public/configmaps/others", ""}},
		{"write another condition", call{"PATCH", "/api/v1/namespaces/default/status", `{"status":{"conditions":[{"type":"Other","status":"True"}]}}`}},
	} {
		t.Run(work.title, func(t *testing.T) {
			err := work.call.do(t, c.admin)
			if work.call.verb == http.MethodDelete && apierrors.IsNotFound(err) {
				return // the policies have not refused
			}
			if err != nil {
				t.Errorf("refused: %v", err)
			}
		})
	}
	// Controllers and collectors do their work. A user that the file names upgrades, and deletes no
	// kind.
	upgrader := as(t, c.AdminConfig(), "upgrader")
	harness.Must(t, definition(t, c, "revocationslices", func(version map[string]any) {
		properties(version, "spec")["added"] = map[string]any{"type": "string"}
	}).do(t, upgrader))
	if err := (call{"DELETE", crds + "/revocationslices." + group, ""}).do(t, upgrader); !refusedBy(err, isStatic("node-attestation-guard-definitions")) {
		t.Errorf("an upgrader deletes a kind: %v", err)
	}
	harness.Must(t, call{"PATCH", vaps + "/" + revoked, `{"spec":{"matchConditions":[{"name":"revoked","expression":"false"}]}}`}.do(t, controller))
	namespaces := as(t, c.AdminConfig(), "system:serviceaccount:kube-system:namespace-controller")
	harness.Must(t, call{"DELETE", lists + "/a-1", ""}.do(t, namespaces))
}

// The API server shows a policy nothing by which it could tell an impersonated controller from the
// controller: who may impersonate it is the controller. docs/threat-model.md says so.
func impersonationIsNotSeen(t *testing.T, c *cluster) {
	request := newRequest(t, c.admin)
	harness.Must(t, approve(t.Context(), as(t, c.AdminConfig(), controllerUser), request))
	// Also the credential's ID, by which a policy could recognise a token, can be impersonated.
	config := c.AdminConfig()
	config.Impersonate.UserName, config.Impersonate.Groups = controllerUser, []string{"system:masters"}
	config.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/credential-id": {"JTI=a"}, "authentication.kubernetes.io/pod-name": {"a"}}
	api, err := kubernetes.NewForConfig(config)
	harness.Must(t, err)
	harness.Must(t, approve(t.Context(), api, request))
}

// certificate returns one as a client writes it. It is not trusted: the API server only requires
// that it is well formed.
func certificate(t *testing.T) string {
	t.Helper()
	ca, err := testbed.NewCA("nobody")
	harness.Must(t, err)
	return base64.StdEncoding.EncodeToString(ca.CertPEM())
}

// requestWith returns a request in JSON, padded to a size, with labels.
func requestWith(pkcs10 []byte, size int, labels string) string {
	pkcs10 = append(pkcs10, strings.Repeat("\n", max(0, size-len(pkcs10)))...)
	return `{"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"generateName":"a-","labels":{` + labels + `}},
		"spec":{"signerName":"` + tpmSigner + `","usages":["client auth"],"request":"` + base64.StdEncoding.EncodeToString(pkcs10) + `"}}`
}

// manyLabels are one more than a request may have.
var manyLabels = func() string {
	var all []string
	for i := range 33 {
		all = append(all, fmt.Sprintf(`"label-%d":""`, i))
	}
	return strings.Join(all, ",")
}()

// definition returns a change of the version of one of our CustomResourceDefinitions.
func definition(t *testing.T, c *cluster, plural string, change func(version map[string]any)) call {
	t.Helper()
	return definitionSpec(t, c, plural, func(spec map[string]any) { change(spec["versions"].([]any)[0].(map[string]any)) })
}

// definitionSpec returns a change of the spec of one of our CustomResourceDefinitions.
func definitionSpec(t *testing.T, c *cluster, plural string, change func(spec map[string]any)) call {
	t.Helper()
	path := crds + "/" + plural + "." + group
	spec := read(t, c, path)["spec"].(map[string]any)
	change(spec)
	content, err := json.Marshal(map[string]any{"spec": spec})
	harness.Must(t, err)
	return call{http.MethodPatch, path, string(content)}
}

// marked returns a call that adds a condition to one of our CustomResourceDefinitions.
func marked(t *testing.T, c *cluster, plural, condition string) call {
	t.Helper()
	path := crds + "/" + plural + "." + group
	conditions := append(read(t, c, path)["status"].(map[string]any)["conditions"].([]any), map[string]any{"type": condition, "status": "True", "reason": "Test"})
	content, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": conditions}})
	harness.Must(t, err)
	return call{http.MethodPatch, path + "/status", string(content)}
}

// hooksWithoutRules match nothing.
const hooksWithoutRules = `[{"name":"a.example.com","admissionReviewVersions":["v1"],"sideEffects":"None","failurePolicy":"Ignore","clientConfig":{"url":"https://localhost:1/"}}]`

func withoutRules(kind string) string {
	return object("admissionregistration.k8s.io/v1", kind+"WebhookConfiguration", "without-rules", `"webhooks":`+hooksWithoutRules)
}

func schemaOf(version map[string]any) map[string]any {
	return version["schema"].(map[string]any)["openAPIV3Schema"].(map[string]any)
}

// properties returns the fields of a field in a version's schema.
func properties(version map[string]any, field string) map[string]any {
	return schemaOf(version)["properties"].(map[string]any)[field].(map[string]any)["properties"].(map[string]any)
}

// replaced returns a replacement of an object by a changed one.
func replaced(t *testing.T, c *cluster, path string, change func(object map[string]any)) call {
	t.Helper()
	object := read(t, c, path)
	change(object)
	content, err := json.Marshal(object)
	harness.Must(t, err)
	return call{http.MethodPut, path, string(content)}
}

func read(t *testing.T, c *cluster, path string) (object map[string]any) {
	t.Helper()
	content, err := c.admin.CoreV1().RESTClient().Get().RequestURI(path).DoRaw(t.Context())
	harness.Must(t, errors.Join(err, json.Unmarshal(content, &object)))
	return object
}
