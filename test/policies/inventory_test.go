// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"maps"
	"reflect"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// The overlays for an inventory in several parts change one right, and one pod template, and
// nothing else. The API server takes them.
func TestInventoryOverlays(t *testing.T) {
	base := rendered(t, manifests)
	for title, c := range map[string]struct {
		changed string
		fields  []string
		want    any
	}{
		"inventory-configmaps": {
			"Role node-attestation-system/node-attestation-controller", []string{"rules"},
			map[string]any{
				"apiGroups": []any{""}, "resources": []any{"configmaps"}, "resourceNames": []any{"inventory-north", "inventory-south"}, "verbs": []any{"get"},
			},
		},
		"inventory-volume": {
			"Deployment node-attestation-system/node-attestation-controller", []string{"spec", "template", "spec", "volumes"},
			map[string]any{"name": "inventory", "projected": map[string]any{"sources": []any{
				map[string]any{"configMap": map[string]any{"name": "inventory-north", "optional": true, "items": []any{map[string]any{"key": "inventory.yaml", "path": "north.yaml"}}}},
				map[string]any{"secret": map[string]any{"name": "inventory-south", "optional": true, "items": []any{map[string]any{"key": "inventory.yaml", "path": "south.yaml"}}}},
			}}},
		},
	} {
		folder := documentedOverlay(t, title)
		overlay := rendered(t, folder)
		for name := range maps.Keys(overlay) {
			if same := reflect.DeepEqual(base[name], overlay[name]); same == (name == c.changed) {
				t.Errorf("%s: %s is the same: %t", title, name, same)
			}
		}
		if len(overlay) != len(base) {
			t.Errorf("%s: %d objects, not %d", title, len(overlay), len(base))
		}
		list, _, err := unstructured.NestedSlice(overlay[c.changed].Object, c.fields...)
		harness.Must(t, err)
		if !slices.ContainsFunc(list, func(item any) bool { return reflect.DeepEqual(item, c.want) }) {
			t.Errorf("%s: %v", title, list)
		}
		if _, err := shared.RunKubectl(t.Context(), shared.adminKubeconfig, "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-k", folder); err != nil {
			t.Errorf("%s: %v", title, err)
		}
	}
}
