// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// maxCallsPerMachine bounds our controller's calls to both API servers for each Machine that a
// rollout replaces. docs/performance.md has the measured number. The difference is for retries on a
// busy machine.
const maxCallsPerMachine = 22

// A rollout replaces 20 simulated and 3 booting Machines. The test bounds our controller's API
// calls for each Machine. It logs memory, processor time, and the time from the new template until
// all Machines are Running.
func TestRolloutCosts(t *testing.T) {
	full(t) // not parallel: other stories would use the processors
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	h := c.follow(t)
	deployments := []*machineDeployment{
		c.newMachineDeployment(t, simulatedPrefix+"workers", surge(5)), c.newMachineDeployment(t, "workers", surge(1)),
	}
	replicas := []int{20, 3}
	before := make([][]clusterv1.Machine, len(deployments))
	total := 0
	for i, d := range deployments {
		d.scale(t, int32(replicas[i]))
		total += replicas[i]
	}
	for i, d := range deployments {
		before[i] = d.awaitRunning(t, replicas[i])
	}

	processes := map[string]int{
		"node-attestation-controller": s.controller.Process().PID(), "Cluster API core": s.clusterAPI.Core.PID(),
		"kubeadm bootstrap provider": s.clusterAPI.KubeadmBootstrap.PID(),
	}
	began, usedBefore := time.Now(), usages(t, processes)
	calls := newCalls(t, s.ControlPlane, c.workload)
	for _, d := range deployments {
		d.rollOut(t, func(template *bootstrapv1.KubeadmConfigTemplate) {
			template.Spec.Template.Spec.PreKubeadmCommands = append(template.Spec.Template.Spec.PreKubeadmCommands, "true")
		})
	}
	var after []clusterv1.Machine
	for i, d := range deployments {
		after = append(after, d.awaitReplaced(t, before[i])...)
	}
	took, used := time.Since(began), usages(t, processes)
	table, perMachine := calls.table(t, total)
	h.check(t, after)

	t.Logf("%d simulated and %d real Machines replaced in %s\n%s\n%s", replicas[0], replicas[1], took.Round(100*time.Millisecond), table, compare(t, usedBefore, used))
	if perMachine > maxCallsPerMachine {
		t.Errorf("%.1f calls for each Machine are more than %d", perMachine, maxCallsPerMachine)
	}
	if perMachine < 5 { // record, challenge, approval, certificate, denial of the hello
		t.Errorf("%.1f calls for each Machine: the audit logs must lack some", perMachine)
	}
}

// surge sets maxSurge, the number of extra Machines during a rollout.
func surge(count int) func(*machineDeployment) {
	return func(d *machineDeployment) {
		d.object.Spec.Rollout.Strategy = clusterv1.MachineDeploymentRolloutStrategy{
			Type:          clusterv1.RollingUpdateMachineDeploymentStrategyType,
			RollingUpdate: clusterv1.MachineDeploymentRolloutStrategyRollingUpdate{MaxSurge: ptr.To(intstr.FromInt(count))},
		}
	}
}

// calls counts our controller's API calls since newCalls, from the audit logs of both API servers.
type calls struct {
	clusters []*testbed.ControlPlane
	since    []testbed.AuditMark
}

var apiServers = []string{"management", "workload"}

func newCalls(t *testing.T, management, workload *testbed.ControlPlane) *calls {
	t.Helper()
	c := &calls{clusters: []*testbed.ControlPlane{management, workload}}
	for _, cp := range c.clusters {
		mark, err := cp.AuditMark()
		harness.Must(t, err)
		c.since = append(c.since, mark)
	}
	return c
}

// table returns the calls for each Machine by API server, verb and resource, and their sum. A watch
// counts if it began after newCalls.
func (c *calls) table(t *testing.T, machines int) (table string, perMachine float64) {
	t.Helper()
	count := map[string]int{}
	for i, cp := range c.clusters {
		events, err := cp.AuditSince(c.since[i])
		harness.Must(t, err)
		for _, e := range events {
			ours := strings.HasPrefix(e.User, "system:serviceaccount:node-attestation-system:") || e.ImpersonatedUser != ""
			stage := testbed.StageResponseComplete
			if e.Verb == "watch" {
				stage = testbed.StageResponseStarted
			}
			if !ours || e.Stage != stage {
				continue
			}
			resource := e.Resource
			if e.Resource == "secrets" {
				resource += " " + e.Name // the name shows why the Secret is read
			}
			if e.Subresource != "" {
				resource += "/" + e.Subresource
			}
			count[fmt.Sprintf("%s\t%s %s", apiServers[i], e.Verb, resource)]++
		}
	}
	var rows strings.Builder
	rows.WriteString("API server\tcall\tall\tper Machine\n")
	sum := 0
	for _, call := range slices.Sorted(maps.Keys(count)) {
		sum += count[call]
		fmt.Fprintf(&rows, "%s\t%d\t%.2f\n", call, count[call], float64(count[call])/float64(machines))
	}
	perMachine = float64(sum) / float64(machines)
	fmt.Fprintf(&rows, "both\tall\t%d\t%.2f\n", sum, perMachine)
	return aligned(t, rows.String()), perMachine
}

// usage is the memory and processor time of a process.
type usage struct {
	rss, peak float64 // MiB
	processor time.Duration
}

func usages(t *testing.T, processes map[string]int) map[string]usage {
	t.Helper()
	all := map[string]usage{}
	for name, pid := range processes {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		harness.Must(t, err)
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		harness.Must(t, err)
		// Skip the command name, which may contain spaces. proc(5): utime and stime are fields 14
		// and 15, in ticks of 10 ms.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+2:]))
		u := usage{rss: kibibytes(t, string(status), "VmRSS:") / 1024, peak: kibibytes(t, string(status), "VmHWM:") / 1024}
		for _, field := range fields[11:13] {
			ticks, err := strconv.Atoi(field)
			harness.Must(t, err)
			u.processor += time.Duration(ticks) * 10 * time.Millisecond
		}
		all[name] = u
	}
	return all
}

func kibibytes(t *testing.T, status, field string) float64 {
	t.Helper()
	_, rest, found := strings.Cut(status, "\n"+field)
	if !found {
		t.Fatalf("no %s in\n%s", field, status)
	}
	number, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	harness.Must(t, err)
	return number
}

// compare returns a table of the processes' usage before and after a rollout.
func compare(t *testing.T, before, after map[string]usage) string {
	t.Helper()
	var rows strings.Builder
	rows.WriteString("process\tRSS before, MiB\tafter\tpeak\tprocessor time\n")
	for _, name := range slices.Sorted(maps.Keys(after)) {
		a, z := before[name], after[name]
		fmt.Fprintf(&rows, "%s\t%.0f\t%.0f\t%.0f\t%s\n", name, a.rss, z.rss, z.peak, (z.processor - a.processor).Round(10*time.Millisecond))
	}
	return aligned(t, rows.String())
}

// aligned turns rows with tab-separated cells into aligned columns.
func aligned(t *testing.T, rows string) string {
	t.Helper()
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, err := io.WriteString(w, rows)
	harness.Must(t, errors.Join(err, w.Flush()))
	return b.String()
}
