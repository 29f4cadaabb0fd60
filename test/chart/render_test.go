// SPDX-License-Identifier: Apache-2.0

//go:build helm

package chart

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

// What every case has, unless it says otherwise.
const (
	image         = "image: {repository: registry.invalid/node-attestation-controller, tag: devel}\n"
	configuration = `configuration:
  clusterUID: 0b3f7c1e-8a6d-4e52-9c47-1f6f5f0a2d3b
  signing: {mode: Sign, secretName: node-attestation-ca}
  inventory: {configMap: {name: node-attestation-inventory, key: inventory.yaml}}
  tpm: {pcrs: {bank: sha256, indexes: [0, 1, 2, 3, 4, 5, 6, 7]}}
`
	standalone = image + configuration
	management = image + `mode: management
configuration:
  clusterAPI: {ekSources: [Annotation]}
  signing: {mode: Sign}
  tpm: {pcrs: {bank: sha256, indexes: [0, 1, 2, 3, 4, 5, 6, 7]}}
`
	auditArgument = `
patches:
- target: {kind: Deployment}
  patch: |-
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --audit}
`
	withoutPolicies = `
patches:
- target: {kind: ValidatingAdmissionPolicy|ValidatingAdmissionPolicyBinding}
  patch: |-
    $patch: delete
    apiVersion: any
    kind: Any
    metadata: {name: any}
`
)

// withoutEnforcement keeps the policies of revocation.
const withoutEnforcement = `
patches:
- target: {kind: ValidatingAdmissionPolicy|ValidatingAdmissionPolicyBinding, name: node-attestation-(approval|annotations|certificates|size|metadata|signers|records)}
  patch: |-
    $patch: delete
    apiVersion: any
    kind: Any
    metadata: {name: any}
`

// The chart installs what the kustomizations do, and the documented overlays over them.
func TestChartIsTheKustomization(t *testing.T) {
	for name, c := range map[string]struct {
		// resources and rest make up the kustomization. A resource that begins with / is below
		// packaging. One that begins with = is the title of an overlay in docs/cluster-setup.md.
		resources []string
		rest      string
		values    string
	}{
		"enforce":               {[]string{"/kubernetes"}, "", standalone + "enforcement: Enforce\n"},
		"audit":                 {[]string{"/kubernetes-audit"}, "", standalone + "enforcement: Audit\n"},
		"leave":                 {[]string{"/kubernetes"}, withoutPolicies, standalone + "enforcement: Leave\n"},
		"management":            {[]string{"/cluster-api/management"}, "", management + "enforcement: Enforce\n"},
		"management-audit":      {[]string{"/cluster-api/management"}, auditArgument, management + "enforcement: Audit\n"},
		"management-leave":      {[]string{"/cluster-api/management"}, "", management + "enforcement: Leave\n"},
		"revocation":            {[]string{"/kubernetes-revocation"}, "", standalone + "enforcement: Enforce\nrevocation: {enabled: true}\n"},
		"revocation-management": {[]string{"/cluster-api/management-revocation"}, "", management + "enforcement: Enforce\nrevocation: {enabled: true}\n"},
		// Revoked certificates stay refused when enforcement ends.
		"revocation-leave": {[]string{"/kubernetes-revocation"}, withoutEnforcement, standalone + "enforcement: Leave\nrevocation: {enabled: true}\n"},
		// With Audit the chart adds none of the optional files.
		"audit-optional": {[]string{"/kubernetes-audit"}, "", standalone + options + "enforcement: Audit\n"},
		"optional": {
			[]string{
				"=cert-manager", "/kubernetes/optional/serving.yaml", "/kubernetes/optional/serving-tpm.yaml", "/kubernetes/optional/insecure.yaml",
				"/kubernetes/optional/cert-manager.yaml", "/kubernetes/optional/operators.yaml", "/monitoring",
			}, "",
			standalone + options + "enforcement: Enforce\noperators: {enabled: true}\nmonitoring: {serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboard: {enabled: true}}\n",
		},
		"leave-optional": {
			[]string{
				"/kubernetes", "/kubernetes/optional/serving.yaml", "/kubernetes/optional/serving-tpm.yaml", "/kubernetes/optional/insecure.yaml",
				"/kubernetes/optional/cert-manager.yaml",
			}, withoutPolicies, standalone + options + "enforcement: Leave\n",
		},
		"management-optional": {
			[]string{"/cluster-api/management", "/kubernetes/optional/operators.yaml", "/monitoring"}, "",
			management + "enforcement: Enforce\noperators: {enabled: true}\nmonitoring: {serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboard: {enabled: true}}\n",
		},
		"management-metal3": {
			[]string{"/cluster-api/management", "/cluster-api/optional/metal3.yaml"}, "",
			strings.Replace(management, "ekSources: [Annotation]", "ekSources: [Platform], platform: metal3", 1) + "enforcement: Enforce\n",
		},
		"documented-overlay": {
			[]string{"=overlay"}, "",
			"image: {repository: registry.example/project/node-attestation-controller, digest: 'sha256:" + strings.Repeat("0", 64) + "'}\n" + configuration +
				"  policies: {controllers: ['system:serviceaccount:capi-acme-system:manager']}\nenforcement: Enforce\n",
		},
		"documented-signers": {
			[]string{"=signers"}, "",
			standalone + "  bootstrappers: [{username: 'system:serviceaccount:machines:bootstrap', group: 'system:serviceaccounts'}]\n" +
				"enforcement: Enforce\npolicies: {machineSigners: [example.com/network-plugin]}\n",
		},
		"documented-inventory-configmaps": {
			[]string{"=inventory-configmaps"}, "",
			image + strings.Replace(configuration, "{configMap: {name: node-attestation-inventory, key: inventory.yaml}}",
				"{configMaps: [{name: inventory-north, key: a.yaml}, {name: inventory-south, key: a.yaml}]}", 1) + "enforcement: Enforce\n",
		},
		"documented-inventory-volume": {
			[]string{"=inventory-volume"}, "",
			standalone + `enforcement: Enforce
extraVolumeMounts: [{name: inventory, mountPath: /etc/node-attestation-inventory, readOnly: true}]
extraVolumes:
- name: inventory
  projected:
    sources:
    - configMap: {name: inventory-north, optional: true, items: [{key: inventory.yaml, path: north.yaml}]}
    - secret: {name: inventory-south, optional: true, items: [{key: inventory.yaml, path: south.yaml}]}
`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if strings.Contains(c.values, options) { // a signer of cert-manager's signs
				c.values = strings.Replace(c.values, "{mode: Sign, secretName: node-attestation-ca}", "{mode: ApproveOnly}", 1)
			}
			want := kustomize(t, c.resources, c.rest)
			got, own := render(t, c.values)
			// the release's, which the chart cannot have: see TestRelease for its labels
			delete(want, "Namespace//"+namespace)
			for _, key := range slices.Sorted(maps.Keys(want)) {
				if got[key] == "" {
					t.Errorf("the chart lacks %s", key)
				} else if got[key] != want[key] {
					t.Errorf("%s: the chart alone has\n%s\nand the kustomization alone\n%s", key, less(got[key], want[key]), less(want[key], got[key]))
				}
				delete(got, key)
			}
			if len(got) > 0 {
				t.Errorf("the chart alone has %q", slices.Sorted(maps.Keys(got)))
			}
			expected := []string{"ConfigMap/" + namespace + "/node-attestation-controller", "ConfigMap/" + namespace + "/node-attestation-uninstall"}
			if strings.Contains(c.values, "enforcement: Enforce") {
				expected = append(expected, "ValidatingAdmissionPolicy//node-attestation-uninstall", "ValidatingAdmissionPolicyBinding//node-attestation-uninstall")
			}
			if names := slices.Sorted(maps.Keys(own)); !slices.Equal(names, expected) {
				t.Errorf("of its own it has %q", names)
			}
			checkConfiguration(t, own[expected[0]])
		})
	}
}

// less returns the lines of a text that another does not have.
func less(text, other string) string {
	lines := strings.Split(other, "\n")
	return strings.Join(slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool { return slices.Contains(lines, line) }), "\n")
}

// options has the configuration ask for each optional part. It goes on where configuration ends.
const options = `  signers: [{name: clusterissuers.cert-manager.io/node-ca}]
  serving: {signers: [kubernetes.io/kubelet-serving, cluster.x-k8s.io/kubelet-serving-tpm], forbiddenAddresses: [10.96.0.0/12]}
  insecureSigner: cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure
`

// kustomize has kubectl render a kustomization.
func kustomize(t *testing.T, resources []string, rest string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	packaging, err := filepath.Abs(module + "/packaging")
	if err != nil {
		t.Fatal(err)
	}
	relative := func(from, path string) string {
		t.Helper()
		short, err := filepath.Rel(from, path)
		if err != nil {
			t.Fatal(err)
		}
		return short
	}
	content := "resources:\n"
	for i, resource := range resources {
		if title, ok := strings.CutPrefix(resource, "="); ok {
			_, block, found := strings.Cut(read(t, module+"/docs/cluster-setup.md"), "```yaml\n# "+title+"\n")
			block, _, closed := strings.Cut(block, "```")
			if !found || !closed || !strings.Contains(block, "- ../kubernetes\n") {
				t.Fatalf("docs/cluster-setup.md has no overlay %q", title)
			}
			base := filepath.Join(dir, fmt.Sprintf("overlay-%d", i))
			if err := os.Mkdir(base, 0o700); err != nil {
				t.Fatal(err)
			}
			block = strings.Replace(block, "- ../kubernetes\n", "- "+relative(base, packaging+"/kubernetes")+"\n", 1)
			if err := os.WriteFile(filepath.Join(base, "kustomization.yaml"), []byte(block), 0o600); err != nil {
				t.Fatal(err)
			}
			content += "- " + filepath.Base(base) + "\n"
			continue
		}
		content += "- " + relative(dir, packaging+resource) + "\n"
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(content+rest), 0o600); err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for key, object := range objects(t, shared.mustKubectl(t, "kustomize", "--load-restrictor=LoadRestrictionsNone", dir)) {
		all[key] = comparableText(t, object)
	}
	return all
}

// render renders the chart with helm. all has its objects, without the labels and annotations that
// the chart adds to each. own has the objects that no kustomization has.
func render(t *testing.T, values string) (all map[string]string, own map[string]*unstructured.Unstructured) {
	t.Helper()
	all, own = map[string]string{}, map[string]*unstructured.Unstructured{}
	for key, object := range objects(t, shared.mustRun(t, "template", release, source, "--values="+write(t, "values.yaml", values))) {
		_, name, _ := strings.Cut(key, "/")
		if strings.HasSuffix(name, "/node-attestation-uninstall") || key == "ConfigMap/"+namespace+"/node-attestation-controller" {
			own[key] = object
			continue
		}
		labels := object.GetLabels()
		for _, label := range []string{"helm.sh/chart", "app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "app.kubernetes.io/name"} {
			if labels[label] == "" {
				t.Errorf("%s has no label %s", key, label)
			}
			if label != "app.kubernetes.io/name" {
				delete(labels, label)
			}
		}
		object.SetLabels(labels)
		annotations := object.GetAnnotations()
		if kept := annotations["helm.sh/resource-policy"] == "keep"; kept != (object.GetKind() == "CustomResourceDefinition") {
			t.Errorf("%s: kept when the release is uninstalled: %v", key, kept)
		}
		delete(annotations, "helm.sh/resource-policy")
		object.SetAnnotations(annotations)
		if object.GetKind() == "Deployment" {
			pod := []string{"spec", "template", "metadata", "annotations", "checksum/config"}
			if sum, _, _ := unstructured.NestedString(object.Object, pod...); len(sum) != 64 {
				t.Errorf("checksum of the configuration: %q", sum)
			}
			unstructured.RemoveNestedField(object.Object, pod...)
			containers, _, _ := unstructured.NestedSlice(object.Object, "spec", "template", "spec", "containers")
			for _, container := range containers { // what the API server sets where there is none
				if container := container.(map[string]any); container["imagePullPolicy"] == "IfNotPresent" {
					delete(container, "imagePullPolicy")
				}
			}
			if err := unstructured.SetNestedSlice(object.Object, containers, "spec", "template", "spec", "containers"); err != nil {
				t.Fatal(err)
			}
		}
		all[key] = comparableText(t, object)
	}
	return all, own
}

var literals = regexp.MustCompile(`^\s*\[[^()]*\]\s*$`)

// comparableText returns an object as text. Lists of literals in CEL are sorted, since their order
// means nothing. The label app.kubernetes.io/name is removed, since not every manifest has it.
func comparableText(t *testing.T, object *unstructured.Unstructured) string {
	t.Helper()
	if labels := object.GetLabels(); labels["app.kubernetes.io/name"] == "node-attestation-controller" {
		delete(labels, "app.kubernetes.io/name")
		object.SetLabels(labels)
	}
	for _, field := range []string{"labels", "annotations"} {
		if value, ok, _ := unstructured.NestedMap(object.Object, "metadata", field); ok && len(value) == 0 {
			unstructured.RemoveNestedField(object.Object, "metadata", field)
		}
	}
	variables, _, _ := unstructured.NestedSlice(object.Object, "spec", "variables")
	for _, variable := range variables {
		variable := variable.(map[string]any)
		if expression, _ := variable["expression"].(string); literals.MatchString(expression) {
			found := regexp.MustCompile(`'[^']*'`).FindAllString(expression, -1)
			slices.Sort(found)
			variable["expression"] = fmt.Sprint(found)
		}
	}
	if len(variables) > 0 {
		if err := unstructured.SetNestedSlice(object.Object, variables, "spec", "variables"); err != nil {
			t.Fatal(err)
		}
	}
	content, err := json.MarshalIndent(object.Object, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// checkConfiguration has the controller's own code read the configuration.
func checkConfiguration(t *testing.T, configMap *unstructured.Unstructured) {
	t.Helper()
	content, _, _ := unstructured.NestedString(configMap.Object, "data", "config.yaml")
	if _, err := config.Parse([]byte(content)); err != nil {
		t.Errorf("%v:\n%s", err, content)
	}
}

// Each file of packaging that the chart has a copy of is there, and no manifest is forgotten.
func TestEachManifestIsInTheChart(t *testing.T) {
	for _, folder := range []string{"kubernetes", "kubernetes/optional", "cluster-api/management", "kubernetes-revocation/component", "cluster-api/management-revocation"} {
		files, err := filepath.Glob(filepath.Join(module, "packaging", folder, "*.yaml"))
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, file := range files {
			name := filepath.Join(folder, filepath.Base(file))
			if name == "kubernetes/namespace.yaml" || filepath.Base(name) == "kustomization.yaml" && name != "cluster-api/management/kustomization.yaml" {
				continue
			}
			if copied := filepath.Join(source, "files", name); read(t, copied) != read(t, file) {
				t.Errorf("%s is not packaging/%s: run make generate", copied, name)
			}
		}
	}
}

// What cannot be right is refused before anything is applied.
func TestRefusedValues(t *testing.T) {
	good := standalone + "enforcement: Audit\n"
	for name, c := range map[string]struct{ values, says string }{
		"no values":                {"{}\n", "enforcement"},
		"no enforcement":           {standalone, "enforcement"},
		"no image":                 {configuration + "enforcement: Audit\n", "repository"},
		"another value":            {good + "replica: 3\n", "replica"},
		"another field":            {standalone + "  waitDeadLine: 20m\nenforcement: Audit\n", "waitDeadLine"},
		"no duration":              {standalone + "  waitDeadline: 20\nenforcement: Audit\n", "waitDeadline"},
		"no such mode of a rule":   {standalone + "  credential: Sometimes\nenforcement: Audit\n", "credential"},
		"audit by configuration":   {standalone + "  audit: true\nenforcement: Enforce\n", "audit"},
		"another namespace":        {standalone + "  namespace: other\nenforcement: Enforce\n", "namespace"},
		"no clusterUID":            {image + "configuration: {signing: {mode: Sign}}\nenforcement: Audit\n", "clusterUID"},
		"clusterAPI in standalone": {standalone + "  clusterAPI: {ekSources: [Annotation]}\nenforcement: Audit\n", "configuration"},
		"no clusterAPI":            {good + "mode: management\n", "clusterAPI"},
		"a backslash in a user's name": {
			standalone + "  bootstrappers: [{username: 'CORP\\new', group: machines}]\nenforcement: Enforce\n", "cannot be a name in a policy",
		},
		"CEL in a user's name": {
			standalone + "  bootstrappers: [{username: \"a'] + ['b\", group: machines}]\nenforcement: Enforce\n", "cannot be a name in a policy",
		},
		"a line break in a user's name": {standalone + "enforcement: Enforce\npolicies: {movers: [\"a\\nb\"]}\n", "cannot be a name in a policy"},
		"revocation by an argument":     {good + "extraArgs: [--revocation]\n", "extraArgs"},
		"revocation in audit mode":      {good + "revocation: {enabled: true}\n", "revocation.enabled"},
		"audit by an argument":          {good + "extraArgs: [--audit]\n", "extraArgs"},
		"egress to no port":             {good + "networkPolicy: {apiServerPorts: []}\n", "apiServerPorts"},
		"a quote in a signer's name":    {good + "policies: {machineSigners: [\"a'b\"]}\n", "machineSigners"},
		"no digest":                     {strings.Replace(good, "tag: devel", "digest: devel", 1), "digest"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := shared.run(t.Context(), "template", release, source, "--values="+write(t, "values.yaml", c.values))
			refused(t, err, c.says)
		})
	}
}

// Whatever the documents show as a configuration can be one of the chart's.
func TestDocumentedConfigurations(t *testing.T) {
	texts := []string{read(t, module+"/docs/examples/cluster-api/management/config.yaml")}
	for _, document := range []string{"controller-configuration.md", "inventory.md", "integration/cluster-api.md"} {
		for _, block := range strings.Split(read(t, filepath.Join(module, "docs", document)), "```yaml\n")[1:] {
			block, _, _ = strings.Cut(block, "```")
			if strings.Contains(block, "kind: NodeAttestationControllerConfiguration") {
				texts = append(texts, block)
			}
		}
	}
	if len(texts) < 4 {
		t.Fatalf("%d configurations", len(texts))
	}
	for i, text := range texts {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			var fields map[string]any
			if err := yaml.Unmarshal([]byte(text), &fields); err != nil {
				t.Fatal(err)
			}
			for _, field := range []string{"apiVersion", "kind", "audit"} {
				delete(fields, field)
			}
			values := map[string]any{"enforcement": "Enforce", "image": map[string]any{"repository": "a/b"}, "configuration": fields}
			if fields["clusterAPI"] != nil {
				values["mode"] = "management"
			}
			content, err := yaml.Marshal(values)
			if err != nil {
				t.Fatal(err)
			}
			_, own := render(t, string(content))
			checkConfiguration(t, own["ConfigMap/"+namespace+"/node-attestation-controller"])
		})
	}
}

// Values for pods reach the pods.
func TestPodValues(t *testing.T) {
	out := shared.mustRun(t, "template", release, source, "--values="+write(t, "values.yaml", standalone+`enforcement: Enforce
replicas: 3
extraArgs: [-v=2]
resources: {limits: {memory: 1Gi}}
nodeSelector: {disk: ssd}
tolerations: [{key: a, operator: Exists}]
affinity: {podAntiAffinity: {}}
topologySpreadConstraints: [{maxSkew: 2}]
priorityClassName: high
podLabels: {team: nodes}
podAnnotations: {note: pod}
labels: {owner: nodes}
annotations: {note: all}
networkPolicy: {apiServerPorts: [8443]}
monitoring: {serviceMonitor: {enabled: true, labels: {release: prometheus}}}
`), "--set-json=image.pullSecrets=[{\"name\":\"registry\"}]", "--set=image.pullPolicy=Always")
	all := objects(t, out)
	deployment := all["Deployment/"+namespace+"/node-attestation-controller"]
	content, err := yaml.Marshal(deployment.Object)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"replicas: 3\n", "- -v=2\n", "memory: 1Gi\n", "nodeSelector:\n        disk: ssd\n", "tolerations:\n      - key: a\n", "podAntiAffinity: {}\n", "- maxSkew: 2\n",
		"priorityClassName: high\n", "team: nodes\n", "note: pod\n", "owner: nodes\n", "note: all\n", "imagePullPolicy: Always\n", "imagePullSecrets:\n      - name: registry\n",
	} {
		if !strings.Contains(string(content), want) {
			t.Errorf("the Deployment lacks %q", want)
		}
	}
	ports, _, _ := unstructured.NestedSlice(all["NetworkPolicy/"+namespace+"/node-attestation-controller"].Object, "spec", "egress")
	if text := fmt.Sprint(ports); text != "[map[ports:[map[port:8443 protocol:TCP]]]]" {
		t.Errorf("egress %s", text)
	}
	if labels := all["ServiceMonitor/"+namespace+"/node-attestation-controller"].GetLabels(); labels["release"] != "prometheus" {
		t.Errorf("labels of the ServiceMonitor: %v", labels)
	}
	for key, object := range all {
		if object.GetLabels()["owner"] != "nodes" && !strings.HasSuffix(key, "-uninstall") {
			t.Errorf("%s has labels %v", key, object.GetLabels())
		}
	}
}
