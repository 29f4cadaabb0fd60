// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/internal/listwatch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// ConditionPolicies is the type of the condition on the Namespace's status that says whether the
// admission policies are in force.
const ConditionPolicies = telemetry.ConditionPolicies

// Reasons of that condition. Those with which it is True or False are reasons of Events, too.
const (
	ReasonPoliciesInForce    = "PoliciesInForce"
	ReasonPoliciesNotInForce = "PoliciesNotInForce"
	// ReasonPoliciesUnwatched says that it is not known whether the policies are in force.
	// ReasonPoliciesAudit says that nothing depends on them in audit mode.
	ReasonPoliciesUnwatched = "NotWatched"
	ReasonPoliciesAudit     = "AuditMode"
	// ReasonPoliciesLockNodesOut says that the policies are applied in audit mode, so that nobody
	// can approve requests.
	ReasonPoliciesLockNodesOut = "PoliciesLockNodesOut"
)

const (
	// policiesInterval is the time between two comparisons without an event, and until a failure is
	// retried.
	policiesInterval = 30 * time.Second
	// policiesSettle is the time during which events are collected: one apply writes several
	// objects.
	policiesSettle = 500 * time.Millisecond
	// proveInterval is the shortest time between two proofs of a policy. proveAgain is the time
	// until the next try after a policy let a request pass. The API server evaluates a policy only
	// some seconds after storing it.
	proveInterval, proveAgain = time.Minute, 10 * time.Second
	// alteredGrace is the time after which a differing policy of revocation is reported. The
	// controller itself changes and repairs these policies, and this watch sees its writes late.
	alteredGrace = 3 * time.Second
	// firstListsTimeout bounds the wait for the first lists from the API server.
	firstListsTimeout = 15 * time.Second
)

// approvalPolicy is the policy that refuses the approval of a hello to everybody.
const approvalPolicy = "node-attestation-approval"

const unwatchedPolicies = "cannot watch the admission policies: list and watch on validatingadmissionpolicies and validatingadmissionpolicybindings are needed"

// WatchConfig configures a PolicyWatch.
type WatchConfig struct {
	// Check says which policies the cluster must have. It also has the client that reads them. If
	// Check.Audit is set, a missing policy is no error, since nothing depends on it.
	Check *PolicyCheck
	// Namespace is the Namespace whose status gets the condition.
	Namespace string
	// Remind is the time until a lasting problem is reported again. Default: 15 minutes.
	Remind time.Duration
	// Prove is the shortest time between two proofs of a policy. Default: a minute.
	Prove time.Duration
	// Metrics gauge the problems. Optional.
	Metrics *telemetry.ClusterMetrics
	// Mirror gets the content of each Event on the Namespace, to report it elsewhere, too.
	// Optional.
	Mirror func(kind, reason, message string)
}

// PolicyWatch watches the admission policies of one cluster, and reports when they are not in
// force. It decides nothing: renewals go on.
type PolicyWatch struct {
	WatchConfig
	api client.WithWatch
	log logr.Logger

	policies, bindings toolscache.SharedIndexInformer
	// forbidden says, for each of the two informers, that its last list or watch was forbidden.
	forbidden [2]atomic.Bool
	changed   chan struct{}
	// hello is the name of a request that was just challenged.
	hello atomic.Pointer[string]
	hints chan struct{}

	// The fields below belong to Start's goroutine.
	reporter *telemetry.Reporter
	// since is the time since when the objects are right, zero while they are not.
	since time.Time
	// tried is the time of the last proof. passed counts how often in a row the request passed.
	// again is the request for the next try.
	tried  time.Time
	passed int
	again  string
	// altered has, by policy of revocation, the time since when it differs. pending says that one
	// of these is not reported yet.
	altered map[string]time.Time
	pending bool
	// unproven says that the missing right to prove a policy was logged.
	unproven bool
}

// verdict is the current state of the policies.
type verdict struct {
	telemetry.Verdict
	problems []PolicyProblem
}

// NewPolicyWatch returns a watch, which Start runs. api must not read from a cache. config.Check
// reads with it.
func NewPolicyWatch(config WatchConfig, api client.WithWatch, recorder events.EventRecorder, log logr.Logger) (*PolicyWatch, error) {
	w := &PolicyWatch{
		WatchConfig: config, api: api, log: log,
		changed: make(chan struct{}, 1), hints: make(chan struct{}, 1),
	}
	if w.Remind <= 0 {
		w.Remind = telemetry.RemindInterval
	}
	if w.Prove <= 0 {
		w.Prove = proveInterval
	}
	w.reporter = &telemetry.Reporter{
		Condition: &telemetry.Condition{API: api, Namespace: w.Namespace, Type: ConditionPolicies, Remind: w.Remind, Log: log},
		Events:    telemetry.NewDedupRecorder(recorder), Action: "Compare", Mirror: w.Mirror,
	}
	var err error
	if w.policies, err = w.informer(0, &admissionv1.ValidatingAdmissionPolicyList{}, &admissionv1.ValidatingAdmissionPolicy{}); err != nil {
		return nil, err
	}
	w.bindings, err = w.informer(1, &admissionv1.ValidatingAdmissionPolicyBindingList{}, &admissionv1.ValidatingAdmissionPolicyBinding{})
	return w, err
}

// AddPolicyWatch adds a watch to a manager, whose leader runs it.
func AddPolicyWatch(m ctrl.Manager, config WatchConfig) (*PolicyWatch, error) {
	api, err := client.NewWithWatch(m.GetConfig(), client.Options{HTTPClient: m.GetHTTPClient(), Scheme: m.GetScheme(), Mapper: m.GetRESTMapper()})
	if err != nil {
		return nil, err
	}
	w, err := NewPolicyWatch(config, api, m.GetEventRecorder(telemetry.Component), m.GetLogger().WithName("policies"))
	if err != nil {
		return nil, err
	}
	return w, m.Add(w)
}

// informer returns the watch of one of the two kinds. It keeps only the names of objects that are
// not the release's.
func (w *PolicyWatch) informer(index int, list client.ObjectList, object client.Object) (toolscache.SharedIndexInformer, error) {
	failures := &telemetry.WatchErrors{Log: w.log, Message: unwatchedPolicies, Remind: w.Remind}
	return listwatch.Informer{
		API: w.api, List: list, Object: object, Trim: w.trim, Changed: w.wake, Failed: failures.Handle,
		Called: func(err error) {
			if before := w.forbidden[index].Swap(apierrors.IsForbidden(err)); before != apierrors.IsForbidden(err) {
				w.wake()
			}
		},
	}.New()
}

// trim drops fields that are not compared.
func (w *PolicyWatch) trim(object any) (any, error) {
	switch o := object.(type) {
	case *admissionv1.ValidatingAdmissionPolicy:
		o.ManagedFields, o.Annotations, o.Labels, o.Status = nil, nil, nil, admissionv1.ValidatingAdmissionPolicyStatus{}
		if !w.Check.isOurs(o) {
			o.Spec = admissionv1.ValidatingAdmissionPolicySpec{}
		}
	case *admissionv1.ValidatingAdmissionPolicyBinding:
		o.ManagedFields, o.Annotations, o.Labels = nil, nil, nil
		if !w.Check.isOurs(o) {
			o.Spec = admissionv1.ValidatingAdmissionPolicyBindingSpec{}
		}
	}
	return object, nil
}

func (w *PolicyWatch) wake() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// Challenged passes the name of an open hello, with which a policy can be proven. It never blocks.
// A nil *PolicyWatch does nothing.
func (w *PolicyWatch) Challenged(name string) {
	if w == nil || w.Check.Audit {
		return
	}
	w.hello.Store(&name)
	select {
	case w.hints <- struct{}{}:
	default:
	}
}

// Start watches until ctx ends. A manager runs it, on the leader.
func (w *PolicyWatch) Start(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	for _, informer := range []toolscache.SharedIndexInformer{w.policies, w.bindings} {
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	began := time.Now()
	ticker := time.NewTicker(min(policiesInterval, w.Remind))
	defer ticker.Stop()
	for first := time.NewTimer(0); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-w.changed:
			first.Reset(policiesSettle)
			continue
		case <-first.C:
		case <-w.hints:
		case <-ticker.C:
		}
		v := w.assess(ctx, began)
		if v.Reason == "" {
			first.Reset(policiesSettle)
			continue
		}
		w.report(ctx, v)
		again := w.prove(ctx, v)
		if again == 0 && w.reporter.Condition.Unwritten() {
			again = telemetry.ConditionRetry
		}
		if w.pending && (again == 0 || again > policiesSettle) {
			again = policiesSettle
		}
		if again > 0 {
			first.Reset(again)
		}
	}
}

// assess returns the state of the policies. Its reason is "" until the first lists have arrived.
func (w *PolicyWatch) assess(ctx context.Context, began time.Time) verdict {
	unknown := func(message string) verdict {
		w.since = time.Time{}
		return verdict{telemetry.Verdict{Status: corev1.ConditionUnknown, Reason: ReasonPoliciesUnwatched, Message: message}, nil}
	}
	switch {
	case w.forbidden[0].Load() || w.forbidden[1].Load():
		return unknown(unwatchedPolicies)
	case w.policies.HasSynced() && w.bindings.HasSynced():
	case time.Since(began) < firstListsTimeout:
		return verdict{}
	default:
		return unknown("the API server has not answered the list of admission policies yet")
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	policies, bindings := stored[admissionv1.ValidatingAdmissionPolicy](w.policies), stored[admissionv1.ValidatingAdmissionPolicyBinding](w.bindings)
	state, err := w.Check.assess(ctx, policies, bindings)
	if err != nil {
		return unknown(text.Line(err.Error(), telemetry.MaxLogged))
	}
	revocation, err := w.Check.assessRevocation(ctx, state, policies, bindings)
	if err != nil {
		return unknown(text.Line(err.Error(), telemetry.MaxLogged))
	}
	switch {
	case len(state.Problems) > 0:
		w.since, w.passed = time.Time{}, 0
	case w.since.IsZero():
		w.since = time.Now()
	case w.passed > 1:
		state.Problems = []PolicyProblem{{approvalPolicy, PolicyNotEffective, "policy and binding are there, and the API server lets a hello be approved: is its admission plugin ValidatingAdmissionPolicy on?"}}
		state.Consequence, state.Remedy = consequenceApproval, remedyAPI
	}
	if len(state.Problems) == 0 {
		state.Consequence, state.Remedy = "Revoked certificates may be accepted", remedyRevocation
	}
	state.Problems = append(state.Problems, w.lasting(revocation)...)
	v := func(status corev1.ConditionStatus, reason, message string) verdict {
		return verdict{telemetry.Verdict{Status: status, Reason: reason, Message: message}, state.Problems}
	}
	switch {
	case LocksOut(state.Problems):
		return v(corev1.ConditionFalse, ReasonPoliciesLockNodesOut, describe(state.Problems)+". No node gets a certificate: "+LockOutRemedy)
	case w.Check.Audit && len(state.Problems) > 0:
		return v(corev1.ConditionUnknown, ReasonPoliciesAudit, "nothing depends on the policies in audit mode; not in force: "+describe(state.Problems))
	case w.Check.Audit:
		return v(corev1.ConditionUnknown, ReasonPoliciesAudit, "nothing depends on the policies in audit mode")
	case len(state.Problems) > 0:
		return v(corev1.ConditionFalse, ReasonPoliciesNotInForce, state.String())
	}
	return v(corev1.ConditionTrue, ReasonPoliciesInForce, state.String())
}

// lasting returns the problems, except alterations that are newer than alteredGrace.
func (w *PolicyWatch) lasting(problems []PolicyProblem) (left []PolicyProblem) {
	now, before := time.Now(), w.altered
	w.altered, w.pending = map[string]time.Time{}, false
	for _, p := range problems {
		if p.Problem != PolicyAltered {
			left = append(left, p)
			continue
		}
		since, known := before[p.String()]
		if !known {
			since = now
		}
		w.altered[p.String()] = since
		if now.Sub(since) >= alteredGrace {
			left = append(left, p)
		} else {
			w.pending = true
		}
	}
	return left
}

// stored returns an informer's objects.
func stored[T any](informer toolscache.SharedIndexInformer) []T {
	var all []T
	for _, item := range informer.GetStore().List() {
		if object, ok := item.(*T); ok {
			all = append(all, *object)
		}
	}
	return all
}

// report reports the state, and logs a change, and a lasting problem again after each Remind.
func (w *PolicyWatch) report(ctx context.Context, v verdict) {
	w.Metrics.PolicyProblems(gauged(v))
	before, isNews := w.reporter.Report(ctx, v.Verdict)
	if !isNews {
		return
	}
	message := telemetry.Message(v.Message)
	switch {
	case v.Status == corev1.ConditionFalse:
		what := "the admission policies are not in force"
		if v.Reason == ReasonPoliciesLockNodesOut {
			what = "the admission policies let nobody approve"
		}
		w.log.Error(nil, what, "message", message, "reason", v.Reason)
	case v.Status == corev1.ConditionTrue && before.Status == corev1.ConditionFalse:
		w.log.Info("the admission policies are in force again")
	case v.Reason == ReasonPoliciesUnwatched:
		w.log.Error(nil, "it is not known whether the admission policies are in force", "message", message, "reason", v.Reason)
	default:
		w.log.Info("admission policies", "status", v.Status, "reason", v.Reason, "message", message)
	}
}

// gauged returns the problems for the gauge, with NotWatched if they are not known.
func gauged(v verdict) (problems []telemetry.PolicyProblem) {
	if v.Reason == ReasonPoliciesUnwatched {
		problems = append(problems, telemetry.PolicyProblem{Problem: v.Reason})
	}
	for _, p := range v.problems {
		problems = append(problems, telemetry.PolicyProblem{Policy: p.Policy, Problem: p.Problem})
	}
	return problems
}
