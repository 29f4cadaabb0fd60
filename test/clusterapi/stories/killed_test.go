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

// state is the progress of one Machine that replaces another, as the two API servers show it.
type state struct {
	// the Machine exists, its bootstrap Secret exists, its host is on
	machine, data, provisioned bool
	hello, challenged          bool
	proof, record, issued      bool
	node, nodeRef              bool
	oldDeleted, oldRecord      bool // the old Machine is being deleted, its record still exists
}

// phase is a part of a rollout, defined by the state.
type phase struct {
	name string
	is   func(state) bool
	// stop keeps the rollout in the phase. It is called before the phase begins. If it is nil, the
	// rollout does not stop in the phase.
	stop func(t *testing.T, r *rollout) *stop
	// stopSimulated replaces stop for simulated hosts, whose requests the proxy can delay.
	stopSimulated func(t *testing.T, r *rollout) *stop
	// onlySimulated skips the phase for hosts that boot: they enter the next phase without waiting
	// for the end of this one.
	onlySimulated bool
}

// stop keeps a rollout in a phase until end.
type stop struct {
	// closed when the request that would end the phase is delayed; may be nil
	reached <-chan struct{}
	end     func()
}

var phases = []phase{
	{name: "before the bootstrap Secret", is: func(s state) bool { return s.machine && !s.data }, stop: pausedConfig},
	{name: "booting", is: func(s state) bool { return s.provisioned && !s.hello }, stopSimulated: delaying(createsRequest(attestation.HelloSignerName))},
	{name: "hello filed", is: func(s state) bool { return s.hello && !s.challenged }, stop: delaying(writesChallenge)},
	{name: "challenge given", is: func(s state) bool { return s.challenged && !s.record }, stop: beforeRecord, stopSimulated: delaying(createsRequest(tpm.SignerName))},
	{name: "proof filed", is: func(s state) bool { return s.proof && !s.record }, stop: delaying(readsNode)},
	{name: "record written", is: func(s state) bool { return s.record && !s.issued }, stop: delaying(approves)},
	{name: "hello not closed", is: func(s state) bool { return s.issued }, stop: delaying(closesHello), onlySimulated: true},
	{name: "certificate issued", is: func(s state) bool { return s.issued && !s.nodeRef }, stop: frozenCoreManager, stopSimulated: delaying(createsNode)},
	{name: "Node without nodeRef", is: func(s state) bool { return s.node && !s.nodeRef }, stop: frozenCoreManager},
	{name: "old Machine being deleted", is: func(s state) bool { return s.nodeRef && s.oldDeleted && s.oldRecord }, stop: oldHostStaysOn},
}

// delaying keeps a rollout in a phase by delaying the request that would end the phase.
func delaying(match func(*http.Request, []byte) bool) func(*testing.T, *rollout) *stop {
	return func(_ *testing.T, r *rollout) *stop {
		h := r.proxy.delay(match)
		return &stop{h.reached, h.release}
	}
}

// beforeRecord keeps a rollout without a record. The plugin may have filed its proof or not.
func beforeRecord(_ *testing.T, r *rollout) *stop {
	return &stop{end: r.proxy.delay(readsNode).release}
}

// pausedConfig pauses the next Machine's KubeadmConfig, so that no bootstrap Secret is made.
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

// frozenCoreManager stops Cluster API's core manager (SIGSTOP) before the certificate is issued. So
// the manager does not see the Node, and sets no nodeRef.
func frozenCoreManager(t *testing.T, r *rollout) *stop {
	signal := func(s syscall.Signal) error { return syscall.Kill(r.clusterAPI.Core.PID(), s) }
	if r.frozen++; r.frozen == 1 {
		h := r.proxy.delay(approves)
		go func() {
			select {
			case <-h.reached:
				if err := signal(syscall.SIGSTOP); err != nil {
					t.Error(err)
				}
				h.release()
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
	return &stop{end: r.hosts.delayRelease(r.hosts.IDs(r.old.Name)[0])}
}

// rollout replaces the one Machine of a MachineDeployment.
type rollout struct {
	*machineDeployment

	proxy  *requestProxy
	old    clusterv1.Machine
	paused bool // whether the next Machine's KubeadmConfig is paused
	frozen int  // number of phases that need the core manager stopped
}

// The controller is killed in each phase of a rollout, and started again. Each rollout completes:
// the Machine is Running, with one record of its own TPM and one certificate. No request is left
// open. A proxy delays the request that would end the phase until the controller is dead. The host
// is simulated.
func TestKilledInEachPhase(t *testing.T) {
	full(t)
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	g := newRequestProxy(t, c)
	h := c.follow(t)
	d := c.newMachineDeployment(t, simulatedPrefix+"workers", nil)
	d.scale(t, 1)
	machines := d.awaitRunning(t, 1)
	for _, p := range phases {
		ok := t.Run(strings.ReplaceAll(p.name, " ", "-"), func(t *testing.T) {
			r := &rollout{machineDeployment: d, proxy: g, old: machines[0]}
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

// The same with a host that boots, in a single rollout: the controller is killed nine times before
// the Machine has been replaced.
func TestKilledInAllPhases(t *testing.T) {
	full(t)
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	g := newRequestProxy(t, c)
	h := c.follow(t)
	d := c.newMachineDeployment(t, "workers", nil)
	d.scale(t, 1)
	before := d.awaitRunning(t, 1)
	all := slices.DeleteFunc(slices.Clone(phases), func(p phase) bool { return p.onlySimulated })
	r := &rollout{machineDeployment: d, proxy: g, old: before[0]}
	stopped := all[0].starts(t, r)
	r.begin(t)
	for i, p := range all {
		r.killedIn(t, p, stopped)
		next := &stop{end: func() {}}
		if i+1 < len(all) {
			// before this phase ends, so that the next phase is not missed
			next = all[i+1].starts(t, r)
		}
		stopped.end()
		stopped = next
		harness.Must(t, s.restart(t.Context()))
	}
	h.check(t, d.awaitReplaced(t, before))
}

// starts calls the phase's stop, if the phase has one.
func (p phase) starts(t *testing.T, r *rollout) *stop {
	t.Helper()
	if p.stop == nil {
		return &stop{end: func() {}}
	}
	stopped := p.stop(t, r)
	t.Cleanup(stopped.end)
	return stopped
}

// begin starts the rollout by a new template.
func (r *rollout) begin(t *testing.T) {
	t.Helper()
	r.rollOut(t, func(template *bootstrapv1.KubeadmConfigTemplate) {
		// A different command for each rollout, so that each template differs from the one before.
		template.Spec.Template.Spec.PreKubeadmCommands = append(template.Spec.Template.Spec.PreKubeadmCommands, "echo rollout of "+r.old.Name)
		if r.paused {
			template.Spec.Template.ObjectMeta.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
		}
	})
}

// killedIn kills the controller in a phase. If the phase has a stop, the phase must last until the
// controller is dead.
func (r *rollout) killedIn(t *testing.T, p phase, stopped *stop) {
	t.Helper()
	var at state
	harness.Eventually(t, joinLimit, p.name, func() bool {
		at = r.readState(t)
		return p.is(at)
	})
	if stopped.reached != nil {
		select {
		case <-stopped.reached:
		case <-time.After(joinLimit):
			t.Fatalf("%s: the request that would end the phase was not sent: %+v", p.name, at)
		}
	}
	harness.Must(t, r.controller.Kill())
	dead := r.readState(t)
	if !p.is(dead) && p.stop != nil {
		t.Fatalf("%s: the phase ended before the controller was killed: %+v", p.name, dead)
	}
	t.Logf("the controller was killed in phase %q: %+v", p.name, dead)
}

// readState reads the state from the API servers.
func (r *rollout) readState(t *testing.T) (s state) {
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
