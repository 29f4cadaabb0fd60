// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/report"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

func requestNamed(name, uid string) *certificatesv1.CertificateSigningRequest {
	object := &certificatesv1.CertificateSigningRequest{}
	object.Name, object.UID = name, types.UID(uid)
	return object
}

// A Controller records by a telemetry.NewDedupRecorder.
func TestControllersEventsAreNotRepeated(t *testing.T) {
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	events := &eventList{}
	c, err := New(Config{Rules: rules, Providers: []evidence.Provider{stubTPM{}}, Machines: noMachines{}, Namespace: "n"}, Clients{Events: events})
	if err != nil {
		t.Fatal(err)
	}
	for _, message := range []string{"first", "second"} {
		c.reporter.Event(t.Context(), requestNamed("r", "r"), "", corev1.EventTypeNormal, "A", message)
	}
	if len(events.all) != 1 {
		t.Errorf("%q", events.all)
	}
}

// eventList collects Events.
type eventList struct{ all []string }

func (l *eventList) Eventf(_, _ runtime.Object, kind, reason, _, _ string, args ...any) {
	l.all = append(l.all, kind+" "+reason+" "+args[0].(string))
}

// What a request waits for is reported once, and again once it waits for something else.
func TestWaitingIsReportedOnce(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		hello := k.request("hello", attestation.HelloSignerName, "late", asToken("late"), document{EK: "ek-late"}).Name
		for range 5 {
			in.once(hello)
			time.Sleep(time.Second)
		}
		if events := k.journal.events; len(events) != 1 || !strings.Contains(events[0], string(verifier.ReasonMachineNotFound)) {
			k.Errorf("%q", events)
		}
		late := machineNamed("late", "ek-late")
		late.Ready = false
		k.machine(late)
		for range 3 {
			in.once(hello)
		}
		if events := k.journal.events; len(events) != 2 || !strings.Contains(events[1], string(verifier.ReasonMachineNotReady)) {
			k.Errorf("%q", events)
		}
	})
}

// The kinds of Events: warnings on what is refused and on unattested nodes, none on intermediate
// steps. They are on the Node, too, which learns each reason once a minute. A certificate is
// reported on its Node alone: request and record say so in their conditions.
func TestEvents(t *testing.T) {
	for name, want := range map[string][]string{
		"Challenge": nil,
		"Sign, renewal": {
			"Normal Attested on worker-1: renewal: issued a certificate for node worker-1 to machine worker-1, with serial S, until 2000-01-08T00:00:00Z (node worker-1, EK ek-1, template template-of-ek-1, class renewal)",
		},
		"Approve":          nil,
		"Deny, of a proof": {"Warning AttestationQuoteMismatch on false: AttestationQuoteMismatch: so says the document (node worker-1, EK ek-1, template template-of-ek-1, class first)"},
		"Fail":             {"Warning ApprovedWithoutAttestation on approved-by-hand: ApprovedWithoutAttestation: approved, but not by this controller (node worker-1, EK ek-1, template template-of-ek-1, class first)"},
		"ApproveServing": {
			"Normal AddressesVerified on serves: the addresses of node worker-1 were verified: its serving certificate may be issued (node worker-1, class serving)",
			"Normal AddressesVerified on worker-1: serves: the addresses of node worker-1 were verified: its serving certificate may be issued (node worker-1, class serving)",
		},
		"SignServing": {
			"Normal AddressesVerified on serves-by-us: the addresses of node worker-1 were verified: its serving certificate may be issued (node worker-1, class serving)",
			"Normal AddressesVerified on worker-1: serves-by-us: the addresses of node worker-1 were verified: its serving certificate may be issued (node worker-1, class serving)",
			"Normal Attested on serves-by-us: issued a serving certificate for node worker-1 (node worker-1, class serving)",
			"Normal Attested on worker-1: serves-by-us: issued a serving certificate for node worker-1 (node worker-1, class serving)",
		},
		"ApproveUnattested": {
			"Warning UnattestedNode on stock: approved without evidence, since the node is in unattestedNodes (node left-alone, class renewal)",
			"Warning UnattestedNode on left-alone: stock: approved without evidence, since the node is in unattestedNodes (node left-alone, class renewal)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				scenarios[name].run(k, inSync, nil)
				got := regexp.MustCompile("serial [0-9a-f]+").ReplaceAllString(strings.Join(k.journal.events, "\n"), "serial S")
				if got != strings.Join(want, "\n") {
					k.Errorf("%s\nwant\n%s", got, strings.Join(want, "\n"))
				}
			})
		})
	}
}

// The owner of a record has an Event for each certificate. Record and owner have one for denials of
// the node's own requests, once a minute for each reason. Requests of others cause none.
func TestEventsOnRecords(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Owned = &records.Owned{
			Source: "cluster-api", Cluster: testCluster,
			Owner: func(m verifier.MachineRef) (metav1.OwnerReference, error) {
				return metav1.OwnerReference{APIVersion: "v1", Kind: "Machine", Name: m.Name, UID: "of-worker-1"}, nil
			},
		}
		in := k.start(inSync)
		onRecord := func() (found []string) {
			for _, e := range k.journal.events {
				if strings.Contains(e, " on record/") || strings.Contains(e, " on Machine/") {
					found = append(found, e[:strings.Index(e, ": ")])
				}
			}
			k.journal.events = nil
			return found
		}
		both := func(what string) []string {
			return []string{what + " on record/worker-1", what + " on Machine/worker-1"}
		}
		in.once(k.pair("first", "worker-1", "ek-1", asToken("worker-1")))
		if got := onRecord(); !slices.Equal(got, []string{"Normal Attested on Machine/worker-1"}) {
			k.Errorf("issued: %q", got)
		}
		deny := func(name, requester string) {
			in.once(k.request(name, attestation.HelloSignerName, "worker-1", requester, document{EK: "ek-another"}).Name)
		}
		deny("foreign", asToken("worker-1"))
		deny("neighbour", asNode("worker-2"))
		if got := onRecord(); len(got) > 0 {
			k.Errorf("others' requests: %q", got)
		}
		for i := range 3 {
			deny(fmt.Sprintf("own-%d", i), asNode("worker-1"))
		}
		if got := onRecord(); !slices.Equal(got, both("Warning "+string(verifier.ReasonNodeNameMismatch))) {
			k.Errorf("own requests: %q", got)
		}
	})
}

// Of one requester the Events about denials are bounded. The Node's owner learns of it
// nevertheless, once a minute. Decisions are counted, each of them.
func TestEventsAboutDenialsAreBounded(t *testing.T) {
	const flood = 60
	inBubble(t, func(k *kit) {
		k.config.Metrics = must(registeredMetrics()).For("flooded")
		in := k.start(inSync)
		k.node("worker-2")
		deny := func(i int, requester string) {
			in.once(k.request(fmt.Sprintf("r-%d-%s", i, requester[len(requester)-1:]), attestation.HelloSignerName, "worker-2", requester, document{EK: "ek-1"}).Name)
		}
		for i := range flood {
			deny(i, asToken("worker-1"))
		}
		onRequests, onNode := 0, 0
		for _, e := range k.journal.eventsOf(string(verifier.ReasonNodeNameMismatch)) {
			if strings.Contains(e, "on worker-2") {
				onNode++
			} else {
				onRequests++
			}
		}
		if onRequests != act.EventRate.Burst || onNode != 1 {
			k.Errorf("%d Events on requests, %d on the Node", onRequests, onNode)
		}
		deny(0, asToken("worker-x"))
		if events := k.journal.events; !strings.Contains(events[len(events)-1], "r-0-x") {
			k.Errorf("another requester's denial is not reported: %q", events[len(events)-1])
		}
		time.Sleep(time.Minute)
		deny(flood, asToken("worker-1"))
		if events := k.journal.events; !strings.Contains(events[len(events)-1], "on worker-2") {
			k.Errorf("after a minute the Node's owner is not told: %q", events[len(events)-1])
		}
	})
}

// registeredMetrics are those of all tests: they can be registered once.
var registeredMetrics = sync.OnceValues(telemetry.NewMetrics)

// The hello of a proof that got its certificate is closed as denied, since it cannot end otherwise.
// People see that in its message. Nothing counts it or reports it as a denial.
func TestCompletedHelloIsNoDenial(t *testing.T) {
	for name, configure := range map[string]func(k *kit){"Sign": func(*kit) {}, "ApproveOnly": approveOnly} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				configure(k)
				k.config.Metrics = must(registeredMetrics()).For(t.Name())
				defer k.config.Metrics.Forget()
				in := k.start(inSync)
				hello := k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}).Name
				in.settle()
				proof := k.request("proof", tpmSigner, "worker-1", asToken("worker-1"), document{Hello: hello}).Name
				in.settle()
				if k.config.CA == nil {
					k.issue(proof, "system:node:worker-1")
					in.settle()
				}
				closed := k.is(hello, "Denied/"+attestation.ReasonCompleted)
				if message := closed.Status.Conditions[0].Message; !strings.Contains(message, "normal end") || !strings.Contains(message, " "+proof+",") {
					k.Errorf("%q", message)
				}
				in.once(hello) // the event of its own denial
				if got := countedDecisions(k); got != "Approve/Attested Challenge/Challenged" && got != "Approve/Attested Challenge/Challenged Sign/Attested" {
					k.Errorf("counted: %s", got)
				}
				if events := k.journal.eventsOf(attestation.ReasonCompleted); len(events) > 0 {
					k.Errorf("%q", events)
				}
			})
		})
	}
}

// countedDecisions returns the decisions that the metrics of a test count, once each.
func countedDecisions(k *kit) string {
	var counted []string
	for _, family := range must(metrics.Registry.Gather()) {
		if family.GetName() != "node_attestation_decisions_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, label := range metric.GetLabel() {
				labels[label.GetName()] = label.GetValue()
			}
			if labels["cluster"] == k.Name() {
				counted = append(counted, labels["outcome"]+"/"+labels["reason"])
			}
		}
	}
	slices.Sort(counted)
	return strings.Join(counted, " ")
}

// A warning of the rules is an Event, and the request passes.
func TestWarningsAreReported(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		record := k.attested("worker-1", "ek-1")
		k.machines.list[0].EKs[0].Source = verifier.EKPlatform
		record.Spec.EK.Source = ""
		k.machines.list[0].EKs[0].EK = "ek-another"
		if err := k.server.Update(k.ctx, record); err != nil {
			k.Fatal(err)
		}
		proof := k.pair("proof", "worker-1", "ek-1", asNode("worker-1"))
		in.settle()
		k.is(proof, "Approved/Attested")
		if events := k.journal.eventsOf(string(verifier.ReasonEKNotNamed)); len(events) == 0 || !strings.HasPrefix(events[0], "Warning") {
			k.Errorf("%q", k.journal.events)
		}
		if lines := k.journal.linesWith("warnings EKNotNamed"); len(lines) == 0 {
			k.Error("it is not in the log")
		}
	})
}

// A write that the API server refuses for good is reported on the request, once in 14 minutes and
// within the bound on Events. Other failures are not.
func TestRefusedWritesAreReported(t *testing.T) {
	refusals := map[string]error{
		"invalid":     apierrors.NewInvalid(schema.GroupKind{Kind: "K"}, "n", nil),
		"bad request": apierrors.NewBadRequest("b"),
		"too large":   apierrors.NewRequestEntityTooLargeError("t"),
		"forbidden":   answers["forbidden"](call{}),
		"conflict":    answers["conflict"](call{}),
		"timeout":     answers["timeout"](call{}),
		"not found":   answers["not found"](call{}),
		"other":       errors.New("the connection broke"),
	}
	for name, refusal := range refusals {
		for _, verb := range []string{"create", "get"} {
			t.Run(name+"/"+verb, func(t *testing.T) {
				inBubble(t, func(k *kit) {
					want := 0
					switch name {
					case "forbidden", "invalid", "bad request", "too large":
						if verb == "create" {
							want = 1
						}
					}
					in := k.start(inSync)
					proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
					in.intercept = func(_ int, c call, run func() error) error {
						if c.verb == verb {
							return refusal
						}
						return run()
					}
					for range 10 {
						_, _ = in.reconcile(proof)
						time.Sleep(time.Second)
					}
					if got := len(k.journal.eventsOf(string(report.ReasonWriteRefused))); got != want {
						k.Errorf("%d Events: %q", got, k.journal.events)
					}
					if got := reasonsOf(k.get(proof)); strings.Contains(got, "Denied") {
						k.Errorf("it is %q", got)
					}
				})
			})
		}
	}
}

// A requester whose requests are all refused gets no more Events than for denials.
func TestReportsOfRefusedWritesAreBounded(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		in.intercept = func(_ int, c call, run func() error) error {
			if c.writes() {
				return answers["forbidden"](c)
			}
			return run()
		}
		for i := range 2 * act.EventRate.Burst {
			_, _ = in.reconcile(k.request(fmt.Sprintf("r-%d", i), attestation.HelloSignerName, "worker-2", asToken("worker-1"), document{EK: "ek-1"}).Name)
		}
		if got := len(k.journal.eventsOf(string(report.ReasonWriteRefused))); got != act.EventRate.Burst {
			k.Errorf("%d Events", got)
		}
	})
}
