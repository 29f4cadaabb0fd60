// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"

	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	controlplanev1 "sigs.k8s.io/cluster-api/api/controlplane/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

// elsewhere are kinds that have no schema in an API server, or need more than that; other tests
// read them.
var elsewhere = map[string]bool{
	"KubeletAuthenticatorConfiguration":      true, // TestNodeFiles, and test/prepare
	"NodeAttestationControllerConfiguration": true, // TestControllerConfigurations
	// TestManagement, TestNamespaces, TestMoveOverlay
	"Kustomization":        true,
	"RoleBinding":          true, // TestNamespaces
	"Config":               true, // those of the other guides, in test/prepare
	"JoinConfiguration":    true,
	"KubeletConfiguration": true,
}

// Every manifest of Cluster API in the guides and the examples is what its own schema allows, as an
// API server sees it. So is the same with a field more not: somebody looks.
func TestManifests(t *testing.T) {
	checked := map[string]int{}
	for _, m := range manifests(t) {
		if elsewhere[m.kind] {
			continue
		}
		checked[m.kind]++
		if err := management.try(t, m.text); err != nil {
			t.Errorf("%s: %v", m, err)
		}
		if err := management.try(t, m.text+"\nunknownField: true\n"); err == nil || !strings.Contains(err.Error(), "unknown field") {
			t.Errorf("%s: nobody minds an unknown field: %v", m, err)
		}
	}
	want := map[string]int{
		"Cluster": 3, "ClusterClass": 2, "ClusterResourceSet": 2, "HostedControlPlaneTemplate": 1, "KubeadmConfig": 1, "KubeadmConfigTemplate": 4,
		"KubeadmControlPlane": 1, "KubeadmControlPlaneTemplate": 1, "MachineDeployment": 1, "MachinePool": 1, "MetalCluster": 1, "MetalClusterTemplate": 2,
		"MetalMachinePool": 1, "MetalMachineTemplate": 5,
	}
	if !maps.Equal(checked, want) {
		t.Errorf("%v were checked, not %v: write the new ones here", checked, want)
	}
}

// The controller takes what is said to be its configuration; config.yaml is the first of them.
func TestControllerConfigurations(t *testing.T) {
	var first string
	found := 0
	for _, m := range manifests(t) {
		if m.kind != config.Kind {
			continue
		}
		found++
		c, err := config.Parse([]byte(m.text))
		if err != nil {
			t.Errorf("%s: %v", m, err)
			continue
		}
		if _, err := config.New(c); err != nil {
			t.Errorf("%s: %v", m, err)
		}
		if first == "" && m.where == "cluster-api.md" {
			first = m.text
		}
	}
	if found != 5 {
		t.Errorf("%d configurations", found)
	}
	if first != read(t, examples+"/management/config.yaml") {
		t.Error("the configuration in the guide and config.yaml differ")
	}
}

// specOf returns what a manifest has a machine join with, nil if it is about something else.
func specOf(t *testing.T, m manifest) *bootstrapv1.KubeadmConfigSpec {
	t.Helper()
	var err error
	var spec *bootstrapv1.KubeadmConfigSpec
	switch m.kind {
	case "KubeadmConfig":
		object := &bootstrapv1.KubeadmConfig{}
		err, spec = yaml.UnmarshalStrict([]byte(m.text), object), &object.Spec
	case "KubeadmConfigTemplate":
		object := &bootstrapv1.KubeadmConfigTemplate{}
		err, spec = yaml.UnmarshalStrict([]byte(m.text), object), &object.Spec.Template.Spec
	case "KubeadmControlPlane":
		object := &controlplanev1.KubeadmControlPlane{}
		err, spec = yaml.UnmarshalStrict([]byte(m.text), object), &object.Spec.KubeadmConfigSpec
	default:
		return nil
	}
	if err != nil {
		t.Fatalf("%s: %v", m, err)
	}
	return spec
}

// The plugin takes what templates have machines have as its configuration.
func TestNodeFiles(t *testing.T) {
	configurations, patches := 0, 0
	for _, m := range manifests(t) {
		spec := specOf(t, m)
		if spec == nil {
			continue
		}
		for _, f := range spec.Files {
			switch f.Path {
			case "/etc/kubelet-authenticator/config.yaml":
				configurations++
				checkNodeFile(t, m, spec, f)
			case "/etc/kubernetes/patches/kubeletconfiguration0+strategic.yaml":
				patches++
				var kubelet struct {
					APIVersion         string `json:"apiVersion"`
					Kind               string `json:"kind"`
					ServerTLSBootstrap bool   `json:"serverTLSBootstrap"`
				}
				if err := yaml.UnmarshalStrict([]byte(f.Content), &kubelet); err != nil || kubelet.Kind != "KubeletConfiguration" || !kubelet.ServerTLSBootstrap {
					t.Errorf("%s: %+v %v", m, kubelet, err)
				}
			case "/etc/kubelet-authenticator/bootstrap.kubeconfig":
				if f.ContentFrom.Secret.Name == "" || f.Permissions != "0600" {
					t.Errorf("%s: %+v", m, f)
				}
			default:
				t.Errorf("%s: a file that nobody checks: %s", m, f.Path)
			}
		}
	}
	if configurations != 4 || patches != 1 {
		t.Errorf("%d configurations, %d patches", configurations, patches)
	}
}

// hostID is the provider ID of a machine of the provider Metal.
const hostID = "metal://host-1"

// cloudInit fills in a machine's instance data.
func cloudInit(userData string) string {
	return strings.ReplaceAll(userData, "{{ ds.meta_data.instance_id }}", "host-1")
}

// kubeletArgument returns a flag that a kubelet is started with.
func kubeletArgument(registration bootstrapv1.NodeRegistrationOptions, name string) string {
	for _, argument := range registration.KubeletExtraArgs {
		if argument.Name == name && argument.Value != nil {
			return *argument.Value
		}
	}
	return ""
}

// checkNodeFile checks the plugin's configuration, and that the kubelet is given the same provider
// ID.
func checkNodeFile(t *testing.T, m manifest, spec *bootstrapv1.KubeadmConfigSpec, f bootstrapv1.File) {
	t.Helper()
	var c authenticator.Config
	registrations := []bootstrapv1.NodeRegistrationOptions{spec.JoinConfiguration.NodeRegistration}
	if len(spec.PostKubeadmCommands) > 0 { // a control plane's
		registrations = append(registrations, spec.InitConfiguration.NodeRegistration)
	}
	for _, registration := range registrations {
		if given := cloudInit(kubeletArgument(registration, "provider-id")); given != hostID {
			t.Errorf("%s: the kubelet is given the provider ID %q", m, given)
		}
	}
	err := authenticator.ParseConfig([]byte(cloudInit(f.Content)), &c)
	if err != nil || c.Provider != "tpm" || c.ProviderID != hostID || c.ProviderIDScheme != "" || f.Permissions != "0600" || f.Owner != "root:root" {
		t.Errorf("%s: %+v %+v %v", m, c, f, err)
	}
	if pool := m.kind == "KubeadmConfig"; (c.BootstrapKubeconfig != "") != pool {
		t.Errorf("%s: bootstrapKubeconfig is %q", m, c.BootstrapKubeconfig)
	}
}

// A ClusterClass's patch gives its templates what the templates of other Clusters have, and leaves
// them alone for Clusters that do not ask for it.
func TestClusterClassPatches(t *testing.T) {
	templates, namespace := map[string]string{}, newNamespace(t) // by class and kind
	for _, m := range manifests(t) {
		if !strings.HasPrefix(m.where, "clusterclass") || !strings.HasSuffix(m.kind, "Template") {
			continue
		}
		made := strings.TrimSpace(management.mustKubectl(t, "create", namespace, "--output=name", "--filename="+write(t, m.text)))
		_, name, _ := strings.Cut(made, "/")
		templates[strings.TrimSuffix(name, "-workers")+" "+m.kind] = made
	}
	variables := map[string]any{"nodeAttestation": map[string]any{"providerID": "metal://{{ ds.meta_data.instance_id }}"}}
	found := map[string]int{}
	for _, m := range manifests(t) {
		if m.kind != "ClusterClass" {
			continue
		}
		class := &clusterv1.ClusterClass{}
		if err := yaml.UnmarshalStrict([]byte(m.text), class); err != nil {
			t.Fatal(err)
		}
		// A user who may make Clusters of the class must not be able to put files of their own onto
		// machines. A quote, or one of YAML's line breaks, would end the value.
		pattern := regexp.MustCompile(class.Spec.Variables[0].Schema.OpenAPIV3Schema.Properties["providerID"].Pattern)
		for _, allowed := range []string{"metal://{{ ds.meta_data.instance_id }}", "aws:///{{ ds.meta_data.placement.availability_zone }}/{{ ds.meta_data.instance_id }}"} {
			if !pattern.MatchString(allowed) {
				t.Errorf("%s: refuses %q", m, allowed)
			}
		}
		for _, end := range []string{"'", "\n", "\r", "\u0085", "\u2028", "\u2029", "{% raw %}"} {
			if pattern.MatchString("metal://x" + end + "- path: /etc/cron.d/x") {
				t.Errorf("%s: allows %q in a provider ID", m, end)
			}
		}
		for _, patch := range class.Spec.Patches {
			if got := render(t, patch.EnabledIf, variables); got != "true" {
				t.Errorf("%s: enabled with the variable: %q", m, got)
			}
			if got := render(t, patch.EnabledIf, map[string]any{}); got == "true" {
				t.Errorf("%s: enabled without the variable", m)
			}
			for _, definition := range patch.Definitions {
				kind := definition.Selector.Kind
				found[m.where+" "+kind]++
				patched := management.mustKubectl(t, "patch", templates[class.Name+" "+kind], namespace, "--type=json", "--dry-run=server", "--output=yaml", "--patch="+jsonPatch(t, definition, variables))
				checkPatched(t, m, kind, patched)
			}
		}
	}
	want := map[string]int{
		"clusterclass.yaml KubeadmConfigTemplate": 1, "clusterclass.yaml KubeadmControlPlaneTemplate": 1,
		"clusterclass-hosted.yaml KubeadmConfigTemplate": 1,
	}
	if !maps.Equal(found, want) {
		t.Errorf("%v", found)
	}
}

// newNamespace makes a namespace in the management cluster, and returns kubectl's flag for it.
func newNamespace(t *testing.T) string {
	t.Helper()
	name := "test-" + strings.ToLower(rand.Text())
	management.mustKubectl(t, "create", "namespace", name)
	return "--namespace=" + name
}

// jsonPatch is a definition as Cluster API makes it for a Cluster with these variables.
func jsonPatch(t *testing.T, definition clusterv1.PatchDefinition, variables map[string]any) string {
	t.Helper()
	var operations []map[string]any
	for _, p := range definition.JSONPatches {
		var value any
		var text []byte
		if p.Value != nil {
			text = p.Value.Raw
		} else {
			text = []byte(render(t, p.ValueFrom.Template, variables))
		}
		if err := yaml.Unmarshal(text, &value); err != nil {
			t.Fatal(err)
		}
		operations = append(operations, map[string]any{"op": p.Op, "path": p.Path, "value": value})
	}
	data, err := json.Marshal(operations)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func render(t *testing.T, text string, variables map[string]any) string {
	t.Helper()
	tpl, err := template.New("").Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := tpl.Execute(&out, variables); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func checkPatched(t *testing.T, m manifest, kind, text string) {
	t.Helper()
	var spec bootstrapv1.KubeadmConfigSpec
	if kind == "KubeadmControlPlaneTemplate" {
		object := &controlplanev1.KubeadmControlPlaneTemplate{}
		if err := yaml.UnmarshalStrict([]byte(text), object); err != nil {
			t.Fatal(err)
		}
		spec = object.Spec.Template.Spec.KubeadmConfigSpec
		if !slices.Equal(spec.PostKubeadmCommands, deletesBindings(t)) {
			t.Errorf("%s: %s: commands %q", m, kind, spec.PostKubeadmCommands)
		}
	} else {
		object := &bootstrapv1.KubeadmConfigTemplate{}
		if err := yaml.UnmarshalStrict([]byte(text), object); err != nil {
			t.Fatal(err)
		}
		spec = object.Spec.Template.Spec
	}
	if len(spec.Files) != 1 {
		t.Fatalf("%s: %s: files %+v", m, kind, spec.Files)
	}
	checkNodeFile(t, m, &spec, spec.Files[0])
}

// deletesBindings is what control planes run, by every manifest the same.
func deletesBindings(t *testing.T) (commands []string) {
	t.Helper()
	for _, m := range manifests(t) {
		if m.kind != "KubeadmControlPlane" {
			continue
		}
		object := &controlplanev1.KubeadmControlPlane{}
		if err := yaml.UnmarshalStrict([]byte(m.text), object); err != nil {
			t.Fatal(err)
		}
		if now := object.Spec.KubeadmConfigSpec.PostKubeadmCommands; commands != nil && !slices.Equal(now, commands) {
			t.Errorf("%s: %q", m, now)
		} else {
			commands = now
		}
	}
	return commands
}
