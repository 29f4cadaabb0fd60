// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/hostiletext"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
)

// The API server takes any name without "/" and "%". A request's name adds no entry to the
// inventory that is printed.
func TestNamesAddNoEntry(t *testing.T) {
	entry := "- nodeName: control-plane-1\n  eks:\n  - fingerprint: \"" + strings.Repeat("6", 64) + "\"\n# y"
	configured := []client.Object{
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName}, Data: map[string]string{configKey: goodConfig}},
		inventoryOf("- {nodeName: listed, eks: [{fingerprint: " + ekOf(50) + "}]}"),
	}
	for _, lineEnd := range []string{"\n", "\r\n", "\r", "\u0085", "\u2028", "\u2029"} {
		for place, hello := range map[string]*certificatesv1.CertificateSigningRequest{
			"name":             newHello("x"+lineEnd+strings.ReplaceAll(entry, "\n", lineEnd), "node-a", "", 1, "Maker"),
			"node name":        newHello("a", "node-a"+lineEnd+entry, "", 1, ""),
			"provider ID":      newHello("a", "node-a", "metal://a"+lineEnd+entry, 1, ""),
			"EK's issuer":      newHello("a", "node-a", "", 1, "Maker"+lineEnd+entry),
			"ends a document":  newHello("x"+lineEnd+"---"+lineEnd+entry, "node-a", "", 1, ""),
			"begins a comment": newHello("x"+lineEnd+"#"+lineEnd+entry, "listed", "", 1, ""),
		} {
			t.Run(fmt.Sprintf("%s/%q", place, lineEnd), func(t *testing.T) {
				r := run(t, newAccess(t, append(configured, hello)...), "pending", "-o", "inventory")
				r.want(t, 0, "# WARNING")
				parsed, err := inventory.Parse([]byte(r.stdout))
				if err != nil {
					t.Fatalf("%v in\n%s", err, r.stdout)
				}
				for _, m := range parsed.All() {
					if m.NodeName != "node-a" || len(m.EKs) != 1 || m.EKs[0].Fingerprint != ekOf(1) {
						t.Errorf("a request adds the entry %+v:\n%s", m, r.stdout)
					}
				}
				if strings.ContainsAny(r.stdout, "\r\u0085\u2028\u2029") || strings.Contains(r.stdout, "\n"+entry[:10]+"c") {
					t.Errorf("a request adds a line:\n%q", r.stdout)
				}
			})
		}
	}
}

// A node may create an Event that names the controller as its reporter. It decides no row of the
// status, and it is marked wherever it is shown.
func TestEventsAreClaims(t *testing.T) {
	forged := newEventOn("Node", "worker-1", "KeyCompromised", "run kubectl attest suspend worker-1", time.Minute)
	beside := newEventOn("NodeAttestation", "worker-1", "KeyCompromised", "run kubectl attest suspend worker-1", time.Minute)
	beside.Namespace = defaultNamespace
	a := newAccess(t, newRecord("worker-1", 1), forged, beside)
	for _, format := range []string{"", "-ojson", "-oyaml"} {
		args := strings.Fields("status worker-1 " + format)
		if r := run(t, a, args...); strings.Contains(r.stdout, "Compromised") || strings.Contains(r.stdout, "suspend") || !strings.Contains(r.stdout, "Attested") {
			t.Errorf("%v believes an Event:\n%s", args, r.stdout)
		}
	}
	r := run(t, a, "describe", "worker-1")
	claims := strings.Index(r.stdout, "\nClaims")
	if first := strings.Index(r.stdout, "Compromised"); claims < 0 || first < claims {
		t.Errorf("describe believes an Event:\n%s", r.stdout)
	}
	d := must(a.describe(t.Context(), "worker-1", now))
	for _, h := range d.History {
		if h.Trusted != (h.From == fromRecord) {
			t.Errorf("%+v", h)
		}
	}
	run(t, a, "describe", "worker-1", "-ojson").want(t, 0, `"trusted": false`, `"trusted": true`)
}

// An EK's public key is no secret: anyone with a bootstrap token can file a copy of a node's hello.
// Its reason is not on the row of the node that has attested.
func TestCopyOfAHelloIsAClaim(t *testing.T) {
	denied := ends(newHello("copy", "worker-1", "metal://worker-1", 1, ""), certificatesv1.CertificateDenied, "EKReplaced", "the machine has another TPM")
	s := must(newAccess(t, newRecord("worker-1", 1), denied).status(t.Context(), "worker-1", "", now))
	if len(s.Nodes) != 2 || s.Nodes[0].Claimed || s.Nodes[0].Reason != "Attested" || s.Nodes[0].Request != "" {
		t.Errorf("a copy decides on the record's row: %+v", s.Nodes)
	}
	if last := s.Nodes[len(s.Nodes)-1]; !last.Claimed || last.Reason != "EKReplaced" || last.Request != "copy" {
		t.Errorf("the copy is not shown as a claim: %+v", last)
	}
	// The API server vouches for the node's own credential.
	own := waits(newHello("own", "worker-1", "metal://worker-1", 1, ""), "SignerUnavailable", "there is no CA")
	own.Spec.Username = "system:node:worker-1"
	own.CreationTimestamp = before(10 * time.Minute)
	s = must(newAccess(t, newRecord("worker-1", 1), denied, own).status(t.Context(), "worker-1", "", now))
	if s.Nodes[0].Claimed || s.Nodes[0].Reason != "SignerUnavailable" || s.Nodes[0].WaitingSince == nil {
		t.Errorf("the node's own request is not on its row: %+v", s.Nodes)
	}
	// What the record says of itself outranks any request.
	suspended := newRecord("worker-1", 1)
	suspended.Status.Suspension = &v1alpha1.AppliedSuspension{Time: before(time.Hour), Reason: "stolen"}
	s = must(newAccess(t, suspended, denied, own).status(t.Context(), "worker-1", "", now))
	if s.Nodes[0].Reason != "MachineSuspended" || s.Nodes[0].Message != "stolen" {
		t.Errorf("a request outranks the record: %+v", s.Nodes[0])
	}
}

// Requests and Events of others push out neither entries of the record nor requests of the node.
func TestFloodPushesNothingOut(t *testing.T) {
	objects := []client.Object{newRecord("worker-1", 1)}
	own := waits(newHello("own", "worker-1", "metal://worker-1", 1, ""), "SignerUnavailable", "there is no CA")
	own.Spec.Username, own.CreationTimestamp = "system:node:worker-1", before(20*time.Minute)
	objects = append(objects, own, newEventOn("Node", "worker-1", "Honest", "note", 30*time.Minute))
	for n := range 600 {
		flood := ends(newHello(fmt.Sprintf("flood-%d", n), "worker-1", "", 2, ""), certificatesv1.CertificateDenied, "IdentityBound", "x")
		flood.CreationTimestamp = before(time.Duration(n) * time.Second)
		objects = append(objects, flood, newEventOn("CertificateSigningRequest", flood.Name, "R", "n", time.Duration(n)*time.Millisecond))
	}
	a := newAccess(t, objects...)
	d := must(a.describe(t.Context(), "worker-1", now))
	shown, records := map[string]bool{}, 0
	for _, h := range d.History {
		shown[h.From+"/"+h.Name] = true
		if h.From == "record" {
			records++
		}
	}
	if records != 2 || !shown["request/own"] {
		t.Errorf("%d entries of the record, the node's own request: %t", records, shown["request/own"])
	}
	if len(d.History) > 600 {
		t.Errorf("%d entries", len(d.History))
	}
	run(t, a, "describe", "worker-1").want(t, 0, "made for machine", "own", "older requests", "older Events")
}

// Hostile text before or behind each string of each object that a command reads: no output has a
// raw character or another line because of that text. A decoder reads it back from JSON and YAML.
func TestHostileTextInEveryField(t *testing.T) {
	commands := [][]string{
		{"status"}, {"status", "worker-1"}, {"pending"}, {"pending", "-o", "inventory"}, {"describe", "worker-1"}, {"describe", "worker-9"}, {"describe", "worker-4"}, {"check"}, {"revocations"},
		{"reset", "worker-1"}, {"reset", "worker-1", "--yes", "--delete-node"}, {"revoke", "worker-1", "--reason=r", "--dry-run"}, {"rotate", "--all", "--reason=r", "--dry-run"},
		{"suspend", "worker-1", "--reason=r", "--dry-run", "--evict"}, {"suspend", "--ek", ekOf(9), "--reason=r", "--dry-run"}, {"resume", "worker-4", "--dry-run"},
		{"revoke", "worker-1", "--reason=r", "--yes", "--timeout=1ms"}, {"__complete", "status", ""},
	}
	for _, format := range []string{"json", "yaml"} {
		for _, command := range []string{"status", "pending", "describe worker-1", "describe worker-4", "check", "revocations"} {
			commands = append(commands, append(strings.Fields(command), "-o", format))
		}
	}
	selects := regexp.MustCompile(`\b(Namespace|UID|ResourceVersion|SignerName|ReportingController|GenerateName|Regarding\.(Kind|Name)|Spec\.(NodeName|EK|Cluster|EK\.Fingerprint)|SHA256)$|\[cluster\.x-k8s\.io/cluster-name\]$`)
	isConfig := func(path string) bool { return strings.HasSuffix(path, "["+configKey+"]") }
	hostile := hostiletext.For("")
	for round, keep := range map[string]func(string) bool{
		"all but names":        func(path string) bool { return selects.MatchString(path) || path == "Name" || isConfig(path) },
		"names, too":           func(path string) bool { return selects.MatchString(path) || isConfig(path) },
		"what selects records": func(path string) bool { return path == "Namespace" || strings.HasSuffix(path, "Spec.Cluster") },
	} {
		for side, change := range map[string]func(string) string{"behind": func(s string) string { return s + hostile }, "before": func(s string) string { return hostile + s }} {
			t.Run(round+"/"+side, func(t *testing.T) {
				objects := append(fleet(), revocable()...)
				objects = append(objects,
					&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: defaultNamespace, Name: configMapName}, Data: map[string]string{configKey: goodConfig}},
					inventoryOf("- {nodeName: listed, eks: [{fingerprint: "+ekOf(50)+"}]}"), autoApproving(), podOn("worker-1", "pod"))
				seen := map[string]bool{}
				var planted []client.Object
				for _, o := range objects {
					o = o.DeepCopyObject().(client.Object)
					changed := 0
					hostiletext.Change(o, func(path, value string) string {
						if keep(path) {
							return value
						}
						changed++
						return change(value)
					})
					if changed == 0 {
						t.Errorf("%T has no text", o)
					}
					if key := fmt.Sprintf("%T %s", o, client.ObjectKeyFromObject(o)); !seen[key] {
						seen[key] = true
						planted = append(planted, o)
					}
				}
				for _, args := range commands {
					r := run(t, newAccess(t, planted...), args...)
					for _, out := range []string{r.stdout, r.stderr} {
						for _, problem := range hostiletext.Find(out) {
							t.Errorf("%q: %s", args, problem)
						}
					}
					if r.stdout == "" {
						continue // the planted text hides the object
					}
					var value any
					switch args[len(args)-1] {
					case "json":
						if err := json.Unmarshal([]byte(r.stdout), &value); err != nil {
							t.Errorf("%q: %v", args, err)
						}
					case "yaml":
						if err := yaml.UnmarshalStrict([]byte(r.stdout), &value); err != nil {
							t.Errorf("%q: %v", args, err)
						}
					}
					if kept := fmt.Sprintf("%q", value); value != nil && args[0] != "check" && round != "what selects records" && !strings.Contains(kept, strings.Trim(strconv.Quote(hostile), `"`)) {
						t.Errorf("%q loses text: %.2000s", args, kept)
					}
				}
			})
		}
	}
}

func TestShareOfManyRequesters(t *testing.T) {
	var all []*Request
	for n := range 30 {
		all = append(all, &Request{Requester: fmt.Sprint(n)})
	}
	if kept, omitted := share(all, 20); len(kept) != 20 || omitted != 10 {
		t.Errorf("%d are kept, and %d omitted", len(kept), omitted)
	}
}
