// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2/ktesting"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// listing is a source of machines with parts.
type listing struct {
	mu     sync.Mutex
	states []State
	err    error
}

func (l *listing) Machines(context.Context, time.Time) ([]verifier.Machine, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return nil, l.err
}

func (l *listing) States() []State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.states)
}

func (l *listing) set(err error, states ...State) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err, l.states = err, states
}

// reasons is a recorder that keeps the reasons and notes of Events.
type reasons struct {
	mu  sync.Mutex
	all []string
}

func (r *reasons) Eventf(_, _ runtime.Object, kind, reason, _, _ string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, kind+" "+reason+" "+args[0].(string))
}

func (r *reasons) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.all
	r.all = nil
	return all
}

// usableKeys returns a store with a key.
func usableKeys(t *testing.T) *KeyStore {
	t.Helper()
	api := &secretAPI{}
	store := NewKeyStore(api, api, keySecret, build)
	if err := store.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	return store
}

// A problem and its end are logged once, and are in the condition and in an Event of the leader.
// While the problem lasts, the Event is repeated.
func TestHealthReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		api := fake.NewClientBuilder().WithObjects(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}}).WithStatusSubresource(&corev1.Namespace{}).
			WithInterceptorFuncs(interceptor.Funcs{SubResourceGet: func(ctx context.Context, api client.Client, _ string, object, into client.Object, _ ...client.SubResourceGetOption) error {
				return api.Get(ctx, client.ObjectKeyFromObject(object), into)
			}}).Build()
		machines, reported, leads := &listing{}, &reasons{}, make(chan struct{})
		good := State{Name: "one", LastRead: time.Now()}
		bad := State{Name: "two", Problem: errors.New("broken\nin two")}
		machines.set(nil, good, State{Name: "two"})
		h := NewHealth(HealthConfig{Machines: machines, Keys: usableKeys(t), API: api, Namespace: "n", Events: reported, Leads: leads, Log: logger})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _ = h.Start(ctx) }()
		condition := func() corev1.NamespaceCondition {
			t.Helper()
			namespace := &corev1.Namespace{}
			if err := api.Get(t.Context(), client.ObjectKey{Name: "n"}, namespace); err != nil {
				t.Fatal(err)
			}
			if len(namespace.Status.Conditions) == 0 {
				return corev1.NamespaceCondition{}
			}
			return namespace.Status.Conditions[0]
		}
		pass := func(long time.Duration) {
			time.Sleep(long)
			synctest.Wait()
		}
		machines.set(nil, good, bad)
		pass(healthInterval)
		if c := condition(); c.Reason != "" || len(reported.take()) > 0 {
			t.Errorf("a standby replica reports %+v", c)
		}
		close(leads)
		pass(0)
		want := "two: broken in two: correct the inventory"
		if c := condition(); c.Type != ConditionUsable || c.Status != corev1.ConditionFalse || c.Reason != ReasonSourceUnusable || c.Message != want {
			t.Errorf("%+v", c)
		}
		if all := reported.take(); !slices.Equal(all, []string{"Warning SourceUnusable " + want}) {
			t.Errorf("%q", all)
		}
		pass(10 * time.Minute)
		if all := reported.take(); len(all) > 0 {
			t.Errorf("within ten minutes, again: %q", all)
		}
		pass(6 * time.Minute)
		if all := reported.take(); len(all) != 1 {
			t.Errorf("after a quarter of an hour: %q", all)
		}
		machines.set(nil, good)
		pass(healthInterval)
		if c := condition(); c.Status != corev1.ConditionTrue || c.Reason != ReasonSourcesUsable {
			t.Errorf("%+v", c)
		}
		if all := reported.take(); len(all) != 1 || !strings.HasPrefix(all[0], "Normal SourcesUsable ") {
			t.Errorf("%q", all)
		}
		machines.set(nil, good, State{Name: NameConflicts, Problem: errors.New(NameConflicts + ": an EK twice")})
		pass(healthInterval)
		if c := condition(); c.Status != corev1.ConditionFalse || !strings.HasPrefix(c.Message, NameConflicts+": an EK twice: run node-attestation-controller inventory check") {
			t.Errorf("%+v", c)
		}
		if logged := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); !strings.Contains(logged, "entries of the inventory contradict each other") {
			t.Errorf("it is not logged:\n%s", logged)
		}
		reported.take()
		machines.set(errors.New("no list"), good)
		pass(healthInterval)
		if c := condition(); c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "machines: no list") {
			t.Errorf("%+v", c)
		}
		machines.set(nil, good, bad)
		pass(healthInterval)
		machines.set(nil, good, State{Name: "two"})
		pass(healthInterval)
		logged := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
		for text, times := range map[string]int{"broken in two": 2, "no list": 1, "ERROR the source is invalid": 3, "usable again": 1, "challenge-keys": 0} {
			if strings.Count(logged, text) != times {
				t.Errorf("%q is not logged %d times:\n%s", text, times, logged)
			}
		}
	})
}

// clientCAs answers what client-ca-file has, or an error.
type clientCAs struct {
	client.Reader
	data map[string]string
	err  error
}

func (c *clientCAs) Get(_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	if key != clientCAConfigMap {
		return errors.New("another object is read")
	}
	object.(*corev1.ConfigMap).Data = maps.Clone(c.data)
	return c.err
}

// fixedCA is a CA that does not change.
type fixedCA struct{ ca *signing.CA }

func (f fixedCA) CA(context.Context, time.Time) (*signing.CA, error) { return f.ca, nil }

// A CA signs, unless it is known that the API server does not trust it.
func TestComparedCA(t *testing.T) {
	now := time.Now()
	ours, other := newTestCA(t, now.Add(time.Hour)), newTestCA(t, now.Add(time.Hour))
	ca, err := signing.FromSecret(ours, now)
	if err != nil {
		t.Fatal(err)
	}
	api := &clientCAs{}
	compared := NewComparedCA(fixedCA{ca}, api)
	configMaps := schema.GroupResource{Resource: "configmaps"}
	trusts := func(title string, err error, bundle string, signs bool, reason string) {
		t.Helper()
		now = now.Add(compareAge)
		api.err, api.data = err, map[string]string{clientCAKey: bundle}
		h := &Health{HealthConfig: HealthConfig{CA: compared, Machines: &listing{}, Keys: usableKeys(t)}, logged: map[string]string{}}
		got, err := compared.CA(t.Context(), now)
		if (err == nil) != signs || (got != nil) != signs || !signs && !errors.Is(err, ErrCANotTrusted) {
			t.Errorf("%s: %v", title, err)
		}
		if v := h.check(t.Context()); v.Reason != reason || strings.Contains(v.Message, "CERTIFICATE") {
			t.Errorf("%s: %+v", title, v)
		}
	}
	trusted, untrusted := string(ours["tls.crt"]), string(other["tls.crt"])
	trusts("no answer yet", errors.New("no answer"), "", true, ReasonCANotCompared)
	trusts("another", nil, untrusted, false, ReasonCANotTrusted)
	trusts("no answer after another", errors.New("no answer"), "", false, ReasonCANotTrusted)
	trusts("one of two", nil, untrusted+trusted, true, ReasonSourcesUsable)
	trusts("no answer after one of two", errors.New("no answer"), "", true, ReasonSourcesUsable)
	trusts("another again", nil, untrusted, false, ReasonCANotTrusted)
	trusts("forbidden", apierrors.NewForbidden(configMaps, "", nil), "", true, ReasonCANotCompared)
	trusts("another, again", nil, untrusted, false, ReasonCANotTrusted)
	trusts("gone", apierrors.NewNotFound(configMaps, ""), "", true, ReasonCANotCompared)
	trusts("empty", nil, "", true, ReasonCANotCompared)
	trusts("no certificate", nil, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", true, ReasonCANotCompared)
	trusts("the one", nil, trusted, true, ReasonSourcesUsable)
}
