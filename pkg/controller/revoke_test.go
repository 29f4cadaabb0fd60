// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
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

// revocations are what an enforcer says of a node.
type revocations struct {
	since   bool
	wait    time.Duration
	revoked map[string]bool
}

func (r *revocations) Revoked(fingerprint string) bool            { return r.revoked[fingerprint] }
func (r *revocations) RevokedSince(string, ...types.UID) bool     { return r.since }
func (r *revocations) LastBefore(...types.UID) int64              { return 7 }
func (r *revocations) UntilAccepted(string, string) time.Duration { return r.wait }

// A node is revoked after its hello: the proof is denied, also if every rule holds. If the proof
// was approved before, it fails. A new hello may follow.
func TestRevokedSinceTheHello(t *testing.T) {
	for _, w := range allWatching {
		for _, isApproved := range []bool{false, true} {
			inBubble(t, func(k *kit) {
				in := k.start(w)
				proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
				want := "Denied/" + attestation.ReasonExpired
				if isApproved {
					in.intercept = func(_ int, c call, run func() error) error {
						if c.String() == "update nodeattestations" {
							return errors.New("the leader ends before it signs")
						}
						return run()
					}
					if _, err := in.reconcile(proof); err == nil {
						k.Fatal("it signs without a record of the certificate")
					}
					in.intercept, want = nil, "Approved/Attested Failed/"+attestation.ReasonExpired
				}
				in.actor.Revocations = &revocations{since: true}
				in.settle()
				if got := k.is(proof, want); len(got.Status.Certificate) > 0 {
					k.Errorf("%s: it has a certificate", w)
				}
				in.actor.Revocations = &revocations{}
				again := k.pair("again", "worker-1", "ek-1", asToken("worker-1"))
				in.settle()
				if got := k.is(again, "Approved/Attested"); len(got.Status.Certificate) == 0 {
					k.Errorf("%s: a new hello gets no certificate", w)
				}
			})
		}
	}
}

// A certificate waits until API servers accept it. The same one is published then, unless it was
// revoked meanwhile.
func TestCertificateWaitsForThePolicies(t *testing.T) {
	for name, revoke := range map[string]bool{"accepted": false, "revoked meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				r := &revocations{wait: 3 * time.Second, revoked: map[string]bool{}}
				in.actor.Revocations = r
				proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
				for range 2 {
					if result, err := in.reconcile(proof); err != nil || result.RequeueAfter != r.wait {
						k.Fatalf("%+v, %v", result, err)
					}
				}
				if got := k.is(proof, "Approved/Attested"); len(got.Status.Certificate) > 0 {
					k.Error("it is published before API servers accept it")
				}
				kept := k.record("worker-1").Status.Certificates
				if len(kept) != 1 || kept[0].AfterRevocation != 7 {
					k.Fatalf("%+v", kept)
				}
				r.wait, r.revoked[kept[0].SHA256] = 0, revoke
				in.settle()
				published, err := signing.Fingerprint(k.is(proof, "Approved/Attested").Status.Certificate)
				if err != nil {
					k.Fatal(err)
				}
				if got := len(k.record("worker-1").Status.Certificates); (published == kept[0].SHA256) == revoke || got > 1 != revoke {
					k.Errorf("published %s, issued %s, %d in the record", published, kept[0].SHA256, got)
				}
			})
		})
	}
}
