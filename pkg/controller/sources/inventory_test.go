// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"
)

// The shared machines change with the file, and only then.
func TestInventoryIsParsedOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "inventory.yaml")
	source := NewInventory(file, 0)
	now := time.Now()
	if _, err := source.Machines(t.Context(), now); err == nil {
		t.Error("machines of a file that is not there")
	}
	for i, nodeName := range []string{"a", "b"} {
		content := fmt.Sprintf("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines:\n"+
			"- {name: m, nodeName: %s, providerID: test://m, bootstrapTokenID: abcde%d}\n", nodeName, i)
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		first, err := source.Shared(t.Context(), now)
		if err != nil || len(first) != 1 || first[0].Names[0].Value != nodeName {
			t.Fatalf("%+v, %v", first, err)
		}
		again, err := source.Shared(t.Context(), now)
		if err != nil || &again[0] != &first[0] {
			t.Errorf("parsed again: %v", err)
		}
		// Machines returns a copy that the caller may change.
		own, err := source.Machines(t.Context(), now)
		if err != nil || !reflect.DeepEqual(own, first) {
			t.Fatalf("%+v, %v", own, err)
		}
		own[0].Names[0].Value, own[0].ProviderID = "changed", "changed"
		if first[0].Names[0].Value != nodeName || first[0].ProviderID != "test://m" {
			t.Errorf("%+v", first)
		}
		if token, err := source.Token(t.Context(), fmt.Sprintf("abcde%d", i), now); err != nil || token.Machine.Name != "m" {
			t.Errorf("%+v, %v", token, err)
		}
	}
}
