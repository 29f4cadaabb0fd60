// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/witness"
)

// history has each version of a story's Machines and records, and of the Cluster's certificate
// requests, whatever was killed meanwhile.
type history struct {
	requests *witness.Witness

	mu       sync.Mutex
	machines map[string]*pastMachine // by name
	trouble  []string
	// Both are since count was called, without Machines that are being deleted: the fewest Machines
	// with a Node, and the most Machines.
	fewest, most int
}

// pastMachine is all that was ever seen of one Machine.
type pastMachine struct {
	uid           types.UID
	ek            string // as the platform says
	node          bool   // it has a nodeRef
	deleted, gone bool
	records       map[types.UID]*pastRecord
}

type pastRecord struct {
	eks  map[string]bool
	gone bool
}

// follow begins before the Cluster has Machines.
func (c *cluster) follow(t *testing.T) *history {
	t.Helper()
	requests, err := witness.Observe(t.Context(), c.workload)
	harness.Must(t, err)
	h := &history{requests: requests, machines: map[string]*pastMachine{}}
	watching, err := client.NewWithWatch(c.AdminConfig(), client.Options{Scheme: scheme()})
	harness.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	for _, list := range []client.ObjectList{&clusterv1.MachineList{}, &infrav1.MetalMachineList{}, &v1alpha1.NodeAttestationList{}} {
		w, err := watching.Watch(ctx, list, client.InNamespace(c.namespace))
		harness.Must(t, err)
		ended.Go(func() {
			for event := range w.ResultChan() {
				h.note(event)
			}
			if ctx.Err() == nil {
				h.complain("the watch of the test itself has ended")
			}
		})
	}
	t.Cleanup(func() {
		cancel()
		ended.Wait()
		requests.Close()
	})
	return h
}

func (h *history) complain(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.trouble = append(h.trouble, fmt.Sprintf(format, args...))
}

func (h *history) machine(name string) *pastMachine {
	if h.machines[name] == nil {
		h.machines[name] = &pastMachine{records: map[types.UID]*pastRecord{}}
	}
	return h.machines[name]
}

func (h *history) note(event watch.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch o := event.Object.(type) {
	case *clusterv1.Machine:
		m := h.machine(o.Name)
		m.uid, m.node = o.UID, o.Status.NodeRef.Name != ""
		m.deleted, m.gone = !o.DeletionTimestamp.IsZero(), event.Type == watch.Deleted
		h.tally()
	case *infrav1.MetalMachine: // it has its Machine's name
		if ek := o.Annotations[attestation.AnnotationEK]; ek != "" {
			h.machine(o.Name).ek = ek
		}
	case *v1alpha1.NodeAttestation:
		m := h.machine(o.Spec.Machine.Name)
		if m.records[o.UID] == nil {
			m.records[o.UID] = &pastRecord{eks: map[string]bool{}}
		}
		record := m.records[o.UID]
		record.gone = event.Type == watch.Deleted
		if o.Spec.EK != nil {
			record.eks["sha256:"+o.Spec.EK.Fingerprint] = true
		}
		if o.Spec.NodeName != o.Spec.Machine.Name {
			h.trouble = append(h.trouble, fmt.Sprintf("the record of Machine %s is for Node %s", o.Spec.Machine.Name, o.Spec.NodeName))
		}
	default:
		h.trouble = append(h.trouble, fmt.Sprintf("the watch of the test itself: %s %T", event.Type, event.Object))
	}
}

// tally is called with the lock held.
func (h *history) tally() {
	nodes, there := 0, 0
	for _, m := range h.machines {
		if m.uid == "" || m.deleted || m.gone {
			continue
		}
		there++
		if m.node {
			nodes++
		}
	}
	h.fewest, h.most = min(h.fewest, nodes), max(h.most, there)
}

// count begins to count Machines anew. So many have a Node now.
func (h *history) count(machines int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fewest, h.most = machines, machines
}

// counted returns the fewest Machines with a Node, and the most Machines that there were at once,
// since count.
func (h *history) counted() (fewest, most int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fewest, h.most
}

// check checks the whole history. Each Machine, also a deleted one, had exactly one record, and the
// record never had an EK that the platform did not name for the Machine. Each Machine got exactly
// one certificate, so none while it was being deleted. Records were deleted with their Machines,
// and those of the present Machines exist. No request is left open.
func (h *history) check(t *testing.T, present []clusterv1.Machine) {
	t.Helper()
	var left []string
	harness.Eventually(t, goneLimit, "the watch has seen the records go", func() bool {
		left = h.unsettled(present)
		return len(left) == 0
	})
	issued, err := h.requests.SignedOnce(t.Context())
	if err != nil {
		t.Error(err)
	}
	if _, _, err := h.requests.HellosAreSettled(t.Context()); err != nil {
		t.Error(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, problem := range h.trouble {
		t.Error(problem)
	}
	for _, name := range slices.Sorted(maps.Keys(h.machines)) {
		m := h.machines[name]
		if len(m.records) != 1 || len(issued[name]) != 1 {
			t.Errorf("Machine %s had %d records and %d certificates", name, len(m.records), len(issued[name]))
		}
		for _, record := range m.records {
			if eks := slices.Collect(maps.Keys(record.eks)); len(eks) != 1 || m.ek == "" || !slices.Contains(strings.Split(m.ek, ","), eks[0]) {
				t.Errorf("the record of Machine %s had the EKs %q, the platform says %q", name, eks, m.ek)
			}
		}
	}
	for name := range issued {
		if h.machines[name] == nil {
			t.Errorf("%s has a certificate and no Machine", name)
		}
	}
}

// unsettled returns what is still to be seen: the end of a Machine that is not there, or of its
// record.
func (h *history) unsettled(present []clusterv1.Machine) (left []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, m := range h.machines {
		stays := slices.ContainsFunc(present, func(p clusterv1.Machine) bool { return p.Name == name })
		if m.gone == stays {
			left = append(left, name)
		}
		for _, record := range m.records {
			if record.gone == stays {
				left = append(left, "the record of "+name)
			}
		}
	}
	return left
}
