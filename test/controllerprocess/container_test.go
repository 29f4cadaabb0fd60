// SPDX-License-Identifier: Apache-2.0

package controllerprocess

import (
	"slices"
	"testing"
)

// The environment is what the kubelet makes of the manifest: GOMEMLIMIT follows the limit.
func TestContainer(t *testing.T) {
	c, err := ReadContainer("../..")
	if err != nil {
		t.Fatal(err)
	}
	if c.Memory != 512<<20 {
		t.Errorf("a limit of %d bytes", c.Memory)
	}
	for memory, want := range map[int64][]string{
		c.Memory:      {"MEMORY_LIMIT_MIB=512", "GOMEMLIMIT=512000000"},
		100<<20 + 1:   {"MEMORY_LIMIT_MIB=101", "GOMEMLIMIT=101000000"},
		1<<30 + 1<<29: {"MEMORY_LIMIT_MIB=1536", "GOMEMLIMIT=1536000000"},
	} {
		if got := c.Env(memory); !slices.Equal(got, want) {
			t.Errorf("%d: %q", memory, got)
		}
	}
	if _, err := ReadContainer("nowhere"); err == nil {
		t.Error("a manifest was read where there is none")
	}
}
