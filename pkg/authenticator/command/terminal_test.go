// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// openTerminal returns both sides of a pseudoterminal (pty(7)).
func openTerminal(t *testing.T) (master, terminal *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = terminal.Close() })
	return master, terminal
}

// program runs the real program with a standard output, and returns its exit code and standard
// error.
func program(t *testing.T, stdout *os.File, execInfo string, args ...string) (int, string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), programVariable+"=1", "KUBERNETES_EXEC_INFO="+execInfo)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = stdout, &stderr
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), stderr.String()
}

// On a terminal, a person gets an explanation, and no private key. A question in
// KUBERNETES_EXEC_INFO is answered there, too, and the commands for people print there.
func TestBareCallOnATerminal(t *testing.T) {
	n := newNode(t)
	enrolled(t, n.certs)
	master, terminal := openTerminal(t)
	read := func() string { // what was written, up to a mark
		if _, err := terminal.WriteString("END"); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		for buffer := make([]byte, 4096); !strings.HasSuffix(out.String(), "END"); {
			got, err := master.Read(buffer)
			if err != nil {
				t.Fatal(err)
			}
			out.Write(buffer[:got])
		}
		return strings.TrimSuffix(out.String(), "END")
	}

	code, stderr := program(t, terminal, "", n.flags...)
	if out := read(); code != 3 || out != "" {
		t.Errorf("exit code %d, on the terminal: %q", code, out)
	}
	for _, says := range []string{"kubelet-authenticator-test status ", "kubelet-authenticator-test doctor ", "kubelet-authenticator-test --dry-run ", "is run by the kubelet"} {
		if !strings.Contains(stderr, says) {
			t.Errorf("no %q in\n%s", says, stderr)
		}
	}
	if !regexp.MustCompile(`\nkubelet-authenticator-test: standard output is a terminal[^\n]*\nhint: [^\n]+\n$`).MatchString(stderr) {
		t.Errorf("standard error: %s", stderr)
	}

	code, stderr = program(t, terminal, `{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","spec":{"interactive":false}}`, n.flags...)
	if out := read(); code != 0 || !strings.Contains(out, "PRIVATE KEY") {
		t.Errorf("with a question: exit code %d: %s", code, stderr)
	}
	code, stderr = program(t, terminal, "", n.with("status")...)
	if out := read(); code != 0 || !strings.Contains(out, "ok: valid to ") {
		t.Errorf("status: exit code %d: %s", code, stderr)
	}
}

// Whatever else is no terminal gets the credential: a pipe, a file, /dev/null.
func TestBareCallElsewhere(t *testing.T) {
	n := newNode(t)
	enrolled(t, n.certs)
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	if code, stderr := program(t, null, "", n.flags...); code != 0 || stderr != "" {
		t.Errorf("/dev/null: exit code %d: %s", code, stderr)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	code, stderr := program(t, w, "", n.flags...)
	_ = w.Close()
	var out bytes.Buffer
	if _, err := out.ReadFrom(r); err != nil || code != 0 || !strings.Contains(out.String(), "PRIVATE KEY") {
		t.Errorf("a pipe: exit code %d: %s, %v", code, stderr, err)
	}
}
