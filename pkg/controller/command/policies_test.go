// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/atomicfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
)

// policies runs the command for a folder, and returns what it printed without that folder's name.
func policies(t *testing.T, dir string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, log bytes.Buffer
	args = append([]string{"policies", "--static", dir, "--kubernetes-version=v1.37.0"}, args...)
	code = Program{}.Run(t.Context(), Process{Args: args, Stdout: &out, Stderr: &log})
	return code, strings.ReplaceAll(out.String(), dir+"/", ""), strings.ReplaceAll(log.String(), dir+"/", "")
}

// contents returns all files below a folder, by name.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		all[strings.TrimPrefix(path, dir+"/")] = string(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// The command writes four files. A second run changes none of them. Other options change those that
// depend on them.
func TestPoliciesAreWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "static")
	files := []string{policyset.AdmissionFile, policyset.KubeadmFile, policyset.KubeadmControlPlaneFile, policyset.PoliciesFile}
	for _, run := range []struct {
		args    []string
		written []string
	}{
		{nil, files},
		{nil, nil},
		{[]string{"--revocation"}, []string{policyset.KubeadmControlPlaneFile, policyset.PoliciesFile}},
		{[]string{"--revocation", "--path=/srv/policies"}, []string{policyset.AdmissionFile, policyset.KubeadmFile, policyset.KubeadmControlPlaneFile}},
	} {
		code, stdout, stderr := policies(t, dir, run.args...)
		var want strings.Builder
		for _, name := range files {
			state := "unchanged"
			if strings.Contains(strings.Join(run.written, " ")+" ", name+" ") {
				state = "written"
			}
			want.WriteString(name + ": " + state + "\n")
		}
		if code != 0 || stdout != want.String() || stderr != "" {
			t.Errorf("%v: exit code %d, %s%s", run.args, code, stdout, stderr)
		}
	}
	written := contents(t, dir)
	if len(written) != len(files) {
		t.Errorf("there are %d files", len(written))
	}
	// What a crash left is replaced.
	if err := os.WriteFile(filepath.Join(dir, policyset.PoliciesFile)+atomicfile.Temporary, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := policies(t, dir, "--controller-user=a"); code != 0 {
		t.Error(stderr)
	}
	if len(contents(t, dir)) != len(files) {
		t.Error("a temporary file is left")
	}
}

// A refusal writes nothing, and says why.
func TestPoliciesAreRefused(t *testing.T) {
	for title, c := range map[string]struct {
		file, content string
		args          []string
		code          int
		says          string
	}{
		"no folder":            {args: []string{"--static="}, code: cli.CodeUsage, says: "--static"},
		"an argument":          {args: []string{"more"}, code: cli.CodeUsage, says: "more"},
		"no version":           {args: []string{"--kubernetes-version="}, code: cli.CodeUsage, says: "--kubernetes-version"},
		"no version at all":    {args: []string{"--kubernetes-version=latest"}, code: cli.CodeUsage, says: "must be like v1.37.2"},
		"an older API server":  {args: []string{"--kubernetes-version=1.36.9"}, code: CodeConfiguration, says: "Nothing was written"},
		"a beta":               {args: []string{"--kubernetes-version=v1.37.0-beta.0"}, code: CodeConfiguration, says: "Nothing was written"},
		"the gate is off":      {args: []string{"--feature-gates=A=true,ManifestBasedAdmissionControlConfig=false"}, code: CodeConfiguration, says: "Nothing was written"},
		"an unknown scope":     {args: []string{"--scope=all"}, code: cli.CodeUsage, says: "--scope"},
		"no user":              {args: []string{"--controller-user="}, code: cli.CodeUsage, says: "--controller-user"},
		"a user with a quote":  {args: []string{"--mover=a'b"}, code: cli.CodeUsage, says: "mover"},
		"a signer that is not": {args: []string{"--signer=kubelet"}, code: cli.CodeUsage, says: "signer"},
		"a relative path":      {args: []string{"--path=policies"}, code: cli.CodeUsage, says: "absolute"},
		"a path that goes up":  {args: []string{"--path=/etc/../srv"}, code: cli.CodeUsage, says: "absolute"},
		"a foreign file":       {file: "notes.txt", content: "a", code: CodeConfiguration, says: "notes.txt"},
		"a foreign policy":     {file: "policies/mine.yaml", content: policyset.Mark, code: CodeConfiguration, says: "policies/mine.yaml"},
		"one of that name":     {file: policyset.AdmissionFile, content: "kind: AdmissionConfiguration\n", code: CodeConfiguration, says: policyset.AdmissionFile},
		"a foreign folder":     {file: "pki/ca.key", content: "a", code: CodeConfiguration, says: "pki"},
	} {
		t.Run(title, func(t *testing.T) {
			dir := t.TempDir()
			if c.file != "" {
				path := filepath.Join(dir, c.file)
				if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			before := contents(t, dir)
			code, stdout, stderr := policies(t, dir, c.args...)
			if code != c.code || !strings.Contains(stderr, c.says) || !strings.Contains(stderr, "\nhint: ") || stdout != "" {
				t.Errorf("exit code %d: %s%s", code, stdout, stderr)
			}
			if after := contents(t, dir); len(after) != len(before) || after[c.file] != before[c.file] {
				t.Errorf("it wrote %v", after)
			}
		})
	}
}

// A disk that fails leaves every file as it was.
func TestPoliciesAreWrittenAsAWhole(t *testing.T) {
	dir := t.TempDir()
	if code, _, stderr := policies(t, dir); code != 0 {
		t.Fatal(stderr)
	}
	before := contents(t, dir)
	// The last file cannot be written: a folder has the name of its temporary file.
	files, err := policyset.RenderFiles(policyset.Options{Scope: policyset.Alone, Controllers: []string{"another"}}, "/srv")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, policyset.PoliciesFile)+atomicfile.Temporary, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := replaceFiles(dir, files); err == nil {
		t.Fatal("a file was written over a folder")
	}
	after := contents(t, dir)
	for name, content := range before {
		if after[name] != content {
			t.Errorf("%s is another", name)
		}
	}
	if len(after) != len(before) {
		t.Errorf("there are %d files", len(after))
	}
}
