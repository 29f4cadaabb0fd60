// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	imageBuilder = module + "/image-builder"
	tarballFile  = "/root/tarball.tar.gz"
	gossFile     = "/root/goss"
	// proxiedURL names a host that nobody can find.
	proxiedURL = "http://images.example.invalid/tarball.tar.gz"
	// runningFile makes a kubelet that would show if it were restarted.
	runningFile = "/etc/systemd/system/kubelet.service.d/99-running.conf"
)

// imageFiles are on the machine on which Ansible runs, and of which an image is made. ansible.cfg
// and node.yml do for a role what image-builder's ansible.cfg and ansible/node.yml do, without the
// play's environment. The others are a playbook that catches the role's errors, and a proxy.
var imageFiles = map[string]string{
	"/root/ansible.cfg": `[defaults]
remote_tmp = /tmp/.ansible
inject_facts_as_vars = False
interpreter_python = /usr/bin/python3
pipelining = True
`,
	"/root/node.yml": `- hosts: all
  gather_subset: ["!all", "!min", distribution]
  tasks:
    - include_role: {name: "{{ role }}"}
      loop: "{{ node_custom_roles_post.split() }}"
      loop_control: {loop_var: role}
`,
	"/root/refused.yml": `- hosts: all
  gather_facts: false
  vars: {wrong: "sha256:{{ '0' * 64 }}"}
  tasks:
    - include_tasks: refused-one.yml
      loop_control: {label: "{{ item.case }}"}
      loop:
        - {case: no source, checksum: "{{ wrong }}"}
        - {case: two sources, url: "http://user:secret@x/y.tar.gz", file: tarball.tar.gz, checksum: "{{ wrong }}"}
        - {case: no checksum, file: tarball.tar.gz}
        - {case: MD5, file: tarball.tar.gz, checksum: "md5:d41d8cd98f00b204e9800998ecf8427e"}
        - {case: cut off, file: tarball.tar.gz, checksum: "{{ wrong[:-1] }}"}
        - {case: address, file: tarball.tar.gz, checksum: "sha256:http://x/SHA256SUMS"}
        - {case: another system, family: Suse, file: tarball.tar.gz, checksum: "{{ wrong }}"}
        - {case: another key, file: tarball.tar.gz, checksum: "{{ wrong }}", ek: rsa-3072}
        - {case: another tarball, file: tarball.tar.gz, checksum: "{{ wrong }}"}
`,
	"/root/refused-one.yml": `- block:
    - include_role: {name: "{{ node_custom_roles_post }}"}
      vars:
        ansible_facts: {os_family: "{{ item.family | default('Debian') }}"}
        kubelet_authenticator_url: "{{ item.url | default('') }}"
        kubelet_authenticator_file: "{{ item.file | default('') }}"
        kubelet_authenticator_checksum: "{{ item.checksum | default('') }}"
        kubelet_authenticator_ek_template: "{{ item.ek | default('') }}"
  rescue:
    - debug: {msg: "{{ item.case }}: {{ ansible_failed_result.msg }}"}
`,
	"/etc/systemd/system/proxy.service": "[Service]\nExecStart=/usr/bin/python3 -m http.server --bind 127.0.0.1 --directory /srv/proxied 3128\n",
	runningFile:                         "[Service]\nExecStart=\nExecStart=sleep infinity\n",
}

// builder is a machine of which image-builder makes an image.
type builder struct {
	*computer
	checksum string // of the tarball
	example  struct {
		UserVars string `json:"ansible_user_vars"`
		Roles    string `json:"node_custom_roles_post"`
		Checks   string `json:"goss_entry_file"`
	}
}

func newBuilder(t *testing.T, c *computer) *builder {
	t.Helper()
	b := &builder{computer: c}
	example, err := os.ReadFile(filepath.Join(imageBuilder, "packer-vars.example.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(example, &b.example); err != nil {
		t.Fatal(err)
	}
	tarball := packaged(t, "*.tar.gz")
	sum := sha256.Sum256(tarball)
	b.checksum = "sha256:" + hex.EncodeToString(sum[:])
	system, err := os.ReadFile("/etc/os-release")
	if err != nil {
		t.Fatal(err)
	}
	b.write(t, "/etc/os-release", string(system)) // the testbed's says too little for Ansible
	// What Python's server takes for the file that a proxy is asked for.
	proxied := filepath.Join("/srv/proxied", proxiedURL)
	for path, content := range imageFiles {
		b.write(t, path, content)
	}
	for path, content := range gossFiles {
		b.write(t, path, content)
	}
	if err := os.CopyFS(c.os.Path("/root/packer/goss"), os.DirFS(filepath.Join(imageBuilder, "goss"))); err != nil {
		t.Fatal(err)
	}
	goss, err := os.ReadFile(built.goss)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.os.WriteFile(gossFile, goss, 0o755); err != nil {
		t.Fatal(err)
	}
	b.write(t, tarballFile, string(tarball))
	b.write(t, proxied, string(tarball))
	// where tests run it may be installed, and /usr is theirs
	b.mustRun(t, append([]string{"rm", "-rf"}, debian.installed...)...)
	root, _, _ := strings.Cut(b.example.Roles, "/ansible/")
	if err := os.CopyFS(c.os.Path(root), os.DirFS(imageBuilder)); err != nil {
		t.Fatal(err)
	}
	b.mustRun(t, "systemctl", "daemon-reload")
	b.mustRun(t, "systemctl", "restart", "proxy", "kubelet")
	return b
}

func (b *builder) write(t *testing.T, path, content string) {
	t.Helper()
	if err := b.os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

var recapLine = regexp.MustCompile(`localhost +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=0 `)

// ansible runs a playbook with variables as Packer passes them on, and returns what it prints, and
// how many tasks have changed something. It leaves nothing behind where temporary files are.
func (b *builder) ansible(t *testing.T, playbook string, vars string, args ...string) (out string, changed int) {
	t.Helper()
	began := time.Now()
	out = b.mustRun(t, append([]string{
		"env", "ANSIBLE_CONFIG=/root/ansible.cfg", "ansible-playbook", "--inventory=localhost,", "--connection=local",
		"--extra-vars", "node_custom_roles_post=" + strconv.Quote(b.example.Roles), "--extra-vars", vars, playbook,
	}, args...)...)
	t.Logf("%s after %s", playbook, time.Since(began).Round(100*time.Millisecond))
	recap := recapLine.FindStringSubmatch(out)
	if recap == nil {
		t.Fatal(out)
	}
	changed, _ = strconv.Atoi(recap[1])
	if left := b.mustRun(t, "find", "/tmp", "/root/.ansible", "-type", "f", "-o", "-name", "kubelet-authenticator*"); left != "" {
		t.Errorf("left behind: %s", left)
	}
	return out, changed
}

// places is where the role puts things, from variables that image-builder has for each operating
// system.
type places struct {
	system, vars string
	installed    []string
}

var (
	debian = places{"debian", "sysusr_prefix=/usr systemd_prefix=/usr/lib/systemd", []string{
		pluginFile, dropInFile, "/usr/lib/tmpfiles.d/kubelet-authenticator.conf", "/usr/share/doc/kubelet-authenticator/copyright",
	}}
	flatcar = places{"flatcar", "sysusr_prefix=/opt systemd_prefix=/etc/systemd", []string{
		"/opt/bin/kubelet-authenticator", "/etc/systemd/system/kubelet.service.d/20-kubelet-authenticator.conf",
		"/etc/tmpfiles.d/kubelet-authenticator.conf", "/opt/share/doc/kubelet-authenticator/copyright",
	}}
)

func (b *builder) mustHaveInstalled(t *testing.T, p places, want bool) {
	t.Helper()
	for _, path := range p.installed {
		b.mustHave(t, map[string]bool{path: want})
	}
}

// gossFiles stand in for image-builder's own checks, beside which ours are placed. The included
// check shows that ours do not replace them.
var gossFiles = map[string]string{"/root/packer/goss/goss.yaml": "file: {/root/packer/goss/goss.yaml: {exists: true}}\n"}

// failures runs the image's checks as image-builder does, and returns those that fail.
func (b *builder) failures(t *testing.T, p places) (failed []string) {
	t.Helper()
	cmd := b.os.Command(t.Context(), "sh", "-ec", `cd /root/packer; exec "$@"`, "sh",
		gossFile, "--gossfile="+b.example.Checks, `--vars-inline={"OS": "`+p.system+`"}`, "validate", "--format=json")
	out, err := cmd.Output()
	var report struct {
		Results []struct {
			Successful bool
			ID         string `json:"resource-id"`
			Line       string `json:"summary-line"`
		}
	}
	if jsonErr := json.Unmarshal(out, &report); jsonErr != nil {
		t.Fatalf("goss: %v, %v: %s", err, jsonErr, out)
	}
	own, theirs := 0, 0
	for _, result := range report.Results {
		if _, foreign := gossFiles[result.ID]; foreign {
			theirs++
		} else {
			own++
		}
		if !result.Successful {
			failed = append(failed, result.Line)
		}
	}
	if own < 10 || theirs == 0 || (err == nil) != (len(failed) == 0) {
		t.Fatalf("goss: %v: %d checks, and %d of image-builder's own: %s", err, own, theirs, out)
	}
	return failed
}

// A tarball, baked into an image with the role, as image-builder would do it. The machine that
// starts from the image joins.
func testBakedImage(t *testing.T, k *kubeadmCluster) {
	c := k.newComputer(t, "baked", image{bare: true, join: testbed.KubeadmJoin{Token: k.token}})
	k.admit(t, c.identity(t))
	b := newBuilder(t, c)
	b.mustRefuse(t)
	b.mustInstall(t)
	b.mustFindIdentity(t)

	if err := os.Remove(c.os.Path(runningFile)); err != nil {
		t.Fatal(err)
	}
	b.write(t, configFile, c.config())
	if err := c.os.PowerOff(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.os.PowerOn(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.mustHave(t, map[string]bool{cache.DefaultPath: true, kubelet.EnvFile: false, kubelet.KubeconfigFile: false})
	c.mustJoin(t)
	c.mustBeAttested(t, 1)
	c.mustDiagnose(t, nil)
}

// mustRefuse checks that the role names the variable that is wrong, before anything is there.
func (b *builder) mustRefuse(t *testing.T) {
	t.Helper()
	out, changed := b.ansible(t, "/root/refused.yml", debian.vars)
	for name, reason := range map[string]string{
		"no source":       `kubelet_authenticator_url is \"\" and kubelet_authenticator_file is \"\"`,
		"two sources":     `kubelet_authenticator_url is \"y.tar.gz\" and kubelet_authenticator_file is \"tarball.tar.gz\"`,
		"no checksum":     `kubelet_authenticator_checksum is \"\"`,
		"MD5":             `kubelet_authenticator_checksum is \"md5:d41d8cd98f00b204e9800998ecf8427e\"`,
		"cut off":         `kubelet_authenticator_checksum is \"sha256:` + strings.Repeat("0", 63) + `\"`,
		"address":         `kubelet_authenticator_checksum is \"sha256:http://x/SHA256SUMS\"`,
		"another system":  `os_family is Suse`,
		"another key":     `kubelet_authenticator_ek_template is \"rsa-3072\"`,
		"another tarball": "tarball.tar.gz is " + b.checksum + ", not kubelet_authenticator_checksum",
	} {
		if !strings.Contains(out, `"msg": "`+name+": "+reason) {
			t.Errorf("%s: not refused, or not for the reason %s", name, reason)
		}
	}
	if t.Failed() || changed != 0 || strings.Contains(out, "secret") {
		t.Fatalf("%d changes: %s", changed, out)
	}
	b.mustHaveInstalled(t, debian, false)
}

// mustInstall checks that the role installs from an address and from a file, for both kinds of
// systems, and leaves a kubelet alone that runs.
func (b *builder) mustInstall(t *testing.T) {
	t.Helper()
	fromFile := "kubelet_authenticator_file=" + tarballFile + " kubelet_authenticator_checksum=" + b.checksum + " "
	fromURL := regexp.MustCompile(`https://\S+`).ReplaceAllString(b.example.UserVars, proxiedURL)
	fromURL = strings.Replace(fromURL, "sha256:"+strings.Repeat("0", 64), b.checksum, 1) + " http_proxy=http://127.0.0.1:3128 https_proxy= no_proxy= "
	running := b.mustRun(t, "systemctl", "show", "kubelet", "--property=MainPID,NRestarts")

	out, changed := b.ansible(t, "/root/node.yml", fromFile+flatcar.vars)
	if changed == 0 {
		t.Errorf("nothing has changed: %s", out)
	}
	b.mustHaveInstalled(t, flatcar, true)
	if failures := b.failures(t, flatcar); len(failures) > 0 {
		t.Errorf("the image for Flatcar: %q", failures)
	}
	b.mustRun(t, append([]string{"rm"}, flatcar.installed...)...) // it is to start as one system

	if out, changed = b.ansible(t, "/root/node.yml", fromFile+debian.vars, "--check"); changed == 0 {
		t.Errorf("nothing would change: %s", out)
	}
	b.mustHaveInstalled(t, debian, false)
	if out, changed = b.ansible(t, "/root/node.yml", fromURL+debian.vars); changed == 0 {
		t.Errorf("nothing has changed: %s", out)
	}
	b.mustHaveInstalled(t, debian, true)
	if failures := b.failures(t, debian); len(failures) > 0 {
		t.Errorf("the image: %q", failures)
	}
	if out, changed = b.ansible(t, "/root/node.yml", fromFile+debian.vars); changed != 0 {
		t.Errorf("%d changes the second time: %s", changed, out)
	}
	b.mustConfigure(t, fromFile+debian.vars)
	if now := b.mustRun(t, "systemctl", "show", "kubelet", "--property=MainPID,NRestarts"); now != running {
		t.Errorf("the kubelet that ran has been disturbed: %s, not %s", now, running)
	}
	if out := b.mustRun(t, "systemctl", "show", "kubelet", "--property=NeedDaemonReload"); out != "NeedDaemonReload=no\n" {
		t.Error(out)
	}
}

// mustConfigure checks that the role sets the endorsement key, keeps other settings, and writes no
// configuration without that variable.
func (b *builder) mustConfigure(t *testing.T, vars string) {
	t.Helper()
	file := b.os.Path(configFile)
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("there is a configuration: %v", err)
	}
	const head = "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\nprovider: tpm\n"
	for _, step := range []struct {
		key, before, after string
		changed            bool
	}{
		{"rsa-2048", "", head + "ekTemplate: rsa-2048\n", true},
		{"rsa-2048", head + "ekTemplate: rsa-2048\n", head + "ekTemplate: rsa-2048\n", false},
		{"ecc-p384-high", head + "ekTemplate: rsa-2048\nexpiration: 1h\n", head + "ekTemplate: ecc-p384-high\nexpiration: 1h\n", true},
		{"auto", head + "expiration: 1h\n", head + "expiration: 1h\nekTemplate: auto\n", true},
	} {
		if step.before != "" {
			b.write(t, configFile, step.before)
		}
		out, changed := b.ansible(t, "/root/node.yml", vars+" kubelet_authenticator_ek_template="+step.key)
		have, err := os.ReadFile(file)
		if err != nil || string(have) != step.after || (changed > 0) != step.changed {
			t.Errorf("%s: %v, %d changes, the file is %q, want %q: %s", step.key, err, changed, have, step.after, out)
		}
		config := authenticator.DefaultConfig()
		if err := authenticator.ParseConfig(have, &config); err != nil || config.EKTemplate != step.key {
			t.Errorf("%s: %v, %+v", step.key, err, config)
		}
	}
	b.mustRun(t, "rm", "-r", filepath.Dir(configFile))
}

// mustFindIdentity checks that a node's identity, and a drop-in that hides ours, do not go into an
// image unnoticed.
func (b *builder) mustFindIdentity(t *testing.T) {
	t.Helper()
	// the packaged one would be
	hidden := filepath.Join("/etc/systemd/system/kubelet.service.d", filepath.Base(dropInFile))
	for _, path := range []string{
		filepath.Join(cache.DefaultPath, cache.CurrentFile), "/var/lib/kubelet/pki/kubelet.key", kubelet.KubeconfigFile, kubelet.BootstrapFile, hidden,
	} {
		b.write(t, path, "")
		failures := b.failures(t, debian)
		if len(failures) != 1 || !strings.Contains(failures[0], path) && !strings.Contains(failures[0], filepath.Dir(path)) {
			t.Errorf("with %s: %q", path, failures)
		}
		if err := os.RemoveAll(b.os.Path(path)); err != nil {
			t.Fatal(err)
		}
	}
}
