// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// fingerprints returns those of the EKs that identify prints, by template.
func (m *machine) fingerprints(t *testing.T) map[string]string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), m.plugin, append([]string{"identify", "--output=json"}, m.flags()...)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	var identity struct {
		Device struct {
			EKs []struct{ Template, Fingerprint string }
		}
	}
	if err := json.Unmarshal(out, &identity); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, ek := range identity.Device.EKs {
		found[ek.Template] = ek.Fingerprint
	}
	return found
}

// hurries removes the back-off after a denied request.
func (m *machine) hurries(t *testing.T) {
	t.Helper()
	harness.WorkerEnds(t, m.certs())
	lock, err := m.certs().WaitLock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	state, err := m.certs().State()
	if err != nil {
		t.Fatal(err)
	}
	state.NextAttempt = time.Time{}
	if err := lock.SetState(state); err != nil {
		t.Fatal(err)
	}
}

// An EK template that is set on an enrolled node counts from its next renewal on. The record pins
// the old EK. The renewal is denied until the inventory names the new EK and not the old one, or
// the record is deleted. Meanwhile the old certificate is served.
func TestEKTemplateThatIsSetOnAnEnrolledNode(t *testing.T) {
	for name, admit := range map[string]func(*testing.T, *machine, string){
		"the inventory names the new EK": func(t *testing.T, m *machine, ek string) {
			m.names(t, map[string]string{m.name: ek})
			harness.Eventually(t, harness.Soon, "the change is accepted", func() bool { return m.record(t, m.name).Status.EKReplaced != nil })
		},
		"the record is deleted": func(t *testing.T, m *machine, _ string) { remove(t, m.fleet, m.record(t, m.name)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, func(f *fleet, p *verifier.Policy) {
				f.config.Limits.Default, p.Credential = time.Hour, verifier.Recover
			})
			m := f.newMachine(t, "other-template")
			f.inventoried(t, m)
			f.ahead.Store(int64(-56 * time.Minute)) // it is due when it comes
			first := m.enrols(t)
			f.ahead.Store(0)
			before := f.record(t, m.name)
			harness.WorkerEnds(t, m.certs())

			m.args = []string{"--ek-template=rsa-2048"}
			eks := m.fingerprints(t)
			if before.Spec.EK.Fingerprint != eks["ecc-p256"] || eks["rsa-2048"] == "" {
				t.Fatalf("the record has %s, the machine %v", before.Spec.EK.Fingerprint, eks)
			}
			f.inventoried(t, m) // both EKs
			if served := m.enrols(t); !bytes.Equal(served.Leaf.Raw, first.Leaf.Raw) {
				t.Error("another certificate, although the record has another EK")
			}
			harness.Eventually(t, harness.Soon, "the renewal with the other EK is denied", func() bool {
				return f.renewalRefused(t, m.name, verifier.ReasonIdentityBound)
			})
			m.hurries(t)
			if state, err := m.certs().State(); err != nil || state.Remembered[tpm.Name] != "ecc-p256" || state.Last.Reason != "RequestDenied" {
				t.Errorf("%+v, %v", state, err)
			}

			admit(t, m, eks["rsa-2048"])
			harness.Eventually(t, 30*time.Second, "the node has renewed with the other EK", func() bool {
				return !bytes.Equal(m.enrols(t).Leaf.Raw, first.Leaf.Raw)
			})
			harness.WorkerEnds(t, m.certs())
			after := f.record(t, m.name)
			if state, err := m.certs().State(); err != nil || state.Remembered[tpm.Name] != "rsa-2048" || after.Spec.EK.Fingerprint != eks["rsa-2048"] {
				t.Errorf("%+v, %v, the record has %s", state, err, after.Spec.EK.Fingerprint)
			}
		})
	}
}
