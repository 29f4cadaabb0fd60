// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/retry"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// afterApproval counts the controller's requests to the API server. Once armed, it makes the
// controller's writes fail from the next approval on, until it is disarmed.
type afterApproval struct {
	mu              sync.Mutex
	asked           []string
	armed, approved bool
}

func (a *afterApproval) wrap(next http.RoundTripper) http.RoundTripper { return heldTrip{a, next} }

type heldTrip struct {
	*afterApproval
	next http.RoundTripper
}

func (h heldTrip) RoundTrip(request *http.Request) (*http.Response, error) {
	path := request.URL.Path
	h.mu.Lock()
	h.asked = append(h.asked, path)
	held := h.armed && h.approved && request.Method != http.MethodGet && !strings.Contains(path, "/events") && !strings.Contains(path, "/leases")
	h.mu.Unlock()
	if held {
		return nil, errors.New("the connection broke")
	}
	response, err := h.next.RoundTrip(request)
	if err == nil && response.StatusCode == http.StatusOK && strings.HasSuffix(path, "/approval") {
		h.mu.Lock()
		h.approved = true
		h.mu.Unlock()
	}
	return response, err
}

// arm starts or ends the wait for an approval.
func (a *afterApproval) arm(armed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.armed, a.approved = armed, false
}

// about returns the number of the controller's requests about a CertificateSigningRequest.
func (a *afterApproval) about(name string, since int) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(slices.DeleteFunc(slices.Clone(a.asked[since:]), func(path string) bool { return !strings.Contains(path, name) }))
}

func (a *afterApproval) total() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.asked)
}

// adds adds conditions as an administrator.
func (f *fleet) adds(t *testing.T, name string, kinds ...certificatesv1.RequestConditionType) {
	t.Helper()
	if err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		object := f.get(t, name)
		for _, kind := range kinds {
			object.Status.Conditions = append(object.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue, Reason: "Odd"})
		}
		return f.client.SubResource("approval").Update(t.Context(), object)
	}); err != nil {
		t.Fatal(err)
	}
}

// The API server accepts conditions such as "approved". Each type but "Approved" ends a request,
// also beside a true "Approved". A hello is not answered. A genuine proof is neither approved nor
// signed, not even one that the controller itself approved. No request is evaluated again and
// again.
func TestOddConditions(t *testing.T) {
	f := newFleet(t, nil)
	f.stop()
	var held afterApproval
	config := f.AdminConfig()
	config.Wrap(held.wrap)
	f.stop = f.startWith(t, config)
	m := f.newMachine(t, "odd-conditions")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	odd := []certificatesv1.RequestConditionType{"approved", "APPROVED", "Approved ", "Acme"}

	// Requests that have the conditions before the controller sees them.
	genuine := make([]*certificatesv1.CertificateSigningRequest, 2*len(odd))
	for i := range genuine {
		genuine[i] = p.proof(t, p.challenged(t, p.hello(t)))
	}
	f.stop()
	var ended []string
	for i, kind := range odd {
		ended = append(ended, p.hello(t).Name, p.file(t, genuine[2*i]).Name, p.file(t, genuine[2*i+1]).Name)
		last := ended[len(ended)-3:]
		f.adds(t, last[0], kind)
		f.adds(t, last[1], kind)
		f.adds(t, last[2], certificatesv1.CertificateApproved, kind)
	}
	f.stop = f.startWith(t, config)

	// And one that the controller approves, and cannot sign before it has another condition.
	held.arm(true)
	last := p.file(t, p.proof(t, p.challenged(t, p.hello(t))))
	harness.Eventually(t, time.Minute, "the controller approves", func() bool { return len(f.get(t, last.Name).Status.Conditions) == 1 })
	if !f.recordNames(t, m.name, last) {
		t.Fatal("it was not the controller who approved")
	}
	f.adds(t, last.Name, "approved")
	held.arm(false)
	ended = append(ended, last.Name)

	versions := map[string]string{}
	for _, name := range ended {
		versions[name] = f.get(t, name).ResourceVersion
	}
	time.Sleep(time.Second) // what the watch still had to tell
	since := held.total()
	time.Sleep(2 * time.Second) // what is read in a time in which there is nothing to do
	for _, name := range ended {
		got := f.get(t, name)
		if len(got.Status.Certificate) > 0 || len(got.Annotations) > 0 || got.ResourceVersion != versions[name] {
			t.Errorf("%q: %d bytes of certificate, %v", got.Status.Conditions[len(got.Status.Conditions)-1].Type, len(got.Status.Certificate), got.Annotations)
		}
		if n := held.about(name, since); n > 0 {
			t.Errorf("%q: asked about %d times", got.Status.Conditions[len(got.Status.Conditions)-1].Type, n)
		}
	}
	f.onlyFor(t)
	// The machine still gets its certificate.
	f.onlyFor(t, m.enrols(t).Leaf)
}

// recordNames reports whether a machine's record was last written for a request.
func (f *fleet) recordNames(t *testing.T, machine string, object *certificatesv1.CertificateSigningRequest) bool {
	t.Helper()
	request := f.record(t, machine).Status.Request
	return request != nil && request.UID == object.UID
}
