// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/report"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Reasons of Events on Nodes for whose machines a source names other EKs than their records have.
const (
	ReasonEKChangeAccepted = "EKChangeAccepted"
	ReasonEKChangeHeld     = "EKChangeHeld"
)

const (
	// ekChangesInterval is the interval between comparisons of records and sources if the machines
	// are in memory. ekChangesSlow applies if reading the machines may cost API calls.
	// ekChangesUnwatched applies while records are not watched, since each comparison then lists
	// all records.
	ekChangesInterval, ekChangesSlow, ekChangesUnwatched = 2 * time.Second, 30 * time.Second, time.Minute
	// freeEKChanges and freeEKPercent bound the changes of a source that are accepted without an
	// operator. The percentage is of the machines that the source vouched for, and the larger bound
	// applies. An operator replaces a few boards at a time; a mistake in a source changes many.
	freeEKChanges, freeEKPercent = 3, 5
	// ekChangesRemind is the interval after which held changes are reported again.
	ekChangesRemind = 15 * time.Minute
	// ekFirstUse stands for the source of records that have none, such as those from trust on first
	// use. Changes of these records count together, whichever source names the other EKs.
	ekFirstUse verifier.EKSource = "FirstUse"
)

// Acknowledgements are the names of changes that an operator has acknowledged.
type Acknowledgements interface {
	// AcknowledgedEKChanges returns the names that were read last. They may be stale.
	AcknowledgedEKChanges() []string
	// RemoveAcknowledgedEKChange deletes a name, once the change has taken effect.
	RemoveAcknowledgedEKChange(ctx context.Context, name string) error
}

// EKChanges accepts or holds changes of endorsement keys. A source may now name other EKs for a
// machine than the one in the machine's record (verifier.Rules.ContradictedBy). EKChanges decides
// whether such a change takes effect. An accepted change is written into the machine's record,
// which the rules read. So the change stays accepted, and is counted, until a source names the old
// EK again or the new TPM has enrolled.
type EKChanges struct {
	Rules    *verifier.Rules
	Machines evidence.MachineSource
	// Acknowledgements are optional.
	Acknowledgements Acknowledgements
	Audit            bool
	Metrics          *telemetry.Metrics
	Now              func() time.Time
	Records          *records.Store
	Actor            *act.Actor
	// Reporter records the Events.
	Reporter *report.Reporter
	Log      logr.Logger
	// acknowledged has, by the records' source, the changes that an operator acknowledged and that
	// are not all written yet.
	acknowledged map[verifier.EKSource]acknowledgedChanges
	// reported has, by the records' source, the name of the held changes.
	reported telemetry.Once
}

// acknowledgedChanges is one acknowledgement: its name, and the changes that it is for.
type acknowledgedChanges struct {
	name string
	keys map[string]bool
}

// ekChange is a machine whose record has an EK that no source names.
type ekChange struct {
	object *v1alpha1.NodeAttestation
	record verifier.Record
	// by is the source that contradicts the record. named are the EKs that this source names now,
	// sorted. Both are empty if no source contradicts the record any more.
	by    verifier.EKSource
	named []string
}

// key identifies the change: the machine, its EK, and the EKs that replace it.
func (c ekChange) key() string {
	return fmt.Sprintf("%q %q %q %q", c.record.Machine.Name, c.record.Machine.UID, c.record.EK, c.named)
}

// isNew reports whether the change, with these EKs, is not accepted yet.
func (c ekChange) isNew() bool {
	return len(c.named) > 0 && !slices.Equal(c.named, c.record.EKReplacedBy)
}

// Source runs the comparison.
func (e *EKChanges) Source(log logr.Logger) source.Source {
	e.Log = log
	return InBackground(func(ctx context.Context, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) { e.run(ctx) })
}

func (e *EKChanges) run(ctx context.Context) {
	interval := ekChangesInterval
	if _, shared := e.Machines.(evidence.SharedSource); !shared {
		interval = ekChangesSlow
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for last := time.Now(); ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if !e.Records.InSync() && time.Since(last) < ekChangesUnwatched {
			continue
		}
		last = time.Now()
		if err := e.Compare(ctx, e.Now()); err != nil && ctx.Err() == nil {
			e.Log.Error(nil, "cannot compare the records with the sources of EKs", "cause", text.Line(err.Error(), telemetry.MaxLogged))
		}
	}
}

// Compare goes once through all records.
func (e *EKChanges) Compare(ctx context.Context, now time.Time) error {
	objects, err := e.Records.All(ctx)
	if err != nil {
		return err
	}
	objects = slices.DeleteFunc(objects, func(o v1alpha1.NodeAttestation) bool {
		return o.Spec.EK == nil || !e.Rules.RefusesUnnamed(verifier.EKSource(o.Spec.EK.Source))
	})
	if len(objects) == 0 {
		return nil // reading the machines costs an API call with some sources
	}
	known, err := evidence.MachinesOf(ctx, e.Machines, now)
	if err != nil {
		return fmt.Errorf("machines: %w", err)
	}
	byRef := make(map[verifier.MachineRef]*verifier.Machine, len(known))
	for i := range known {
		byRef[known[i].Ref] = &known[i]
	}
	vouched, changes := map[verifier.EKSource]int{}, map[verifier.EKSource][]ekChange{}
	var failed []error
	for i := range objects {
		object := &objects[i]
		record := e.Records.Record(object)
		machine := byRef[record.Machine]
		change := ekChange{object: object, record: record}
		source := record.EKSource
		if source == "" {
			source = ekFirstUse
		}
		if machine != nil {
			vouched[source]++
			change.by, change.named = e.Rules.ContradictedBy(&record, machine)
		}
		if machine != nil && !machine.Disputed && e.Rules.NamesEK(machine, record.EK) {
			if record.EKReplacedBy != nil {
				failed = append(failed, e.mark(ctx, object, nil))
				e.Log.Info("a source names the EK again", "node", record.NodeName, "machine", record.Machine.Name, "source", source)
			}
			continue
		}
		if change.isNew() || record.EKReplacedBy != nil {
			changes[source] = append(changes[source], change)
		}
	}
	for _, source := range slices.Sorted(maps.Keys(vouched)) {
		failed = append(failed, e.settle(ctx, source, vouched[source], changes[source], now))
	}
	return errors.Join(failed...)
}

// settle accepts the changes of the records with one source, or holds them.
func (e *EKChanges) settle(ctx context.Context, source verifier.EKSource, vouched int, changes []ekChange, now time.Time) error {
	name := nameOfChanges(source, changes)
	if e.Acknowledgements != nil && slices.Contains(e.Acknowledgements.AcknowledgedEKChanges(), name) {
		keys := map[string]bool{}
		for _, change := range changes {
			keys[change.key()] = true
		}
		if e.acknowledged == nil {
			e.acknowledged = map[verifier.EKSource]acknowledgedChanges{}
		}
		e.acknowledged[source] = acknowledgedChanges{name, keys}
	}
	acknowledged := e.acknowledged[source]
	var accept, held []ekChange
	counted := 0 // the changes without an acknowledgement, accepted or new
	for _, change := range changes {
		before := change.object.Status.EKReplaced
		switch {
		case acknowledged.keys[change.key()] && (change.isNew() || !before.Acknowledged):
			accept = append(accept, change)
		case change.isNew():
			held = append(held, change)
			counted++
		case !before.Acknowledged:
			counted++
		}
	}
	if free := max(freeEKChanges, vouched*freeEKPercent/100); counted <= free {
		accept, held = append(accept, held...), nil
		if !e.Audit {
			e.reported.Forget(string(source))
		}
	} else {
		e.hold(ctx, source, name, held, fmt.Sprintf("the EKs of %d of the %d machines with the source %s changed; at most %d are accepted without an acknowledgement",
			counted, vouched, source, free), now)
	}
	e.Metrics.EKChanges(source, len(changes)-len(held), len(held))
	if e.Audit { // no record is written
		if len(accept) > 0 && e.reported.MarkReported(string(source), name, now, ekChangesRemind) {
			e.Log.Info("a source names other EKs for machines: enforcement would refuse those in their records", "source", source, "change", name, "machines", len(accept))
		}
		return nil
	}
	var failed []error
	for _, change := range accept {
		failed = append(failed, e.accept(ctx, change, acknowledged.keys[change.key()], now))
	}
	if err := errors.Join(failed...); err != nil || acknowledged.name == "" {
		return err
	}
	// All acknowledged changes are written. The acknowledgement is removed from the Secret, so that
	// the same changes are held if they come again.
	if err := e.Acknowledgements.RemoveAcknowledgedEKChange(ctx, acknowledged.name); err != nil {
		return err
	}
	delete(e.acknowledged, source)
	return nil
}

// accept writes into a record that its EK is refused from now on, and which EKs may replace it.
func (e *EKChanges) accept(ctx context.Context, change ekChange, acknowledged bool, now time.Time) error {
	record := change.record
	replacement := &v1alpha1.EKReplacement{Since: metav1.NewTime(now), EKs: change.named, Acknowledged: acknowledged}
	if before := change.object.Status.EKReplaced; before != nil {
		replacement.Since = before.Since
		if !change.isNew() {
			replacement.EKs = before.EKs
		}
	}
	if err := e.mark(ctx, change.object, replacement); err != nil {
		return fmt.Errorf("record %s: %w", change.object.Name, err)
	}
	if !change.isNew() {
		return nil
	}
	e.Log.Info("a source names other EKs for the machine: the one in its record is refused from now on", "node", record.NodeName,
		"machine", record.Machine.Name, "source", change.by, "ek", record.EK, "acknowledged", acknowledged)
	message := fmt.Sprintf("%s names other endorsement keys for machine %s: the key sha256:%s is refused from now on", change.by, record.Machine.Name, record.EK)
	e.Reporter.EventOnNamedNode(ctx, record.NodeName, corev1.EventTypeWarning, ReasonEKChangeAccepted, message)
	e.Reporter.EventOnRecord(change.object, corev1.EventTypeWarning, ReasonEKChangeAccepted, message)
	return nil
}

// hold reports changes that are not accepted.
func (e *EKChanges) hold(ctx context.Context, source verifier.EKSource, name string, held []ekChange, why string, now time.Time) {
	if len(held) == 0 || !e.reported.MarkReported(string(source), name, now, ekChangesRemind) {
		return
	}
	slices.SortFunc(held, func(a, b ekChange) int { return strings.Compare(a.record.NodeName, b.record.NodeName) })
	nodes := make([]string, len(held))
	for i, change := range held {
		nodes[i] = change.record.NodeName
	}
	cure := fmt.Sprintf("if the source is right, annotate the Secret of the challenge keys with %s=%s", sources.AnnotationAcceptEKChanges, name)
	e.Log.Error(nil, "a source names other EKs for too many machines: the change is held, and the records decide", "source", source,
		"change", name, "why", why, "nodes", text.Names(nodes), "hint", cure, "audit", e.Audit)
	for _, change := range held[:min(len(held), text.MaxNames)] {
		e.Reporter.EventOnNamedNode(ctx, change.record.NodeName, corev1.EventTypeWarning, ReasonEKChangeHeld, fmt.Sprintf(
			"%s names other endorsement keys for the machine. Its record decides, since %s; %s", change.by, why, cure))
	}
}

// nameOfChanges returns what an operator acknowledges: the records' source, and a digest of which
// machines change from which EK to which. It names these changes, and no change that comes later.
func nameOfChanges(source verifier.EKSource, changes []ekChange) string {
	keys := make([]string, 0, len(changes))
	for _, change := range changes {
		if change.isNew() || !change.object.Status.EKReplaced.Acknowledged {
			keys = append(keys, change.key())
		}
	}
	slices.Sort(keys)
	sum := sha256.Sum256([]byte(strings.Join(keys, "\n")))
	return fmt.Sprintf("%s-%s", source, hex.EncodeToString(sum[:8]))
}

// mark writes into a record whether its EK is replaced, under the version that was compared.
func (e *EKChanges) mark(ctx context.Context, object *v1alpha1.NodeAttestation, replacement *v1alpha1.EKReplacement) error {
	if e.Audit {
		return nil
	}
	marked := object.DeepCopy()
	marked.Status.EKReplaced = replacement
	return e.Actor.WriteRecord(ctx, marked)
}
