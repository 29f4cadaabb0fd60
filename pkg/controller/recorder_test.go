// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// recordList is a sink that keeps records.
type recordList struct {
	mu  sync.Mutex
	all []decisionlog.Record
}

func (*recordList) Name() string { return "test" }
func (*recordList) Close() error { return nil }

func (l *recordList) Write(_ context.Context, lines [][]byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range lines {
		record, err := decisionlog.Parse(line)
		if err != nil {
			panic(err)
		}
		l.all = append(l.all, *record)
	}
	return len(lines), nil
}

// written returns the records so far.
func (l *recordList) written() []decisionlog.Record {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

// ids returns the IDs of all records but those of the hello that a scenario filed before.
func (l *recordList) ids() string {
	var ids []string
	for _, r := range l.written() {
		ids = append(ids, r.ID)
	}
	return strings.Join(ids, " ")
}

// recordDecisions has the kit's controllers hand their records to a list.
func (k *kit) recordDecisions() *recordList {
	k.Helper()
	list := &recordList{}
	k.config.Decisions = decisionlog.Config{
		Log:        decisionlog.New(logr.Discard(), nil, list),
		Controller: decisionlog.Controller{Version: "v1", Commit: "abc", Identity: "replica-1"}, Cluster: decisionlog.Cluster{UID: testCluster},
	}
	k.Cleanup(k.config.Decisions.Log.Close)
	return list
}

// recordsOf are the IDs of the records that the scenarios leave.
var recordsOf = map[string]string{
	"Ignore":                              "",
	"Ignore, approved for another signer": "",
	"Wait":                                "",
	"Challenge":                           "",
	"Deny, of a hello":                    "uid-of-contradicts/Denied",
	"Deny, of a proof":                    "uid-of-false/Denied",
	"Deny, of an unknown version":         "uid-of-versioned/Denied",
	"Fail":                                "uid-of-approved-by-hand/Failed",
	"Approve":                             "uid-of-approved/Approved",
	"Sign, first":                         "uid-of-first/Issued",
	"Sign, again":                         "uid-of-again/Issued",
	"Sign, renewal":                       "uid-of-renewal/Issued",
	"Sign, of one round":                  "uid-of-one-round/Issued",
	"ApproveServing":                      "uid-of-serves/Approved",
	"SignServing":                         "uid-of-serves-by-us/Issued",
	"ApproveUnattested":                   "uid-of-stock/Approved",
}

// Each final decision has one record, and no other decision has any. So it is if each write fails
// once, whether or not the API server carried it out.
func TestEachFinalDecisionHasARecord(t *testing.T) {
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, known := recordsOf[name]
			if !known {
				t.Fatal("which records does it leave?")
			}
			writes := 0
			inBubble(t, func(k *kit) {
				list := k.recordDecisions()
				in, request := s.run(k, inSync, nil)
				for _, c := range in.made() {
					if c.writes() {
						writes++
					}
				}
				if got := list.ids(); got != want {
					t.Errorf("%q, want %q", got, want)
				}
				for _, record := range list.written() {
					checkRecord(k, record, k.get(request))
				}
			})
			if s.alike {
				return
			}
			for i := range writes {
				for _, carriedOut := range []bool{false, true} {
					inBubble(t, func(k *kit) {
						list := k.recordDecisions()
						s.run(k, inSync, failWrite(i, carriedOut))
						if got := list.ids(); got != want && !lostByAnswer(name, i, writes, carriedOut) {
							t.Errorf("write %d of %d, carried out: %t: %q, want %q", i+1, writes, carriedOut, got, want)
						}
					})
				}
			}
		})
	}
}

// failWrite has the i-th write fail, after the API server carried it out or before.
func failWrite(i int, carriedOut bool) func(int, call, func() error) error {
	n := 0
	return func(_ int, c call, run func() error) error {
		if !c.writes() {
			return run()
		}
		n++
		if n-1 != i {
			return run()
		}
		if carriedOut {
			if err := run(); err != nil {
				return err
			}
		}
		return apierrors.NewTimeoutError("injected", 1)
	}
}

// lostByAnswer reports whether a record may be lost: the answer to the last write was. Nothing is
// left to do then that would show that the record is missing. A hello that is open would.
func lostByAnswer(name string, i, writes int, carriedOut bool) bool {
	return carriedOut && i == writes-1 && !slices.Contains([]string{"Sign, first", "Sign, again", "Sign, renewal"}, name)
}

// checkRecord checks what each record must have, by the request as it is in the end.
func checkRecord(k *kit, record decisionlog.Record, request *certificatesv1.CertificateSigningRequest) {
	k.Helper()
	if record.Request.Name != request.Name || record.Request.SHA256 != decisionlog.DigestOf(request.Spec.Request) || record.Request.SignerName != request.Spec.SignerName ||
		!record.Request.Created.Equal(request.CreationTimestamp.Time) || record.Requester.Username != request.Spec.Username || len(record.Requester.Groups) != 2 {
		k.Errorf("%+v", record)
	}
	if record.Controller.Identity != "replica-1" || record.Cluster.UID != testCluster || record.Time.IsZero() || record.Class == "" || record.Audit || record.Recovered {
		k.Errorf("%+v", record)
	}
	if node := nodeIn(request); record.Node == nil || node != "system:node:"+record.Node.Name && node != request.Name {
		k.Errorf("node %+v of %s", record.Node, node)
	}
	last := request.Status.Conditions[len(request.Status.Conditions)-1]
	if e := record.Evidence; e != nil && e.Proven == (record.Outcome == decisionlog.Denied) {
		k.Errorf("%s, and proven: %t", record.Outcome, e.Proven)
	}
	switch record.Outcome {
	case decisionlog.Issued:
		fingerprint, err := signing.Fingerprint(request.Status.Certificate)
		if err != nil || record.Certificate == nil || string(record.Certificate.SHA256) != fingerprint || record.Certificate.Serial == "" || record.Certificate.NotAfter.IsZero() {
			k.Errorf("certificate %+v, %v", record.Certificate, err)
		}
		if record.Machine == nil || record.Machine.Name != "worker-1" || record.Machine.Source != "inventory" || record.Machine.UID != "of-worker-1" {
			k.Errorf("machine %+v", record.Machine)
		}
		if e := record.Evidence; record.Class != "serving" && (e == nil || !e.Proven) {
			k.Errorf("evidence %+v", e)
		}
		if e := record.Evidence; record.Hello != nil && (e.EK == nil || e.EK.Fingerprint != "ek-1" || e.EK.Template != "template-of-ek-1" || e.EK.Source != string(verifier.EKInventory)) {
			k.Errorf("evidence %+v", e)
		}
		if hello := record.Hello; hello != nil && (hello.Name != "hello-"+request.Name || hello.SHA256 != decisionlog.DigestOf(k.get(hello.Name).Spec.Request)) {
			k.Errorf("hello %+v", hello)
		}
	case decisionlog.Denied, decisionlog.Failed:
		if record.Reason != last.Reason || len(record.Refusals) == 0 || record.Refusals[0].Reason != last.Reason || record.Message != last.Message || record.Certificate != nil {
			k.Errorf("%+v", record)
		}
	default:
		if record.Reason != last.Reason || record.Certificate != nil {
			k.Errorf("%+v", record)
		}
	}
}

// In audit mode a decision that would be final is recorded, once, however often it is made.
func TestAuditedDecisionsAreRecorded(t *testing.T) {
	for name, want := range map[string]string{"Sign, first": "uid-of-first/Approved", "Deny, of a hello": "uid-of-contradicts/Denied", "Wait": "", "SignServing": "uid-of-serves-by-us/Approved"} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				k.config.Audit = true
				list := k.recordDecisions()
				in, request := scenarios[name].run(k, inSync, nil)
				in.once(request)
				if got := list.ids(); got != want {
					t.Errorf("%q, want %q", got, want)
				}
				for _, record := range list.written() {
					if !record.Audit || record.Certificate != nil {
						t.Errorf("%+v", record)
					}
				}
			})
		})
	}
}

// A hello proves nothing, also where its evidence is accepted.
func TestRecordOfAHelloProvesNothing(t *testing.T) {
	inBubble(t, func(k *kit) {
		list := k.recordDecisions()
		late := machineNamed("late", "ek-late")
		late.Ready = false
		k.machine(late)
		in := k.start(inSync)
		k.request("waits", attestation.HelloSignerName, "late", asToken("late"), document{EK: "ek-late"})
		in.settle()
		time.Sleep(time.Hour)
		in.settle()
		records := list.written()
		if len(records) != 1 || records[0].Outcome != decisionlog.Denied || records[0].Reason != string(verifier.ReasonMachineNotReady) ||
			records[0].Machine.Name != "late" || records[0].Evidence.Proven || records[0].Evidence.EK.Source != "" {
			t.Errorf("%+v", records)
		}
	})
}

// What another signer issues has a record of its own, made from what was recorded of the machine.
func TestCertificateOfAnotherSignerIsRecorded(t *testing.T) {
	inBubble(t, func(k *kit) {
		approveOnly(k)
		list := k.recordDecisions()
		in := k.start(inSync)
		name := k.pair("elsewhere", "worker-1", "ek-1", asToken("worker-1"))
		in.settle()
		k.issue(name, "system:node:worker-1")
		in.settle()
		if got := list.ids(); got != "uid-of-elsewhere/Approved uid-of-elsewhere/Issued" {
			t.Fatalf("%q", got)
		}
		record := list.written()[1]
		fingerprint, err := signing.Fingerprint(k.get(name).Status.Certificate)
		if err != nil || !record.Recovered || string(record.Certificate.SHA256) != fingerprint || record.Node.Name != "worker-1" || record.Machine.Name != "worker-1" ||
			record.Hello.Name != "hello-elsewhere" || record.Evidence.EK.Fingerprint != "ek-1" || record.Evidence.EK.Source != string(verifier.EKInventory) || !record.Evidence.Proven {
			t.Errorf("%+v, %v", record, err)
		}
	})
}

// So has evidence of one round, which has no hello.
func TestCertificateOfAnotherSignerWithoutAHelloIsRecorded(t *testing.T) {
	inBubble(t, func(k *kit) {
		approveOnly(k)
		list := k.recordDecisions()
		in := k.start(inSync)
		name := k.request("one-round", acmeSigner, "worker-1", asToken("worker-1"), document{Machine: "worker-1"}).Name
		in.settle()
		k.issue(name, "system:node:worker-1")
		in.settle()
		if got := list.ids(); got != "uid-of-one-round/Approved uid-of-one-round/Issued" || list.written()[1].Hello != nil || list.written()[1].Evidence.EK != nil {
			t.Errorf("%q", got)
		}
	})
}

// The controller is killed after it published a certificate. The next one finds the open hello, and
// makes the record.
func TestRecordAfterACrash(t *testing.T) {
	inBubble(t, func(k *kit) {
		lost := k.recordDecisions()
		in := k.start(inSync)
		name := k.pair("interrupted", "worker-1", "ek-1", asToken("worker-1"))
		killed := errors.New("killed")
		in.intercept = func(_ int, c call, run func() error) error {
			err := run()
			if c.String() == "patch "+requestsResource+"/status" {
				in.intercept = func(int, call, func() error) error { return killed }
				return killed
			}
			return err
		}
		if _, err := in.reconcile(name); !errors.Is(err, killed) || lost.ids() != "" {
			t.Fatalf("%v, %q", err, lost.ids())
		}
		in.stop()
		list := k.recordDecisions()
		k.start(inSync).settle()
		if got := list.ids(); got != "uid-of-interrupted/Issued" {
			t.Fatalf("%q", got)
		}
		if record := list.written()[0]; !record.Recovered || record.Certificate == nil {
			t.Errorf("%+v", record)
		}
	})
}

// Without a decision log, the process log has the record of a certificate that another signer
// issued.
func TestOthersCertificateInTheProcessLog(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.CA = nil
		in := k.start(inSync)
		name := k.pair("theirs", "worker-1", "ek-1", asToken("worker-1"))
		in.settle()
		k.issue(name, "system:node:worker-1")
		in.settle()
		if lines := k.journal.linesWith("recorded"); len(lines) != 1 || !strings.Contains(lines[0], "request "+name) || !strings.Contains(lines[0], "uid-of-"+name+"/Issued") {
			t.Errorf("%q", lines)
		}
	})
}

// A hello that nobody answered is denied by no rule, and has a record all the same.
func TestExpiredHelloIsRecorded(t *testing.T) {
	inBubble(t, func(k *kit) {
		list := k.recordDecisions()
		in := k.start(inSync)
		k.request("greets", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"})
		in.settle()
		time.Sleep(time.Hour)
		in.settle()
		records := list.written()
		if len(records) != 1 || records[0].ID != "uid-of-greets/Denied" || records[0].Reason != string(verifier.ReasonHelloExpired) ||
			records[0].Evidence.EK.Fingerprint != "ek-1" || records[0].Evidence.Proven || records[0].Node.Name != "worker-1" {
			t.Errorf("%+v", records)
		}
	})
}

// A warning at the approval is in the record of the certificate, though it is none any more when
// the certificate is signed.
func TestRecordHasTheWarningsOfTheApproval(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.policy.Credential = verifier.Recover
		list := k.recordDecisions()
		in := k.start(inSync)
		k.node("worker-1")
		k.pair("lost-its-record", "worker-1", "ek-1", asNode("worker-1"))
		in.settle()
		records := list.written()
		if len(records) != 1 || len(records[0].Warnings) == 0 || !strings.Contains(records[0].Warnings[0].Message, "had none") || records[0].Requester.CredentialID != "X509SHA256=worker-1" {
			t.Errorf("%+v", records)
		}
	})
}

// A flood of denials fills no disk: of one requester it leaves a bounded number of records, and
// fewer with whole requests. The next record says how many are missing. Others are not affected.
func TestRecordsOfDenialsAreBounded(t *testing.T) {
	inBubble(t, func(k *kit) {
		list := k.recordDecisions()
		k.config.Decisions.Archive = true
		in := k.start(inSync)
		deny := func(i int, machine string) {
			in.once(k.request(fmt.Sprintf("flood-%s-%d", machine, i), attestation.HelloSignerName, "worker-9", asToken(machine), document{EK: "ek-" + machine[len(machine)-1:]}).Name)
		}
		// the bounds of a requester's decision records, and of those with the whole request
		const deniedRecords, deniedArchives, more = 500, 50, 20
		for i := range deniedRecords + more {
			deny(i, "worker-1")
		}
		if n := len(list.written()); n != deniedRecords {
			t.Errorf("%d records", n)
		}
		archived := 0
		for _, record := range list.written() {
			if record.Archive != nil {
				archived++
			}
		}
		if archived != deniedArchives {
			t.Errorf("%d with whole requests", archived)
		}
		deny(0, "worker-2")
		time.Sleep(2 * time.Second)
		deny(-1, "worker-1")
		deny(-2, "worker-1")
		last := list.written()[deniedRecords:]
		if len(last) != 3 || last[0].Unrecorded != 0 || last[0].Archive == nil || last[1].Unrecorded != more || last[2].Unrecorded != 0 {
			t.Errorf("%d: %+v", len(last), last)
		}
	})
}

// The archive has what verify needs, and nothing else: no label, no annotation, no status.
func TestArchive(t *testing.T) {
	inBubble(t, func(k *kit) {
		list := k.recordDecisions()
		k.config.Decisions.Archive = true
		scenarios["Sign, first"].run(k, inSync, nil)
		archive := list.written()[0].Archive
		for name, kept := range map[string]*certificatesv1.CertificateSigningRequest{"first": archive.Request, "hello-first": archive.Hello} {
			want := k.get(name)
			if kept.Name != name || kept.UID != want.UID || !kept.CreationTimestamp.Equal(&want.CreationTimestamp) || kept.Spec.String() != want.Spec.String() || kept.Kind != "CertificateSigningRequest" {
				t.Errorf("%+v", kept)
			}
			if len(kept.Labels)+len(kept.Annotations)+len(kept.Status.Conditions)+len(kept.Status.Certificate) > 0 {
				t.Errorf("it has more: %+v", kept)
			}
		}
	})
}

// A request that the cache cut has neither digest nor archive: it would be that of another request.
func TestTooLongRequestIsNotDigested(t *testing.T) {
	inBubble(t, func(k *kit) {
		list := k.recordDecisions()
		k.config.Decisions.Archive = true
		in := k.start(inSync)
		long := k.request("long", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"})
		long.Spec.Request = append(long.Spec.Request, make([]byte, attestation.MaxRequestSize)...)
		if err := k.server.Update(k.ctx, long); err != nil {
			k.Fatal(err)
		}
		in.settle()
		records := list.written()
		if len(records) != 1 || records[0].Reason != string(verifier.ReasonMalformedRequest) || records[0].Request.SHA256 != "" || records[0].Archive != nil {
			t.Errorf("%+v", records)
		}
	})
}

// Without a log of their own, records are in the line about their decision.
func TestRecordsInTheProcessLog(t *testing.T) {
	inBubble(t, func(k *kit) {
		scenarios["Sign, first"].run(k, inSync, nil)
		lines := k.journal.linesWith("decided")
		with := k.journal.linesWith(" record ")
		if len(lines) != 2 || len(with) != 1 || !strings.Contains(with[0], "uid-of-first/Issued") {
			t.Errorf("%q", lines)
		}
	})
}
