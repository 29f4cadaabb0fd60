// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// status returns the status of the revocation.
func (w *world) status(t *testing.T) v1alpha1.NodeRevocationStatus {
	t.Helper()
	r := &v1alpha1.NodeRevocation{}
	if err := w.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "r"}, r); err != nil {
		t.Fatal(err)
	}
	return r.Status
}

func (w *world) isRevoked(sum string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.record.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool { return c.SHA256 == sum && c.Revoked })
}

// requested creates a request.
func (w *world) requested(t *testing.T, name string) types.UID {
	t.Helper()
	request := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name)}}
	if err := w.Create(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	return request.UID
}

func (w *world) isComplete(t *testing.T) bool {
	return meta.IsStatusConditionTrue(w.status(t).Conditions, v1alpha1.ConditionComplete)
}

// The clock of the API server that stores requests differs from the clock of the API server that
// stores revocations. A request from before the revocation is revoked, and one from after it is
// not.
func TestClocksDiffer(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{-10 * time.Minute, -time.Second, 0, time.Second, 10 * time.Minute} {
		t.Run(ahead.String(), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, revocationOf(v1alpha1.RevokeImmediately))
			w.record = record("a", issued("old", time.Second-ahead))
			e := w.starts(t)
			w.eventually(t, "the certificate from before is revoked", func() bool { return w.isRevoked(digits("old")) })
			if w.isComplete(t) {
				t.Error("it is complete, and the node has no other certificate")
			}
			renewed := issued("new", -time.Second-ahead)
			renewed.AfterRevocation = e.LastBefore(w.requested(t, "proof"), w.requested(t, "hello"))
			w.mu.Lock()
			w.record.Status.Certificates = append(w.record.Status.Certificates, renewed)
			w.mu.Unlock()
			e.wake()
			w.eventually(t, "it is complete", func() bool { return w.isComplete(t) })
			if w.isRevoked(digits("new")) || e.Revoked(digits("new")) || !e.Revoked(digits("old")) {
				t.Errorf("the certificate from after is revoked: %+v", w.record.Status.Certificates)
			}
		})
	}
}

// A request that existed when the controller first saw a revocation is older, and gets no
// certificate. That holds for each revocation that this process finds, so also after a crash, with
// another leader, and after the revocation is complete.
func TestRequestsFromBefore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, revocationOf(v1alpha1.RevokeImmediately))
	before := w.requested(t, "before")
	expect := func(e *Enforcer, what string, node string, since bool, after int64, requests ...types.UID) {
		t.Helper()
		if got := e.RevokedSince(node, requests...); got != since {
			t.Errorf("%s: revoked since: %v", what, got)
		}
		if got := e.LastBefore(requests...); got != after {
			t.Errorf("%s: after revocation %d, want %d", what, got, after)
		}
	}
	e := w.enforcer(t)
	expect(e, "nothing is known yet", "a", false, 0, before)
	in := func(change func(*v1alpha1.NodeRevocation)) input {
		t.Helper()
		r := &v1alpha1.NodeRevocation{}
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "r"}, r); err != nil {
			t.Fatal(err)
		}
		r.UID = "r"
		if change != nil {
			change(r)
		}
		return input{revocations: []v1alpha1.NodeRevocation{*r}, records: []v1alpha1.NodeAttestation{record("a")}}
	}
	number := func(e *Enforcer, in input, want bool) {
		t.Helper()
		if written, err := e.assignNumbers(t.Context(), in); err != nil || written != want {
			t.Fatalf("%v, %v", written, err)
		}
	}
	number(e, in(nil), true)
	number(e, in(nil), false)
	if got := w.status(t).Number; got != 1 {
		t.Errorf("number %d", got)
	}
	after := w.requested(t, "after")
	expect(e, "pending", "a", true, 0, before)
	expect(e, "a proof after its hello", "a", true, 0, after, before)
	expect(e, "later", "a", false, 1, after)
	expect(e, "another node", "b", false, 0, before)

	// After a restart, the existing requests count as older. The next request is newer.
	e = w.enforcer(t)
	number(e, in(func(r *v1alpha1.NodeRevocation) {
		r.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionComplete, Status: metav1.ConditionTrue}}
	}), false)
	expect(e, "after a restart", "a", true, 0, after)
	later := w.requested(t, "later")
	expect(e, "after a restart, later", "a", false, 1, later)

	// Another revocation, of all nodes: a certificate has number 4, so that number was used before.
	next := in(func(r *v1alpha1.NodeRevocation) {
		r.UID, r.Status.Number, r.Spec.All, r.Spec.Nodes = "next", 0, true, nil
	})
	next.records[0].Status.Certificates = []v1alpha1.IssuedCertificate{{AfterRevocation: 4}}
	number(e, next, true)
	expect(e, "between", "b", true, 4, later)
	expect(e, "from the beginning", "b", true, 0, before)
	last := w.requested(t, "last")
	expect(e, "newest", "b", false, 5, last)
	// the management cluster's etcd is restored: it lacks these revocations
	restored := in(func(r *v1alpha1.NodeRevocation) { r.UID, r.Status.Number = "again", 0 })
	number(e, restored, true)
	expect(e, "after a restore", "a", true, 5, last)
	if got := w.status(t).Number; got != 6 {
		t.Errorf("number %d is given twice", got)
	}
	// two leaders have given one number
	twice := in(nil)
	twice.revocations = append(twice.revocations, *twice.revocations[0].DeepCopy())
	twice.revocations[0].UID, twice.revocations[1].UID = "again", "other"
	number(e, twice, true)
	if got := w.status(t).Number; got != 7 {
		t.Errorf("number %d is given twice", got)
	}
}

// A revocation that an older release has seen selects by time, so that an upgrade does not revoke
// what nodes got since.
func TestRevocationOfAnOlderRelease(t *testing.T) {
	t.Parallel()
	r := revocationOf(v1alpha1.RevokeImmediately)
	r.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionComplete, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonInProgress}}
	w := newWorld(t, r)
	w.record = record("a", issued("old", time.Second), issued("new", -time.Second))
	e := w.starts(t)
	w.eventually(t, "it is complete", func() bool { return w.isComplete(t) })
	if !e.Revoked(digits("old")) || e.Revoked(digits("new")) || w.status(t).Number != 0 {
		t.Errorf("%+v", w.record.Status.Certificates)
	}
}

// While the requests cannot be listed, a certificate is revoked by its time, the condition says so,
// and nothing is announced or complete.
func TestRequestsCannotBeListed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, revocationOf(v1alpha1.RevokeImmediately))
	w.unlistable = true
	e := w.starts(t)
	w.reports(t, ReasonNotInForce)
	w.eventually(t, "the certificate is revoked", func() bool { return e.Revoked(digits("old")) })
	w.mu.Lock()
	if slices.Contains(w.written, "v1.ConfigMap") {
		t.Error("a renewal is announced")
	}
	w.unlistable = false
	w.mu.Unlock()
	w.eventually(t, "the renewal is announced", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.Contains(w.written, "v1.ConfigMap")
	})
}

// A revocation with a time selects no request from after itself, whatever that request's time is.
func TestSelects(t *testing.T) {
	t.Parallel()
	at := func(after time.Duration) *metav1.Time { return new(metav1.NewTime(noon.Add(after))) }
	for name, c := range map[string]struct {
		number, after           int64
		issuedBefore, requested *metav1.Time
		want                    bool
	}{
		"before, and the clock is ahead":          {2, 1, nil, at(10 * time.Minute), true},
		"after, and the clock is behind":          {2, 2, nil, at(-10 * time.Minute), false},
		"after a later one":                       {2, 3, nil, nil, false},
		"recovered":                               {2, 0, nil, nil, true},
		"a time":                                  {2, 1, at(-time.Hour), at(-time.Hour - time.Second), true},
		"later than the time":                     {2, 1, at(-time.Hour), at(-time.Hour), false},
		"a time, and not known":                   {2, 1, at(-time.Hour), nil, true},
		"a time in the future, and after":         {2, 2, at(time.Hour), at(0), false},
		"of an older release":                     {0, 0, nil, at(-time.Second), true},
		"of an older release, and later":          {0, 0, nil, at(0), false},
		"of an older release, and not known":      {0, 0, nil, nil, true},
		"of an older release, a time, and before": {0, 0, at(time.Hour), at(time.Minute), true},
	} {
		r := revocation(v1alpha1.RevokeImmediately)
		r.Status.Number, r.Spec.IssuedBefore = c.number, c.issuedBefore
		if got := r.Selects(&v1alpha1.IssuedCertificate{Requested: c.requested, AfterRevocation: c.after}); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

var errUnlistable = errors.New("no requests")

// listOfRequests fails if unlistable is set.
func (w *world) listOfRequests(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
	w.mu.Lock()
	fails := w.unlistable && list.GetObjectKind().GroupVersionKind().Kind == "CertificateSigningRequest"
	w.mu.Unlock()
	if fails {
		return errUnlistable
	}
	return c.List(ctx, list, options...)
}
