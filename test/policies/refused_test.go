// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A proof whose approval the API server refuses has an Event with the cause. The refusals do not
// count against the machine's rate, so the machine enrols as soon as the right is there.
func (l *live) reportsRefusedWrites(t *testing.T, m *machine) {
	const burst = 2
	l.startReady(t, func(c *config.Config) {
		c.Rates.PerMachine = config.Rate{Every: metav1.Duration{Duration: time.Hour}, Burst: burst}
	})
	missing := right{"approve", certs, "signers", "", tpmSigner}
	roles := l.roles(t)
	i := slices.IndexFunc(roles, func(r role) bool { return slices.Contains(r.atoms(), missing) })
	if i < 0 {
		t.Fatalf("not in rbac.yaml: %s", missing)
	}
	l.write(t, roles[i].without(missing))
	l.await(t, missing, false)
	mark, err := l.AuditMark()
	harness.Must(t, err)
	began := time.Now()
	e := m.begin(t)
	proof := ""
	harness.Eventually(t, patience, "the approval is refused more often than the machine's rate allows", func() bool {
		_, forbidden := l.asked(t, mark)
		refused := 0
		for _, event := range forbidden {
			if event.Code == http.StatusForbidden && event.Subresource == "approval" {
				refused++
				proof = event.Name
			}
		}
		return refused > burst+1
	})
	var events []eventsv1.Event
	harness.Eventually(t, patience, "the proof has an Event", func() bool {
		list, err := l.admin.EventsV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "regarding.name=" + proof})
		harness.Must(t, err)
		events = list.Items
		return len(events) > 0
	})
	if len(events) != 1 || events[0].Reason != "WriteRefused" || events[0].Type != "Warning" || !strings.Contains(events[0].Note, missing.refusal()) {
		t.Errorf("Events on the proof: %+v", events)
	}
	l.write(t, roles[i])
	l.await(t, missing, true)
	granted := time.Now()
	e.succeeds(t)
	t.Logf("refused for %s, enrolled %s after the right was there", granted.Sub(began), time.Since(granted))
}
