// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
)

// modelIn returns what makes machines with models, each in a directory of its own.
func modelIn(t *testing.T) func(i int) (*Machine, error) {
	t.Helper()
	ca, err := swtpm.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	return func(i int) (*Machine, error) {
		own := filepath.Join(dir, fmt.Sprint(i))
		if err := os.Mkdir(own, 0o700); err != nil {
			return nil, err
		}
		return NewModel(fmt.Sprintf("node-%03d", i), own, ca)
	}
}

// maxMachine bounds what a machine with a model has in memory, in bytes, with all that it keeps of
// its keys.
const maxMachine = 64 << 10

// A fleet of models is cheap, its inventory is one, and each machine is another.
func TestModels(t *testing.T) {
	const count = 50
	one := modelIn(t)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	all, err := Make(count, one)
	if err != nil {
		t.Fatal(err)
	}
	defer Stop(all...)
	content, err := Inventory(t.Context(), all...)
	if err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	each := (int64(after.HeapAlloc+after.StackInuse) - int64(before.HeapAlloc+before.StackInuse)) / count
	t.Logf("%d bytes of memory and %d of the inventory for each", each, len(content)/count)
	if each > maxMachine {
		t.Errorf("more than %d", maxMachine)
	}
	listed, err := inventory.Parse(content)
	if err != nil {
		t.Fatal(err)
	}
	if len(listed.All()) != count {
		t.Errorf("%d machines in the inventory", len(listed.All()))
	}
}

func TestNothingIsLeftAfterAnError(t *testing.T) {
	one := modelIn(t)
	var made atomic.Int32
	var sockets [20]string
	wrong := errors.New("wrong")
	all, err := Make(len(sockets), func(i int) (*Machine, error) {
		if i == len(sockets)/2 {
			return nil, wrong
		}
		m, err := one(i)
		if err == nil {
			made.Add(1)
			sockets[i] = m.Chip.Socket()
		}
		return m, err
	})
	if !errors.Is(err, wrong) || all != nil {
		t.Errorf("%d machines, %v", len(all), err)
	}
	if n := int(made.Load()); n == 0 || n > len(sockets)/2+atOnce {
		t.Errorf("%d were made", n)
	}
	for _, socket := range sockets {
		if socket == "" {
			continue
		}
		if conn, err := net.Dial("unix", socket); err == nil {
			_ = conn.Close()
			t.Errorf("%s still answers", socket)
		}
	}
}

// Whom a certificate has to be by is not left out by mistake.
func TestIssuerIsNeeded(t *testing.T) {
	m, err := modelIn(t)(0)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Stop()
	if times, err := m.Attest(t.Context(), Cluster{URL: "https://127.0.0.1:1"}); err == nil || times.Hellos > 0 {
		t.Errorf("%+v, %v", times, err)
	}
}
