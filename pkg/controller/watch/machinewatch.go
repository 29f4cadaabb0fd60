// SPDX-License-Identifier: Apache-2.0

// Package watch has what runs beside the decisions on requests: machines that appear (Machines),
// endorsement keys that change (EKChanges), certificates that were issued without attestation
// (Issued), and requests without evidence (NoEvidence).
package watch

import (
	"context"
	"maps"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// ListedMachines are the claims of listed machines: their EKs, and the node names of those without
// an EK in any source.
type ListedMachines struct{ eks, nodes map[string]bool }

func listMachines(machines []verifier.Machine) *ListedMachines {
	l := &ListedMachines{eks: map[string]bool{}, nodes: map[string]bool{}}
	for i := range machines {
		for _, ek := range machines[i].EKs {
			l.eks[ek.EK] = true
		}
		if len(machines[i].EKs) > 0 {
			continue
		}
		for _, name := range machines[i].Names {
			l.nodes[name.Value] = true
		}
	}
	delete(l.eks, "")
	delete(l.nodes, "")
	return l
}

// Has reports whether a listed machine has this claim.
func (l *ListedMachines) Has(claim fairqueue.Claim) bool {
	return l != nil && (l.eks[claim.EK] || l.nodes[claim.Node])
}

func (l *ListedMachines) equal(other *ListedMachines) bool {
	return other != nil && maps.Equal(l.eks, other.eks) && maps.Equal(l.nodes, other.nodes)
}

// Intervals between two comparisons of the machines. machinesSlow is for a source that builds all
// machines in each call.
const (
	machinesInterval = time.Second
	machinesSlow     = 5 * time.Second
)

// Machines follows the machines for the queue, and wakes requests that wait for them.
type Machines struct {
	Machines evidence.MachineSource
	Now      func() time.Time
	Queue    *fairqueue.Queue
	Retries  *fairqueue.Retries[collect.WaitingEvidence]
	// Listed has the claims of machines in a source. They have a share of their own in the queue.
	// It is nil until the machines are known.
	Listed *atomic.Pointer[ListedMachines]
	// recordsKnown says that the records were in sync when the queue was last reclassified, so that
	// it knew their AKs.
	recordsKnown bool
	Records      *records.Store
	log          logr.Logger
	// last has the shared machines of the last comparison.
	last []verifier.Machine
}

// InBackground returns a source that calls run as long as the Controller runs, on the leader. queue
// is the Controller's.
func InBackground(run func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request])) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go run(ctx, queue)
		return nil
	})
}

// Source runs the watch.
func (w *Machines) Source(log logr.Logger) source.Source {
	w.log = log
	return InBackground(w.run)
}

func (w *Machines) run(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	interval := machinesInterval
	_, shared := w.Machines.(evidence.SharedSource)
	if !shared {
		interval = machinesSlow
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for ; ctx.Err() == nil; wait(ctx, ticker) {
		idle := w.Listed.Load() != nil && w.Queue.Len() == 0 && w.Retries.Len() == 0
		// nothing is queued and nothing waits, so building all machines would be wasted
		if !shared && idle {
			continue
		}
		if err := w.Compare(ctx, queue); err != nil && ctx.Err() == nil {
			// each decision fails with this error and reports it
			w.log.V(1).Info("the machines are not known", "cause", text.Line(err.Error(), telemetry.MaxLogged))
		}
	}
}

func wait(ctx context.Context, ticker *time.Ticker) {
	select {
	case <-ctx.Done():
	case <-ticker.C:
	}
}

// Compare reclassifies what is queued, and wakes what waits, if the machines have changed.
func (w *Machines) Compare(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	if !w.recordsKnown && w.Records.InSync() {
		w.recordsKnown = true
		w.Queue.Reclassify()
	}
	machines, err := evidence.MachinesOf(ctx, w.Machines, w.Now())
	if err != nil {
		return err
	}
	_, shared := w.Machines.(evidence.SharedSource)
	before := w.Listed.Load()
	if shared && before != nil && evidence.IsSameSlice(machines, w.last) {
		return nil
	}
	listed := listMachines(machines)
	if !shared && listed.equal(before) { // waiting requests are retried anyway
		return nil
	}
	w.last = machines
	w.Listed.Store(listed)
	w.Queue.Reclassify()
	for _, name := range w.Retries.Wake(listed.Has) {
		queue.Add(reconcile.Request{NamespacedName: client.ObjectKey{Name: name}})
	}
	return nil
}
