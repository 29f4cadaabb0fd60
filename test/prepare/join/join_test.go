// SPDX-License-Identifier: Apache-2.0

// Package join has the real kubeadm, kubelet and systemd do what the guides in docs/integration
// say. All of that runs in namespaces of its own.
package join

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../../.."

	pluginFile       = "/usr/bin/kubelet-authenticator"
	dropInFile       = "/usr/lib/systemd/system/kubelet.service.d/20-kubelet-authenticator.conf"
	documentedServer = "https://cluster.example.com:6443"
	tpmSocket        = "/opt/testbed/tpm"

	configFile    = "/etc/kubelet-authenticator/config.yaml"
	staticFile    = "/etc/kubelet-authenticator/bootstrap.kubeconfig"
	discoveryFile = "/etc/kubelet-authenticator/discovery.conf"
	caFile        = "/etc/kubelet-authenticator/ca.crt"
	joinFile      = "/etc/kubelet-authenticator/join.yaml"
)

// built is what the tests start.
var built struct {
	plugin, kubeadm string
	kubelet         compile.KubeletComponents
}

func TestMain(m *testing.M) {
	build := func(ctx context.Context, dir string) error {
		return compile.Program(ctx, module, filepath.Join(dir, "kubelet-authenticator"), "./cmd/kubelet-authenticator")
	}
	os.Exit(testbed.MainIsolated(m, 8, build, func(ctx context.Context, dir string) (err error) {
		built.plugin = filepath.Join(dir, "kubelet-authenticator")
		if built.kubelet, err = compile.Kubelet(ctx, os.Stderr); err != nil {
			return err
		}
		built.kubeadm, err = compile.Kubeadm(ctx, os.Stderr)
		return err
	}))
}

// The parts of the guides that tests follow.
const (
	byExecPart      = "\n## Nodes that join by exec\n"
	confinementPart = "\n## Confinement and proxies\n"
)

// guide returns the code blocks of a guide by language: those before a heading, and those after it.
func guide(t *testing.T, name, heading string) (before, after map[string][]string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(module, "docs", "integration", name))
	harness.Must(t, err)
	first, second, ok := strings.Cut(string(data), heading)
	if !ok {
		t.Fatalf("%s: no %q", name, heading)
	}
	return codeBlocks(first), codeBlocks(second)
}

func codeBlocks(text string) map[string][]string {
	found := map[string][]string{}
	for i, part := range strings.Split(text, "```") {
		if i%2 == 1 {
			language, block, _ := strings.Cut(part, "\n")
			found[language] = append(found[language], block)
		}
	}
	return found
}

// byExec is what docs/integration/kubeadm.md has one write and type.
type byExec struct {
	byAccount, byCertificate                   string // commands
	bootstrappers, config, discovery, joinFile string
	validate, join, doctor                     string // commands
}

func readByExec(t *testing.T) byExec {
	t.Helper()
	_, found := guide(t, "kubeadm.md", byExecPart)
	texts, commands := found["yaml"], found["sh"]
	if len(texts) != 4 || len(commands) != 3 {
		t.Fatalf("%d texts, commands %q", len(texts), commands)
	}
	onNode := strings.Split(strings.TrimSpace(commands[2]), "\n")
	if len(onNode) != 3 {
		t.Fatalf("%q", onNode)
	}
	return byExec{commands[0], commands[1], texts[0], texts[1], texts[2], texts[3], onNode[0], onNode[1], onNode[2]}
}

// cluster is like one that "kubeadm init" makes. It has the bindings that approve without
// attestation, and our ClusterRoles.
type cluster struct {
	*testbed.ControlPlane
	admin string // kubeconfig
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	harness.Must(t, err)
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, cp.StartControllerManager(t.Context()))
	_, err = cp.KubeadmInit(t.Context(), built.kubeadm)
	harness.Must(t, err)
	c := &cluster{cp, filepath.Join(t.TempDir(), "admin.kubeconfig")}
	harness.Must(t, cp.WriteKubeconfig(c.admin, cp.AdminUser()))
	manifests := filepath.Join(module, "packaging", "kubernetes")
	c.kubectl(t, c.admin, "apply", "--filename="+filepath.Join(manifests, "namespace.yaml"), "--filename="+filepath.Join(manifests, "rbac.yaml"))
	return c
}

func (c *cluster) kubectl(t *testing.T, kubeconfig string, args ...string) string {
	t.Helper()
	out, err := c.RunKubectl(t.Context(), kubeconfig, args...)
	harness.Must(t, err)
	return out
}

// credential returns a kubeconfig that an administrator makes with the documented commands, on the
// machine that has the cluster's CA.
func (c *cluster) credential(t *testing.T, commands string) []byte {
	t.Helper()
	dir, etc := t.TempDir(), t.TempDir()
	key, err := c.ClientCA().KeyPEM()
	harness.Must(t, err)
	harness.Must(t, os.MkdirAll(filepath.Join(etc, "kubernetes", "pki"), 0o700))
	for path, content := range map[string][]byte{
		filepath.Join(dir, "ca.crt"):                      c.ServerCA(),
		filepath.Join(etc, "kubernetes", "pki", "ca.crt"): c.ClientCA().CertPEM(),
		filepath.Join(etc, "kubernetes", "pki", "ca.key"): key,
		filepath.Join(etc, "kubernetes", "admin.conf"):    c.AdminKubeconfig(),
	} {
		harness.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
		harness.Must(t, os.WriteFile(path, content, 0o600))
	}
	script := "mount --bind " + etc + " /etc\n" + strings.ReplaceAll(commands, documentedServer, c.ServerURL())
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", "sh", "-eu", "-c", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "KUBECONFIG=/etc/kubernetes/admin.conf", "HOME="+dir,
		"PATH="+filepath.Dir(c.Kubectl())+":"+filepath.Dir(built.kubeadm)+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s\n%s", err, commands, out)
	}
	made, err := clientcmd.LoadFromFile(filepath.Join(dir, "bootstrap.kubeconfig"))
	harness.Must(t, err)
	for _, cluster := range made.Clusters {
		// here clients and API server have two CAs, kubeadm has one for both
		cluster.CertificateAuthorityData = c.ServerCA()
		// kubeadm has it from the cluster, as a host without a scheme
		cluster.Server = c.ServerURL()
	}
	data, err := clientcmd.Write(*made)
	harness.Must(t, err)
	return data
}

// mustBeLet checks that the controller's configuration lists the credential's user, and that the
// user has the rights of the ClusterRole and no others.
func (c *cluster) mustBeLet(t *testing.T, credential []byte, among []config.Bootstrapper) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	harness.Must(t, os.WriteFile(file, credential, 0o600))
	var review struct {
		Status struct {
			UserInfo struct {
				Username string
				Groups   []string
			}
		}
	}
	harness.Must(t, yaml.Unmarshal([]byte(c.kubectl(t, file, "auth", "whoami", "--output=yaml")), &review))
	who, listed := review.Status.UserInfo, false
	for _, b := range among {
		if b.Username == who.Username && strings.Contains(" "+strings.Join(who.Groups, " ")+" ", " "+b.Group+" ") {
			listed = true
		}
	}
	if !listed {
		t.Errorf("%+v is none of %+v", who, among)
	}
	for verb, want := range map[string]bool{"create": true, "get": true, "watch": true, "list": false, "delete": false, "patch": false} {
		_, err := c.RunKubectl(t.Context(), file, "auth", "can-i", verb, "certificatesigningrequests.certificates.k8s.io")
		if (err == nil) != want {
			t.Errorf("%s may %s: %v", who.Username, verb, err)
		}
	}
}

// newMachine starts one with the documented configuration file, a TPM and files of its own.
func (c *cluster) newMachine(t *testing.T, name, config string, files map[string]string) *testbed.Machine {
	t.Helper()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	attestor.Start(t, c.ControlPlane, name, chip)
	// The host may have no system UUID, or the same one as all of them.
	files[configFile] = strings.Replace(config, "providerIDScheme: metal", "providerID: metal://"+name, 1) + "tpmDevice: " + tpmSocket + "\n"
	files[caFile] = string(c.ServerCA())
	options := c.KubeadmMachine(name, built.kubeadm, built.kubelet, files)
	options.Programs[pluginFile] = built.plugin
	options.Binds[tpmSocket] = swtpm.NewProxy(t, chip).Socket()
	m, err := testbed.StartMachine(t.Context(), options)
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(m.Journal(context.WithoutCancel(t.Context()), "kubelet"))
		}
		if err := m.Remove(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// byUser counts a node's requests for client certificates by requester: those for
// kube-controller-manager's signer, and those for other signers.
func (c *cluster) byUser(t *testing.T, name string) (managers, others map[string]int) {
	t.Helper()
	list, err := c.Client().CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	managers, others = map[string]int{}, map[string]int{}
	for _, r := range list.Items {
		block, _ := pem.Decode(r.Spec.Request)
		request, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil || request.Subject.CommonName != "system:node:"+name {
			continue
		}
		if r.Spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName {
			managers[r.Spec.Username]++
		} else {
			others[r.Spec.Username]++
		}
	}
	return managers, others
}

func (c *cluster) mustBecomeReady(t *testing.T, name string) {
	t.Helper()
	harness.Eventually(t, 2*time.Minute, "node "+name+" is ready", func() bool {
		node, err := c.Client().CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(node.Status.Conditions, func(condition corev1.NodeCondition) bool {
			return condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue
		})
	})
}

// The test follows the guide to the letter: with each of its credentials, with the drop-in and
// without it.
func TestBootstrapByExecDocument(t *testing.T) {
	documented := readByExec(t)
	bootstrappers, err := config.Parse([]byte("apiVersion: controller.attestation.cluster.x-k8s.io/v1alpha1\nkind: NodeAttestationControllerConfiguration\n" + documented.bootstrappers))
	harness.Must(t, err)
	if len(bootstrappers.Bootstrappers) != 2 {
		t.Fatalf("%+v", bootstrappers.Bootstrappers)
	}
	c := newCluster(t)
	for name, row := range map[string]struct {
		credential, user string
		dropIn           bool
		failing          []string // of doctor's checks
	}{
		"with-drop-in":    {documented.byAccount, "system:serviceaccount:machines:bootstrap", true, nil},
		"without-drop-in": {documented.byCertificate, "machines", false, []string{"kubelet-bootstrap", "kubelet-rotation", "kubelet-kubeconfig"}},
	} {
		t.Run(name, func(t *testing.T) {
			credential := c.credential(t, row.credential)
			c.mustBeLet(t, credential, bootstrappers.Bootstrappers)
			files := map[string]string{
				discoveryFile: strings.Replace(documented.discovery, documentedServer, c.ServerURL(), 1),
				// What the test's machines need beside it.
				joinFile: documented.joinFile + "nodeRegistration: " + registration(t, c) + "\n",
			}
			if row.dropIn {
				data, err := os.ReadFile(filepath.Join(module, "packaging", "systemd", filepath.Base(dropInFile)))
				harness.Must(t, err)
				files[dropInFile] = string(data)
			}
			m := c.newMachine(t, name, documented.config, files)
			harness.Must(t, m.WriteFile(staticFile, credential, 0o600))
			run := func(command string) (string, error) { return m.Run(t.Context(), strings.Fields(command)...) }

			out, err := run(documented.validate)
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			out, err = run(documented.join)
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			c.mustBecomeReady(t, name)
			managers, others := c.byUser(t, name)
			if len(others) != 1 || others[row.user] != 2 {
				t.Errorf("requests with evidence: %v", others)
			}
			kind := kubelet.ReadKubeconfig(m.Path(kubelet.KubeconfigFile), "").Kind
			out, err = run(documented.doctor)
			if got := failing(t, m); !slices.Equal(got, row.failing) {
				t.Errorf("checks that fail: %q, not %q", got, row.failing)
			}
			if row.dropIn && (len(managers) > 0 || kind != kubelet.Ours || err != nil) {
				t.Errorf("requests without evidence: %v; kubelet.conf: %s; doctor: %v: %s", managers, kind, err, out)
			}
			if !row.dropIn && (len(managers) != 1 || managers["system:node:"+name] == 0 || kind != kubelet.Bootstrapped || err == nil) {
				t.Errorf("requests without evidence: %v; kubelet.conf: %s; doctor: %v: %s", managers, kind, err, out)
			}
			if _, err := os.Stat(m.Path(staticFile)); err != nil {
				t.Error(err)
			}
		})
	}
}

// failing returns which of doctor's checks fail on a machine.
func failing(t *testing.T, m *testbed.Machine) []string {
	t.Helper()
	out, err := m.Command(t.Context(), pluginFile, "doctor", "--output=json").Output()
	var report doctor.Report
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	failed := report.Checks.Named(checkup.Failure)
	if (err == nil) != (len(failed) == 0) {
		t.Errorf("doctor: %v: %q", err, failed)
	}
	return failed
}

// registration is the nodeRegistration of the test bed's own machines.
func registration(t *testing.T, c *cluster) string {
	t.Helper()
	var join struct{ NodeRegistration map[string]any }
	harness.Must(t, yaml.Unmarshal([]byte(c.KubeadmJoinConfig(testbed.KubeadmJoin{Kubeconfig: discoveryFile})), &join))
	delete(join.NodeRegistration, "name") // the host's
	data, err := yaml.Marshal(join.NodeRegistration)
	harness.Must(t, err)
	inline, err := yaml.YAMLToJSON(data)
	harness.Must(t, err)
	return string(inline)
}

// kubeadm takes the documented file as it is, and minds a mistake.
func TestJoinConfiguration(t *testing.T) {
	discovery := filepath.Join(t.TempDir(), "discovery.conf")
	documented := readByExec(t)
	harness.Must(t, os.WriteFile(discovery, []byte(documented.discovery), 0o600))
	text := strings.Replace(documented.joinFile, discoveryFile, discovery, 1)
	for name, c := range map[string]struct {
		text string
		good bool
	}{
		"as documented":    {text, true},
		"an unknown field": {strings.Replace(text, "kubeConfigPath", "kubeconfigPath", 1), false},
		"another version":  {strings.Replace(text, "v1beta4", "v1beta9", 1), false},
		"no such file":     {documented.joinFile, false},
	} {
		file := filepath.Join(t.TempDir(), "join.yaml")
		harness.Must(t, os.WriteFile(file, []byte(c.text), 0o600))
		out, err := exec.CommandContext(t.Context(), built.kubeadm, "config", "validate", "--config="+file).CombinedOutput()
		if (err == nil) != c.good {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}
