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

// history records each watch event of a story's Machines, MetalMachines and records, and of the
// Cluster's certificate requests. The watches are the test's own: a killed controller does not
// interrupt them.
type history struct {
	requests *witness.Witness

	mu       sync.Mutex
	machines map[string]*pastMachine // by name
	problems []string
	// fewest is the lowest number of Machines with a Node since count was called. most is the
	// highest number of Machines. Both ignore Machines that are being deleted.
	fewest, most int
}

// pastMachine is the last state of one Machine, and all its records.
type pastMachine struct {
	uid           types.UID
	ek            string // as its MetalMachine's annotation says
	node          bool   // whether it has a nodeRef
	deleted, gone bool
	records       map[types.UID]*pastRecord
}

type pastRecord struct {
	eks  map[string]bool
	gone bool
}

// follow starts the watches. Call it before the Cluster has Machines.
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
				h.addProblem("a watch of this test ended early")
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

func (h *history) addProblem(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.problems = append(h.problems, fmt.Sprintf(format, args...))
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
		h.updateCounts()
	case *infrav1.MetalMachine: // it has the name of its Machine
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
			h.problems = append(h.problems, fmt.Sprintf("the record of Machine %s is for Node %s", o.Spec.Machine.Name, o.Spec.NodeName))
		}
	default:
		h.problems = append(h.problems, fmt.Sprintf("a watch of this test got an unexpected event: %s %T", event.Type, event.Object))
	}
}

// updateCounts updates fewest and most. The caller must hold h.mu.
func (h *history) updateCounts() {
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

// count resets fewest and most. machines is the present number of Machines, all with a Node.
func (h *history) count(machines int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fewest, h.most = machines, machines
}

// counted returns the lowest number of Machines with a Node, and the highest number of Machines,
// since count was called.
func (h *history) counted() (fewest, most int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fewest, h.most
}

// check checks the whole history. Each Machine, even a deleted one, must have had exactly one
// record and exactly one certificate. The EK of the record must be one that the MetalMachine names.
// Records must be deleted with their Machines. Records of present Machines must exist. No request
// may be left open.
func (h *history) check(t *testing.T, present []clusterv1.Machine) {
	t.Helper()
	var left []string
	harness.Eventually(t, goneLimit, "the watch has seen the deletion of old Machines and records", func() bool {
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
	for _, problem := range h.problems {
		t.Error(problem)
	}
	for _, name := range slices.Sorted(maps.Keys(h.machines)) {
		m := h.machines[name]
		if len(m.records) != 1 || len(issued[name]) != 1 {
			t.Errorf("Machine %s had %d records and %d certificates", name, len(m.records), len(issued[name]))
		}
		for _, record := range m.records {
			if eks := slices.Collect(maps.Keys(record.eks)); len(eks) != 1 || m.ek == "" || !slices.Contains(strings.Split(m.ek, ","), eks[0]) {
				t.Errorf("the record of Machine %s had the EKs %q, the MetalMachine names %q", name, eks, m.ek)
			}
		}
	}
	for name := range issued {
		if h.machines[name] == nil {
			t.Errorf("%s has a certificate and no Machine", name)
		}
	}
}

// unsettled returns Machines and records whose deletion the watch has not seen yet, and those of
// present Machines that were deleted.
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
