// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// maxGap is the longest time between two renewals of a node's Lease that does not count as a missed
// one. The kubelet renews the Lease every 10 s, and one missed renewal makes 20 s. A busy machine
// may be late.
const maxGap = 19 * time.Second

// watch watches a node that is ready, until the test ends or Stop is called.
func (m *machine) watch(t *testing.T) *harness.Pulse {
	t.Helper()
	return harness.WatchNode(t, m.Client(), m.name)
}

// ready returns why the node is not ready, or why that is not known, and is empty if it is.
func (m *machine) ready(ctx context.Context) string {
	why, err := harness.NotReady(ctx, m.Client(), m.name)
	if err != nil {
		return err.Error()
	}
	return why
}
