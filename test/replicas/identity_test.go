// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A leader with an identity of its own is killed, and started again at once. It leads again before
// its Lease has expired, so the standby replica does not take over. If the leader does not come
// back, the other replica leads.
func TestKilledLeaderLeadsOn(t *testing.T) {
	forgetAfterwards(t)
	pair := make([]*replica, 2)
	for i, name := range []string{"first", "second"} {
		c, err := controllerprocess.New(controllerprocess.Options{
			ControlPlane: shared.ControlPlane, Dir: t.TempDir(), Binary: shared.controller, Args: []string{"--leader-identity=" + name},
		})
		if err != nil {
			t.Fatal(err)
		}
		pair[i] = &replica{c, name}
		t.Cleanup(func() {
			if err := c.Kill(); err != nil {
				t.Errorf("replica %s ended by itself: %v", name, err)
			}
		})
		pair[i].ready(t)
		leader(t, pair[:i+1])
	}
	leads := leader(t, pair)
	term := func() (transitions int32, renewed time.Time) {
		t.Helper()
		lease, err := shared.Client().CoordinationV1().Leases(controllerprocess.Namespace).Get(t.Context(), leaseName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if who := *lease.Spec.HolderIdentity; who != leads.name {
			t.Fatalf("replica %s leads, and the Lease is %s's", leads.name, who)
		}
		return *lease.Spec.LeaseTransitions, lease.Spec.RenewTime.Time
	}
	before, renewed := term()
	leads.kill(t)
	leads.start(t)
	harness.Eventually(t, deposed, "it leads again", func() bool { return leads.leads(t.Context()) })
	after, again := term()
	t.Logf("it leads on %s after it last renewed its Lease", again.Sub(renewed).Round(time.Millisecond))
	if after != before {
		t.Errorf("the Lease has changed hands %d times", after-before)
	}

	other := pair[0]
	if other == leads {
		other = pair[1]
	}
	leads.kill(t)
	harness.Eventually(t, deposed, "the other one leads", func() bool { return other.leads(t.Context()) })
}
