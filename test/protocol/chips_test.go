// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"testing"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/tpmmodel"
)

// chip is a TPM of any kind that the tests can look into.
type chip interface {
	Socket() string
	Transport() transport.TPM
	Handles() ([]tpm2.TPMHandle, error)
	LockoutCounter() (uint32, error)
	Extend(pcr int, data []byte) error
	maker() *swtpm.CA
}

type ofSwtpm struct{ *swtpm.TPM }

func (c ofSwtpm) maker() *swtpm.CA { return c.CA }

type ofModel struct{ *tpmmodel.Chip }

func (c ofModel) maker() *swtpm.CA { return c.CA }

// starter starts a chip that ends with the test.
type starter func(testing.TB, swtpm.Options) chip

func startSwtpm(t testing.TB, o swtpm.Options) chip {
	t.Helper()
	return ofSwtpm{swtpm.Start(t, o)}
}

func startModel(t testing.TB, o swtpm.Options) chip {
	t.Helper()
	c, err := tpmmodel.NewChip(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	return ofModel{c}
}

// starters are all of them.
var starters = map[string]starter{"swtpm": startSwtpm, "model": startModel}

// forEachChip runs a test against swtpm and against the model: what holds of the one has to hold of
// the other.
func forEachChip(t *testing.T, test func(*testing.T, starter)) {
	for name, start := range starters {
		t.Run(name, func(t *testing.T) { test(t, start) })
	}
}
