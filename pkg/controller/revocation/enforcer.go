// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/internal/listwatch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// idleInterval is the time between two rounds without an event. activeInterval applies while
	// nodes renew, since no event says that a node uses its new certificate.
	idleInterval, activeInterval = 30 * time.Second, 2 * time.Second
	// roundTimeout bounds the calls of one round.
	roundTimeout = 30 * time.Second
	// retryInterval is the time until the next round if a round failed or left records to mark.
	retryInterval = time.Second
	// startTimeout bounds the wait for the first lists of the informers.
	startTimeout = 15 * time.Second
	// unseenPause is the time until the next round if the informer does not show our own writes
	// yet. unseenTimeout bounds that wait.
	unseenPause, unseenTimeout = 50 * time.Millisecond, 2 * time.Second
	// settle is the time during which events are collected before a round: an apply writes several
	// objects.
	settle = 20 * time.Millisecond
	// versionInterval is the time between two requests for the version of an API server that is too
	// old.
	versionInterval = 10 * time.Minute
)

// Reasons of the condition NodeAttestationRevocationInForce, and of Events on the Namespace.
const (
	ReasonInForce         = "RevocationInForce"
	ReasonNotInForce      = "RevocationNotInForce"
	ReasonListsFull       = "RevocationSlicesFull"
	ReasonAPIServerTooOld = "APIServerTooOld"
)

// Records are the records of the cluster, such as a *records.Store.
type Records interface {
	// All returns all records. The caller must not change them.
	All(ctx context.Context) ([]v1alpha1.NodeAttestation, error)
	// Write updates a record under the version that was read, else it returns a conflict.
	Write(ctx context.Context, record *v1alpha1.NodeAttestation, now time.Time) error
	// InSync reports whether All reads from a live cache, and so costs no API call.
	InSync() bool
}

// Config configures an Enforcer. A field is required unless its comment says optional or Default.
type Config struct {
	// Cluster is the cluster's UID, as in records.
	Cluster string
	// Namespace has the NodeRevocations, NodeSuspensions and RevocationSlices.
	Namespace string
	// SlicePrefix begins the names of the lists. Labels are their labels, and Owners their owners.
	// Both are optional.
	SlicePrefix string
	Labels      map[string]string
	Owners      []metav1.OwnerReference
	// Signers are the signers from which a machine may request a new certificate with a revoked
	// one.
	Signers []string
	// Objects reads and writes NodeRevocations, NodeSuspensions and RevocationSlices. Joined reads
	// and writes policies, the announcement and Nodes in the cluster that nodes join. Both must
	// read without a cache, and must have no timeout of their own, since they watch.
	Objects, Joined client.WithWatch
	// Version returns the version of the API server that nodes join.
	Version func(context.Context) (*version.Info, error)
	Records Records
	// StatusNamespace is the Namespace in the cluster that nodes join whose status gets the
	// condition.
	StatusNamespace string
	// Events records Events on StatusNamespace.
	Events events.EventRecorder
	// Mirror gets the content of each Event on StatusNamespace, to report it elsewhere, too.
	// Optional.
	Mirror func(kind, reason, message string)
	// Applied is called after a revocation or suspension was applied to a machine. It must not
	// block.
	Applied func(ctx context.Context, a Application)
	// Metrics are optional.
	Metrics *telemetry.ClusterMetrics
	Log     logr.Logger
	// Now is the clock. Default: the system's.
	Now func() time.Time
}

// Enforcer makes API servers refuse writes with revoked certificates. Run it in one process at a
// time. A nil Enforcer revokes nothing.
type Enforcer struct {
	Config
	revocations, suspensions, lists, policies toolscache.SharedIndexInformer
	changed                                   chan struct{}
	rendered                                  atomic.Pointer[map[string]*admissionv1.ValidatingAdmissionPolicySpec]
	state                                     atomic.Pointer[policyState]
	order                                     atomic.Pointer[order]
	// runs is the time when Run began, nil before that.
	runs atomic.Pointer[time.Time]

	// The fields below belong to Run's goroutine.
	reporter *telemetry.Reporter
	// unseen has, by name, the versions of our own writes of lists that the informer does not show
	// yet. unseenSince is the time of the last such write.
	unseen      map[string]string
	unseenSince time.Time
	// announced is the content of the ConfigMap when it was last read, at the time announcedAt.
	announced   *string
	announcedAt time.Time
	failures    telemetry.Once
}

// New returns an Enforcer.
func New(config Config) (*Enforcer, error) {
	e := &Enforcer{Config: config, changed: make(chan struct{}, 1), unseen: map[string]string{}}
	if e.Now == nil {
		e.Now = time.Now
	}
	e.reporter = &telemetry.Reporter{
		Condition: &telemetry.Condition{API: e.Joined, Namespace: e.StatusNamespace, Type: telemetry.ConditionRevocation, Remind: telemetry.RemindInterval, Log: e.Log},
		Events:    e.Events, Action: "Revoke", Mirror: e.Mirror,
	}
	for _, w := range []struct {
		into   *toolscache.SharedIndexInformer
		api    client.WithWatch
		list   client.ObjectList
		object client.Object
		in     []client.ListOption
	}{
		{&e.revocations, e.Objects, &v1alpha1.NodeRevocationList{}, &v1alpha1.NodeRevocation{}, []client.ListOption{client.InNamespace(e.Namespace)}},
		{&e.suspensions, e.Objects, &v1alpha1.NodeSuspensionList{}, &v1alpha1.NodeSuspension{}, []client.ListOption{client.InNamespace(e.Namespace)}},
		{&e.lists, e.Objects, &v1alpha1.RevocationSliceList{}, &v1alpha1.RevocationSlice{}, []client.ListOption{
			client.InNamespace(e.Namespace), client.MatchingFields{v1alpha1.FieldCluster: e.Cluster},
		}},
		{&e.policies, e.Joined, &admissionv1.ValidatingAdmissionPolicyList{}, &admissionv1.ValidatingAdmissionPolicy{}, nil},
	} {
		failures := &telemetry.WatchErrors{Log: e.Log, Message: "cannot watch what revocation needs: is packaging/kubernetes-revocation applied?", Remind: telemetry.RemindInterval}
		informer, err := listwatch.Informer{
			API: w.api, List: w.list, Object: w.object, In: w.in, Trim: trim, Changed: e.wake, Failed: failures.Handle,
		}.New()
		if err != nil {
			return nil, err
		}
		*w.into = informer
	}
	return e, nil
}

// trim drops fields that nobody reads. Updates are safe, since they start from a live read.
func trim(object any) (any, error) {
	if o, ok := object.(client.Object); ok {
		o.SetManagedFields(nil)
		if policy, ok := o.(*admissionv1.ValidatingAdmissionPolicy); ok && !isOurs(policy.Name) {
			policy.Spec = admissionv1.ValidatingAdmissionPolicySpec{}
		}
	}
	return object, nil
}

func isOurs(policy string) bool {
	for number := int32(1); number <= PolicyCount; number++ {
		if policy == PolicyName(number) {
			return true
		}
	}
	return policy == TokenPolicyName
}

func (e *Enforcer) wake() {
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

// ErrSuspensionsUnread says that the suspensions could not be read yet.
var ErrSuspensionsUnread = errors.New("the suspensions are not known yet")

// Suspended returns the endorsement keys of suspended machines. It reads the informer, so it may be
// stale.
func (e *Enforcer) Suspended() (map[string]bool, error) {
	if e == nil {
		return nil, nil
	}
	if !e.suspensions.HasSynced() {
		return nil, ErrSuspensionsUnread
	}
	eks := map[string]bool{}
	for _, item := range e.suspensions.GetStore().List() {
		eks[item.(*v1alpha1.NodeSuspension).Spec.EK] = true
	}
	return eks, nil
}

// Rendered returns the desired spec of a policy. It is nil if the spec is not known yet, or if the
// Enforcer does not write that policy.
func (e *Enforcer) Rendered(policy string) *admissionv1.ValidatingAdmissionPolicySpec {
	if e == nil {
		return nil
	}
	if all := e.rendered.Load(); all != nil {
		return (*all)[policy]
	}
	return nil
}

// Run enforces until ctx ends. Suspended works with every version of the API server.
func (e *Enforcer) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { e.suspensions.RunWithContext(ctx) })
	e.runs.Store(new(time.Now()))
	if !e.awaitVersion(ctx) {
		return
	}
	for _, informer := range []toolscache.SharedIndexInformer{e.revocations, e.lists, e.policies} {
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	for timer, settling := time.NewTimer(0), false; ; {
		select {
		case <-ctx.Done():
			return
		case <-e.changed:
			// only the first event: otherwise a steady stream of events would delay the round for
			// ever
			if !settling {
				settling = true
				timer.Reset(settle)
			}
			continue
		case <-timer.C:
		}
		settling = false
		timer.Reset(e.round(ctx))
	}
}

// awaitVersion waits until the API server is new enough to report the certificate of each request.
// It returns false if ctx ended before.
func (e *Enforcer) awaitVersion(ctx context.Context) bool {
	for {
		info, err := e.Version(ctx)
		pause := retryInterval
		switch {
		case err != nil:
			e.fail("cannot read the version of the API server", err)
		case namesCredentials(info):
			return true
		default:
			pause = versionInterval
			e.state.Store(&policyState{}) // no policy refuses anything
			e.say(ctx, corev1.ConditionFalse, ReasonAPIServerTooOld,
				fmt.Sprintf("revocation is not started: the API server %.32s is older than 1.32, and does not say with which certificate a request came", info.GitVersion))
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// round makes a plan and carries it out. It returns the time until the next round if no event
// comes. It writes the lists before the policies: after a crash, each certificate in a policy is
// also on a list.
func (e *Enforcer) round(ctx context.Context) time.Duration {
	for _, informer := range []toolscache.SharedIndexInformer{e.revocations, e.suspensions, e.lists, e.policies} {
		if informer.HasSynced() {
			continue
		}
		if time.Since(*e.runs.Load()) > startTimeout {
			e.say(ctx, corev1.ConditionFalse, ReasonNotInForce, "the objects of revocation cannot be read: apply packaging/kubernetes-revocation")
		}
		return retryInterval / 4
	}
	if e.isBehind() {
		return unseenPause
	}
	ctx, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	in, err := e.input(ctx)
	if err != nil {
		return e.notInForce(ctx, "cannot read what is revoked", err)
	}
	p := newPlan(in)
	if len(p.reportsNeeded) > 0 {
		if in.inUse, err = e.reports(ctx, p.reportsNeeded); err != nil {
			// without the reports, certificates are revoked at the limit
			e.fail("cannot read which certificates nodes use", err)
		}
		p = newPlan(in)
	}
	unlisted := e.writeLists(ctx, in.existing, p.lists)
	for _, err := range unlisted {
		if apierrors.IsConflict(err) { // the next round has the newer version
			return retryInterval
		}
	}
	problems := e.writePolicies(ctx, p, unlisted)
	// Older requests must be listed before nodes can read an announcement.
	if numbered, err := e.assignNumbers(ctx, in); err != nil {
		return e.notInForce(ctx, "cannot find out which requests are older than a revocation", err)
	} else if numbered {
		return settle // the next round selects by these numbers
	}
	e.gauge(p, len(problems) == 0)
	if err := e.announce(ctx, p.announcement); err != nil {
		problems = append(problems, "the announcement to nodes: "+text.Line(err.Error(), 256))
	}
	e.conclude(ctx, p, problems)
	if len(unlisted) > 0 {
		return retryInterval // records say only what the lists say
	}
	left, err := e.markRecords(ctx, in, p.marks)
	if err = errors.Join(err, e.writeStatuses(ctx, in.revocations, p.statuses)); err != nil {
		return e.fail("cannot write what was revoked into records and revocations", err)
	}
	e.failures.Forget("")
	switch {
	case left > 0 || len(problems) > 0:
		return retryInterval
	case p.active && e.Records.InSync():
		return activeInterval
	}
	return idleInterval
}

// fail logs a failure once, and returns the time until the next try.
func (e *Enforcer) fail(what string, err error) time.Duration {
	cause := text.Line(err.Error(), telemetry.MaxLogged)
	if !apierrors.IsConflict(err) && !errors.Is(err, context.Canceled) && e.failures.MarkReported("", what+cause, time.Now(), 0) {
		e.Log.Error(nil, what, "cause", cause)
	}
	return retryInterval
}

// notInForce reports a failure that keeps newly revoked certificates from being refused. It ignores
// a conflict, since the next round has the newer version.
func (e *Enforcer) notInForce(ctx context.Context, what string, err error) time.Duration {
	if !apierrors.IsConflict(err) && ctx.Err() == nil {
		e.say(ctx, corev1.ConditionFalse, ReasonNotInForce, what+": "+text.Line(err.Error(), 256))
	}
	return e.fail(what, err)
}

// isBehind reports whether the informer does not show our own last writes yet. A plan from such
// stale lists could remove a certificate from its policy for a moment.
func (e *Enforcer) isBehind() bool {
	if time.Since(e.unseenSince) > unseenTimeout {
		clear(e.unseen) // another writer has replaced our version
	}
	for name, version := range e.unseen {
		item, _, _ := e.lists.GetStore().GetByKey(e.Namespace + "/" + name)
		if list, ok := item.(*v1alpha1.RevocationSlice); ok && list.ResourceVersion == version {
			delete(e.unseen, name)
		}
	}
	return len(e.unseen) > 0
}

// input reads the input of the plan.
func (e *Enforcer) input(ctx context.Context) (in input, err error) {
	in = input{now: e.Now(), suspensions: stored[v1alpha1.NodeSuspension](e.suspensions), existing: stored[v1alpha1.RevocationSlice](e.lists)}
	for _, r := range stored[v1alpha1.NodeRevocation](e.revocations) {
		if r.Spec.Cluster == e.Cluster {
			r.Status.Number = cmp.Or(e.order.Load().numberOf(&r), r.Status.Number) // the informer may be stale
			in.revocations = append(in.revocations, r)
		}
	}
	slices.SortFunc(in.revocations, func(a, b v1alpha1.NodeRevocation) int { return cmp.Compare(a.Name, b.Name) })
	in.records, err = e.Records.All(ctx)
	return in, err
}

// stored returns shallow copies of an informer's objects. Their fields are shared with the
// informer, so the caller must not change these.
func stored[T any](informer toolscache.SharedIndexInformer) (all []T) {
	for _, item := range informer.GetStore().List() {
		if object, ok := any(item).(*T); ok {
			all = append(all, *object)
		}
	}
	return all
}

// writeLists writes the changed lists, the one with the lowest number first. It returns the errors
// by the number of the list. Certificates move from lists without a policy to lists with one. So
// that such a certificate is never on no list, a failed list with a policy keeps the lists without
// one from being written.
func (e *Enforcer) writeLists(ctx context.Context, existing []v1alpha1.RevocationSlice, wanted map[int32]v1alpha1.RevocationSliceSpec) map[int32]error {
	byNumber := map[int32]*v1alpha1.RevocationSlice{}
	for i := range existing {
		byNumber[existing[i].Spec.Number] = &existing[i]
	}
	failed := map[int32]error{}
	for _, number := range slices.Sorted(maps.Keys(wanted)) {
		if number > PolicyCount && len(failed) > 0 {
			break
		}
		if err := e.writeList(ctx, byNumber[number], number, wanted[number]); err != nil {
			failed[number] = fmt.Errorf("slice %d: %w", number, err)
		}
	}
	return failed
}

// writeList writes one list, if it has changed. list is nil if there is none yet.
func (e *Enforcer) writeList(ctx context.Context, list *v1alpha1.RevocationSlice, number int32, wanted v1alpha1.RevocationSliceSpec) error {
	write := func(ctx context.Context) error { return e.Objects.Update(ctx, list) }
	switch {
	case list == nil:
		list = &v1alpha1.RevocationSlice{Spec: v1alpha1.RevocationSliceSpec{Cluster: e.Cluster, Number: number}}
		list.Namespace, list.Name, list.Labels, list.OwnerReferences = e.Namespace, fmt.Sprintf("%s-%02d", e.SlicePrefix, number), e.Labels, e.Owners
		write = func(ctx context.Context) error { return e.Objects.Create(ctx, list) }
	case equality.Semantic.DeepEqual(list.Spec.Certificates, wanted.Certificates) && equality.Semantic.DeepEqual(list.Spec.Current, wanted.Current):
		return nil
	default:
		list = list.DeepCopy()
	}
	list.Spec.Certificates, list.Spec.Current = wanted.Certificates, wanted.Current
	if err := write(ctx); err != nil {
		return err
	}
	e.unseen[list.Name], e.unseenSince = list.ResourceVersion, time.Now()
	return nil
}

// writePolicies writes the policies that differ from the plan. It returns the problems that keep
// certificates from being refused. unlisted has the errors of lists that could not be written:
// their policies stay as they are.
func (e *Enforcer) writePolicies(ctx context.Context, p plan, unlisted map[int32]error) (problems []string) {
	rendered, failed := map[string]*admissionv1.ValidatingAdmissionPolicySpec{}, map[string]error{}
	for number := int32(1); number <= PolicyCount; number++ {
		spec, err := RenderPolicy(p.lists[number], e.Signers)
		if err = cmp.Or(unlisted[number], err); err != nil {
			failed[PolicyName(number)] = err
			continue
		}
		rendered[PolicyName(number)] = &spec
	}
	if _, applied, _ := e.policies.GetStore().GetByKey(TokenPolicyName); applied { // it is optional
		spec, omitted, err := RenderTokenPolicy(p.suspendedNodes)
		if err == nil {
			rendered[TokenPolicyName] = &spec
		} else {
			failed[TokenPolicyName] = err
		}
		if len(omitted) > 0 {
			problems = append(problems, fmt.Sprintf("policy %s: has no room for %d of %d nodes", TokenPolicyName, len(omitted), len(p.suspendedNodes)))
		}
	}
	e.rendered.Store(&rendered)
	for _, name := range slices.Sorted(maps.Keys(rendered)) {
		if err := e.writePolicy(ctx, name, rendered[name]); err != nil {
			failed[name] = err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(failed)) {
		problems = append(problems, fmt.Sprintf("policy %s: %s", name, text.Line(failed[name].Error(), 256)))
	}
	e.state.Store(e.state.Load().next(p.lists, failed, time.Now()))
	return problems
}

// errMissing is for an object that only the operator can create, since RBAC cannot limit create to
// a name.
var errMissing = errors.New("it is missing: apply packaging/kubernetes-revocation")

func (e *Enforcer) writePolicy(ctx context.Context, name string, spec *admissionv1.ValidatingAdmissionPolicySpec) error {
	item, exists, err := e.policies.GetStore().GetByKey(name)
	if err != nil {
		return err
	}
	if !exists {
		return errMissing
	}
	if cached := item.(*admissionv1.ValidatingAdmissionPolicy); equality.Semantic.DeepEqual(&cached.Spec, spec) {
		return nil
	}
	policy := &admissionv1.ValidatingAdmissionPolicy{}
	if err := e.Joined.Get(ctx, client.ObjectKey{Name: name}, policy); err != nil {
		return err
	}
	// the informer does not show our own write yet
	if equality.Semantic.DeepEqual(&policy.Spec, spec) {
		return nil
	}
	policy.Spec = *spec.DeepCopy()
	if err := e.Joined.Update(ctx, policy); err != nil {
		return err
	}
	e.Log.Info("wrote a policy", "policy", name)
	return nil
}

// gauge sets the metrics of revoked certificates. They count as refused only if each policy matches
// the plan.
func (e *Enforcer) gauge(p plan, inForce bool) {
	var count telemetry.RevokedCertificates
	for _, list := range p.lists {
		for _, c := range list.Certificates {
			switch {
			case p.isUnenforced(c.NodeName) || !inForce:
				count.NotInForce++
			case c.Suspended:
				count.Suspended++
			default:
				count.Revoked++
			}
		}
	}
	e.Metrics.Revoked(count, PolicyCount*SliceCapacity)
}

// conclude sets the condition: whether each revoked certificate is refused.
func (e *Enforcer) conclude(ctx context.Context, p plan, problems []string) {
	switch {
	case len(problems) > 0:
		e.say(ctx, corev1.ConditionFalse, ReasonNotInForce, strings.Join(problems, "; "))
	case len(p.unenforced) > 0:
		e.say(ctx, corev1.ConditionFalse, ReasonListsFull,
			"the policies are full, and do not refuse revoked certificates of these nodes until there is room: "+text.Names(p.unenforced))
	default:
		e.say(ctx, corev1.ConditionTrue, ReasonInForce, "the writes of each revoked certificate are refused")
	}
}

// say reports whether revocation is in force, and logs a change, and a lasting problem again.
func (e *Enforcer) say(ctx context.Context, status corev1.ConditionStatus, reason, message string) {
	if _, isNews := e.reporter.Report(ctx, telemetry.Verdict{Status: status, Reason: reason, Message: message}); isNews {
		e.Log.Info("revocation", "status", status, "reason", reason, "message", telemetry.Message(message))
	}
}
