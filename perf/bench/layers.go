// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// layers are what the plugin is made of, from below. Most of a run on the valid path is over before
// main: packages are initialised, whether it needs them or not.
var layers = []struct {
	name     string
	packages []string
}{
	{"floor + net/http, crypto/tls, encoding/json", []string{"net/http", "crypto/tls", "encoding/json"}},
	{"... + cobra, go-tpm", []string{"github.com/spf13/cobra", "github.com/google/go-tpm/tpm2"}},
	{"... + client-go's rest", []string{"k8s.io/client-go/rest"}},
	{"... + clientcmd", []string{"k8s.io/client-go/tools/clientcmd"}},
	{"... + k8s.io/api/certificates/v1", []string{"k8s.io/api/certificates/v1"}},
	{"... + the plugin's own packages", []string{own + "/pkg/authenticator/command", own + "/pkg/provider/tpm"}},
}

const own = "github.com/kubelet-authenticator/kubelet-authenticator"

// validLayers compares the floor with programs that do what it does and have been linked with more
// and more of the plugin.
func (b *bench) validLayers(ctx context.Context) error {
	file := filepath.Join(b.dir, "file.pem")
	if err := os.WriteFile(file, []byte("-----BEGIN CERTIFICATE-----\n"), 0o600); err != nil {
		return err
	}
	const source = "bench/floor/main.go"
	code, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	const imports = `import "os"`
	if !strings.Contains(string(code), imports) {
		return fmt.Errorf("%s: where its imports are is not known", source)
	}
	var programs []*program
	var linked strings.Builder
	add := func(name string) error {
		folder := filepath.Join(b.dir, name)
		main, binary := filepath.Join(folder, "main.go"), filepath.Join(folder, "program")
		if err := os.Mkdir(folder, 0o700); err != nil {
			return err
		}
		with := strings.Replace(string(code), imports, "import (\n\"os\"\n"+linked.String()+")", 1)
		if err := os.WriteFile(main, []byte(with), 0o600); err != nil { //nolint:gosec // G703: it is the floor's
			return err
		}
		programs = append(programs, &program{args: []string{binary, file}, env: os.Environ()})
		return compile.Program(ctx, ".", binary, main)
	}
	if err := add("layer-0"); err != nil {
		return err
	}
	for i, l := range layers {
		for _, path := range l.packages {
			fmt.Fprintf(&linked, "_ %q\n", path)
		}
		if err := add(fmt.Sprint("layer-", i+1)); err != nil {
			return err
		}
	}
	if err := inTurns(ctx, programs, b.pairs); err != nil {
		return err
	}
	for i, l := range layers {
		b.table.add(compared(l.name, programs[i+1].times, "floor", programs[0].times))
		b.validBars = append(b.validBars, plot.Bar{Name: l.name, Value: median(rounds(programs[i+1].times, programs[0].times)), Group: 1})
	}
	return nil
}
