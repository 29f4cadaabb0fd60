// SPDX-License-Identifier: Apache-2.0

package static

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/attestctl"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The first request that an API server accepts after its start is refused already.
func TestFirstRequestAfterAStart(t *testing.T) {
	t.Parallel()
	dir := newFolder(t)
	policies(t, dir)
	c := newCluster(t, dir, testbed.Options{APIServerArgs: []string{readsFrom(dir)}})
	request := newRequest(t, c.admin)
	server := c.APIServer()
	for start := range 3 {
		harness.Must(t, server.Stop())
		started := make(chan error, 1)
		go func() { started <- server.Start(t.Context()) }()
		answers, guarded := 0, 0
		for deadline := time.Now().Add(time.Second); answers == 0 || time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
			err := approve(t.Context(), c.admin, request)
			switch {
			case err == nil:
				t.Fatalf("start %d: answer %d is an approval", start, answers)
			case refusedBy(err, isStatic(approvalPolicy)):
				guarded++
			}
			if status := apierrors.APIStatus(nil); errors.As(err, &status) {
				if answers++; answers == 1 {
					deadline = time.Now().Add(time.Second)
				}
			}
		}
		harness.Must(t, <-started)
		if guarded == 0 {
			t.Errorf("start %d: no policy has answered", start)
		}
		t.Logf("start %d: %d answers in the first second, %d by the policy", start, answers, guarded)
	}
}

// A file with a mistake keeps an API server from starting. While one runs, it keeps the policies
// that it has, and says so.
func TestBadFile(t *testing.T) {
	t.Parallel()
	dir := newFolder(t)
	policies(t, dir)
	c := newCluster(t, dir, testbed.Options{APIServerArgs: []string{readsFrom(dir)}})
	request := newRequest(t, c.admin)
	file := filepath.Join(dir, policyset.PoliciesFile)
	good, err := os.ReadFile(file)
	harness.Must(t, err)
	log := filepath.Join(c.Dir(), "kube-apiserver.log")
	for title, bad := range map[string][]byte{
		"a file that was cut off":         good[:len(good)/2],
		"an expression that is no CEL":    bytes.Replace(good, []byte("request.userInfo.username in variables.controllers"), []byte("request.userInfo.username in in"), 1),
		"a name without the suffix":       bytes.ReplaceAll(good, []byte("node-attestation-size.static.k8s.io"), []byte("node-attestation-size")),
		"a binding of a policy elsewhere": bytes.Replace(good, []byte("policyName: node-attestation-size.static"), []byte("policyName: elsewhere.static"), 1),
	} {
		if bytes.Equal(bad, good) {
			t.Fatalf("%s is the good file", title)
		}
		before := size(t, log)
		replace(t, file, bad)
		harness.Eventually(t, harness.Soon, title+": the API server's log has the file", func() bool {
			content, err := os.ReadFile(log)
			return err == nil && strings.Contains(string(content[before:]), " manifest config\" err=") && strings.Contains(string(content[before:]), dir)
		})
		if err := approve(t.Context(), c.admin, request); !refusedBy(err, isStatic(approvalPolicy)) {
			t.Errorf("%s: the old policies are not in force: %v", title, err)
		}
	}
	server, err := c.AddAPIServer(t.Context())
	if err == nil || !strings.Contains(err.Error(), filepath.Dir(file)) {
		t.Errorf("an API server starts with a bad file, or does not name its folder: %v", err)
	}
	_ = server.Stop() // it has ended already, or the test has failed
	// The names in docs/operations.md.
	const metrics = "apiserver_manifest_admission_config_controller_"
	if failed := metric(t, c.admin, metrics+`automatic_reloads_total`); !strings.Contains(failed, `status="failure"`) {
		t.Errorf("no failure is counted: %s", failed)
	}
	if hash := metric(t, c.admin, metrics+"last_config_info"); !strings.Contains(hash, fmt.Sprintf("sha256:%x", sha256.Sum256(append(good, 0)))) {
		t.Errorf("the hash is another: %s", hash)
	}
	// Without the feature gate it does not start either, because it cannot read the policies that
	// its flag names.
	replace(t, file, good)
	server, err = c.AddAPIServer(t.Context(), "--feature-gates=ManifestBasedAdmissionControlConfig=false")
	if err == nil || !strings.Contains(err.Error(), "ManifestBasedAdmissionControlConfig") {
		t.Errorf("an API server starts without the feature gate, or does not name it: %v", err)
	}
	_ = server.Stop()
	// The API server reads the static form of each kind of cluster.
	for _, scope := range policyset.Scopes() {
		policies(t, dir, "--scope="+scope, "--revocation", "--signer=example.com/own", "--machine-signer=example.com/network", "--bootstrapper=boot", "--mover=mover")
		harness.Eventually(t, harness.Soon, "the API server has the policies of scope "+scope, func() bool {
			identity, err := askIdentity(t.Context(), c.admin)
			return err == nil && identity.Scope == scope && identity.Digest == digestOf(t, dir)
		})
	}
}

// From policies in the API to policies on disk, and then to another file and another controller,
// while somebody tries an approval all the time. None is accepted.
func TestMoveWithoutAGap(t *testing.T) {
	t.Parallel()
	dir := newFolder(t)
	c := newCluster(t, dir, testbed.Options{})
	c.apply(t, "kubernetes/namespace.yaml", "kubernetes/crd.yaml", "kubernetes/policies.yaml", "kubernetes/rbac.yaml")
	request := newRequest(t, c.admin)
	refuses := func(api kubernetes.Interface, policy string) func() bool {
		return func() bool { return refusedBy(approve(t.Context(), api, request), policy) }
	}
	harness.Eventually(t, harness.Soon, "the policies in the API are in force", refuses(c.admin, approvalPolicy))
	attacker := newAttacker(t, c, request)
	// 1. Both forms: the API servers are restarted with the file, one after the other.
	policies(t, dir)
	second, err := c.AddAPIServer(t.Context(), readsFrom(dir))
	harness.Must(t, err)
	attacker.also(second.Client())
	if _, err := askIdentity(t.Context(), c.admin); err == nil {
		t.Error("an API server without the file shows the identity policy")
	}
	identity, err := askIdentity(t.Context(), second.Client())
	harness.Must(t, err)
	if release, err := policyset.ReleaseDigest(policyset.Alone, false); err != nil || identity.Release != release || identity.Digest != digestOf(t, dir) || !slices.Equal(identity.Controllers, []string{controllerUser}) {
		t.Errorf("the identity policy is %+v: %v", identity, err)
	}
	harness.Must(t, approve(t.Context(), as(t, second.AdminConfig(), controllerUser), request))
	harness.Must(t, c.APIServer().Stop())
	third, err := c.AddAPIServer(t.Context(), readsFrom(dir))
	harness.Must(t, err)
	attacker.also(third.Client())
	if other, err := askIdentity(t.Context(), third.Client()); err != nil || other.Digest != identity.Digest {
		t.Errorf("two API servers with one file differ: %v", err)
	}
	const inForce = "are the release's; API servers with static policies: "
	c.attestCheckSays(t, third, checkup.OK, inForce+third.URL())
	// 2. The static form alone.
	for _, kind := range []string{"validatingadmissionpolicybindings", "validatingadmissionpolicies"} {
		_, err := c.RunKubectl(t.Context(), c.kubeconfig, "--server="+third.URL(), "delete", kind, "--all")
		harness.Must(t, err)
	}
	harness.Eventually(t, harness.Soon, "the static policy alone refuses", refuses(third.Client(), isStatic(approvalPolicy)))
	harness.Must(t, approve(t.Context(), as(t, third.AdminConfig(), controllerUser), request))
	c.attestCheckSays(t, third, checkup.OK, inForce+third.URL())
	// 3. The controller gets another name: both names, then the new one.
	const renamed = "system:serviceaccount:node-attestation-system:renamed"
	for _, names := range [][]string{{controllerUser, renamed}, {renamed}} {
		var users []string
		for _, name := range names {
			users = append(users, "--controller-user="+name)
		}
		policies(t, dir, users...)
		for _, server := range []*testbed.APIServer{second, third} {
			harness.Eventually(t, harness.Soon, "an API server has the new file", func() bool {
				identity, err := askIdentity(t.Context(), server.Client())
				return err == nil && identity.Digest == digestOf(t, dir)
			})
			harness.Must(t, approve(t.Context(), as(t, server.AdminConfig(), renamed), request))
		}
	}
	if err := approve(t.Context(), as(t, third.AdminConfig(), controllerUser), request); !refusedBy(err, isStatic(approvalPolicy)) {
		t.Errorf("the old name still approves: %v", err)
	}
	c.attestCheckSays(t, third, checkup.Failure, `name the controller "`+renamed+`", which is not configured: `+third.URL())
	attacker.stop()
}

// attestCheckSays runs kubectl attest check against an API server, and fails the test unless the
// check of the policies has this status, and a message with this text.
func (c *cluster) attestCheckSays(t *testing.T, server *testbed.APIServer, status checkup.Status, message string) {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	harness.WriteFile(t, kubeconfig, server.Kubeconfig(c.AdminUser()))
	var stdout, stderr bytes.Buffer
	attestctl.Program{Version: "v0.0.0-test"}.Run(t.Context(), attestctl.Process{
		Args: []string{"check", "-o", "json", "--kubeconfig=" + kubeconfig}, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr, Getenv: os.Getenv,
	})
	var report struct{ Checks []checkup.Result }
	harness.Must(t, json.Unmarshal(stdout.Bytes(), &report))
	for _, r := range report.Checks {
		if r.Name == "policies" && r.Status == status && strings.Contains(r.Message, message) {
			return
		}
	}
	t.Errorf("kubectl attest check does not say %s, %q: %s%s", status, message, &stdout, &stderr)
}

// attacker tries an approval all the time.
type attacker struct {
	t        *testing.T
	request  string
	done     chan struct{}
	running  atomic.Int32
	accepted atomic.Int64
	refused  atomic.Int64
}

func newAttacker(t *testing.T, c *cluster, request string) *attacker {
	a := &attacker{t: t, request: request, done: make(chan struct{})}
	a.also(c.admin)
	return a
}

// also lets the attacker ask another API server, too.
func (a *attacker) also(api kubernetes.Interface) {
	a.running.Add(1)
	go func() {
		defer a.running.Add(-1)
		for {
			select {
			case <-a.done:
				return
			case <-time.After(5 * time.Millisecond):
			}
			switch err := approve(context.Background(), api, a.request); {
			case err == nil:
				a.accepted.Add(1)
			case apierrors.IsForbidden(err):
				a.refused.Add(1)
			}
		}
	}()
}

func (a *attacker) stop() {
	close(a.done)
	harness.Eventually(a.t, harness.Soon, "the attacker has ended", func() bool { return a.running.Load() == 0 })
	if a.accepted.Load() > 0 || a.refused.Load() < 100 {
		a.t.Errorf("%d approvals were accepted, %d were refused", a.accepted.Load(), a.refused.Load())
	}
	a.t.Logf("%d approvals were refused, none accepted", a.refused.Load())
}

// kubeadm takes the entries for its ClusterConfiguration.
func TestKubeadmTakesItsFile(t *testing.T) {
	t.Parallel()
	dir := newFolder(t)
	policies(t, dir)
	kubeadm, err := compile.Kubeadm(t.Context(), os.Stderr)
	harness.Must(t, err)
	if out, err := exec.CommandContext(t.Context(), kubeadm, "config", "validate", "--config", filepath.Join(dir, policyset.KubeadmFile)).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// metric returns the lines of a metric of an API server.
func metric(t *testing.T, api kubernetes.Interface, name string) string {
	t.Helper()
	content, err := api.CoreV1().RESTClient().Get().RequestURI("/metrics").DoRaw(t.Context())
	harness.Must(t, err)
	var found []string
	for line := range strings.Lines(string(content)) {
		if strings.HasPrefix(line, name+"{") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return strings.Join(found, "\n")
}

// digestOf returns the digest of a folder's policies, as the identity policy has it.
func digestOf(t *testing.T, dir string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, policyset.PoliciesFile))
	harness.Must(t, err)
	at := bytes.Index(content, []byte("---\napiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingAdmissionPolicy\nmetadata:\n  name: "+policyset.IdentityName))
	sum := sha256.Sum256(content[:at])
	return hex.EncodeToString(sum[:])
}

// replace replaces a file as a whole.
func replace(t *testing.T, path string, content []byte) {
	t.Helper()
	harness.WriteFile(t, path+".tmp", content)
	harness.Must(t, os.Rename(path+".tmp", path))
}

func size(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	harness.Must(t, err)
	return info.Size()
}
