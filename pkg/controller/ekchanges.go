// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
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
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Reasons of Events on Nodes whose machines have other EKs by a source than by their records.
const (
	ReasonEKChangeAccepted = "EKChangeAccepted"
	ReasonEKChangeHeld     = "EKChangeHeld"
)

const (
	// ekChangesInterval is how often records and sources are compared, and ekChangesUnwatched how
	// often while records are not watched: each time lists them all then.
	ekChangesInterval, ekChangesUnwatched = 2 * time.Second, time.Minute
	// freeEKChanges and freeEKPercent bound the changes of a source that are accepted without an
	// operator: the larger of the two, of the machines that the source vouched for. An operator
	// replaces a few boards at a time; a mistake in a source changes many.
	freeEKChanges, freeEKPercent = 3, 5
	// ekChangesRemind is how often changes that are held are reported again.
	ekChangesRemind = 15 * time.Minute
)

// ekChanges decides whether it takes effect that a source names other EKs for machines than those
// which it vouched for (verifier.Rules.ContradictsEK). What is accepted is written into the
// machine's record, and the rules go by that: so it stays accepted, and is counted, whatever the
// source says of others later.
type ekChanges struct {
	*Controller
	log logr.Logger
	// reported are the changes of each source that were last reported without being accepted.
	reported map[verifier.EKSource]reportedChanges
}

type reportedChanges struct {
	name string
	at   time.Time
}

// ekChange is a machine whose record has an EK that its source no longer names.
type ekChange struct {
	object  *v1alpha1.NodeAttestation
	record  verifier.Record
	machine *verifier.Machine
}

// ekChanges returns a source that compares records and sources as long as the Controller runs, on
// the leader.
func (c *Controller) ekChanges(log logr.Logger) source.Source {
	e := &ekChanges{Controller: c, log: log, reported: map[verifier.EKSource]reportedChanges{}}
	return source.Func(func(ctx context.Context, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go e.run(ctx)
		return nil
	})
}

func (e *ekChanges) run(ctx context.Context) {
	ticker := time.NewTicker(ekChangesInterval)
	defer ticker.Stop()
	for last := time.Now(); ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if !e.records.told.hears() && time.Since(last) < ekChangesUnwatched {
			continue
		}
		last = time.Now()
		if err := e.compare(ctx, e.Now()); err != nil && ctx.Err() == nil {
			e.log.Info("cannot compare the records with the sources of EKs", "cause", text.Line(err.Error(), maxProblem))
		}
	}
}

// compare goes once through all records.
func (e *ekChanges) compare(ctx context.Context, now time.Time) error {
	known, err := machines(ctx, e.Machines, now)
	if err != nil {
		return fmt.Errorf("machines: %w", err)
	}
	byRef := make(map[verifier.MachineRef]*verifier.Machine, len(known))
	for i := range known {
		byRef[known[i].Ref] = &known[i]
	}
	objects, err := e.records.all(ctx)
	if err != nil {
		return err
	}
	vouched, changes := map[verifier.EKSource]int{}, map[verifier.EKSource][]ekChange{}
	for i := range objects {
		object := &objects[i]
		record := e.records.of(object)
		machine := byRef[record.Machine]
		if machine == nil || record.EKSource == "" {
			continue
		}
		vouched[record.EKSource]++
		switch {
		case e.Rules.ContradictsEK(&record, machine):
			changes[record.EKSource] = append(changes[record.EKSource], ekChange{object, record, machine})
		case record.EKReplaced && e.Rules.NamesEK(machine, record.EK):
			if err := e.mark(ctx, object, nil); err != nil {
				return err
			}
			e.log.Info("the source names the EK again", "node", record.NodeName, "machine", record.Machine.Name, "source", record.EKSource)
		}
	}
	for _, source := range slices.Sorted(maps.Keys(vouched)) {
		if err := e.settle(ctx, source, vouched[source], changes[source], now); err != nil {
			return err
		}
	}
	return nil
}

// settle accepts the changes of one source, or holds them.
func (e *ekChanges) settle(ctx context.Context, source verifier.EKSource, vouched int, changes []ekChange, now time.Time) error {
	unacknowledged := 0
	for _, change := range changes {
		if r := change.object.Status.EKReplaced; r == nil || !r.Acknowledged {
			unacknowledged++
		}
	}
	name := nameOfChanges(source, changes)
	acknowledged := e.AcceptedEKChanges != nil && slices.Contains(e.AcceptedEKChanges(), name)
	if free := max(freeEKChanges, vouched*freeEKPercent/100); unacknowledged > free && !acknowledged {
		e.hold(ctx, source, name, changes, fmt.Sprintf("the source changed the EKs of %d of its %d machines; at most %d are accepted without an acknowledgement",
			unacknowledged, vouched, free), now)
		return nil
	}
	e.Metrics.gaugeEKChanges(source, len(changes), 0)
	if e.Audit { // no record is written
		if len(changes) > 0 && e.isNews(source, name, now) {
			e.log.Info("a source names other EKs for machines: enforcement would refuse those in their records", "source", source, "change", name, "machines", len(changes))
		}
		return nil
	}
	delete(e.reported, source)
	for _, change := range changes {
		before := change.object.Status.EKReplaced
		if before != nil && (before.Acknowledged || !acknowledged) {
			continue
		}
		if err := e.mark(ctx, change.object, &v1alpha1.EKReplacement{Since: metav1.NewTime(now), Acknowledged: acknowledged}); err != nil {
			return err
		}
		if before != nil {
			continue
		}
		e.log.Info("the source names other EKs for the machine: the one in its record is refused from now on", "node", change.record.NodeName,
			"machine", change.record.Machine.Name, "source", source, "ek", change.record.EK, "acknowledged", acknowledged)
		e.eventOnNamed(ctx, change.record.NodeName, ReasonEKChangeAccepted, fmt.Sprintf(
			"%s names other endorsement keys for machine %s: the key sha256:%s is refused from now on", source, change.record.Machine.Name, change.record.EK))
	}
	return nil
}

// hold reports changes that are not accepted. What was accepted of them before stays so.
func (e *ekChanges) hold(ctx context.Context, source verifier.EKSource, name string, changes []ekChange, why string, now time.Time) {
	var nodes []string
	for _, change := range changes {
		if change.object.Status.EKReplaced == nil {
			nodes = append(nodes, change.record.NodeName)
		}
	}
	slices.Sort(nodes)
	e.Metrics.gaugeEKChanges(source, len(changes)-len(nodes), len(nodes))
	if !e.isNews(source, name, now) {
		return
	}
	cure := fmt.Sprintf("if the source is right, annotate the Secret of the challenge keys with %s=%s", AnnotationAcceptEKChanges, name)
	e.log.Error(nil, "a source names other EKs for too many machines: the change is held, and the records decide", "source", source,
		"change", name, "why", why, "nodes", named(nodes), "hint", cure, "audit", e.Audit)
	for _, node := range nodes[:min(len(nodes), maxNamed)] {
		e.eventOnNamed(ctx, node, ReasonEKChangeHeld, fmt.Sprintf(
			"%s names other endorsement keys for the machine. Its record decides, since %s; %s", source, why, cure))
	}
}

// isNews reports whether these changes of a source were not reported a moment ago.
func (e *ekChanges) isNews(source verifier.EKSource, name string, now time.Time) bool {
	if last := e.reported[source]; last.name == name && now.Sub(last.at).Abs() < ekChangesRemind {
		return false
	}
	e.reported[source] = reportedChanges{name, now}
	return true
}

// nameOfChanges returns what an operator acknowledges: the source, and a digest of which machines
// change from which EK to which. An acknowledgement is for these, and for no change that comes
// later.
func nameOfChanges(source verifier.EKSource, changes []ekChange) string {
	lines := make([]string, 0, len(changes))
	for _, change := range changes {
		var named []string
		for _, ek := range change.machine.EKs {
			if ek.Source == source {
				named = append(named, ek.EK)
			}
		}
		slices.Sort(named)
		lines = append(lines, fmt.Sprintf("%q %q %q %q", change.record.Machine.Name, change.record.Machine.UID, change.record.EK, named))
	}
	slices.Sort(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	return fmt.Sprintf("%s-%s", source, hex.EncodeToString(sum[:8]))
}

// mark writes into a record whether its EK is replaced, under the version that was compared.
func (e *ekChanges) mark(ctx context.Context, object *v1alpha1.NodeAttestation, replacement *v1alpha1.EKReplacement) error {
	if e.Audit {
		return nil
	}
	marked := object.DeepCopy()
	marked.Status.EKReplaced = replacement
	return e.records.write(ctx, marked)
}

// eventOnNamed records a warning on a Node, if there is one of that name.
func (e *ekChanges) eventOnNamed(ctx context.Context, name, reason, message string) {
	if node, err := e.getNode(ctx, name); err == nil && node != nil {
		e.events.Eventf(node, nil, corev1.EventTypeWarning, reason, "Compare", "%s", message[:min(len(message), maxCondition)])
	}
}
