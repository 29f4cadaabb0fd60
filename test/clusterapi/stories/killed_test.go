// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// state is what the two API servers show of one Machine that replaces another.
type state struct {
	machine, data, provisioned bool // the Machine is there, its bootstrap Secret, its host is on
	hello, challenged          bool
	proof, record, issued      bool
	node, nodeRef              bool
	oldDeleted, oldRecord      bool // of the Machine that is replaced: it is being deleted, and its record is there
}

// phase is a part of a rollout, by what the API servers show.
type phase struct {
	name string
	is   func(state) bool
	// stop keeps the rollout in the phase. It is called before the phase. If nil, the rollout goes
	// on.
	stop func(t *testing.T, r *rollout) *stop
	// stopSimulated replaces stop for simulated hosts, whose requests the gate can delay.
	stopSimulated func(t *testing.T, r *rollout) *stop
	// onlySimulated is for a phase that a host that boots does not wait in for the next one.
	onlySimulated bool
}

// stop is a rollout that stops in a phase.
type stop struct {
	reached <-chan struct{} // closed when a request waits that would end the phase; nil if that is not the point
	end     func()
}

var phases = []phase{
	{name: "before the bootstrap Secret", is: func(s state) bool { return s.machine && !s.data }, stop: pausedConfig},
	{name: "booting", is: func(s state) bool { return s.provisioned && !s.hello }, stopSimulated: holding(files(attestation.HelloSignerName))},
	{name: "hello filed", is: func(s state) bool { return s.hello && !s.challenged }, stop: holding(challenges)},
	{name: "challenge given", is: func(s state) bool { return s.challenged && !s.record }, stop: beforeRecord, stopSimulated: holding(files(tpm.SignerName))},
	{name: "proof filed", is: func(s state) bool { return s.proof && !s.record }, stop: holding(readsNode)},
	{name: "record written", is: func(s state) bool { return s.record && !s.issued }, stop: holding(approves)},
	{name: "hello not closed", is: func(s state) bool { return s.issued }, stop: holding(closesHello), onlySimulated: true},
	{name: "certificate issued", is: func(s state) bool { return s.issued && !s.nodeRef }, stop: frozenCore, stopSimulated: holding(registers)},
	{name: "Node without nodeRef", is: func(s state) bool { return s.node && !s.nodeRef }, stop: frozenCore},
	{name: "old Machine being deleted", is: func(s state) bool { return s.nodeRef && s.oldDeleted && s.oldRecord }, stop: oldHostStaysOn},
}

// holding stops where a request would go out.
func holding(match func(*http.Request, []byte) bool) func(*testing.T, *rollout) *stop {
	return func(_ *testing.T, r *rollout) *stop {
		h := r.gate.hold(match)
		return &stop{h.reached, h.letGo}
	}
}

// beforeRecord stops before there is a record, wherever the plugin is by then.
func beforeRecord(_ *testing.T, r *rollout) *stop { return &stop{end: r.gate.hold(readsNode).letGo} }

// pausedConfig pauses the bootstrap provider for the next Machine.
func pausedConfig(t *testing.T, r *rollout) *stop {
	r.paused = true
	return &stop{end: sync.OnceFunc(func() {
		r.paused = false
		configs := &bootstrapv1.KubeadmConfigList{}
		harness.Must(t, r.client.List(context.WithoutCancel(t.Context()), configs, client.InNamespace(r.namespace)))
		for _, config := range configs.Items {
			before := config.DeepCopy()
			delete(config.Annotations, clusterv1.PausedAnnotation)
			harness.Must(t, client.IgnoreNotFound(r.client.Patch(context.WithoutCancel(t.Context()), &config, client.MergeFrom(before))))
		}
	})}
}

// frozenCore freezes Cluster API's core manager before the certificate is issued, so that it does
// not see the Node.
func frozenCore(t *testing.T, r *rollout) *stop {
	signal := func(s syscall.Signal) error { return syscall.Kill(r.clusterAPI.Core.PID(), s) }
	if r.frozen++; r.frozen == 1 {
		h := r.gate.hold(approves)
		go func() {
			select {
			case <-h.reached:
				if err := signal(syscall.SIGSTOP); err != nil {
					t.Error(err)
				}
				h.letGo()
			case <-t.Context().Done():
			}
		}()
	}
	return &stop{end: sync.OnceFunc(func() {
		if r.frozen--; r.frozen == 0 {
			harness.Must(t, signal(syscall.SIGCONT))
		}
	})}
}

// oldHostStaysOn delays the release of the old host, so that its Machine stays in deletion.
func oldHostStaysOn(_ *testing.T, r *rollout) *stop {
	return &stop{end: r.hosts.keep(r.hosts.IDs(r.old.Name)[0])}
}

// rollout replaces the one Machine of a MachineDeployment.
type rollout struct {
	*machineDeployment

	gate   *gate
	old    clusterv1.Machine
	paused bool // is the next Machine's bootstrap provider
	frozen int  // so many phases want the core manager not to run
}

// The controller is killed in each phase of a rollout, and started again. Each time the rollout
// completes: the Machine is Running with one record and one certificate of its own TPM. No request
// is left open. The gate delays the request that would end the phase until the controller is dead.
// The host is simulated.
func TestKilledInEachPhase(t *testing.T) {
	full(t)
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	g := newGate(t, c)
	h := c.follow(t)
	d := c.newMachineDeployment(t, simulatedPrefix+"workers", nil)
	d.scale(t, 1)
	machines := d.awaitRunning(t, 1)
	for _, p := range phases {
		ok := t.Run(strings.ReplaceAll(p.name, " ", "-"), func(t *testing.T) {
			r := &rollout{machineDeployment: d, gate: g, old: machines[0]}
			if p.stopSimulated != nil {
				p.stop = p.stopSimulated
			}
			stopped := p.starts(t, r)
			r.begin(t)
			r.killedIn(t, p, stopped)
			stopped.end()
			harness.Must(t, s.restart(t.Context()))
			machines = d.awaitReplaced(t, machines)
			h.check(t, machines)
		})
		if !ok {
			return
		}
	}
}

// The same with a host that boots, in one rollout: the controller is killed nine times until one
// Machine has been replaced.
func TestKilledInAllPhases(t *testing.T) {
	full(t)
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	g := newGate(t, c)
	h := c.follow(t)
	d := c.newMachineDeployment(t, "workers", nil)
	d.scale(t, 1)
	before := d.awaitRunning(t, 1)
	all := slices.DeleteFunc(slices.Clone(phases), func(p phase) bool { return p.onlySimulated })
	r := &rollout{machineDeployment: d, gate: g, old: before[0]}
	stopped := all[0].starts(t, r)
	r.begin(t)
	for i, p := range all {
		r.killedIn(t, p, stopped)
		next := &stop{end: func() {}}
		if i+1 < len(all) {
			next = all[i+1].starts(t, r) // before this one ends, so that none is missed
		}
		stopped.end()
		stopped = next
		harness.Must(t, s.restart(t.Context()))
	}
	h.check(t, d.awaitReplaced(t, before))
}

// starts keeps the rollout in a phase, if there is a way to do that.
func (p phase) starts(t *testing.T, r *rollout) *stop {
	t.Helper()
	if p.stop == nil {
		return &stop{end: func() {}}
	}
	stopped := p.stop(t, r)
	t.Cleanup(stopped.end)
	return stopped
}

// begin changes the template.
func (r *rollout) begin(t *testing.T) {
	t.Helper()
	r.rollOut(t, func(template *bootstrapv1.KubeadmConfigTemplate) {
		// One that differs from the one before.
		template.Spec.Template.Spec.PreKubeadmCommands = append(template.Spec.Template.Spec.PreKubeadmCommands, "echo rollout of "+r.old.Name)
		if r.paused {
			template.Spec.Template.ObjectMeta.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
		}
	})
}

// killedIn kills the controller in a phase. If the rollout stops there, the phase has to last until
// the controller is dead.
func (r *rollout) killedIn(t *testing.T, p phase, stopped *stop) {
	t.Helper()
	var at state
	harness.Eventually(t, joinLimit, p.name, func() bool {
		at = r.look(t)
		return p.is(at)
	})
	if stopped.reached != nil {
		select {
		case <-stopped.reached:
		case <-time.After(joinLimit):
			t.Fatalf("%s: nobody makes the request that was to be held back: %+v", p.name, at)
		}
	}
	harness.Must(t, r.controller.Kill())
	dead := r.look(t)
	if !p.is(dead) && p.stop != nil {
		t.Fatalf("%s: it was over before the controller was killed: %+v", p.name, dead)
	}
	t.Logf("the controller was killed: %s: %+v", p.name, dead)
}

// look asks the API servers.
func (r *rollout) look(t *testing.T) (s state) {
	t.Helper()
	next := ""
	for _, m := range r.machines(t) {
		if m.Name == r.old.Name {
			s.oldDeleted = !m.DeletionTimestamp.IsZero()
			continue
		}
		next = m.Name
		s.machine, s.data, s.nodeRef = true, m.Spec.Bootstrap.DataSecretName != nil, m.Status.NodeRef.Name != ""
		s.provisioned = ptr.Deref(m.Status.Initialization.InfrastructureProvisioned, false)
	}
	for _, record := range r.records(t) {
		s.oldRecord = s.oldRecord || record.Spec.Machine.Name == r.old.Name
		s.record = s.record || record.Spec.Machine.Name == next
	}
	if next == "" {
		return s
	}
	requests, err := r.workload.Client().CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	for _, request := range requests.Items {
		if commonName(t, request.Spec.Request) != "system:node:"+next {
			continue
		}
		switch request.Spec.SignerName {
		case attestation.HelloSignerName:
			s.hello, s.challenged = true, s.challenged || request.Annotations[attestation.AnnotationChallenge] != ""
		case tpm.SignerName:
			s.proof, s.issued = true, s.issued || len(request.Status.Certificate) > 0
		}
	}
	_, err = r.workload.Client().CoreV1().Nodes().Get(t.Context(), next, metav1.GetOptions{})
	s.node = err == nil
	harness.Must(t, client.IgnoreNotFound(err))
	return s
}

func commonName(t *testing.T, request []byte) string {
	t.Helper()
	block, _ := pem.Decode(request)
	if block == nil {
		return ""
	}
	parsed, err := x509.ParseCertificateRequest(block.Bytes)
	harness.Must(t, err)
	return parsed.Subject.CommonName
}
