// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const (
	monitoring = "../../packaging/monitoring/"
	// authorizerMetric begins the metrics that another process serves: the authorizer.
	authorizerMetric = "node_attestation_authorizer_"
)

// labelsOf has the labels of each metric, by its name.
type labelsOf map[string]map[string]bool

var sample = regexp.MustCompile(`(?m)^(node_attestation_\w+?)(?:_bucket|_sum|_count)?(?:\{(.*)\})? \S+$`)

// scrape adds what the controller serves now.
func (s labelsOf) scrape(t *testing.T, l *live) {
	t.Helper()
	served, err := l.controller.Metrics(t.Context())
	harness.Must(t, err)
	for _, found := range sample.FindAllStringSubmatch(served, -1) {
		if s[found[1]] == nil {
			s[found[1]] = map[string]bool{}
		}
		for _, label := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(found[2], -1) {
			if label[1] != "le" {
				s[found[1]][label[1]] = true
			}
		}
	}
}

func (s labelsOf) await(t *testing.T, l *live, names ...string) {
	t.Helper()
	harness.Eventually(t, patience, "served: "+strings.Join(names, ", "), func() bool {
		s.scrape(t, l)
		return !slices.ContainsFunc(names, func(name string) bool { return s["node_attestation_"+name] == nil })
	})
}

// A running controller serves each metric and label that the rules, the dashboard and
// docs/runbooks.md use. It runs in audit mode, then as approver alone, then it
// enforces and revokes.
func TestMetricsAreServed(t *testing.T) {
	t.Parallel()
	l := newLive(t)
	all := labelsOf{}

	l.kubectl(t, "apply", "--server-side", "-k", auditManifests)
	harness.Must(t, controllerprocess.Provide(t.Context(), l.ControlPlane))
	harness.Must(t, l.StartControllerManager(t.Context()))
	m, replaced := l.newMachine(t, "measured"), l.newMachine(t, "replaced")
	l.inventoried(t, m, replaced)
	l.startReady(t, func(c *config.Config) { c.Audit = true })
	l.reasonOf(t, l.file(t, builtinSigner), certificatesv1.CertificateApproved) // issued without attestation
	all.await(t, l, "controller_build_info", "issued_without_attestation_total", "auto_approving_bindings", "policy_problems")

	harness.Must(t, controllerprocess.Apply(t.Context(), l.ControlPlane, module))
	harness.Must(t, controllerprocess.AwaitPolicies(t.Context(), l.ControlPlane))
	l.startReady(t, approveOnly)
	all.scrape(t, l)

	harness.Must(t, controllerprocess.InstallRevocation(t.Context(), l.ControlPlane, module))
	l.startReady(t, func(c *config.Config) {
		c.Revocation.Enabled = true
		c.DecisionLog.File = filepath.Join(l.dir, "decisions")
	})
	m.begin(t).succeeds(t)
	replaced.begin(t).succeeds(t)
	l.newMachine(t, "unknown").begin(t) // waits
	_, err := l.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "unattested"}}, metav1.CreateOptions{})
	harness.Must(t, err)
	other := l.newMachine(t, "replaced")
	l.inventoried(t, m, other)
	all.await(t, l, "records", "waiting_requests", "unattested_nodes", "ek_changes", "revoked_certificates", "decision_records_lost_total", "request_age_seconds")

	all.areDocumented(t)
	for _, file := range []string{"rules.yaml", "dashboard.json"} {
		all.haveWhatIsAsked(t, file)
	}
}

var (
	documentedRow  = regexp.MustCompile("(?m)^\\| `(node_attestation_\\w+)` \\|.*\\|([^|]*)\\|$")
	documentedName = regexp.MustCompile("`(\\w+)`")
)

// areDocumented compares with the table of docs/runbooks.md. Each metric has the label
// cluster, unless its row says "no cluster".
func (s labelsOf) areDocumented(t *testing.T) {
	t.Helper()
	content, err := os.ReadFile("../../docs/runbooks.md")
	harness.Must(t, err)
	rows := slices.DeleteFunc(documentedRow.FindAllStringSubmatch(string(content), -1), func(row []string) bool {
		return strings.HasPrefix(row[1], authorizerMetric)
	})
	if len(rows) != len(s) {
		t.Errorf("%d metrics are documented, and %d served: %q", len(rows), len(s), slices.Sorted(maps.Keys(s)))
	}
	for _, row := range rows {
		labels := map[string]bool{}
		cell, without := strings.CutPrefix(strings.TrimSpace(row[2]), "no `cluster`")
		if !without {
			labels["cluster"] = true
		}
		for _, label := range documentedName.FindAllStringSubmatch(cell, -1) {
			labels[label[1]] = true
		}
		if !maps.Equal(labels, s[row[1]]) {
			t.Errorf("%s: the labels %q are served, and %q documented", row[1], slices.Sorted(maps.Keys(s[row[1]])), slices.Sorted(maps.Keys(labels)))
		}
	}
}

var (
	askedMetric = regexp.MustCompile(`\b(node_attestation_\w+?)(?:_bucket)?\b(?:\{([^}]*)\})?`)
	askedLabel  = regexp.MustCompile(`(\w+)\s*[=!]`)
)

// haveWhatIsAsked compares with the queries of a file of packaging/monitoring.
func (s labelsOf) haveWhatIsAsked(t *testing.T, file string) {
	t.Helper()
	content, err := os.ReadFile(monitoring + file)
	harness.Must(t, err)
	for _, asked := range askedMetric.FindAllStringSubmatch(string(content), -1) {
		if strings.HasPrefix(asked[1], authorizerMetric) {
			continue
		}
		if s[asked[1]] == nil {
			t.Errorf("%s asks for %s, which no controller serves", file, asked[1])
		}
		for _, label := range askedLabel.FindAllStringSubmatch(asked[2], -1) {
			if !s[asked[1]][label[1]] {
				t.Errorf("%s: %s has no label %s", file, asked[1], label[1])
			}
		}
	}
}
