// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

func requestNamed(name, uid string) *certificatesv1.CertificateSigningRequest {
	object := &certificatesv1.CertificateSigningRequest{}
	object.Name, object.UID = name, types.UID(uid)
	return object
}

// A Controller records by a telemetry.NewDedupRecorder.
func TestControllersEventsAreNotRepeated(t *testing.T) {
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	events := &eventList{}
	c, err := New(Config{Rules: rules, Providers: []Provider{stubTPM{}}, Machines: noMachines{}, Namespace: "n"}, Clients{Events: events})
	if err != nil {
		t.Fatal(err)
	}
	for _, message := range []string{"first", "second"} {
		c.reporter.event(t.Context(), requestNamed("r", "r"), "", corev1.EventTypeNormal, "A", message)
	}
	if len(events.all) != 1 {
		t.Errorf("%q", events.all)
	}
}

// eventList collects Events.
type eventList struct{ all []string }

func (l *eventList) Eventf(_, _ runtime.Object, kind, reason, _, _ string, args ...any) {
	l.all = append(l.all, kind+" "+reason+" "+args[0].(string))
}
