// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// indexedMachines has the slice that a SharedSource returned last, and its index.
type indexedMachines struct {
	machines []verifier.Machine
	index    *verifier.MachineIndex
}

// indexOf returns the index of a slice that a SharedSource returned. It makes the index once for
// each slice. It returns nil for other sources: an index for a single decision costs more than
// going through all machines.
func (c *Collector) indexOf(machines []verifier.Machine) *verifier.MachineIndex {
	if _, shared := c.Machines.(evidence.SharedSource); !shared {
		return nil
	}
	c.indexMu.Lock()
	defer c.indexMu.Unlock()
	if c.indexed.index == nil || !evidence.IsSameSlice(c.indexed.machines, machines) {
		c.indexed = indexedMachines{machines, verifier.NewMachineIndex(machines)}
	}
	return c.indexed.index
}
