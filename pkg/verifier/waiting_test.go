// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Each reason with which the rules wait has a text for people, and no other reason has one.
func TestEachReasonToWaitHasAText(t *testing.T) {
	const call = `f\.wait\(`
	calls, named := regexp.MustCompile(call), regexp.MustCompile(call+`(Reason\w+),`)
	declared := regexp.MustCompile(`(?m)^\t(Reason\w+) +Reason = "(\w+)"$`)
	// The values of these are constants of another package.
	values := map[string]Reason{"ReasonUnknownCredential": ReasonUnknownCredential, "ReasonNodeAlreadyRegistered": ReasonNodeAlreadyRegistered}
	waits := map[Reason]bool{}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		source := string(data)
		for _, m := range declared.FindAllStringSubmatch(source, -1) {
			values[m[1]] = Reason(m[2])
		}
		found := named.FindAllStringSubmatch(source, -1)
		if len(found) != len(calls.FindAllString(source, -1)) {
			t.Errorf("%s waits with a reason that this test does not find", file)
		}
		for _, m := range found {
			names = append(names, m[1])
		}
	}
	for _, name := range names {
		reason := values[name]
		if reason == "" {
			t.Errorf("the value of %s is not found", name)
			continue
		}
		waits[reason] = true
		if WaitingText(reason) == "" {
			t.Errorf("%s has no text", reason)
		}
	}
	for reason, text := range waitingTexts {
		if !waits[reason] {
			t.Errorf("%s has a text, and no rule waits with it", reason)
		}
		w := attestation.Statement{Reason: string(reason), Text: text}
		if got, err := attestation.ParseStatement(w.String()); err != nil || got != w || len(text) > 400 {
			t.Errorf("%s: %v, %d bytes", w, err, len(text))
		}
	}
}
