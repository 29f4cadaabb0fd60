// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"
	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/hostiletext"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// monitoring is the page with the metrics.
const monitoring = "../../../docs/runbooks.md"

// all has the metrics, which are registered once in a process.
var all = sync.OnceValues(func() (*ClusterMetrics, *Metrics) {
	state, err := NewClusterMetrics()
	if err != nil {
		panic(err)
	}
	decisions, err := NewMetrics()
	if err != nil {
		panic(err)
	}
	if err := RegisterBuildInfo("v1", "abc"); err != nil {
		panic(err)
	}
	records, err := NewDecisionLogMetrics()
	if err != nil {
		panic(err)
	}
	records.Start("file") // gives both counters a sample
	denials, err := NewAuthorizerMetrics()
	if err = errors.Join(err, denials.Lists(func() time.Duration { return time.Second }, func() int { return 1 })); err != nil {
		panic(err)
	}
	denials.Denied("revoked", false)
	lookups, err := NewLookupMetrics()
	if err != nil {
		panic(err)
	}
	lookups.Called("gce", true, time.Second)
	lookups.Counted("gce", LookupBusy)
	return state, decisions
})

// ourFamilies returns the metrics of this package.
func ourFamilies(t *testing.T) map[string]*dto.MetricFamily {
	t.Helper()
	gathered, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	families := map[string]*dto.MetricFamily{}
	for _, f := range gathered {
		if strings.HasPrefix(f.GetName(), "node_attestation_") {
			families[f.GetName()] = f
		}
	}
	return families
}

// samples returns the values of a metric in a cluster, by its other labels.
func samples(t *testing.T, name, cluster string) map[string]float64 {
	t.Helper()
	found := map[string]float64{}
	for _, m := range ourFamilies(t)[name].GetMetric() {
		ours, key := false, ""
		for _, l := range m.GetLabel() {
			if l.GetName() == "cluster" {
				ours = l.GetValue() == cluster
			} else {
				key += l.GetValue()
			}
		}
		if ours {
			found[key] = m.GetGauge().GetValue()
		}
	}
	return found
}

// useAll gives each metric a sample.
func useAll(cluster string) *ClusterMetrics {
	state, decisions := all()
	m, d := state.For(cluster), decisions.For(cluster)
	m.BindingFound("b", "r")
	m.NodesWithoutRecord(1)
	m.PolicyProblems([]PolicyProblem{{"p", "Missing"}})
	m.Source("ca", true, time.Unix(1, 0))
	m.Machines(2)
	m.CA(time.Unix(3, 0), new(true))
	m.Revoked(RevokedCertificates{Revoked: 7, Suspended: 8, NotInForce: 9}, 10)
	m.Observe(State{
		Waiting: func() map[string]int { return map[string]int{"MachineNotFound": 4} },
		Records: func() ([]Record, bool) {
			return []Record{{"a", time.Unix(6, 0), time.Unix(5, 0)}, {NodeName: "none"}, {"a", time.Unix(4, 0), time.Unix(3, 0)}}, true
		},
	})
	d.Decided(&certificatesv1.CertificateSigningRequest{}, verifier.Decision{Outcome: verifier.Approve}, "Attested", time.Second, time.Now())
	d.EKChanges("Inventory", 1, 0)
	d.IssuedWithoutAttestation("example.com/x", true, "attested")
	return m
}

// The names, units and helps are as Prometheus' conventions want them.
func TestMetricsFollowConventions(t *testing.T) {
	m := useAll("lint")
	t.Cleanup(m.Forget)
	problems, err := promlint.NewWithMetricFamilies(slices.Collect(maps.Values(ourFamilies(t)))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// The page has a row for each metric of the controllers, with its help, and names no other.
func TestMetricsAreDocumented(t *testing.T) {
	m := useAll("documented")
	t.Cleanup(m.Forget)
	content, err := os.ReadFile(monitoring)
	if err != nil {
		t.Fatal(err)
	}
	page, families := string(content), ourFamilies(t)
	for name, family := range families {
		if row := fmt.Sprintf("| `%s` | %s |", name, strings.TrimSuffix(family.GetHelp(), ".")); !strings.Contains(page, row) {
			t.Errorf("there is no row %s", row)
		}
	}
	inCode, names := map[string]bool{}, regexp.MustCompile(`\bnode_attestation_[a-z_]+`)
	for _, root := range []string{"..", "../../clusterapi"} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			for _, name := range regexp.MustCompile(`"node_attestation_[a-z_]+"`).FindAllString(string(source), -1) {
				inCode[strings.Trim(name, `"`)] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(inCode) < len(families) {
		t.Errorf("%d names in the code, and %d metrics", len(inCode), len(families))
	}
	for name := range inCode {
		if !strings.Contains(page, "| `"+name+"` |") {
			t.Errorf("there is no row for %s", name)
		}
	}
	for _, name := range names.FindAllString(page, -1) {
		base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		if !inCode[name] && !inCode[base] {
			t.Errorf("the page names %s, which is not in the code", name)
		}
	}
}

// A scrape reads the state. If a node has several records, the newest certificate counts. A
// forgotten cluster has no series.
func TestStateIsAskedFor(t *testing.T) {
	m := useAll("state")
	other := useAll("other")
	t.Cleanup(other.Forget)
	for name, want := range map[string]map[string]float64{
		"node_attestation_waiting_requests":                               {"MachineNotFound": 4},
		"node_attestation_records":                                        {"": 3},
		"node_attestation_record_certificate_not_after_timestamp_seconds": {"a": 6},
		"node_attestation_record_last_attested_timestamp_seconds":         {"a": 5},
		"node_attestation_source_usable":                                  {"ca": 1},
		"node_attestation_source_last_read_timestamp_seconds":             {"ca": 1},
		"node_attestation_machines":                                       {"": 2},
		"node_attestation_ca_not_after_timestamp_seconds":                 {"": 3},
		"node_attestation_ca_trusted":                                     {"": 1},
		"node_attestation_policies_in_force":                              {"": 0},
		"node_attestation_revoked_certificates":                           {"revoked": 7, "suspended": 8, "not_in_force": 9},
		"node_attestation_revocation_list_capacity":                       {"": 10},
	} {
		if got := samples(t, name, "state"); !maps.Equal(got, want) {
			t.Errorf("%s: %v, not %v", name, got, want)
		}
	}
	m.CA(time.Time{}, nil)
	m.SourceGone("ca")
	m.PolicyProblems(nil)
	m.Observe(State{Waiting: func() map[string]int { return nil }, Records: func() ([]Record, bool) { return nil, false }})
	for _, name := range []string{
		"node_attestation_ca_not_after_timestamp_seconds", "node_attestation_ca_trusted", "node_attestation_source_usable", "node_attestation_source_last_read_timestamp_seconds",
		"node_attestation_records", "node_attestation_record_certificate_not_after_timestamp_seconds", "node_attestation_waiting_requests",
	} {
		if got := samples(t, name, "state"); len(got) > 0 {
			t.Errorf("%s: %v", name, got)
		}
	}
	if got := samples(t, "node_attestation_policies_in_force", "state"); got[""] != 1 {
		t.Errorf("%v", got)
	}
	useAll("state").Forget()
	for name, family := range ourFamilies(t) {
		if got := samples(t, name, "state"); family.GetType() == dto.MetricType_GAUGE && name != "node_attestation_ek_changes" && len(got) > 0 {
			t.Errorf("%s is still there: %v", name, got)
		}
		if got := samples(t, name, "other"); strings.HasPrefix(name, "node_attestation_record") && len(got) == 0 {
			t.Errorf("%s of another cluster is gone", name)
		}
	}
}

// If there are too many records, those whose certificates end first have a series.
func TestRecordSeriesAreBounded(t *testing.T) {
	records := map[[2]string]Record{}
	for i := range 10 {
		name := fmt.Sprint(i)
		records[[2]string{"c", name}] = Record{NodeName: name, NotAfter: time.Unix(int64(100-i), 0)}
	}
	if all := soonest(records, 10); len(all) != 10 {
		t.Errorf("%d", len(all))
	}
	if all := soonest(records, 2); len(all) != 2 || all[0].NodeName != "9" || all[1].NodeName != "8" {
		t.Errorf("%v", all)
	}
}

// A cluster's administrator names ClusterRoleBindings, and may run an API server that invents
// signers. Neither text gets into a scrape as it is, nor makes any number of series.
func TestHostileTextOfLabels(t *testing.T) {
	m := useAll("hostile")
	_, decisions := all()
	t.Cleanup(m.Forget)
	t.Cleanup(decisions.For("hostile").Forget)
	long := strings.Repeat("x", 1<<20)
	for _, name := range []string{hostiletext.For("name"), long, "\xff", "kubernetes.io/" + hostiletext.For("signer"), "cluster.x-k8s.io/" + hostiletext.For("signer")} {
		m.BindingFound(name, "r")
		m.Source(name, true, time.Unix(1, 0))
		decisions.For("hostile").IssuedWithoutAttestation(name, false, "other")
	}
	for i := range 1000 {
		m.BindingFound(fmt.Sprint("b", i), "r")
		decisions.For("hostile").IssuedWithoutAttestation(fmt.Sprintf("kubernetes.io/%d", i), false, "other")
		decisions.For("hostile").IssuedWithoutAttestation(fmt.Sprintf("cluster.x-k8s.io/%d", i), false, "other")
	}
	m.BindingGone(hostiletext.For("name"))
	var out strings.Builder
	for _, family := range ourFamilies(t) {
		if series := len(family.GetMetric()); series > 2*maxBindings {
			t.Errorf("%s: %d series", family.GetName(), series)
		}
		if _, err := expfmt.MetricFamilyToText(&out, family); err != nil {
			t.Error(err)
		}
	}
	for _, problem := range hostiletext.Find(out.String()) {
		t.Error(problem)
	}
	if out.Len() > 1<<20 || samples(t, "node_attestation_auto_approving_bindings", "hostile")[text.Quote(hostiletext.For("name"), maxBindingName)+"r"] != 0 {
		t.Errorf("%d bytes, or a series of a deleted binding", out.Len())
	}
}
