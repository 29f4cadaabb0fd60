// SPDX-License-Identifier: Apache-2.0

package operations

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// page is docs/operations.md.
var page = sync.OnceValues(func() (*harness.Page, error) { return harness.ReadPage(filepath.Join(module, "docs", "operations.md")) })

// recipe is a recipe of the page.
type recipe struct{ *harness.Recipe }

// newRecipe opens a recipe. The test gives the value of each variable, except the namespace. What
// the operator keeps is linked in his folder.
func newRecipe(t *testing.T, title string, values map[string]string) recipe {
	t.Helper()
	p, err := page()
	harness.Must(t, err)
	given := map[string]string{"NAMESPACE": namespace}
	maps.Copy(given, values)
	r := recipe{p.Recipe(t, title, given, shared.operator()...)}
	for name := range values {
		if !r.Has(name) {
			t.Fatalf("%s: it does not set %s", title, name)
		}
	}
	for _, name := range []string{"cluster", "packaging"} {
		harness.Must(t, os.Symlink(filepath.Join(shared.dir, name), filepath.Join(r.Dir, name)))
	}
	return r
}

// inventory guards the operator's inventory: two concurrent recipes would overwrite each other's.
var inventory sync.Mutex

// step runs the next block, which must contain a text.
func (r recipe) step(contains string) (output string) {
	if strings.Contains(r.Next(), "machines/") {
		inventory.Lock()
		defer inventory.Unlock()
	}
	return r.Step(contains)
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	harness.Must(t, err)
	return string(data)
}

// A test follows each recipe, also those that are added to the page.
func allAreTried(t *testing.T) {
	p, err := page()
	harness.Must(t, err)
	p.AllAreTried(t)
}
