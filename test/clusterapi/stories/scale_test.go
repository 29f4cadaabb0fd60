// SPDX-License-Identifier: Apache-2.0

package stories

import "testing"

// A MachineDeployment scales from 0 to 2 to 1. The Machine that goes takes its host, its record and its Node along.
func TestScale(t *testing.T) {
	t.Parallel()
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	d := c.newMachineDeployment(t, "workers", nil)
	d.scale(t, 2)
	before := d.awaitRunning(t, 2)
	d.scale(t, 1)
	after := d.awaitRunning(t, 1)
	for _, m := range before {
		if m.Name != after[0].Name && len(s.hosts.IDs(m.Name)) != 0 {
			t.Errorf("the host of Machine %s is still on", m.Name)
		}
	}
}
