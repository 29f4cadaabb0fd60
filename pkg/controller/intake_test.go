// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// queueOf returns the queue that feeds a controller.
func (in *instance) queueOf() workqueue.TypedRateLimitingInterface[reconcile.Request] {
	queue := in.queue.NewQueue("test", workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	in.k.Cleanup(func() {
		queue.ShutDown()
		synctest.Wait()
	})
	return queue
}

// cached returns a request as the cache has it.
func (in *instance) cached(name string) *certificatesv1.CertificateSigningRequest {
	in.k.Helper()
	object := &certificatesv1.CertificateSigningRequest{}
	if err := in.cache.Get(in.k.ctx, client.ObjectKey{Name: name}, object); err != nil {
		in.k.Fatal(err)
	}
	return object
}

func requestFor(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: client.ObjectKey{Name: name}}
}

// With one token each for requesters, a second look waits for the next token. What costs next to
// nothing takes none: requests of others, decided and approved ones, and challenged hellos.
func TestWhichLooksTakeATokenOfTheRate(t *testing.T) {
	const every = time.Minute
	hello := func(k *kit) *certificatesv1.CertificateSigningRequest {
		return k.request("r", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"})
	}
	for name, c := range map[string]struct {
		file    func(k *kit)
		limited bool
	}{
		"a pending hello": {func(k *kit) { hello(k) }, true},
		"a pending proof": {func(k *kit) {
			k.request("r", tpmSigner, "worker-1", asToken("worker-1"), document{Hello: "h"})
		}, true},
		"a challenged hello": {func(k *kit) { k.challenged(hello(k)) }, false},
		"a hello with a challenge for ages": {func(k *kit) {
			hello(k)
			k.annotate("r", attestation.AnnotationChallenge, must(challengeUntil(time.Now().Add(24*time.Hour))))
		}, true},
		"a hello with what is no challenge": {func(k *kit) {
			hello(k)
			k.annotate("r", attestation.AnnotationChallenge, "{}")
		}, true},
		"an approved proof": {func(k *kit) {
			k.request("r", tpmSigner, "worker-1", asToken("worker-1"), document{Hello: "h"})
			k.condition("r", certificatesv1.CertificateApproved, "A")
		}, false},
		"a denied hello": {func(k *kit) {
			hello(k)
			k.condition("r", certificatesv1.CertificateDenied, "A")
		}, false},
		"another signer's": {func(k *kit) { k.plain("r", "example.com/other", "worker-1", asToken("worker-1")) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				k.config.Rates = fairqueue.DefaultRates()
				k.config.Rates.Requester = fairqueue.Rate{Every: every, Burst: 1}
				in := k.start(unwatched)
				c.file(k)
				queue := in.queueOf()
				var took time.Duration
				for range 2 {
					if !in.intake.Observed().Create(event.CreateEvent{Object: in.cached("r")}) || !in.intake.Observed().Update(event.UpdateEvent{ObjectNew: in.cached("r")}) {
						k.Fatal("an event does not pass")
					}
					queue.Add(requestFor("r"))
					began := time.Now()
					got, _ := queue.Get()
					queue.Done(got)
					took += time.Since(began)
				}
				if limited := took >= every/2; limited != c.limited {
					k.Errorf("two looks took %s", took)
				}
				if !in.intake.Observed().Delete(event.DeleteEvent{Object: in.cached("r")}) {
					k.Error("its end does not pass")
				}
			})
		})
	}
}

// A hello whose challenge is open comes back once the challenge is over, and is then denied. The
// look at it takes a token: with forged challenges a requester would save that.
func TestEndOfAChallenge(t *testing.T) {
	for name, lifetime := range map[string]time.Duration{"ours": 5 * time.Minute, "forged": 59 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				k.config.Rates = fairqueue.DefaultRates()
				k.config.Rates.Requester = fairqueue.Rate{Every: 20 * time.Minute, Burst: 1}
				in := k.start(inSync)
				k.tpm.lifetime = lifetime
				k.challenged(k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}))
				queue := in.queueOf()
				in.intake.Observe(in.cached("hello"))
				queue.Add(requestFor("hello"))
				request, _ := queue.Get()
				result := in.once("hello")
				queue.Done(request)
				if want := lifetime + intake.CloseDelay; result.RequeueAfter > want || result.RequeueAfter < want-time.Second {
					k.Errorf("it comes back after %s", result.RequeueAfter)
				}
				if len(in.made()) > 0 || k.tpm.count() > 0 {
					k.Errorf("an open challenge costs %v", in.made())
				}
				// The first look took no token, so there is one for the second, and none for a
				// third.
				for i, wait := range []time.Duration{0, 15 * time.Minute} {
					queue.Add(requestFor("hello"))
					began := time.Now()
					request, _ = queue.Get()
					queue.Done(request)
					if took := time.Since(began); took < wait || i == 0 && took > time.Minute {
						k.Errorf("look %d took %s", i+2, took)
					}
				}
				time.Sleep(lifetime)
				in.once("hello")
				k.is("hello", "Denied/"+string(verifier.ReasonHelloExpired))
			})
		})
	}
}

// In audit mode an expired hello stays open.
func TestEndOfAChallengeInAuditMode(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Audit = true
		in := k.start(inSync)
		k.challenged(k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}))
		time.Sleep(time.Hour)
		if result := in.once("hello"); result.RequeueAfter != intake.CloseDelay {
			k.Errorf("%+v", result)
		}
		k.is("hello", "")
	})
}

// withOrigin returns a request that shows its AK to a tpmStub.
func withOrigin(object *certificatesv1.CertificateSigningRequest, ak string) *certificatesv1.CertificateSigningRequest {
	object.Annotations = map[string]string{attestation.AnnotationOrigin: ak}
	return object
}

// The flow of a proof has the EK that its hello claims, while the cache has the hello.
func TestFlowOf(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(unwatched)
		k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
		k.request("lonely", tpmSigner, "worker-1", asNode("worker-1"), document{Hello: "none"})
		k.file(withOrigin(k.build("shown", attestation.HelloSignerName, "worker-1", document{EK: "ek-1"}), "ak-1"), asNode("worker-1"))
		k.file(withOrigin(k.build("shown-late", tpmSigner, "worker-1", document{Hello: "shown"}), "ak-1"), asNode("worker-1"))
		for name, want := range map[string]fairqueue.Flow{
			"hello-proof": {Class: fairqueue.Tokens, Requester: asToken("worker-1"), Claim: fairqueue.Claim{EK: "ek-1", Node: "worker-1"}},
			"proof":       {Class: fairqueue.Tokens, Requester: asToken("worker-1"), Claim: fairqueue.Claim{EK: "ek-1", Node: "worker-1", Proof: true}},
			"shown":       {Class: fairqueue.Nodes, Requester: asNode("worker-1"), Claim: fairqueue.Claim{AK: "ak-1", EK: "ek-1", Node: "worker-1"}},
			"shown-late":  {Class: fairqueue.Nodes, Requester: asNode("worker-1"), Claim: fairqueue.Claim{AK: "ak-1", EK: "ek-1", Node: "worker-1", Proof: true}},
			"lonely":      {Class: fairqueue.Nodes, Requester: asNode("worker-1"), Claim: fairqueue.Claim{Node: "worker-1", Proof: true}},
		} {
			if got := in.intake.FlowOf(in.cached(name)); got != want {
				k.Errorf("%s: %+v", name, got)
			}
		}
	})
}

// woken is a queue that notes what is added.
type woken struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
	names []string
}

func (w *woken) Add(request reconcile.Request) { w.names = append(w.names, request.Name) }

func (w *woken) taken() []string {
	names := w.names
	w.names = nil
	slices.Sort(names)
	return names
}

// Two requests wait: one for a machine that becomes known, one for a machine that does not.
func waiting(k *kit, in *instance) {
	k.request("listed", attestation.HelloSignerName, "late", asToken("late"), document{EK: "ek-late"})
	k.request("unlisted", attestation.HelloSignerName, "never", asToken("never"), document{EK: "ek-never"})
	in.once("listed")
	in.once("unlisted")
}

// A source that shares its machines: the same slice changes nothing, another one wakes what is
// listed.
func TestSharedMachinesWake(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Machines = sharedList{k.machines}
		in := k.start(inSync)
		w, queue := in.machineWatch, &woken{}
		compare := func(want ...string) {
			k.Helper()
			if err := w.Compare(k.ctx, queue); err != nil {
				k.Fatal(err)
			}
			if got := queue.taken(); !slices.Equal(got, want) {
				k.Errorf("woken are %q, want %q", got, want)
			}
		}
		compare()
		if !in.listed.Load().Has(fairqueue.Claim{EK: "ek-1"}) {
			k.Error("the machines are not listed")
		}
		waiting(k, in)
		compare()
		k.machine(machineNamed("late", "ek-late"))
		compare("listed")
		before := in.listed.Load()
		compare()
		if in.listed.Load() != before {
			k.Error("the same slice was listed again")
		}
		k.machines.set(k.machines.list...) // another slice, and the same machines
		compare("listed")
		k.machines.fail(errors.New("away"))
		if err := w.Compare(k.ctx, queue); err == nil || len(queue.taken()) > 0 {
			k.Error("machines that are not known were compared")
		}
	})
}

// A leader that starts has requests in its queue before it has the records. They are ordered again
// once it has them.
func TestRecordsThatAreKnownLater(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(unwatched)
		record := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "worker-1"}}
		record.Spec = v1alpha1.NodeAttestationSpec{Cluster: testCluster, NodeName: "worker-1", AKName: "ak-1"}
		if err := k.server.Create(k.ctx, record); err != nil {
			k.Fatal(err)
		}
		queue, w := in.queueOf(), in.machineWatch
		// the newest copy would be first
		for _, name := range []string{"copy-1", "shown", "copy-2"} {
			object := k.build(name, attestation.HelloSignerName, "worker-1", document{EK: "ek-1"})
			if name == "shown" {
				withOrigin(object, "ak-1")
			}
			k.file(object, asNode("worker-1"))
			in.intake.Observe(in.cached(name))
			queue.Add(requestFor(name))
		}
		compare := func() {
			if err := w.Compare(k.ctx, queue); err != nil {
				k.Fatal(err)
			}
		}
		compare()
		source := must(in.records.Watch(logr.Discard()))
		ctx, stop := context.WithCancel(k.ctx)
		defer synctest.Wait()
		defer stop()
		if err := source.Start(ctx, nil); err != nil {
			k.Fatal(err)
		}
		synctest.Wait()
		compare()
		if first, _ := queue.Get(); first != requestFor("shown") {
			k.Errorf("%s comes first", first.Name)
		}
	})
}

// A source that builds its machines: equal ones change nothing.
func TestBuiltMachinesWake(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		w, queue := in.machineWatch, &woken{}
		for i, want := range [][]string{nil, nil, {"listed"}, nil} {
			switch i {
			case 1:
				waiting(k, in)
			case 2:
				k.machine(machineNamed("late", "ek-late"))
			}
			if err := w.Compare(k.ctx, queue); err != nil {
				k.Fatal(err)
			}
			if got := queue.taken(); !slices.Equal(got, want) {
				k.Errorf("%d: woken are %q, want %q", i, got, want)
			}
		}
	})
}

// The watch of a source that builds its machines rests while nothing is queued and nothing waits.
// That of a shared source does not. Both end with their context.
func TestMachineWatchRests(t *testing.T) {
	for _, shared := range []bool{false, true} {
		inBubble(t, func(k *kit) {
			if shared {
				k.config.Machines = sharedList{k.machines}
			}
			in := k.start(inSync)
			ctx, cancel := context.WithCancel(k.ctx)
			defer synctest.Wait()
			defer cancel()
			if err := in.machineWatch.Source(logr.Discard()).Start(ctx, in.queueOf()); err != nil {
				k.Fatal(err)
			}
			synctest.Wait()
			first := k.machines.count()
			if first == 0 || in.listed.Load() == nil {
				k.Fatal("the machines were not listed at the start")
			}
			time.Sleep(time.Minute)
			if idle := k.machines.count() == first; idle == shared {
				k.Errorf("shared %t: they were read %d times", shared, k.machines.count()-first)
			}
			waiting(k, in)
			read := k.machines.count()
			k.machines.fail(errors.New("away")) // each decision says so
			time.Sleep(time.Minute)
			if k.machines.count() == read {
				k.Errorf("shared %t: they were not read while a request waits", shared)
			}
		})
	}
}
