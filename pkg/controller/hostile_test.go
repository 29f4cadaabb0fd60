// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/hostiletext"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
)

// lineList is a sink that keeps the lines of the decision log.
type lineList struct {
	mu    sync.Mutex
	lines string
}

func (*lineList) Name() string { return "test" }
func (*lineList) Close() error { return nil }

func (l *lineList) Write(_ context.Context, lines [][]byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range lines {
		l.lines += string(line)
	}
	return len(lines), nil
}

// Whatever a requester writes into any field of a request: nothing of it gets as it is into an
// Event, a condition, an annotation or the decision log. The log has a test in
// pkg/controller/command.
func TestHostileTextOfRequests(t *testing.T) {
	for _, username := range []string{hostiletext.For("user"), "system:bootstrap:" + hostiletext.For("token"), asNode(hostiletext.For("node")), asNode("worker-1"), asToken("worker-1")} {
		inBubble(t, func(k *kit) {
			list := &lineList{}
			k.config.Decisions = decisionlog.Config{Log: decisionlog.New(logr.Discard(), nil, list), Archive: true}
			k.Cleanup(k.config.Decisions.Log.Close)
			k.node("worker-1")
			k.attested("worker-1", "ek-1")
			var filed []*certificatesv1.CertificateSigningRequest
			file := func(title string, object *certificatesv1.CertificateSigningRequest) {
				hostiletext.Plant(object, "ResourceVersion", "Namespace", "DeletionTimestamp", "DeletionGracePeriodSeconds", "Spec.Request", "Spec.SignerName", "Spec.Usages", "Status")
				object.Name = hostiletext.For(title + " by " + username)
				object.UID, object.Spec.Username = "", username
				if err := k.server.Create(k.ctx, object); err != nil {
					k.Fatal(err)
				}
				filed = append(filed, object)
			}
			hostile := hostiletext.For("evidence")
			file("hello", k.build("hello", attestation.HelloSignerName, "worker-1", document{EK: hostile}))
			file("proof", k.build("proof", tpmSigner, "worker-1", document{Hello: hostile}))
			file("impostor", k.build("impostor", attestation.HelloSignerName, "worker-2", document{EK: "ek-1"}))
			file("odd node", k.build("odd", tpmSigner, hostiletext.For("node"), document{EK: "ek-1"}))
			k.providerIDs["worker-2"] = "x://\u3164א\u0301" // what a request may have as a provider ID
			file("provider ID", k.build("id", attestation.HelloSignerName, "worker-2", document{EK: "ek-2"}))
			garbage := k.build("garbage", tpmSigner, "worker-1", document{})
			garbage.Spec.Request = []byte(hostile)
			file("garbage", garbage)
			approved := k.build("approved", tpmSigner, "worker-1", document{Hello: "hello"})
			approved.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
				{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: hostile, Message: hostile},
			}
			file("approved", approved)
			in := k.start(inSync)
			in.settle()
			synctest.Wait() // the decision log is written

			outputs, decided := map[string]string{"decision log": list.lines}, 0
			for _, object := range filed {
				for _, event := range k.journal.events {
					// The journal names the object; an Event refers to it.
					reason, note, _ := strings.Cut(event, " on "+object.Name+": ")
					outputs["Event "+reason] += note + "\n"
				}
				after := k.get(object.Name)
				for key, value := range after.Annotations {
					if value != object.Annotations[key] {
						outputs["annotation "+key] = value
						decided++
					}
				}
				for _, c := range after.Status.Conditions[len(object.Status.Conditions):] {
					outputs["condition of "+object.Name[:10]] = c.Reason + " " + c.Message
					decided++
				}
			}
			for what, output := range outputs {
				for _, problem := range hostiletext.FindUnquoted(output) {
					t.Errorf("%.40q: %.40q: %s", username, what, problem)
				}
			}
			if decided < 4 || len(k.journal.events) < 4 || list.lines == "" {
				t.Errorf("only %d decisions, Events %q, records %q", decided, k.journal.events, list.lines)
			}
		})
	}
}
