// SPDX-License-Identifier: Apache-2.0

package command

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A client is made again when its kubeconfig is written, and when it changes. A missing file is no
// change: its last content may still work.
func TestUntilChanged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	const interval = 10 * time.Millisecond
	for _, content := range []string{"one", "two"} {
		ctx, stop := untilChanged(t.Context(), path, interval)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		<-ctx.Done()
		stop()
	}
	ctx, stop := untilChanged(t.Context(), path, interval)
	defer stop()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ctx.Done():
		t.Error("a missing file counts as a change")
	case <-time.After(20 * interval):
	}
}
