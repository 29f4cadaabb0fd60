// SPDX-License-Identifier: Apache-2.0

// Package reliability has two sizes of each test below this folder. "make test-all" runs the short
// one of all, "make soak" the long one of those that it names. docs/reliability.md has the results.
package reliability

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Variable names the long runs, separated by commas. "all" is each of them.
const Variable = "KUBELET_AUTHENTICATOR_TEST_SOAK"

// Names are the long runs. "make soak ONLY=NAME" runs one of them.
var Names = []string{
	"limits",        // node: memory and processes of plugin and worker
	"signer-outage", // node: one hour without a signer, with a real kubelet
	"rotations",     // storage: 10,000 certificates, one after the other
	"power-cut",     // storage: power is lost after each system call
	"tpm-renewals",  // tpm: 1,440 renewals with one TPM
	"campaign",      // controller: 10,000 machines, and everything around them fails
	"fleet",         // fleet: 100,000 simulated nodes for a week
	"authorizer",    // authorizer: a real kubelet while its API server's authorizer is away
	"neighbours",    // neighbours: a workload cluster that attacks the controller of another one
}

// Size returns long in the run called name, and short in "make test-all". It skips t in each other
// long run.
func Size[T any](t testing.TB, name string, short, long T) T {
	t.Helper()
	if !slices.Contains(Names, name) {
		t.Fatalf("no long run is called %q: add it to reliability.Names", name)
	}
	asked := os.Getenv(Variable)
	if asked == "" {
		return short
	}
	for _, n := range strings.Split(asked, ",") {
		if n == name || n == "all" {
			return long
		}
		if !slices.Contains(Names, n) {
			t.Fatalf("%s: no long run is called %q; there are %s", Variable, n, strings.Join(Names, ", "))
		}
	}
	t.Skipf("not part of %s=%s", Variable, asked)
	return short
}
