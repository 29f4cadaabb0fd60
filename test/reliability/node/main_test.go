// SPDX-License-Identifier: Apache-2.0

// Package node runs the plugin and its worker as children of a stand-in for the kubelet, in control
// groups as systemd makes them. The faults are too little memory, too few processes, a read-only
// certificate directory, and processes that are frozen or all killed at once. The TPM is a software
// one, and the control plane a real one.
package node

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const module = "../../.."

// programs are the paths of what the tests start. testPlugin is the product with hooks.
type programs struct {
	plugin, testPlugin string
	kubelet            compile.KubeletComponents
}

var built programs

func TestMain(m *testing.M) {
	build := func(ctx context.Context, dir string) error {
		made := programsIn(dir)
		return errors.Join(
			compile.Program(ctx, module, made.plugin, "./cmd/kubelet-authenticator"),
			compile.Program(ctx, module+"/test", made.testPlugin, "./testplugin"))
	}
	os.Exit(testbed.MainIsolated(inCluster{m}, 6, build, func(ctx context.Context, dir string) (err error) {
		built = programsIn(dir)
		built.kubelet, err = compile.Kubelet(ctx, os.Stderr)
		return err
	}))
}

func programsIn(dir string) programs {
	return programs{plugin: filepath.Join(dir, "kubelet-authenticator"), testPlugin: filepath.Join(dir, "testplugin")}
}

var shared *testbed.ControlPlane

type inCluster struct{ *testing.M }

func (m inCluster) Run() int {
	return testbed.Main(m.M, func(ctx context.Context, cp *testbed.ControlPlane, _ string) error {
		shared = cp
		return cp.BindGroup(ctx, "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup)
	})
}

// unit is a machine whose kubelet is stood in for by a shell. All of its processes are in one
// control group.
type unit struct {
	*harness.Machine
	group *testbed.TaskGroup
	chip  *swtpm.TPM
	env   []string
}

// newUnit returns one with a bootstrap token. An attestor answers its requests.
func newUnit(t *testing.T, plugin string) *unit {
	t.Helper()
	name := strings.ReplaceAll(harness.TestNode(t), "#", "-")
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	u := &unit{Machine: harness.MachineOf(t.TempDir(), chip, plugin, name), chip: chip}
	u.Args = []string{"--provider=tpm"} // testplugin has no default
	attestor.Start(t, shared, name, chip)
	token, err := shared.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	harness.Must(t, shared.WriteKubeconfig(u.Bootstrap, testbed.TokenUser(token)))
	u.group, err = testbed.NewTaskGroup()
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			if log, err := os.ReadFile(u.Certs().File(cache.LogFile)); err == nil {
				t.Logf("--- worker of %s ---\n%s", name, log)
			}
		}
		harness.Must(t, u.group.Remove())
		harness.KillWorker(t, u.Certs())
	})
	return u
}

// standIn calls the plugin, and says how that went. It outlives the plugin.
const standIn = `"$@"; code=$?; exit $code`

// command is a call of the plugin by the stand-in for the kubelet.
func (u *unit) command(extra ...string) testbed.Command {
	return testbed.Command{Path: "/bin/sh", Args: slices.Concat([]string{"-c", standIn, "kubelet", u.Plugin}, u.Flags(), extra)}
}

// run calls the plugin in the unit's control group.
func (u *unit) run(t *testing.T, extra ...string) harness.Result {
	t.Helper()
	return u.runCommand(t, u.group.Within(u.command(extra...)))
}

// runOutside calls the plugin outside the unit's control group, as the next kubelet does.
func (u *unit) runOutside(t *testing.T, extra ...string) harness.Result {
	t.Helper()
	return u.runCommand(t, u.command(extra...))
}

func (u *unit) runCommand(t *testing.T, c testbed.Command) harness.Result {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), c.Path, c.Args...)
	cmd.Env = append(harness.ExecEnv(shared), u.env...)
	return harness.RunPlugin(t, cmd)
}

// due gives the unit a certificate that is due, and valid for another ten minutes.
func (u *unit) due(t *testing.T) *cache.Pair {
	t.Helper()
	return harness.Install(t, shared, u.Certs(), u.Name, time.Now().Add(-95*time.Minute), time.Now().Add(10*time.Minute))
}

// steps are those at which faults happen, of a run and a worker. The second round takes some of
// them again. The short form has one before each kind of write.
func steps(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, step := range authenticator.Steps() {
		if step != enrol.StepAnnouncement && step != enrol.StepReport { // only with checks
			all = append(all, string(step))
		}
	}
	for _, twice := range []enrol.Step{enrol.StepSave, enrol.StepFile, enrol.StepSaveUID} {
		all = append(all, string(twice)+"#2")
	}
	return reliability.Size(t, "limits", []string{string(enrol.StepSaveUID), string(enrol.StepInstall)}, all)
}

// kinds are a first certificate, and one that replaces a certificate which is still valid.
var kinds = []string{"enrolment", "renewal"}

// atEachStep runs a test for each kind and step, many at once. deadline is a worker's.
func atEachStep(t *testing.T, deadline time.Duration, f func(t *testing.T, c *call)) {
	t.Helper()
	for _, kind := range kinds {
		for _, step := range steps(t) {
			t.Run(kind+"/"+strings.NewReplacer(" ", "-", "#", "-").Replace(step), func(t *testing.T) {
				t.Parallel()
				c := &call{unit: newUnit(t, built.testPlugin), hold: filepath.Join(t.TempDir(), "hold"), ended: make(chan harness.Result, 1)}
				if kind == "renewal" {
					c.old = c.due(t)
				}
				c.env = []string{"TEST_HOLD_FILE=" + c.hold, "TEST_WORKER_DEADLINE=" + deadline.String()}
				harness.WriteFile(t, c.hold, []byte(step))
				go func() { c.ended <- c.run(t) }()
				t.Cleanup(func() { c.resume(t) })
				harness.Eventually(t, time.Minute, "a process takes the step "+step, func() bool {
					held, err := os.ReadFile(c.hold + ".held")
					if err == nil {
						c.held, err = strconv.Atoi(string(held))
						return err == nil
					}
					// A worker may reach its deadline before that on a busy machine. The kubelet
					// calls again.
					select {
					case <-c.ended:
						go func() { time.Sleep(calledAgain); c.ended <- c.run(t) }()
					default:
					}
					return false
				})
				f(t, c)
			})
		}
	}
}

// calledAgain is how soon the stand-in for the kubelet calls the plugin again.
const calledAgain = 500 * time.Millisecond

// call is a first call of the plugin. It, or its worker, is held before a step.
type call struct {
	*unit
	// old is the certificate that is valid meanwhile, nil if there is none.
	old   *cache.Pair
	hold  string // file
	held  int    // process
	ended chan harness.Result
}

// resume lets the process that is held go on.
func (c *call) resume(t *testing.T) {
	t.Helper()
	if err := os.Remove(c.hold + ".held"); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// prints calls the plugin without waiting for a certificate. One that is valid is printed at once.
// Without one there is an error that can be acted on.
func (c *call) prints(t *testing.T) harness.Result {
	t.Helper()
	var extra []string
	if c.old == nil {
		extra = []string{"--wait-timeout=1s"}
	}
	r := c.runOutside(t, extra...)
	switch {
	case c.old != nil && (r.Code != 0 || r.Took > promptly):
		t.Errorf("exit code %d after %s while a certificate is valid: %s", r.Code, r.Took, r.Stderr)
	case r.Code != 0:
		isActionable(t, r)
	}
	return r
}

// promptly is how long a run takes at most that prints what is on disk, on a very busy machine. A
// run that waits for a worker takes 30 s.
const promptly = 15 * time.Second

// isActionable checks that a run has failed by itself, and has said what can be done.
func isActionable(t *testing.T, r harness.Result) {
	t.Helper()
	if r.Code < 10 || r.Code > 99 || !strings.Contains(r.Stderr, "hint: ") {
		t.Errorf("exit code %d: %s", r.Code, r.Stderr)
	}
}

// recovers calls the plugin until it prints another certificate than the old one. Then nothing may
// be lost: one hello and one proof were filed, and the directory has no damaged or left-over file.
func (c *call) recovers(t *testing.T) {
	t.Helper()
	began := time.Now()
	harness.Eventually(t, time.Minute, "the new certificate is printed", func() bool {
		r := c.prints(t)
		return r.Code == 0 && (c.old == nil || !bytes.Equal(r.Leaf.Raw, c.old.Leaf.Raw))
	})
	took := time.Since(began)
	harness.WorkerEnds(t, c.Certs())
	c.prints(t) // the next process cleans up what was left behind
	harness.WorkerEnds(t, c.Certs())
	hellos, proofs := harness.Requests(t, shared, c.Name)
	if len(hellos) != 1 || len(proofs) != 1 {
		t.Errorf("%d hellos and %d proofs, not one each", len(hellos), len(proofs))
	}
	c.isClean(t)
	if handles, err := c.chip.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("left in the TPM: %x, %v", handles, err)
	}
	t.Logf("a new certificate after %s", took.Round(time.Millisecond))
}

// isWhole checks that nothing in the certificate directory is damaged, and that nothing was set
// aside.
func (u *unit) isWhole(t *testing.T) {
	t.Helper()
	dir := u.Certs()
	if _, err := dir.Current(); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if _, err := dir.Pending(); err != nil {
		t.Error(err)
	}
	if _, err := dir.State(); err != nil {
		t.Error(err)
	}
	u.hasNo(t, "*.set-aside-*")
}

// isClean checks that no half-written file is left either.
func (u *unit) isClean(t *testing.T) {
	t.Helper()
	u.isWhole(t)
	u.hasNo(t, ".*")
}

func (u *unit) hasNo(t *testing.T, pattern string) {
	t.Helper()
	if found, err := filepath.Glob(u.Certs().File(pattern)); err != nil || len(found) > 0 {
		t.Errorf("in the certificate directory: %q, %v", found, err)
	}
}
