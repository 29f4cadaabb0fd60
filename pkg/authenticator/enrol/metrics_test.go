// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/klog/v2/textlogger"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// withTextfile has an Authenticator write metrics into a directory of their own.
func withTextfile(t *testing.T, a *Enroller) {
	t.Helper()
	a.MetricsTextfile = filepath.Join(t.TempDir(), "kubelet_authenticator.prom")
}

// families reads a text file as the node exporter does, and holds it against the rules for names.
func families(t *testing.T, data []byte) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	parsed, err := parser.TextToMetricFamilies(bytes.NewReader(data))
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	problems, err := promlint.New(bytes.NewReader(data)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v\n%s", problems, err, data)
	}
	for name, family := range parsed {
		if !strings.HasPrefix(name, "kubelet_authenticator_") || family.GetHelp() == "" {
			t.Errorf("%s: another prefix, or no help", name)
		}
		for _, metric := range family.GetMetric() {
			if metric.TimestampMs != nil {
				t.Errorf("%s: the collector refuses a file with timestamps", name)
			}
		}
	}
	return parsed
}

// metricValues are the samples of a file, as name{label=value}.
func metricValues(t *testing.T, path string) map[string]float64 {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for name, family := range families(t, data) {
		for _, metric := range family.GetMetric() {
			key := strings.TrimPrefix(name, "kubelet_authenticator_")
			for _, pair := range metric.GetLabel() {
				key += "{" + pair.GetName() + "=" + pair.GetValue() + "}"
			}
			values[key] = metric.GetGauge().GetValue()
		}
	}
	return values
}

func wantMetrics(t *testing.T, got, want map[string]float64) {
	t.Helper()
	for name, value := range want {
		if have, ok := got[name]; !ok || have != value {
			t.Errorf("%s: %v (there: %v), want %v", name, have, ok, value)
		}
	}
}

func TestWorkerWritesMetrics(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077)) // as the program sets it
	api := &plugintest.APIServer{Decide: func(object *certificatesv1.CertificateSigningRequest) {
		object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), nil)
	}}
	a := enrolling(t, api)
	withTextfile(t, a)
	a.Node.Access.UserAgent = "kubelet-authenticator/v1.2.3"
	if err := a.Work(t.Context()); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(a.MetricsTextfile)
	if err != nil || info.Mode() != 0o644 {
		t.Errorf("the collector runs as another user: %v, %v", info.Mode(), err)
	}
	if entries, err := os.ReadDir(filepath.Dir(a.MetricsTextfile)); err != nil || len(entries) != 1 {
		t.Errorf("something is left behind: %v, %v", entries, err)
	}
	pair, err := a.Node.Dir().Current()
	if err != nil {
		t.Fatal(err)
	}
	got := metricValues(t, a.MetricsTextfile)
	wantMetrics(t, got, map[string]float64{
		"certificate_not_before_timestamp_seconds": float64(pair.Leaf.NotBefore.Unix()),
		"certificate_not_after_timestamp_seconds":  float64(pair.Leaf.NotAfter.Unix()),
		"certificate_renewal_timestamp_seconds":    timestamp(nodestate.RenewAt(pair.Leaf)).value,
		"pending_request_timestamp_seconds":        0,
		"last_worker_start_timestamp_seconds":      float64(plugintest.Noon.Unix()),
		"last_worker_end_timestamp_seconds":        float64(plugintest.Noon.Unix()),
		"last_success_timestamp_seconds":           float64(plugintest.Noon.Unix()),
		"consecutive_failures":                     0,
		"next_attempt_timestamp_seconds":           0,
		"last_worker_result{reason=Success}":       1,

		"build_info{program=kubelet-authenticator}{version=v1.2.3}{goversion=" + runtime.Version() + "}": 1,
	})
	for _, phase := range []Step{StepLock, StepTidy, StepPrepare, StepFile, StepCheck, StepInstall} {
		if seconds, ok := got["last_worker_phase_duration_seconds{phase="+string(phase)+"}"]; !ok || seconds < 0 || seconds > 60 {
			t.Errorf("phase %s: %v, there: %v", phase, seconds, ok)
		}
	}
}

// A renewal that fails leaves no other trace while the old certificate is valid.
func TestFailedWorkerWritesMetrics(t *testing.T) {
	api := &plugintest.APIServer{Refuses: []string{"token", "certificate"}}
	a := enrolling(t, api)
	withTextfile(t, a)
	pair := plugintest.NewPair(t, plugintest.DueSoon)
	plugintest.InstallPair(t, a.Node.Dir(), pair)
	for n := 1.0; n <= 2; n++ {
		plugintest.MustFail(t, a.Work(t.Context()), reason.BootstrapRefused)
		state, err := a.Node.Dir().State()
		if err != nil {
			t.Fatal(err)
		}
		wantMetrics(t, metricValues(t, a.MetricsTextfile), map[string]float64{
			"certificate_not_after_timestamp_seconds":              float64(pair.Leaf.NotAfter.Unix()),
			"last_worker_result{reason=" + state.Last.Reason + "}": 1,
			"consecutive_failures":                                 n,
			"next_attempt_timestamp_seconds":                       timestamp(state.NextAttempt).value,
			"last_success_timestamp_seconds":                       0,
		})
		a.Node.Now = func() time.Time { return state.NextAttempt }
	}
}

// What a worker leaves pending shows.
func TestMetricsOfAPendingRequest(t *testing.T) {
	a := enrolling(t, &plugintest.APIServer{})
	withTextfile(t, a)
	w := newWorker(t, a)
	pending := newPending(t, a)
	pending.Requests[0].FiledAt = plugintest.Noon.Add(-time.Minute)
	// without one it was never filed
	for uid, want := range map[string]float64{"": 0, "uid": float64(plugintest.Noon.Add(-time.Minute).Unix())} {
		pending.Requests[0].UID = uid
		if err := w.lock.SetPending(pending); err != nil {
			t.Fatal(err)
		}
		w.writeMetrics(&cache.State{})
		got := metricValues(t, a.MetricsTextfile)
		wantMetrics(t, got, map[string]float64{"pending_request_timestamp_seconds": want})
		for name := range got {
			if strings.HasPrefix(name, "last_worker_result") || strings.HasPrefix(name, "certificate_") {
				t.Errorf("there is none yet: %s", name)
			}
		}
	}
}

// The file system of the metrics may hang. By then all else is on disk, and the next worker may
// start.
func TestMetricsThatHangHoldNothing(t *testing.T) {
	a := enrolling(t, &plugintest.APIServer{Decide: func(object *certificatesv1.CertificateSigningRequest) {
		object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), nil)
	}})
	withTextfile(t, a)
	a.Step = func(step Step) {
		if _, err := os.Lstat(a.MetricsTextfile); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("they are written before step %s", step)
		}
	}
	if err := a.Work(t.Context()); err != nil {
		t.Fatal(err)
	}
	_ = metricValues(t, a.MetricsTextfile)
	if id := a.Node.Dir().Worker(); id.PID != 0 {
		t.Errorf("the worker's place is taken by %v", id)
	}
	state, err := a.Node.Dir().State()
	if err != nil || state.Last == nil || a.Node.Load().Pair == nil {
		t.Errorf("state %+v, %v", state, err)
	}
	a.Step = func(Step) {}
	w := newWorker(t, a)
	w.enroller.MetricsTextfile = filepath.Join(t.TempDir(), "none", "x.prom")
	tried := false
	// while they are written
	w.log = textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(writerFunc(func(p []byte) (int, error) {
		tried = true
		lock, err := a.Node.Dir().TryLock()
		if err != nil {
			t.Error(err)
		} else {
			lock.Unlock()
		}
		return len(p), nil
	}))))
	w.writeMetrics(state)
	if !tried {
		t.Error("nothing was logged")
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A worker gets its certificate whether its metrics can be written or not.
func TestMetricsNeverFailAWorker(t *testing.T) {
	for name, textfile := range map[string]func(*testing.T) string{
		"no directory": func(t *testing.T) string { return filepath.Join(t.TempDir(), "none", "x.prom") },
		"a directory in the file's place": func(t *testing.T) string {
			path := filepath.Join(t.TempDir(), "x.prom")
			if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil {
				t.Fatal(err)
			}
			return path
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := enrolling(t, &plugintest.APIServer{Decide: func(object *certificatesv1.CertificateSigningRequest) {
				object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), nil)
			}})
			a.MetricsTextfile = textfile(t)
			before := plugintest.Snapshot(t, filepath.Dir(a.MetricsTextfile))
			if err := a.Work(t.Context()); err != nil || a.Node.Load().Pair == nil {
				t.Errorf("%v, certificate %v", err, a.Node.Load().Pair)
			}
			if after := plugintest.Snapshot(t, filepath.Dir(a.MetricsTextfile)); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
}

// A state file may come from another release, or from somebody else. Its texts are no labels.
func TestMetricsHaveClosedSetsOfLabels(t *testing.T) {
	a := testEnroller(t)
	withTextfile(t, a)
	w := newWorker(t, a)
	state := &cache.State{Last: &cache.Result{
		Reason: "Hunter2", Message: "hunter2", Hint: "hunter2", Request: "hunter2", Finished: plugintest.Noon,
		Phases: []cache.Phase{{Name: "hunter2", Milliseconds: 1}, {Name: "save", Milliseconds: 250}, {Name: "save", Milliseconds: 500}, {Name: "record"}},
	}}
	w.writeMetrics(state)
	data, err := os.ReadFile(a.MetricsTextfile)
	if err != nil || strings.Contains(strings.ToLower(string(data)), "hunter2") {
		t.Errorf("%v\n%s", err, data)
	}
	got := metricValues(t, a.MetricsTextfile)
	wantMetrics(t, got, map[string]float64{"last_worker_result{reason=Unexpected}": 1, "last_worker_phase_duration_seconds{phase=save}": 0.75})
	phases := 0
	for name := range got {
		if strings.HasPrefix(name, "last_worker_phase_duration_seconds") {
			phases++
		}
	}
	if phases != 1 {
		t.Errorf("%d phases: %v", phases, got)
	}
	for _, info := range reason.All() {
		if info.Reason == resultSuccess {
			t.Errorf("%s is a failure", info.Reason)
		}
	}
}

// The program's name and version come from the build. Whatever is in them, the file can be read.
func TestMetricsEscapeLabels(t *testing.T) {
	a := testEnroller(t)
	withTextfile(t, a)
	a.Node.Access.UserAgent = "a\\b/\"v\n1\""
	newWorker(t, a).writeMetrics(&cache.State{})
	for name := range metricValues(t, a.MetricsTextfile) {
		if strings.HasPrefix(name, "build_info") && !strings.Contains(name, "{program=a\\b}{version=\"v\n1\"}") {
			t.Errorf("%q", name)
		}
	}
}

// What a killed worker has left is removed.
func TestMetricsCleanUp(t *testing.T) {
	a := testEnroller(t)
	withTextfile(t, a)
	dir := filepath.Dir(a.MetricsTextfile)
	old := time.Now().Add(-time.Hour)
	for _, name := range []string{".kubelet_authenticator.prom.tmp-1", "other.prom", ".other.prom.tmp-1"} {
		path := plugintest.WriteFile(t, dir, name, "half")
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
	}
	newWorker(t, a).writeMetrics(&cache.State{})
	var names []string
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if want := []string{".other.prom.tmp-1", "kubelet_authenticator.prom", "other.prom"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("%q, %v", names, err)
	}
}

// monitoring is the page with the metrics.
const monitoring = "../../../docs/node.md"

// The page has a row for each metric, with its help, and names no other.
func TestMetricsAreDocumented(t *testing.T) {
	page, err := os.ReadFile(monitoring)
	if err != nil {
		t.Fatal(err)
	}
	a := testEnroller(t)
	withTextfile(t, a)
	a.Node.CheckInterval = time.Hour
	plugintest.InstallPair(t, a.Node.Dir(), plugintest.NewPair(t, nil))
	newWorker(t, a).writeMetrics(&cache.State{Last: &cache.Result{Started: plugintest.Noon, Finished: plugintest.Noon, Phases: []cache.Phase{{Name: "lock"}}}})
	data, err := os.ReadFile(a.MetricsTextfile)
	if err != nil {
		t.Fatal(err)
	}
	written := families(t, data)
	for name, family := range written {
		if row := "| `" + name + "` | " + strings.TrimSuffix(family.GetHelp(), ".") + " |"; !strings.Contains(string(page), row) {
			t.Errorf("there is no row %s", row)
		}
	}
	for _, name := range regexp.MustCompile(`\bkubelet_authenticator_\w+`).FindAllString(string(page), -1) {
		if written[name] == nil {
			t.Errorf("the page names %s, which is not written", name)
		}
	}
}
