// SPDX-License-Identifier: Apache-2.0

//go:build helm

package chart

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// installed is a release in the cluster that all tests share, and a controller that runs as its
// Deployment says. No pods run there.
type installed struct {
	*bed
	t          *testing.T
	binary     string
	controller *controllerprocess.Controller
	machine    *fleet.Machine
	token      string
}

// The story of a cluster: audit, enforcement, upgrade, rollback, uninstall, and a new installation.
// Enforcement begins and ends only where the values say so, and no record is lost.
func TestRelease(t *testing.T) {
	i := prepare(t)
	values := write(t, "values.yaml", standalone+"  unattestedNodes: [old]\n")
	var printed string
	helm := func(args ...string) (err error) {
		t.Helper()
		printed, err = i.run(t.Context(), append(args, "--values="+values)...)
		return err
	}
	says := func(notes string) {
		t.Helper()
		if !strings.Contains(printed, notes) {
			t.Errorf("the notes do not say %q:\n%s", notes, printed)
		}
	}

	// Audit changes nothing.
	harness.Must(t, helm("install", release, source, "--set=enforcement=Audit"))
	says("Nodes renew as before")
	i.enforces(false)
	i.start()
	i.attests(false)

	// Enforcement does not begin while it would lock a node out.
	i.node("old")
	i.node("forgotten")
	enforce := []string{"upgrade", release, source, "--set=enforcement=Enforce"}
	refused(t, helm(enforce...), "lock 1 nodes out, such as forgotten")
	i.mustKubectl(t, "delete", "node", "forgotten")
	harness.Must(t, helm(enforce...))
	says("WARNING: ENFORCEMENT IS ON")
	for _, done := range []string{"label namespace", "create secret", "create configmap"} {
		if strings.Contains(printed, done) {
			t.Errorf("the notes say %q again:\n%s", done, printed)
		}
	}
	i.enforces(true)
	i.start()
	i.attests(true)
	i.mustKubectl(t, "wait", "--for=condition=NodeAttestationPoliciesInForce", "namespace/"+namespace, "--timeout=20s")
	record, key := i.state()

	// An upgrade without values keeps them. So does one with other values, an image, and a
	// definition with another version; what the controller wrote stays.
	newer := i.newer()
	_, err := i.run(t.Context(), "upgrade", release, newer, "--reuse-values", "--set=image.tag=v9.9.9,replicas=3,configuration.waitDeadline=15m")
	harness.Must(t, err)
	i.wants("registry.invalid/node-attestation-controller:v9.9.9 3", "v1alpha1 v1alpha2")
	i.same(record, key)
	i.start()
	if content := read(t, i.controller.ConfigFile()); !strings.Contains(content, "waitDeadline: 15m") {
		t.Errorf("the controller runs with\n%s", content)
	}
	i.attests(true)

	// Back to the release before: enforcement goes on.
	i.mustRun(t, "rollback", release)
	i.wants("registry.invalid/node-attestation-controller:devel 2", "v1alpha1")
	i.same(record, key)
	i.enforces(true)
	i.start()
	i.attests(true)

	// Uninstalling, forgotten values and another mode do not end enforcement.
	_, err = i.run(t.Context(), "uninstall", release)
	refused(t, err, "enforcement is on, and without the controller no node renews")
	i.enforces(true)
	mends := regexp.MustCompile(`helm (rollback) (\S+) (\d+)`).FindStringSubmatch(err.Error())
	if mends == nil {
		t.Fatal(err)
	}
	i.mustRun(t, mends[1:]...)
	refused(t, helm("upgrade", release, source), "enforcement") // forgotten
	_, err = i.run(t.Context(), "upgrade", release, source, "--set=enforcement=Enforce,mode=management", "--values="+write(t, "management.yaml", management))
	refused(t, err, "end that first")
	i.enforces(true)
	i.wants("registry.invalid/node-attestation-controller:devel 2", "v1alpha1")

	// Leave: the policies go, and who attests still gets a certificate. Then the release goes, and
	// the records stay.
	harness.Must(t, helm("upgrade", release, source, "--set=enforcement=Leave"))
	says("THE CLUSTER IS NOT PROTECTED")
	i.enforces(false)
	i.start()
	i.attests(true)
	harness.Must(t, i.controller.Stop())
	harness.Eventually(t, 30*time.Second, "the policy against uninstalling is no longer in effect", func() bool {
		_, err := i.RunKubectl(t.Context(), i.admin, "create", "configmap", "node-attestation-uninstall", "--namespace="+namespace, "--dry-run=server")
		return err == nil
	})
	i.mustRun(t, "uninstall", release)
	for _, kind := range []string{"deployments", "serviceaccounts", "roles", "poddisruptionbudgets", "networkpolicies"} {
		if left := i.mustKubectl(t, "get", kind, "--namespace="+namespace, "--output=name"); left != "" {
			t.Errorf("uninstalled, and there is %s", left)
		}
	}
	i.same(record, "")
	if gone := i.mustKubectl(t, "get", "crd", "nodeattestations.attestation.cluster.x-k8s.io", "--output=jsonpath={.metadata.deletionTimestamp}"); gone != "" {
		t.Errorf("the definition of records was deleted at %s", gone)
	}
	i.mustKubectl(t, "get", "namespace/"+namespace, "--namespace="+namespace, "secret/"+controllerprocess.CASecret, "configmap/"+controllerprocess.Inventory)

	// Installed again, it takes the records over.
	harness.Must(t, helm("install", release, source, "--set=enforcement=Enforce"))
	i.enforces(true)
	i.start()
	i.attests(true)
	i.same(record, "")

	// A rollback asks nobody: as the README warns, enforcement ends and begins with it.
	harness.Must(t, helm("upgrade", release, source, "--set=enforcement=Audit"))
	i.enforces(false)
	i.mustRun(t, "rollback", release, "1")
	i.enforces(true)
	i.mustRun(t, "rollback", release, "2")
	i.enforces(false)
	i.same(record, "")
}

// A management cluster has its policies, and the same refusal. What kubectl applied becomes the
// chart's, and enforcement goes on meanwhile.
func TestOtherInstallations(t *testing.T) {
	cp, err := testbed.Start(t.Context(), testbed.Options{Etcd: shared.ControlPlane})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, cp.Stop()) })
	i := &installed{bed: &bed{ControlPlane: cp, helm: shared.helm, home: t.TempDir(), admin: filepath.Join(t.TempDir(), "admin")}, t: t}
	harness.Must(t, cp.WriteKubeconfig(i.admin, cp.AdminUser()))
	policies := func() string {
		t.Helper()
		return i.mustKubectl(t, "get", "validatingadmissionpolicies", "--output=jsonpath={.items[*].metadata.name}")
	}

	values := "--values=" + write(t, "management.yaml", management)
	_, err = i.run(t.Context(), "install", release, source, values, "--set=enforcement=Enforce", "--create-namespace")
	harness.Must(t, err)
	if got := policies(); got != "node-attestation-records node-attestation-secrets node-attestation-uninstall" {
		t.Errorf("a management cluster has the policies %s", got)
	}
	// A policy takes effect up to seconds after it was stored.
	harness.Eventually(t, harness.Soon, "the policy against uninstalling", func() bool {
		_, err := i.RunKubectl(t.Context(), i.admin, "create", "configmap", "node-attestation-uninstall", "--namespace="+namespace, "--dry-run=server")
		return err != nil
	})
	_, err = i.run(t.Context(), "uninstall", release)
	refused(t, err, "enforcement is on")
	i.mustRun(t, "rollback", release, "1")

	// The workload clusters' policies would stay, and nobody would approve for their nodes.
	_, err = i.run(t.Context(), "upgrade", release, source, values, "--set=enforcement=Audit")
	refused(t, err, "the policies of workload clusters let nobody else approve")
	_, err = i.run(t.Context(), "upgrade", release, source, "--values="+write(t, "values.yaml", standalone), "--set=enforcement=Audit")
	refused(t, err, "mode standalone does not serve them")

	// An upgrade to Leave that failed has left the policies there, of which the release knows no
	// more.
	_, err = i.run(t.Context(), "upgrade", release, source, values, "--set=enforcement=Leave", `--set-json=extraVolumeMounts=[{"name":"none","mountPath":"/none"}]`)
	refused(t, err, "volumeMounts")
	_, err = i.run(t.Context(), "uninstall", release)
	refused(t, err, "enforcement is on")
	i.mustKubectl(t, "get", "deployment/node-attestation-controller", "--namespace="+namespace)
	i.mustRun(t, "rollback", release, "1")

	_, err = i.run(t.Context(), "upgrade", release, source, values, "--set=enforcement=Leave")
	harness.Must(t, err)
	// A policy that is deleted refuses for some seconds more. Then it is enough to ask again.
	harness.Eventually(t, harness.Soon, "an uninstallation after Leave", func() bool {
		_, err := i.run(t.Context(), "uninstall", release)
		return err == nil
	})
	if got := policies(); got != "" {
		t.Errorf("uninstalled, and there are the policies %s", got)
	}

	i.mustKubectl(t, "apply", "--server-side", "--force-conflicts", "--kustomize="+module+"/packaging/kubernetes")
	before := i.mustKubectl(t, "get", "validatingadmissionpolicies", "--output=jsonpath={.items[*].metadata.uid}")
	take := []string{"install", release, source, "--values=" + write(t, "values.yaml", standalone), "--set=enforcement=Enforce"}
	_, err = i.run(t.Context(), take...)
	refused(t, err, "invalid ownership metadata")
	take = append(take, "--take-ownership", "--force-conflicts")
	for _, enforcement := range []string{"Audit", "Leave"} {
		_, err = i.run(t.Context(), append(take, "--set=enforcement="+enforcement)...)
		refused(t, err, "policies that this release has not installed")
	}
	_, err = i.run(t.Context(), append(take, "--rollback-on-failure", `--set-json=extraVolumeMounts=[{"name":"none","mountPath":"/none"}]`)...)
	refused(t, err, "enforcement was on before this release")
	_, err = i.run(t.Context(), "rollback", release, "1", "--force-conflicts")
	refused(t, err, "volumeMounts")
	take[0] = "upgrade"
	_, err = i.run(t.Context(), take...)
	harness.Must(t, err)
	after := i.mustKubectl(t, "get", "validatingadmissionpolicies", "--output=jsonpath={.items[*].metadata.uid}")
	for _, uid := range strings.Fields(before) {
		if !strings.Contains(after, uid) {
			t.Errorf("a policy was made anew: %s before, %s after", before, after)
		}
	}
}

func prepare(t *testing.T) *installed {
	t.Helper()
	i := &installed{bed: shared, t: t, binary: filepath.Join(t.TempDir(), "controller")}
	harness.Must(t, controllerprocess.Build(t.Context(), module, i.binary))
	// As the chart's README says.
	readme := read(t, source+"/README.md")
	label := "kubectl label namespace node-attestation-system attestation.cluster.x-k8s.io/cluster-api=both \\\n" +
		"  pod-security.kubernetes.io/enforce=restricted pod-security.kubernetes.io/warn=restricted\n"
	if !strings.Contains(readme, "kubectl create namespace node-attestation-system\n"+label) {
		t.Error("the README makes the namespace in another way")
	}
	i.mustKubectl(t, "create", "namespace", namespace)
	i.mustKubectl(t, strings.Fields(strings.ReplaceAll(label, "\\\n", " "))[1:]...)
	var want corev1.Namespace
	harness.Must(t, yaml.Unmarshal([]byte(read(t, module+"/packaging/kubernetes/namespace.yaml")), &want))
	got, err := i.Client().CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{})
	harness.Must(t, err)
	for name, value := range want.Labels {
		if got.Labels[name] != value {
			t.Errorf("the README's namespace has no label %s=%s", name, value)
		}
	}

	harness.Must(t, controllerprocess.Provide(t.Context(), i.ControlPlane))
	harness.Must(t, i.BindKubeadmBootstrap(t.Context()))
	i.token, err = i.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	maker, err := swtpm.NewCA()
	harness.Must(t, err)
	i.machine, err = fleet.NewModel("node-1", t.TempDir(), maker)
	harness.Must(t, err)
	t.Cleanup(i.machine.Stop)
	inventory, err := fleet.Inventory(t.Context(), i.machine)
	harness.Must(t, err)
	harness.Must(t, controllerprocess.SetInventory(t.Context(), i.ControlPlane, inventory))
	t.Cleanup(func() {
		if i.controller != nil {
			harness.Must(t, i.controller.Stop())
		}
	})
	return i
}

// start starts the controller again, and waits until it is ready. Configuration, arguments and
// rights are those of the release.
func (i *installed) start() {
	i.t.Helper()
	if i.controller != nil {
		harness.Must(i.t, i.controller.Stop())
	}
	// Waits for the policies that exist. No controller answers their probes yet.
	harness.Must(i.t, controllerprocess.AwaitPolicies(i.t.Context(), i.ControlPlane))
	configMap, err := i.Client().CoreV1().ConfigMaps(namespace).Get(i.t.Context(), "node-attestation-controller", metav1.GetOptions{})
	harness.Must(i.t, err)
	deployment, err := i.Client().AppsV1().Deployments(namespace).Get(i.t.Context(), "node-attestation-controller", metav1.GetOptions{})
	harness.Must(i.t, err)
	var args []string
	for _, arg := range deployment.Spec.Template.Spec.Containers[0].Args {
		if !strings.HasPrefix(arg, "--config=") && !strings.HasPrefix(arg, "--leader-identity=") {
			args = append(args, arg)
		}
	}
	i.controller, err = controllerprocess.New(controllerprocess.Options{
		ControlPlane: i.ControlPlane, Dir: i.t.TempDir(), Binary: i.binary, Args: args,
		Edit: func(fields map[string]any) {
			for field := range fields {
				if field != "healthBindAddress" && field != "metricsBindAddress" {
					delete(fields, field)
				}
			}
			harness.Must(i.t, yaml.Unmarshal([]byte(configMap.Data["config.yaml"]), &fields))
		},
	})
	harness.Must(i.t, err)
	harness.Must(i.t, i.controller.Start(i.t.Context()))
	harness.Must(i.t, i.controller.Ready(i.t.Context()))
}

// attests has the machine ask for a certificate, which it gets or does not get.
func (i *installed) attests(want bool) {
	i.t.Helper()
	patience := 30 * time.Second
	if !want {
		patience = 2 * time.Second // an answer comes within half a second
	}
	ctx, cancel := context.WithTimeout(i.t.Context(), patience)
	defer cancel()
	_, err := i.machine.Attest(ctx, fleet.Cluster{URL: i.ServerURL(), CA: i.ServerCA(), Token: i.token, Issuer: i.ClientCA().Certificate()})
	if (err == nil) != want {
		i.t.Fatalf("attests: %v\n%s", err, i.controller.LogTail())
	}
}

func (i *installed) node(name string) {
	i.t.Helper()
	_, err := i.Client().CoreV1().Nodes().Create(i.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	harness.Must(i.t, err)
}

// enforces wants all policies, or none.
func (i *installed) enforces(want bool) {
	i.t.Helper()
	const all = 8 // of packaging/kubernetes, and the one against uninstalling
	got := strings.Fields(i.mustKubectl(i.t, "get", "validatingadmissionpolicies,validatingadmissionpolicybindings", "--output=name"))
	if (want && len(got) != 2*all) || (!want && len(got) != 0) {
		i.t.Fatalf("there are %d policies and bindings: %q", len(got), got)
	}
}

// state returns the machine's record by its UID, and the controller's key.
func (i *installed) state() (record, key string) {
	i.t.Helper()
	record = i.mustKubectl(i.t, "get", "nodeattestation", "node-1", "--namespace="+namespace, "--output=jsonpath={.metadata.uid} {.spec}")
	key = i.mustKubectl(i.t, "get", "secret", "node-attestation-controller-key", "--namespace="+namespace, "--output=jsonpath={.data}")
	if len(record) < 40 || len(key) < 40 {
		i.t.Fatalf("record %q, %d bytes of keys", record, len(key))
	}
	return record, key
}

// same wants the state as it was. An empty key is not compared.
func (i *installed) same(record, key string) {
	i.t.Helper()
	if now := i.mustKubectl(i.t, "get", "nodeattestation", "node-1", "--namespace="+namespace, "--output=jsonpath={.metadata.uid} {.spec}"); now != record {
		i.t.Errorf("the record was %s and is %s", record, now)
	}
	if key == "" {
		return
	}
	if _, now := i.state(); now != key {
		i.t.Error("the controller's key is another")
	}
}

// wants compares image and replicas, and the versions of records.
func (i *installed) wants(deployment, versions string) {
	i.t.Helper()
	if got := i.mustKubectl(i.t, "get", "deployment", "node-attestation-controller", "--namespace="+namespace,
		"--output=jsonpath={.spec.template.spec.containers[0].image} {.spec.replicas}"); got != deployment {
		i.t.Errorf("the Deployment has %s, and should have %s", got, deployment)
	}
	if got := i.mustKubectl(i.t, "get", "crd", "nodeattestations.attestation.cluster.x-k8s.io", "--output=jsonpath={.spec.versions[*].name}"); got != versions {
		i.t.Errorf("records have the versions %s, and should have %s", got, versions)
	}
}

// newer returns a copy of the chart in which records have one version more.
func (i *installed) newer() string {
	i.t.Helper()
	dir := filepath.Join(i.t.TempDir(), "node-attestation-controller")
	harness.Must(i.t, os.CopyFS(dir, os.DirFS(source)))
	path := filepath.Join(dir, "files/kubernetes/crd.yaml")
	var crd map[string]any
	harness.Must(i.t, yaml.Unmarshal([]byte(read(i.t, path)), &crd))
	spec := crd["spec"].(map[string]any)
	versions := spec["versions"].([]any)
	content, err := json.Marshal(versions[0])
	harness.Must(i.t, err)
	var next map[string]any
	harness.Must(i.t, json.Unmarshal(content, &next))
	next["name"], next["storage"] = "v1alpha2", false
	spec["versions"] = append(versions, next)
	content, err = yaml.Marshal(crd)
	harness.Must(i.t, err)
	harness.Must(i.t, os.WriteFile(path, content, 0o600))
	return dir
}

// The controller writes revoked certificates into policies of the release. An upgrade keeps them,
// and meets no conflict. A rollback has to force: it brings the lists of the old revision back,
// until the controller has written its own again.
func TestRevocationOutlivesUpgrades(t *testing.T) {
	cp, err := testbed.Start(t.Context(), testbed.Options{Etcd: shared.ControlPlane})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, cp.Stop()) })
	i := &installed{bed: &bed{ControlPlane: cp, helm: shared.helm, home: t.TempDir(), admin: filepath.Join(t.TempDir(), "admin")}, t: t}
	harness.Must(t, cp.WriteKubeconfig(i.admin, cp.AdminUser()))
	controller := cp.AdminConfig()
	controller.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + namespace + ":node-attestation-controller", Groups: []string{"system:authenticated"}}
	client, err := kubernetes.NewForConfig(controller)
	harness.Must(t, err)
	policies := client.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	name := revocation.PolicyName(3)
	digest := strings.Repeat("0", 64)
	fill := func(node string) {
		t.Helper()
		policy, err := policies.Get(t.Context(), name, metav1.GetOptions{})
		harness.Must(t, err)
		policy.Spec, err = revocation.RenderPolicy(v1alpha1.RevocationSliceSpec{Certificates: []v1alpha1.RevokedCertificate{{SHA256: digest, NodeName: node}}}, []string{"example.com/signer"})
		harness.Must(t, err)
		_, err = policies.Update(t.Context(), policy, metav1.UpdateOptions{FieldManager: "node-attestation-controller"})
		harness.Must(t, err)
	}
	has := func(what string) {
		t.Helper()
		policy, err := policies.Get(t.Context(), name, metav1.GetOptions{})
		harness.Must(t, err)
		if content := policy.Spec.MatchConditions[0].Expression; !strings.Contains(content, what) {
			t.Errorf("the policy has no %s, but %s", what, content)
		}
	}
	values := "--values=" + write(t, "values.yaml", standalone+"enforcement: Enforce\nrevocation: {enabled: true}\n")
	_, err = i.run(t.Context(), "install", release, source, values, "--create-namespace")
	harness.Must(t, err)
	fill("node-a")
	for range 2 {
		_, err = i.run(t.Context(), "upgrade", release, source, values, "--set=replicas=3")
		harness.Must(t, err)
		has("system:node:node-a")
	}
	fill("node-b")
	_, err = i.run(t.Context(), "rollback", release)
	refused(t, err, "conflict")
	has("system:node:node-b")
	i.mustRun(t, "rollback", release, "2", "--force-conflicts")
	fill("node-c")
	_, err = i.run(t.Context(), "upgrade", release, source, values)
	harness.Must(t, err)
	has("system:node:node-c")
	// Without enforcement of attestation, revoked certificates stay refused.
	_, err = i.run(t.Context(), "upgrade", release, source, values, "--set=enforcement=Leave")
	harness.Must(t, err)
	has("system:node:node-c")
}
