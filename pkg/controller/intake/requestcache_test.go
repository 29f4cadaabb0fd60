// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"bytes"
	"context"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/statetest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// bounded is the intake of a Controller with a RequestCache.
var bounded = &Intake{Summarized: true}

// The cache keeps whole what may be decided on, and of all else that it is there.
func TestRequestsAreTrimmed(t *testing.T) {
	p := policy()
	p.UnattestedNodes = []string{"left-alone"}
	rules, err := verifier.New(p)
	if err != nil {
		t.Fatal(err)
	}
	request := func(signer string, size int, conditions ...certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequest {
		r := &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{
				Name: "r", UID: "u", ResourceVersion: "7", CreationTimestamp: metav1.Now(),
				Annotations: map[string]string{"a": "b", attestation.AnnotationChallenge: "c"}, Labels: map[string]string{"a": "b"}, GenerateName: "g",
				Finalizers: []string{"example.com/f"}, OwnerReferences: []metav1.OwnerReference{{Name: "o"}}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}},
			},
			Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: signer, Username: "n", Request: bytes.Repeat([]byte("x"), size), Extra: map[string]certificatesv1.ExtraValue{"a": {"b"}}},
		}
		for _, c := range conditions {
			r.Status.Conditions = append(r.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: c, Status: corev1.ConditionTrue, Message: "long"})
		}
		return r
	}
	issued := request("example.com/tpm", 100, certificatesv1.CertificateApproved)
	issued.Status.Certificate = []byte("c")
	// A node that is left alone here shows its evidence to somebody else.
	elsewhere := request("kubernetes.io/kube-apiserver-client-kubelet", 100)
	elsewhere.Spec.Username = "system:node:left-alone"
	elsewhere.Spec.Request = []byte("-----BEGIN " + attestation.BlockProvider + "-----\nYQ==\n-----END " + attestation.BlockProvider + "-----\n")
	leftAlone := request("kubernetes.io/kube-apiserver-client-kubelet", 100)
	leftAlone.Spec.Username = "system:node:left-alone"
	for name, c := range map[string]struct {
		request *certificatesv1.CertificateSigningRequest
		size    int
		state   csrstate.State
	}{
		"ours":                   {request("example.com/tpm", 100), 100, csrstate.Pending},
		"ours, approved":         {request("example.com/tpm", 100, certificatesv1.CertificateApproved), 100, csrstate.Approved},
		"ours, issued":           {issued, 100, csrstate.Issued},
		"ours, denied":           {request("example.com/tpm", 100, certificatesv1.CertificateDenied), 0, csrstate.Denied},
		"ours, failed":           {request("example.com/tpm", 100, certificatesv1.CertificateApproved, certificatesv1.CertificateFailed), 0, csrstate.Failed},
		"ours, lower case":       {request("example.com/tpm", 100, "approved"), 0, csrstate.Closed},
		"ours, lower case, too":  {request("example.com/tpm", 100, certificatesv1.CertificateApproved, "approved"), 0, csrstate.Closed},
		"ours, capitals, before": {request("example.com/tpm", 100, "APPROVED", certificatesv1.CertificateApproved), 0, csrstate.Closed},
		"ours, with a blank":     {request("example.com/tpm", 100, "Approved "), 0, csrstate.Closed},
		"ours, others' type":     {request("example.com/tpm", 100, certificatesv1.CertificateApproved, "Acme"), 0, csrstate.Closed},
		"ours, as it may":        {request("example.com/tpm", attestation.MaxRequestSize), attestation.MaxRequestSize, csrstate.Pending},
		"ours, too long":         {request("example.com/tpm", 1<<20), attestation.MaxRequestSize + 1, csrstate.Pending},
		"left alone":             {leftAlone, 100, csrstate.Pending},
		"another provider's, of a node that is left alone": {elsewhere, 0, csrstate.Pending},
		"another's":       {request("example.com/other", 1<<20), 0, csrstate.Pending},
		"another's, done": {request("example.com/other", 1<<20, certificatesv1.CertificateApproved), 0, csrstate.Approved},
	} {
		concerned := rules.Matches(c.request)
		got := NewRequestCache(rules).Reduce(c.request)
		if len(got.Spec.Request) != c.size || cap(got.Spec.Request) > 2*attestation.MaxRequestSize || csrstate.Of(got) != c.state || rules.Matches(got) != concerned {
			t.Errorf("%s: %d bytes, of %d, %v", name, len(got.Spec.Request), cap(got.Spec.Request), csrstate.Of(got))
		}
		kept := metav1.ObjectMeta{Name: "r", UID: "u", ResourceVersion: "7", CreationTimestamp: c.request.CreationTimestamp}
		if c.size > 0 {
			kept.Annotations = map[string]string{attestation.AnnotationChallenge: "c"}
		}
		if _, claimed := bounded.summaryIn(got); claimed != (c.size > 0 && c.state == csrstate.Pending) || bounded.IsDropped(got) {
			t.Errorf("%s: %q", name, got.Annotations)
		}
		delete(got.Annotations, annotationSummary)
		if !reflect.DeepEqual(got.ObjectMeta, kept) || (c.size == 0) != (got.Spec.Extra == nil) {
			t.Errorf("%s: %+v", name, got.ObjectMeta)
		}
	}
	long := request("example.com/tpm", 100)
	long.Annotations[attestation.AnnotationChallenge] = strings.Repeat("c", attestation.MaxChallenge+1)
	if _, kept := NewRequestCache(rules).Reduce(long).Annotations[attestation.AnnotationChallenge]; kept {
		t.Error("a challenge that is too long is kept")
	}
}

// Beyond the budget a request's content is dropped, and its claim is kept. The budget is free again
// once the objects are.
func TestRequestsBeyondTheBudget(t *testing.T) {
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	cache := NewRequestCache(rules)
	large := func(name, requester string) *certificatesv1.CertificateSigningRequest {
		r := requestNamed(name, "uid-"+name)
		r.Annotations = map[string]string{annotationSummary: `{"dropped":true,"ek":"forged"}`, attestation.AnnotationChallenge: "c"}
		r.Spec = certificatesv1.CertificateSigningRequestSpec{
			SignerName: attestation.HelloSignerName, Username: requester, Request: make([]byte, attestation.MaxRequestSize), Groups: []string{"g"},
		}
		return r
	}
	kept, dropped := map[string][]*certificatesv1.CertificateSigningRequest{}, map[string]int{}
	file := func(name, requester string) {
		got := cache.Reduce(large(name, requester))
		if claim, ok := bounded.summaryIn(got); !ok || claim.EK != "" || got.Name != name || got.Spec.Username != requester || got.Spec.SignerName != attestation.HelloSignerName {
			t.Fatalf("%+v", got)
		}
		if !bounded.IsDropped(got) {
			kept[requester] = append(kept[requester], got)
			return
		}
		dropped[requester]++
		if got.Size() > 1000 || csrstate.Of(got) != csrstate.Pending {
			t.Errorf("%d bytes are kept, %v", got.Size(), csrstate.Of(got))
		}
	}
	const perRequester = 16<<20/attestation.MaxRequestSize - 1
	for i := range 2 * perRequester {
		file(strconv.Itoa(i), "flood")
	}
	file("honest", "another")
	if len(kept["flood"]) != perRequester || dropped["flood"] != perRequester || len(kept["another"]) != 1 {
		t.Errorf("%d of the flood are kept, %d dropped, %d of another", len(kept["flood"]), dropped["flood"], len(kept["another"]))
	}
	runtime.KeepAlive(kept["flood"])
	kept["flood"] = nil
	deadline := time.Now().Add(time.Minute)
	// the collector calls back in a goroutine of its own
	for ; len(kept["flood"]) == 0; file("later", "flood") {
		if time.Now().After(deadline) {
			t.Fatal("nothing of the flood is in memory, and the budget is not free")
		}
		runtime.GC()
	}
}

// If requests are listed, from any version, no answer has more than a page of them. The requests of
// earlier pages are trimmed by then.
func TestListsAreTrimmed(t *testing.T) {
	const count = 2*listPage + 1
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	var pages int
	lists := &toolscache.ListWatch{ListWithContextFunc: func(_ context.Context, options metav1.ListOptions) (apiruntime.Object, error) {
		if options.ResourceVersion != "" || options.ResourceVersionMatch != "" || options.Limit != listPage {
			t.Errorf("the watch cache answers without pages: %+v", options)
		}
		list := &certificatesv1.CertificateSigningRequestList{ListMeta: metav1.ListMeta{ResourceVersion: "9"}}
		for i := pages * listPage; i < min(count, (pages+1)*listPage); i++ {
			list.Items = append(list.Items, *labelled(strconv.Itoa(i)))
		}
		if pages++; pages*listPage < count {
			list.Continue = strconv.Itoa(pages)
		}
		return list, nil
	}}
	list, err := NewRequestCache(rules).reducing(lists).(*toolscache.ListWatch).ListWithContext(t.Context(), metav1.ListOptions{ResourceVersion: "0", Limit: 500})
	if err != nil {
		t.Fatal(err)
	}
	items, err := meta.ExtractList(list)
	if err != nil || len(items) != count || pages != 3 {
		t.Fatalf("%d requests in %d pages, %v", len(items), pages, err)
	}
	for i, item := range items {
		if got := item.(*certificatesv1.CertificateSigningRequest); got.Name != strconv.Itoa(i) || got.Labels != nil {
			t.Errorf("%d: %+v", i, got.ObjectMeta)
		}
	}
}

func labelled(name string) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "7", Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"k8s.io/initial-events-end": "true"}},
		Spec:       certificatesv1.CertificateSigningRequestSpec{SignerName: "example.com/tpm"},
	}
}

// Each event of a watch is reduced, but for bookmarks: by their annotations client-go knows that it
// has the first state.
func TestWatchesAreReduced(t *testing.T) {
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	events := watch.NewFake()
	watches := &toolscache.ListWatch{WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return events, nil }}
	reduced, err := NewRequestCache(rules).reducing(watches).(*toolscache.ListWatch).WatchWithContext(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer reduced.Stop()
	for _, kind := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted, watch.Bookmark} {
		go events.Action(kind, labelled("r"))
		e := <-reduced.ResultChan()
		if got := e.Object.(*certificatesv1.CertificateSigningRequest); e.Type != kind || (got.Labels != nil) != (kind == watch.Bookmark) {
			t.Errorf("%s: %s, %+v", kind, e.Type, got.ObjectMeta)
		}
	}
	failure := &metav1.Status{Message: "gone"}
	go events.Error(failure)
	if e := <-reduced.ResultChan(); e.Type != watch.Error || e.Object != failure {
		t.Errorf("%+v", e)
	}
}

// A request that ended without a certificate is trimmed, and still ended: the queue and Reconcile
// go by its state.
func TestTrimmedState(t *testing.T) {
	for _, c := range statetest.Cases() {
		request := &certificatesv1.CertificateSigningRequest{Status: c.Status}
		state, kept := csrstate.Of(request), csrstate.Of(trimmed(request))
		if kept != state && (!kept.Finished() || !state.Finished()) && len(c.Status.Certificate) == 0 {
			t.Errorf("%s: %v, and %v once trimmed", c.Title, state, kept)
		}
	}
}
