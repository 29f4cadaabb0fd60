// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"cmp"
	"context"
	"reflect"
	"strconv"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/statetest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

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
		state   state
	}{
		"ours":                   {request("example.com/tpm", 100), 100, undecided},
		"ours, approved":         {request("example.com/tpm", 100, certificatesv1.CertificateApproved), 100, approved},
		"ours, issued":           {issued, 100, done},
		"ours, denied":           {request("example.com/tpm", 100, certificatesv1.CertificateDenied), 0, done},
		"ours, failed":           {request("example.com/tpm", 100, certificatesv1.CertificateApproved, certificatesv1.CertificateFailed), 0, done},
		"ours, lower case":       {request("example.com/tpm", 100, "approved"), 0, done},
		"ours, lower case, too":  {request("example.com/tpm", 100, certificatesv1.CertificateApproved, "approved"), 0, done},
		"ours, capitals, before": {request("example.com/tpm", 100, "APPROVED", certificatesv1.CertificateApproved), 0, done},
		"ours, with a blank":     {request("example.com/tpm", 100, "Approved "), 0, done},
		"ours, others' type":     {request("example.com/tpm", 100, certificatesv1.CertificateApproved, "Acme"), 0, done},
		"ours, as it may":        {request("example.com/tpm", attestation.MaxRequestSize), attestation.MaxRequestSize, undecided},
		"ours, too long":         {request("example.com/tpm", 1<<20), attestation.MaxRequestSize + 1, undecided},
		"left alone":             {leftAlone, 100, undecided},
		"another provider's, of a node that is left alone": {elsewhere, 0, undecided},
		"another's":       {request("example.com/other", 1<<20), 0, undecided},
		"another's, done": {request("example.com/other", 1<<20, certificatesv1.CertificateApproved), 0, approved},
	} {
		concerned := rules.Matches(c.request)
		out, err := TrimRequests(rules)(c.request)
		got, ok := out.(*certificatesv1.CertificateSigningRequest)
		if err != nil || !ok {
			t.Fatalf("%s: %v", name, err)
		}
		if len(got.Spec.Request) != c.size || cap(got.Spec.Request) > 2*attestation.MaxRequestSize || stateOf(got) != c.state || rules.Matches(got) != concerned {
			t.Errorf("%s: %d bytes, of %d, %v", name, len(got.Spec.Request), cap(got.Spec.Request), stateOf(got))
		}
		kept := metav1.ObjectMeta{Name: "r", UID: "u", ResourceVersion: "7", CreationTimestamp: c.request.CreationTimestamp}
		if c.size > 0 {
			kept.Annotations = map[string]string{attestation.AnnotationChallenge: "c"}
		}
		if !reflect.DeepEqual(got.ObjectMeta, kept) || (c.size == 0) != (got.Spec.Extra == nil) {
			t.Errorf("%s: %+v", name, got.ObjectMeta)
		}
		if again, err := TrimRequests(rules)(got.DeepCopy()); err != nil || !reflect.DeepEqual(again, got) {
			t.Errorf("%s: trimmed twice: %+v, %v", name, again, err)
		}
	}
	long := request("example.com/tpm", 100)
	long.Annotations[attestation.AnnotationChallenge] = strings.Repeat("c", attestation.MaxChallenge+1)
	if out, err := TrimRequests(rules)(long); err != nil || out.(*certificatesv1.CertificateSigningRequest).Annotations != nil {
		t.Errorf("a challenge that is too long: %+v, %v", out, err)
	}
	if out, err := TrimRequests(rules)("another object"); err != nil || out != "another object" {
		t.Errorf("%v, %v", out, err)
	}
}

// Where requests are listed, whatever version is asked for, no answer has more than a page of them,
// and those of the pages before are trimmed by then.
func TestListsAreTrimmed(t *testing.T) {
	const count = 2*listPage + 1
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	var pages int
	var before []certificatesv1.CertificateSigningRequest
	lists := &toolscache.ListWatch{ListWithContextFunc: func(_ context.Context, options metav1.ListOptions) (runtime.Object, error) {
		if options.ResourceVersion != "" || options.ResourceVersionMatch != "" || options.Limit != listPage {
			t.Errorf("the watch cache answers without pages: %+v", options)
		}
		for i := range before {
			if before[i].Labels != nil {
				t.Errorf("page %d was not trimmed before the next", pages)
			}
		}
		list := &certificatesv1.CertificateSigningRequestList{ListMeta: metav1.ListMeta{ResourceVersion: "9"}}
		for i := pages * listPage; i < min(count, (pages+1)*listPage); i++ {
			list.Items = append(list.Items, certificatesv1.CertificateSigningRequest{
				ObjectMeta: metav1.ObjectMeta{Name: strconv.Itoa(i), ResourceVersion: "7", Labels: map[string]string{"a": "b"}},
				Spec:       certificatesv1.CertificateSigningRequestSpec{SignerName: "example.com/tpm"},
			})
		}
		if pages++; pages*listPage < count {
			list.Continue = strconv.Itoa(pages)
		}
		before = list.Items
		return list, nil
	}}
	list, err := pagedList(lists, TrimRequests(rules)).(*toolscache.ListWatch).ListWithContext(t.Context(), metav1.ListOptions{ResourceVersion: "0", Limit: 500})
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

// A request that ended without a certificate is trimmed, and still ended: the queue and Reconcile
// go by its state.
func TestStateOf(t *testing.T) {
	want := map[csrstate.State]state{csrstate.Pending: undecided, csrstate.Approved: approved}
	for _, c := range statetest.Cases() {
		request := &certificatesv1.CertificateSigningRequest{Status: c.Status}
		got := stateOf(request)
		if got != cmp.Or(want[c.State], done) {
			t.Errorf("%s: %d", c.Title, got)
		}
		if kept := stateOf(trimmed(request)); kept != got && len(c.Status.Certificate) == 0 {
			t.Errorf("%s: %d, and %d once trimmed", c.Title, got, kept)
		}
	}
}
