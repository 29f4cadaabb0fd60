// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// oneRequest is a client of an API server that has one request, and counts what is patched.
type oneRequest struct {
	client.Client
	object  *certificatesv1.CertificateSigningRequest
	patches *int
}

func (c oneRequest) Get(_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	c.object.DeepCopyInto(o.(*certificatesv1.CertificateSigningRequest))
	return nil
}

func (c oneRequest) SubResource(string) client.SubResourceClient {
	return countedPatches{patches: c.patches}
}

type countedPatches struct {
	client.SubResourceClient
	patches *int
}

func (p countedPatches) Patch(context.Context, client.Object, client.Patch, ...client.SubResourcePatchOption) error {
	*p.patches++
	return nil
}

// noRecords is an API server without records.
type noRecords struct{ client.WithWatch }

func (noRecords) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

// newAttacked returns a Controller with one request in its cache.
func newAttacked(t *testing.T, config Config, object *certificatesv1.CertificateSigningRequest) (*Controller, *int) {
	t.Helper()
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	config.Rules, config.Namespace = rules, "n"
	if config.Machines == nil {
		config.Machines = noMachines{}
	}
	if config.Providers == nil {
		config.Providers = []evidence.Provider{stubTPM{}}
	}
	patches := new(int)
	api := oneRequest{object: object, patches: patches}
	c, err := New(config, Clients{Client: api, Live: api, Records: noRecords{}, Events: &eventList{}})
	if err != nil {
		t.Fatal(err)
	}
	return c, patches
}

func helloNamed(name string) *certificatesv1.CertificateSigningRequest {
	hello := requestNamed(name, "uid-"+name)
	hello.Spec.SignerName, hello.Spec.Username = attestation.HelloSignerName, "system:bootstrap:abcdef"
	return hello
}

func queued(object client.Object) ctrl.Request {
	return ctrl.Request{NamespacedName: client.ObjectKeyFromObject(object)}
}

// A forged challenge that ends between the event and the look does not save the token of the
// denial.
func TestForgedChallengeCostsAToken(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	rates := fairqueue.DefaultRates()
	rates.Requester = fairqueue.Rate{Every: time.Hour, Burst: 1}
	hello := helloNamed("h")
	c, patches := newAttacked(t, Config{Rates: rates, Now: func() time.Time { return now }}, hello)
	defer c.queue.ShutDown()
	for range 3 { // the bucket has one token
		hello.Annotations = map[string]string{attestation.AnnotationChallenge: must(challengeUntil(now.Add(-intake.CloseDelay + time.Second)))}
		now = now.Add(999 * time.Millisecond)
		c.intake.Observe(hello)
		c.queue.Add(queued(hello))
		served := make(chan ctrl.Request, 1)
		go func() {
			if request, shutdown := c.queue.Get(); !shutdown {
				served <- request
			}
		}()
		select {
		case request := <-served:
			now = now.Add(time.Millisecond)
			if _, err := c.Reconcile(t.Context(), request); err != nil {
				t.Fatal(err)
			}
			c.queue.Done(request)
		case <-time.After(100 * time.Millisecond):
			if *patches != 1 {
				t.Errorf("%d requests were denied", *patches)
			}
			return // the queue waits for a token
		}
	}
	t.Errorf("%d requests were denied with one token", *patches)
}

// Without a RequestCache the annotation is the requester's own. S1: a request to another signer is
// ignored.
func TestForgedClaimOfAnotherSigner(t *testing.T) {
	foreign := helloNamed("f")
	foreign.Spec.SignerName = "example.com/other"
	foreign.Annotations = map[string]string{"attestation.cluster.x-k8s.io/cached-claim": `{"expires":1,"dropped":true}`}
	c, patches := newAttacked(t, Config{}, foreign)
	if _, err := c.Reconcile(t.Context(), queued(foreign)); err != nil || *patches > 0 {
		t.Errorf("%v, %d writes", err, *patches)
	}
	// With one, what was dropped is judged by what the API server has.
	c, patches = newAttacked(t, Config{Requests: &intake.RequestCache{}}, foreign)
	if _, err := c.Reconcile(t.Context(), queued(foreign)); err != nil || *patches > 0 {
		t.Errorf("restored: %v, %d writes", err, *patches)
	}
}

// sharedMachines are a SharedSource.
type sharedMachines []verifier.Machine

func (s sharedMachines) Machines(context.Context, time.Time) ([]verifier.Machine, error) {
	return s, nil
}
func (s sharedMachines) Shared(context.Context, time.Time) ([]verifier.Machine, error) { return s, nil }

// askedTPM is a provider that notes whether it was asked about a named EK.
type askedTPM struct {
	evidence.Challenger
	named *bool
}

func (askedTPM) Name() string                                             { return "tpm" }
func (askedTPM) EK(_, _ *certificatesv1.CertificateSigningRequest) string { return "e1" }
func (p askedTPM) Verify(_ context.Context, q evidence.Question) verifier.Evidence {
	*p.named = q.Named
	return verifier.Evidence{Provider: "tpm", EK: "e1"}
}

// An inventory names the EK of the machine. That counts for each node name that the request may ask
// for.
func TestNamedEKOfAnIndexedMachine(t *testing.T) {
	machines := sharedMachines{{
		Ref: verifier.MachineRef{Name: "m"}, EKs: []verifier.NamedEK{{Source: verifier.EKInventory, EK: "e1"}},
		Names: []verifier.NodeName{{Source: verifier.NameInventory, Value: "worker-1"}},
	}}
	for name, source := range map[string]evidence.MachineSource{"all machines": struct{ evidence.MachineSource }{machines}, "indexed": machines} {
		named, hello := false, helloNamed("h")
		c, _ := newAttacked(t, Config{Machines: source, Providers: []evidence.Provider{askedTPM{named: &named}}}, hello)
		s, err := c.collector.Collect(t.Context(), hello, verifier.Claim{Provider: "tpm", Hello: true, NodeName: "worker-9"}, time.Now(),
			collect.Passes[len(collect.Passes)-1], collect.NewMemo())
		if err != nil {
			t.Fatal(err)
		}
		if !s.EKNamed || !named {
			t.Errorf("%s: the provider is asked about an EK that nothing names; %d machines", name, len(s.Machines))
		}
	}
}
