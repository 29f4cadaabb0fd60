// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// Explanation is the output of the command explain: a row of docs/reasons.md.
type Explanation struct {
	Reason  string `json:"reason"`
	Meaning string `json:"meaning"`
	Remedy  string `json:"remedy"`
}

func (i *invocation) explainCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "explain [REASON]",
		Short: "Say what a reason means and what to do; without one, list all reasons",
		Long: `Say what a reason of a condition, an Event or a denied request means, and what to do. Without a reason, list all of them.

It asks no cluster: the texts are those of docs/reasons.md of this release.`,
		Example: `  kubectl attest explain ProviderIDMismatch`,
		Args:    cobra.MaximumNArgs(1),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			var names []string
			for _, e := range explanations() {
				names = append(names, e.Reason+"\t"+e.Meaning)
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, args []string) error {
			all := explanations()
			if len(args) == 0 {
				return i.printExplanations(all, format)
			}
			at := slices.IndexFunc(all, func(e Explanation) bool { return strings.EqualFold(e.Reason, args[0]) })
			if at < 0 {
				return cli.Fail(codeNotFound, "kubectl attest explain lists all reasons", fmt.Errorf("no reason %.64q%s", args[0], text.DidYouMean(args[0], "", reasonNames(all))))
			}
			if format != "" {
				return i.Print(format, all[at])
			}
			_, err := fmt.Fprintf(i.Stdout, "%s\n  meaning: %s\n  what to do: %s\n", all[at].Reason, all[at].Meaning, all[at].Remedy)
			return err
		},
	}
	outputFlag(c, &format)
	return c
}

func (i *invocation) printExplanations(all []Explanation, format string) error {
	if format != "" {
		return i.Print(format, all)
	}
	for _, e := range all {
		if _, err := fmt.Fprintln(i.Stdout, e.Reason); err != nil {
			return err
		}
	}
	return nil
}

func reasonNames(all []Explanation) (names []string) {
	for _, e := range all {
		names = append(names, e.Reason)
	}
	return names
}

// remedies returns one line for each of the reasons that this release knows: what it means, and
// what to do.
func remedies(reasons []string) (lines []string) {
	all := explanations()
	for _, reason := range slices.Compact(slices.Sorted(slices.Values(reasons))) {
		if at := slices.IndexFunc(all, func(e Explanation) bool { return e.Reason == reason }); at >= 0 {
			lines = append(lines, fmt.Sprintf("%s: %s; what to do: %s", reason, all[at].Meaning, all[at].Remedy))
		}
	}
	return lines
}

var (
	reasonRow = regexp.MustCompile(`^\| (\w+) \| (.*) \| (.*) \|$`)
	pageLink  = regexp.MustCompile(`\[([^\]]*)\]\(([^)]*)\)`)
)

// explanations returns the rows of the tables in docs/reasons.md that begin with a reason, sorted.
func explanations() (all []Explanation) {
	inTable := false
	for line := range strings.Lines(docs.Reasons) {
		row := reasonRow.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		switch {
		case row == nil:
			inTable = inTable && strings.HasPrefix(line, "|")
		case row[1] == "reason":
			inTable = true
		case inTable:
			all = append(all, Explanation{row[1], plainText(row[2]), plainText(row[3])})
		}
	}
	slices.SortFunc(all, func(a, b Explanation) int { return strings.Compare(a.Reason, b.Reason) })
	return all
}

// plainText writes a link as its text and its page.
func plainText(markdown string) string {
	return pageLink.ReplaceAllStringFunc(markdown, func(link string) string {
		parts := pageLink.FindStringSubmatch(link)
		page := parts[2]
		if strings.HasPrefix(page, "#") {
			page = "reasons.md" + page
		}
		return parts[1] + " (docs/" + page + ")"
	})
}
