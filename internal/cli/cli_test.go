// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/spf13/cobra"
)

// An error is printed once, on standard error, with the exit code and the hint of its Failure.
func TestRun(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args           []string
		err            error
		code           int
		stdout, stderr string
	}{
		"success":               {[]string{"work"}, nil, 0, "worked, \n", ""},
		"a format":              {[]string{"work", "-o", "json"}, nil, 0, "worked, json\n", ""},
		"an empty format":       {[]string{"work", "-o", ""}, nil, 0, "worked, \n", ""},
		"another format":        {[]string{"work", "-o", "xml"}, nil, 3, "", "program: invalid argument \"xml\" for \"-o, --output\" flag: must be one of json, yaml\nhint: see --help\n"},
		"a failure inside":      {[]string{"work"}, fmt.Errorf("work: %w", Fail(20, "do this", errors.New("refused"))), 20, "", "program: refused\nhint: do this\n"},
		"without a hint":        {[]string{"work"}, Fail(20, "", errors.New("refused")), 20, "", "program: refused\n"},
		"of several lines":      {[]string{"work"}, errors.New("a\n\x1b[31mb\r\n"), 1, "", "program: a \\u001b[31mb\n"},
		"an unknown command":    {[]string{"worl"}, nil, 3, "", "program: unknown command or argument \"worl\" for program; did you mean work?\nhint: see --help\n"},
		"a superfluous word":    {[]string{"work", "more"}, nil, 3, "", "program: unknown command or argument \"more\" for program work\nhint: see --help\n"},
		"an unknown flag":       {[]string{"work", "--outptu=json"}, nil, 3, "", "program: unknown flag: --outptu; did you mean --output?\nhint: see --help\n"},
		"the version":           {[]string{"version", "-o", "yaml"}, nil, 0, "", ""},
		"a version as anything": {[]string{"version", "-o", "text"}, nil, 3, "", "program: invalid argument \"text\" for \"-o, --output\" flag: must be one of json, yaml\nhint: see --help\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			p := Process{Args: c.args, Stdout: &stdout, Stderr: &stderr}
			root := &cobra.Command{Use: "program", RunE: func(*cobra.Command, []string) error { return nil }}
			p.Init(root)
			var format string
			work := &cobra.Command{Use: "work", Args: NoArgs, RunE: func(*cobra.Command, []string) error {
				if c.err == nil {
					_, _ = fmt.Fprintf(&stdout, "worked, %s\n", format)
				}
				return c.err
			}}
			OptionalOutputFlag(work, &format, "json or yaml", "json", "yaml")
			root.AddCommand(work, p.VersionCommand("program", BuildInfo{Version: "v1"}))
			code := p.Run(t.Context(), root, AsFailure)
			if code != c.code || stderr.String() != c.stderr || name != "the version" && stdout.String() != c.stdout {
				t.Errorf("exit code %d, %q, %q", code, stdout.String(), stderr.String())
			}
			if name == "the version" && !bytes.Contains(stdout.Bytes(), []byte("version: v1\n")) {
				t.Errorf("version: %q", stdout.String())
			}
		})
	}
}
