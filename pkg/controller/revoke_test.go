// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
)

// revocationList is a sink that keeps revocations.
type revocationList struct{ all []decisionlog.Revocation }

func (*revocationList) Name() string { return "test" }
func (*revocationList) Close() error { return nil }

func (l *revocationList) Write(_ context.Context, lines [][]byte) (int, error) {
	for _, line := range lines {
		done, err := decisionlog.ParseRevocation(line)
		if err != nil {
			panic(err)
		}
		l.all = append(l.all, *done)
	}
	return len(lines), nil
}

// What an operator did to a machine is in Events on record, Machine and Node, and in the decision
// log, with the operator's reason. Without a decision log it is in the process log.
func TestAppliedIsReported(t *testing.T) {
	ends := time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
	sum := strings.Repeat("ab", 32)
	certificates := []v1alpha1.IssuedCertificate{{SHA256: sum, Serial: "1f", NotAfter: metav1.NewTime(ends)}}
	for name, c := range map[string]struct {
		applied  revocation.Application
		event    string
		recorded decisionlog.Revocation
	}{
		"revoked": {
			revocation.Application{Action: revocation.Revoked, Object: "r-1", Reason: "key leaked", Certificates: certificates},
			"Warning CertificateRevoked on %s: from now on API servers refuse writes with 1 certificate, by r-1: key leaked",
			decisionlog.Revocation{Action: decisionlog.Revoked, Object: "r-1", Reason: "key leaked"},
		},
		"suspended": {
			revocation.Application{Action: revocation.Suspended, Object: "ek-1", Reason: "machine stolen", Certificates: certificates},
			"Warning MachineSuspended on %s: the machine gets no certificate, and API servers refuse its writes, by ek-1: machine stolen",
			decisionlog.Revocation{Action: decisionlog.Suspended, Object: "ek-1", Reason: "machine stolen"},
		},
		"resumed": {
			revocation.Application{Action: revocation.Resumed, Reason: "machine stolen"},
			"Normal MachineResumed on %s: the machine may attest again",
			decisionlog.Revocation{Action: decisionlog.Resumed, Reason: "machine stolen"},
		},
	} {
		for _, logged := range []bool{true, false} {
			inBubble(t, func(k *kit) {
				list := &revocationList{}
				k.config.Decisions = decisionlog.Config{Controller: decisionlog.Controller{Identity: "replica-1"}, Cluster: decisionlog.Cluster{UID: testCluster}}
				if logged {
					k.config.Decisions.Log = decisionlog.New(logr.Discard(), nil, list)
					k.Cleanup(k.config.Decisions.Log.Close)
				}
				in := k.start(inSync)
				in.reporter.RevocationLog = logr.New(k.journal)
				k.node("worker-1")
				record := k.attested("worker-1", "ek-1")
				record.Spec.ProviderID = "test://worker-1"
				record.OwnerReferences = []metav1.OwnerReference{{APIVersion: "cluster.x-k8s.io/v1beta2", Kind: "Machine", Name: "m-1", UID: "uid-of-m-1"}}
				c.applied.Record = record
				in.reporter.Applied(k.ctx, c.applied)
				synctest.Wait()

				_, reason, _ := strings.Cut(c.event, " ")
				reason, _, _ = strings.Cut(reason, " ")
				events, want := k.journal.eventsOf(reason), []string{}
				for _, on := range []string{"record/worker-1", "Machine/m-1", "worker-1"} {
					want = append(want, strings.Replace(c.event, "%s", on, 1))
				}
				slices.Sort(events)
				slices.Sort(want)
				if !slices.Equal(events, want) {
					t.Errorf("%s: Events %q, want %q", name, events, want)
				}
				expected := c.recorded
				expected.APIVersion, expected.Kind, expected.ID = decisionlog.APIVersion, decisionlog.KindRevocation, string(record.UID)+"/"+record.ResourceVersion+"/"+string(expected.Action)
				expected.Time, expected.Controller, expected.Cluster = decisionlog.Time{Time: time.Now().UTC()}, k.config.Decisions.Controller, k.config.Decisions.Cluster
				expected.Node = decisionlog.Node{Name: "worker-1", ProviderID: "test://worker-1"}
				expected.Machine, expected.EK = decisionlog.Machine{Source: "inventory", Name: "worker-1", UID: "uid-of-m-1"}, "ek-1"
				if len(c.applied.Certificates) > 0 {
					expected.Certificates = []decisionlog.RevokedCertificate{{SHA256: decisionlog.Digest(sum), Serial: "1f", NotAfter: decisionlog.Time{Time: ends}}}
				}
				inLine := len(k.journal.linesWith(" record &{decision.")) > 0
				switch {
				case logged && (len(list.all) != 1 || inLine || !reflect.DeepEqual(list.all[0], expected)):
					t.Errorf("%s: recorded %+v, want %+v", name, list.all, expected)
				case !logged && !inLine:
					t.Errorf("%s: the process log has %q", name, k.journal.linesWith("applied"))
				}
				if record.UID == "" || record.ResourceVersion == "" {
					t.Errorf("%s: the kit gives no identity", name)
				}
			})
		}
	}
}
