// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/report"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// unlisted files a hello of a machine that nobody knows.
func (k *kit) unlisted(name, requester string) string {
	k.Helper()
	return k.request(name, attestation.HelloSignerName, "late", requester, document{EK: "ek-late"}).Name
}

// waitingFor returns the reason in the annotation of a request, "" if there is none.
func (k *kit) waitingFor(name string) string {
	k.Helper()
	waiting, err := attestation.ParseStatement(k.get(name).Annotations[attestation.AnnotationWaiting])
	if err == nil && waiting.Text != verifier.WaitingText(verifier.Reason(waiting.Reason)) {
		k.Errorf("the text of %s is %q", waiting.Reason, waiting.Text)
	}
	return waiting.Reason
}

// A request says what it waits for. That is written once for each reason, in place of what the
// requester wrote there, and is gone with the challenge.
func TestWaitingIsPublished(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		hello := k.unlisted("hello", asToken("late"))
		k.annotate(hello, attestation.AnnotationWaiting, "Forged: by the requester")
		for range 5 {
			in.once(hello)
			time.Sleep(time.Second)
		}
		if got := k.waitingFor(hello); got != string(verifier.ReasonMachineNotFound) || in.counted()["patch certificatesigningrequests"] != 1 {
			k.Errorf("%q, %v", got, in.made())
		}
		late := machineNamed("late", "ek-late")
		late.Ready = false
		k.machine(late)
		for range 3 {
			in.once(hello)
		}
		if got := k.waitingFor(hello); got != string(verifier.ReasonMachineNotReady) || in.counted()["patch certificatesigningrequests"] != 1 {
			k.Errorf("%q, %v", got, in.made())
		}
		k.machines.list[len(k.machines.list)-1].Ready = true
		in.once(hello)
		annotations := k.get(hello).Annotations
		if _, still := annotations[attestation.AnnotationWaiting]; still || annotations[attestation.AnnotationChallenge] == "" {
			k.Errorf("after the challenge: %v", annotations)
		}
	})
}

// In audit mode nothing is written.
func TestAuditPublishesNothing(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Audit = true
		in := k.start(inSync)
		hello := k.unlisted("hello", asToken("late"))
		in.once(hello)
		if len(k.get(hello).Annotations) > 0 || k.journal.outcomes() != "Wait" {
			k.Errorf("%v", k.get(hello).Annotations)
		}
	})
}

// Of one requester as many requests are annotated as have Events: 50, then one a second. The others
// follow at their next looks, and another requester's is annotated at once.
func TestPublishedReasonsAreBounded(t *testing.T) {
	const flood = 60
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		annotated := func() (n int) {
			k.Helper()
			for i := range flood {
				in.once(fmt.Sprint("r-", i))
			}
			return in.counted()["patch certificatesigningrequests"]
		}
		for i := range flood {
			k.unlisted(fmt.Sprint("r-", i), asToken("late"))
		}
		if got := annotated(); got != act.EventRate.Burst {
			k.Errorf("%d are annotated at once", got)
		}
		if got := annotated(); got != 0 {
			k.Errorf("%d more are annotated at once", got)
		}
		in.once(k.unlisted("other", asToken("worker-x")))
		if k.waitingFor("other") == "" {
			k.Error("another requester's is not annotated")
		}
		in.counted()
		for second := range flood - act.EventRate.Burst {
			time.Sleep(time.Second)
			if got := annotated(); got != 1 {
				k.Errorf("%d are annotated after %d s", got, second+1)
			}
		}
		for i := range flood {
			if k.waitingFor(fmt.Sprint("r-", i)) == "" {
				k.Errorf("r-%d is never annotated", i)
			}
		}
	})
}

// The time of the write counts against the requester's turns: with a slow API server it has fewer.
func TestPublishingTakesTurns(t *testing.T) {
	const slow = time.Second
	inBubble(t, func(k *kit) {
		k.config.Rates = fairqueue.DefaultRates()
		k.config.Rates.Requester = fairqueue.Rate{Every: 10 * time.Millisecond, Burst: 100}
		in := k.start(inSync)
		in.intercept = func(_ int, c call, run func() error) error {
			if c.writes() {
				time.Sleep(slow)
			}
			return run()
		}
		queue := in.queueOf()
		look := func(name string) (took time.Duration) {
			k.Helper()
			in.intake.Observe(in.cached(name))
			queue.Add(requestFor(name))
			began := time.Now()
			request, _ := queue.Get()
			took = time.Since(began)
			in.once(name)
			queue.Done(request)
			return took
		}
		look(k.unlisted("first", asToken("late")))
		// the write took all of the burst
		if took := look(k.unlisted("second", asToken("late"))); took == 0 {
			k.Error("the next request had its turn at once")
		}
		if took := look(k.unlisted("other", asToken("worker-x"))); took > 0 {
			k.Errorf("another requester's had its turn after %s", took)
		}
	})
}

// A write that fails, for any reason, does not change the decision. It is repeated at the next
// evaluation.
func TestPublishingFails(t *testing.T) {
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				hello := k.unlisted("hello", asToken("late"))
				in.intercept = func(_ int, c call, run func() error) error {
					if c.writes() {
						return answer(c)
					}
					return run()
				}
				if result := in.once(hello); result.RequeueAfter != time.Second || k.journal.outcomes() != "Wait" {
					k.Errorf("%+v", result)
				}
				if reported := len(k.journal.eventsOf(string(report.ReasonWriteRefused))); (reported == 1) != (name == "forbidden") {
					k.Errorf("%d Events: %q", reported, k.journal.events)
				}
				in.intercept = nil
				in.once(hello)
				if k.waitingFor(hello) == "" {
					k.Error("it is not repeated")
				}
			})
		})
	}
}

// The event of our own annotation queues nothing, also if the cache has no room for the content any
// more.
func TestAnnotationQueuesNothingWithoutContent(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		hello := k.unlisted("hello", asToken("late"))
		before := in.cached(hello)
		k.annotate(hello, attestation.AnnotationWaiting, "A: b")
		in.Requests.Budget = fairqueue.NewBudget()
		in.Requests.Budget.Reserve(asToken("late"), 16<<20)
		after := in.cached(hello)
		if !in.intake.IsDropped(after) || in.intake.Observed().Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}) {
			k.Error("it is queued")
		}
	})
}

// The event of our own annotation queues nothing: a look would take a token of the requester. Any
// other change does.
func TestAnnotationQueuesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		change func(k *kit, hello string)
		queued bool
	}{
		"the annotation": {func(k *kit, hello string) {
			k.annotate(hello, attestation.AnnotationWaiting, "A: b")
		}, false},
		"a challenge": {func(k *kit, hello string) { k.challenged(k.get(hello)) }, true},
		"a condition": {func(k *kit, hello string) {
			k.condition(hello, certificatesv1.CertificateDenied, "A")
		}, true},
		"an approval":              {func(k *kit, hello string) { k.condition(hello, certificatesv1.CertificateApproved, "A") }, true},
		"nothing, which is resync": {func(*kit, string) {}, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				hello := k.unlisted("hello", asToken("late"))
				before := in.cached(hello)
				c.change(k, hello)
				for cache, updated := range map[string]event.UpdateEvent{
					"bounded": {ObjectOld: before, ObjectNew: in.cached(hello)},
					"whole":   {ObjectOld: k.request("other", attestation.HelloSignerName, "late", asToken("late"), document{EK: "ek-late"}), ObjectNew: k.get("other")},
				} {
					if cache == "whole" {
						c.change(k, "other")
						updated.ObjectNew = k.get("other")
					}
					if got := in.intake.Observed().Update(updated); got != c.queued {
						k.Errorf("%s: queued: %t", cache, got)
					}
				}
			})
		})
	}
}
