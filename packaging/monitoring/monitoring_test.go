// SPDX-License-Identifier: Apache-2.0

// Package monitoring holds rules and dashboard together with the programs and the documents. What
// the rules do is tested by promtool (make monitoring).
package monitoring

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"
)

const (
	root     = "../.."
	runbooks = "docs/runbooks.md"
	// runbookURL is where the runbooks are published.
	runbookURL = "https://github.com/kubelet-authenticator/kubelet-authenticator/blob/main/" + runbooks + "#"
)

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

type rule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func readRules(t *testing.T) []rule {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	if err := yaml.UnmarshalStrict([]byte(read(t, "rules.yaml")), &file); err != nil {
		t.Fatal(err)
	}
	var all []rule
	for _, group := range file.Groups {
		all = append(all, group.Rules...)
	}
	return all
}

var metricName = regexp.MustCompile(`\b(node_attestation|kubelet_authenticator)_\w+`)

// metrics returns the names of the programs' metrics. They are those in the tables of two pages,
// which the programs' own tests compare with what they serve.
func metrics(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, page := range []string{"docs/node.md", "docs/runbooks.md"} {
		for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\|").FindAllStringSubmatch(read(t, filepath.Join(root, page)), -1) {
			names[row[1]] = true
		}
	}
	return names
}

// Rules and dashboard ask for no metric that nobody has, and each of the controller's is used.
func TestMetricsExist(t *testing.T) {
	exist, used := metrics(t), map[string]bool{}
	for _, file := range []string{"rules.yaml", "dashboard.json"} {
		for _, name := range metricName.FindAllString(read(t, file), -1) {
			name = strings.TrimSuffix(name, "_bucket")
			used[name] = true
			if !exist[name] {
				t.Errorf("%s asks for %s, which no program has", file, name)
			}
		}
	}
	for name := range exist {
		if strings.HasPrefix(name, "node_attestation_") && !used[name] {
			t.Errorf("neither rules nor dashboard use %s", name)
		}
	}
}

// Each alert says what it is about, has a section of its own in the runbooks, and fires in
// promtool's tests. No section is without an alert.
func TestAlertsHaveRunbooks(t *testing.T) {
	book, tests := read(t, filepath.Join(root, runbooks)), read(t, "rules_test.yaml")
	var alerts []string
	for _, rule := range readRules(t) {
		alerts = append(alerts, rule.Alert)
		for _, name := range []string{"summary", "description"} {
			if rule.Annotations[name] == "" {
				t.Errorf("%s has no %s", rule.Alert, name)
			}
		}
		if got, want := rule.Annotations["runbook_url"], runbookURL+strings.ToLower(rule.Alert); got != want {
			t.Errorf("%s: %s, want %s", rule.Alert, got, want)
		}
		if !slices.Contains([]string{"warning", "critical"}, rule.Labels["severity"]) {
			t.Errorf("%s: %v", rule.Alert, rule.Labels)
		}
		fires := regexp.MustCompile(`alertname="` + rule.Alert + `", alertstate="firing", severity="` + rule.Labels["severity"] + `"|alertname: ` + rule.Alert + `\n`)
		if !fires.MatchString(tests) {
			t.Errorf("%s with severity %s fires in no test", rule.Alert, rule.Labels["severity"])
		}
	}
	slices.Sort(alerts)
	var sections []string
	for _, heading := range regexp.MustCompile(`(?m)^### (\w+)$`).FindAllStringSubmatch(book, -1) {
		sections = append(sections, heading[1])
	}
	slices.Sort(sections)
	if alerts = slices.Compact(alerts); !slices.Equal(alerts, sections) {
		t.Errorf("alerts\n%q\nsections of %s\n%q", alerts, runbooks, sections)
	}
}

// Grafana can import the dashboard. Each panel has a number of its own, and panels do not overlap.
// Queries use the chosen data source and the chosen clusters.
func TestDashboard(t *testing.T) {
	type target struct{ RefID, Expr, LegendFormat string }
	var dashboard struct {
		UID, Title    string
		SchemaVersion int
		Templating    struct{ List []struct{ Name string } }
		Links         []struct{ URL string }
		Panels        []struct {
			ID         int
			Type       string
			Title      string
			GridPos    struct{ H, W, X, Y int }
			Datasource struct{ UID string }
			Targets    []target
		}
	}
	if err := json.Unmarshal([]byte(read(t, "dashboard.json")), &dashboard); err != nil {
		t.Fatal(err)
	}
	if dashboard.UID == "" || dashboard.Title == "" || dashboard.SchemaVersion == 0 || len(dashboard.Templating.List) != 2 {
		t.Errorf("%+v", dashboard)
	}
	if len(dashboard.Links) != 1 || dashboard.Links[0].URL+"#" != runbookURL {
		t.Errorf("links: %+v", dashboard.Links)
	}
	quantile := regexp.MustCompile(`histogram_quantile\(0\.(\d+)`)
	ids, taken := map[int]bool{}, map[[2]int]string{}
	for _, p := range dashboard.Panels {
		if ids[p.ID] || p.Title == "" || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %d %q: its number is taken, or it does not fit: %+v", p.ID, p.Title, p.GridPos)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" {
					t.Fatalf("%q lies over %q", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if len(p.Targets) == 0 || p.Datasource.UID != "${datasource}" {
			t.Errorf("%q asks nobody", p.Title)
		}
		for _, asked := range p.Targets {
			chosen := strings.Contains(asked.Expr, `cluster=~"$cluster"`) || strings.HasPrefix(asked.Expr, "count by (version)") || strings.Contains(asked.Expr, "kubelet_authenticator_")
			if all := strings.HasSuffix(p.Title, ", in all clusters"); chosen == all {
				t.Errorf("%q: its title says that it shows all clusters: %v, and its query selects them: %v", p.Title, all, chosen)
			}
			if q := quantile.FindStringSubmatch(asked.Expr); q != nil && asked.LegendFormat != "p"+(q[1] + "0")[:2] {
				t.Errorf("%q: the quantile 0.%s is labelled %s", p.Title, q[1], asked.LegendFormat)
			}
			balanced := strings.Count(asked.Expr, "(") == strings.Count(asked.Expr, ")") && strings.Count(asked.Expr, "{") == strings.Count(asked.Expr, "}")
			if !balanced || !metricName.MatchString(asked.Expr) && !strings.Contains(asked.Expr, `apiserver_validating_admission_policy_check_total{policy=~"node-attestation-`) {
				t.Errorf("%q: %s", p.Title, asked.Expr)
			}
		}
	}
}

// The Service selects the controller's pods, and the ServiceMonitor the Service.
func TestServiceMonitorFindsTheController(t *testing.T) {
	type object struct {
		Kind     string
		Metadata struct {
			Namespace string
			Labels    map[string]string
		}
		Spec struct {
			Selector  map[string]any
			Ports     []struct{ Name, TargetPort string }
			Endpoints []struct{ Port string }
		}
	}
	var service, monitor object
	first, second, _ := strings.Cut(read(t, "servicemonitor.yaml"), "\n---\n")
	for document, into := range map[string]*object{first: &service, second: &monitor} {
		if err := yaml.Unmarshal([]byte(document), into); err != nil {
			t.Fatal(err)
		}
	}
	deployment := read(t, filepath.Join(root, "packaging/kubernetes/deployment.yaml"))
	const name = "app.kubernetes.io/name"
	pods, _ := service.Spec.Selector[name].(string)
	if pods == "" || !strings.Contains(deployment, name+": "+pods) || len(service.Spec.Ports) != 1 ||
		!strings.Contains(deployment, "{name: "+service.Spec.Ports[0].TargetPort+", containerPort: 8080}") || service.Metadata.Namespace != "node-attestation-system" {
		t.Errorf("%+v", service)
	}
	matched, _ := monitor.Spec.Selector["matchLabels"].(map[string]any)
	if service.Metadata.Labels[name] != matched[name] || monitor.Metadata.Namespace != service.Metadata.Namespace ||
		len(monitor.Spec.Endpoints) != 1 || monitor.Spec.Endpoints[0].Port != service.Spec.Ports[0].Name {
		t.Errorf("%+v does not select %+v", monitor, service)
	}
}

// The end points ask for no credential. So only pods of labelled namespaces reach the metrics, and
// no pod reaches the probes.
func TestOnlyMonitoringReachesTheController(t *testing.T) {
	var pods map[string]string
	ports := map[string]int32{}
	var policy *networkingv1.NetworkPolicy
	for document := range strings.SplitSeq(read(t, filepath.Join(root, "packaging/kubernetes/deployment.yaml")), "\n---\n") {
		switch {
		case strings.Contains(document, "\nkind: Deployment\n"):
			var deployment appsv1.Deployment
			if err := yaml.UnmarshalStrict([]byte(document), &deployment); err != nil {
				t.Fatal(err)
			}
			pods = deployment.Spec.Template.Labels
			for _, port := range deployment.Spec.Template.Spec.Containers[0].Ports {
				ports[port.Name] = port.ContainerPort
			}
		case strings.Contains(document, "\nkind: NetworkPolicy\n"):
			policy = &networkingv1.NetworkPolicy{}
			if err := yaml.UnmarshalStrict([]byte(document), policy); err != nil {
				t.Fatal(err)
			}
		}
	}
	if policy == nil || ports["metrics"] == 0 || ports["health"] == 0 {
		t.Fatalf("%v, %v", policy, ports)
	}
	selector, err := metav1.LabelSelectorAsSelector(&policy.Spec.PodSelector)
	if err != nil || !selector.Matches(labels.Set(pods)) || !slices.Contains(policy.Spec.PolicyTypes, networkingv1.PolicyTypeIngress) {
		t.Fatalf("%+v does not limit what reaches pods with %v: %v", policy.Spec, pods, err)
	}
	want := []networkingv1.NetworkPolicyIngressRule{{
		From:  []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"attestation.cluster.x-k8s.io/scrape": "true"}}}},
		Ports: []networkingv1.NetworkPolicyPort{{Protocol: new(corev1.ProtocolTCP), Port: new(intstr.FromInt32(ports["metrics"]))}},
	}}
	if !reflect.DeepEqual(policy.Spec.Ingress, want) {
		t.Errorf("ingress: %+v", policy.Spec.Ingress)
	}
}
