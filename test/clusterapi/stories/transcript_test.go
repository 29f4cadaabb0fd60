// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

var update = flag.Bool("update", false, "write the transcript into docs/integration/cluster-api.md")

// The transcript in the document is between these lines.
const transcriptBegin, transcriptEnd = "<!-- transcript -->\n```console\n", "```\n<!-- /transcript -->\n"

// terminal runs a user's commands, and records them and their output.
type terminal struct {
	kubectl, dir string
	seen         strings.Builder
}

// newTerminal returns a terminal in a folder with the workload cluster's one.kubeconfig. The
// default kubeconfig is for the management cluster, with the Cluster's namespace.
func newTerminal(t *testing.T, c *cluster) *terminal {
	t.Helper()
	u := &terminal{kubectl: c.Kubectl(), dir: t.TempDir()}
	harness.Must(t, c.WriteKubeconfig(u.at("config"), c.AdminUser()))
	harness.Must(t, c.workload.WriteKubeconfig(u.at("one.kubeconfig"), c.workload.AdminUser()))
	_, err := u.run(t.Context(), "config", "set-context", "--current", "--namespace="+c.namespace)
	harness.Must(t, err)
	return u
}

func (u *terminal) at(name string) string { return filepath.Join(u.dir, name) }

func (u *terminal) run(ctx context.Context, args ...string) (string, error) {
	if args[0] == "attest" {
		return attest(ctx, append(args[1:], "--kubeconfig="+u.at("config"))...)
	}
	cmd := exec.CommandContext(ctx, u.kubectl, args...)
	cmd.Dir = u.dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+u.at("config"), "HOME="+u.dir)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// types runs a command, and records it as in the transcript. No argument may contain a space.
func (u *terminal) types(t *testing.T, command string) {
	t.Helper()
	out, err := u.run(t.Context(), strings.Fields(command)[1:]...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	u.seen.WriteString("$ " + command + "\n")
	for line := range strings.Lines(out) {
		u.seen.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
}

// isDocumented compares the recorded output with the transcript in the document. With -update it
// writes the output into the document instead.
func (u *terminal) isDocumented(t *testing.T) {
	t.Helper()
	const path = module + "/docs/integration/cluster-api.md"
	content, err := os.ReadFile(path)
	harness.Must(t, err)
	before, rest, ok := strings.Cut(string(content), transcriptBegin)
	documented, after, closed := strings.Cut(rest, transcriptEnd)
	if !ok || !closed {
		t.Fatalf("%s has no place for the transcript", path)
	}
	if *update {
		harness.Must(t, os.WriteFile(path, []byte(before+transcriptBegin+u.seen.String()+transcriptEnd+after), 0o644))
		return
	}
	if want, got := mask(documented), mask(u.seen.String()); !slices.Equal(want, got) {
		t.Errorf("the transcript in %s is out of date; update it with -update. The document has\n%s\nthis run printed\n%s",
			path, strings.Join(want, "\n"), strings.Join(got, "\n"))
	}
}

// masks hide parts that differ between runs: names, keys, ages, times and the number of replicas.
var masks = []struct {
	what *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`one-workers-[a-z0-9]{5}-[a-z0-9]{5}`), "MACHINE"},
	{regexp.MustCompile(`\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`), "UID"},
	{regexp.MustCompile(`\bnode-csr-\S+`), "REQUEST"},
	{regexp.MustCompile(`system:bootstrap:\S+`), "TOKEN"},
	{regexp.MustCompile(`\b[0-9a-f]{12}\b`), "EK"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`), "TIME"},
	{regexp.MustCompile(`\b(\d+[dhms])+\b`), "AGE"},
	{regexp.MustCompile(`--replicas=\d`), "--replicas=N"},
	{regexp.MustCompile(`[ \t]+`), " "},
}

// mask returns each command and its masked output lines. The lines are sorted, because their order
// depends on random names. Equal lines are kept once, so the number of lines is not compared.
func mask(transcript string) (all []string) {
	for _, command := range strings.Split(transcript, "$ ")[1:] {
		for _, m := range masks {
			command = m.what.ReplaceAllString(command, m.with)
		}
		lines := strings.Split(strings.TrimSpace(command), "\n")
		all = append(all, "$ "+lines[0])
		slices.Sort(lines[1:])
		all = append(all, slices.Compact(lines[1:])...)
	}
	return all
}
