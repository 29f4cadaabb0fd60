// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// suspend has an instance read these suspensions.
func (in *instance) suspend(eks ...string) {
	suspended := map[string]bool{}
	for _, ek := range eks {
		suspended[ek] = true
	}
	in.collector.Suspended = func() (map[string]bool, error) { return suspended, nil }
}

var allWatching = []watching{inSync, stale, unwatched}

// Whatever a suspended machine asks is denied, however stale the cache of records is. Another
// machine goes on meanwhile, and the machine itself after it is resumed.
func TestSuspendedMachineIsDenied(t *testing.T) {
	const denied = "Denied/MachineSuspended"
	for name, file := range map[string]func(k *kit) (request string){
		"hello": func(k *kit) string {
			return k.request("r", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}).Name
		},
		"hello of a machine with a record": func(k *kit) string {
			k.attested("worker-1", "ek-1")
			return k.request("r", attestation.HelloSignerName, "worker-1", asNode("worker-1"), document{EK: "ek-1"}).Name
		},
		"proof": func(k *kit) string { return k.pair("r", "worker-1", "ek-1", asToken("worker-1")) },
		"renewal": func(k *kit) string {
			k.attested("worker-1", "ek-1")
			return k.pair("r", "worker-1", "ek-1", asNode("worker-1"))
		},
		"serving": func(k *kit) string {
			k.attested("worker-1", "ek-1")
			return k.serving("r", oursToServe, "worker-1", asNode("worker-1")).Name
		},
		"serving, issued by another signer": func(k *kit) string {
			k.attested("worker-1", "ek-1")
			return k.serving("r", servingSigner, "worker-1", asNode("worker-1")).Name
		},
		"no record, another machine name and another node name": func(k *kit) string {
			k.machines.set()
			k.machine(machineNamed("fresh", "ek-1"))
			return k.pair("r", "fresh", "ek-1", asToken("fresh"))
		},
		"no record, and no machine has the key": func(k *kit) string {
			k.machines.set()
			return k.request("r", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}).Name
		},
		"another key, since the source names it": func(k *kit) string {
			k.attested("worker-1", "ek-1")
			k.machines.set(machineNamed("worker-1", "ek-next"))
			return k.pair("r", "worker-1", "ek-next", asToken("worker-1"))
		},
	} {
		for _, w := range allWatching {
			t.Run(name+", "+w.String(), func(t *testing.T) {
				inBubble(t, func(k *kit) {
					request := ""
					if w == stale { // the cache lacks the record
						in := k.start(w)
						in.suspend("ek-1")
						request = file(k)
						in.settle()
					} else {
						request = file(k)
						in := k.start(w)
						in.suspend("ek-1")
						in.settle()
					}
					if got := k.is(request, denied); len(got.Status.Certificate) > 0 {
						t.Error("it has a certificate")
					}
				})
			})
		}
	}
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		in.suspend("ek-1")
		other := k.pair("other", "worker-2", "ek-2", asToken("worker-2"))
		in.settle()
		if len(k.is(other, "Approved/Attested").Status.Certificate) == 0 {
			t.Error("another machine is held up")
		}
		in.suspend()
		again := k.pair("again", "worker-1", "ek-1", asToken("worker-1"))
		in.settle()
		if len(k.is(again, "Approved/Attested").Status.Certificate) == 0 {
			t.Error("it is resumed, and not admitted")
		}
	})
}

// A hello of a suspended machine is denied by one write, without a look at its evidence. The other
// call is for the Event on the Node.
func TestHellosOfASuspendedMachineAreCheap(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		in.suspend("ek-1")
		hello := k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}).Name
		in.counted()
		in.once(hello)
		k.is(hello, "Denied/MachineSuspended")
		if calls := in.counted(); len(calls) != 2 || calls["get nodes"] != 1 || calls["patch certificatesigningrequests/approval"] != 1 || k.tpm.count() != 0 {
			t.Errorf("%v, %d looks at the evidence", calls, k.tpm.count())
		}
	})
}

// A request that was approved before its machine was suspended is not signed.
func TestSuspendedAfterTheApproval(t *testing.T) {
	for _, w := range allWatching {
		inBubble(t, func(k *kit) {
			in := k.start(w)
			proof := k.pair("proof", "worker-1", "ek-1", asToken("worker-1"))
			in.intercept = func(_ int, c call, run func() error) error {
				if c.String() == "update nodeattestations" {
					return errors.New("the leader ends before it signs")
				}
				return run()
			}
			if _, err := in.reconcile(proof); err == nil {
				t.Fatal("it signs without a record of the certificate")
			}
			k.is(proof, "Approved/Attested")
			in.intercept = nil
			in.suspend("ek-1")
			in.settle()
			if got := k.is(proof, "Approved/Attested Failed/MachineSuspended"); len(got.Status.Certificate) > 0 {
				t.Errorf("%s: it has a certificate", w)
			}
		})
	}
}

// While it is not known which machines are suspended, each request waits. Then it goes on.
func TestSuspensionsAreNotKnown(t *testing.T) {
	for _, w := range []watching{inSync, unwatched} {
		inBubble(t, func(k *kit) {
			in := k.start(w)
			in.collector.Suspended = func() (map[string]bool, error) { return nil, errors.New("connection refused") }
			k.attested("worker-2", "ek-2")
			hello := k.request("hello", attestation.HelloSignerName, "worker-1", asToken("worker-1"), document{EK: "ek-1"}).Name
			renewal := k.pair("renewal", "worker-2", "ek-2", asNode("worker-2"))
			serving := k.serving("serving", oursToServe, "worker-2", asNode("worker-2")).Name
			unattested := k.plain("left-alone", kubeletSigner, "left-alone", asNode("left-alone")).Name
			in.settle()
			for _, request := range []string{hello, renewal, serving} {
				waiting, err := attestation.ParseStatement(k.is(request, "").Annotations[attestation.AnnotationWaiting])
				if err != nil || waiting.Reason != string(verifier.ReasonSuspensionsUnknown) || strings.Contains(waiting.Text, "refused") {
					t.Errorf("%s, %s: waits for %+v, %v", w, request, waiting, err)
				}
			}
			k.is(unattested, "Approved/UnattestedNode") // no machine, so none that is suspended
			in.suspend("ek-2")
			time.Sleep(time.Minute)
			in.settle()
			if k.get(hello).Annotations[attestation.AnnotationChallenge] == "" {
				t.Errorf("%s: the hello is not challenged", w)
			}
			k.is(renewal, "Denied/MachineSuspended")
			k.is(serving, "Denied/MachineSuspended")
		})
	}
}

// A revoked certificate may ask for another client certificate, and for no serving certificate.
func TestRevokedCertificateAsks(t *testing.T) {
	for _, w := range allWatching {
		inBubble(t, func(k *kit) {
			record := k.attested("worker-1", "ek-1")
			record.Status.Certificates[0].Revoked = true
			if err := k.server.Update(k.ctx, record); err != nil {
				t.Fatal(err)
			}
			k.node("worker-1")
			in := k.start(w)
			serving := k.serving("serving", oursToServe, "worker-1", asNode("worker-1")).Name
			approved := k.serving("approved", oursToServe, "worker-1", asNode("worker-1")).Name
			k.condition(approved, certificatesv1.CertificateApproved, "BySomebody")
			in.settle()
			k.is(serving, "Denied/CertificateRevoked")
			k.is(approved, "Approved/BySomebody Failed/CertificateRevoked")
			renewal := k.pair("renewal", "worker-1", "ek-1", asNode("worker-1"))
			in.settle()
			if len(k.is(renewal, "Approved/Attested").Status.Certificate) == 0 {
				t.Errorf("%s: the node does not come back", w)
			}
			certificates := k.record("worker-1").Status.Certificates
			if len(certificates) != 2 || !certificates[0].Revoked || certificates[1].Revoked || certificates[1].Requested == nil {
				t.Errorf("%s: %+v", w, certificates)
			}
		})
	}
}
