// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"cmp"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

func (i *invocation) statusCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the node's certificate, its renewal, the last attempt and the pending request",
		Long: `Show what the files of this node say about its certificate. It takes no lock, writes nothing, and asks neither the network nor the
TPM, so monitoring can run it every minute. It takes the flags that the kubelet's kubeconfig gives the plugin, unless --config is given,
and names them. A flag on the command line wins.

Exit codes:
  0   the certificate is valid and used, and no renewal is due
  40  the certificate is valid and used, and its renewal is due
  41  the certificate is valid and used, but its renewal fails, it is rejected, or the configuration is wrong
  42  the certificate has expired
  43  there is no usable certificate
  12  the certificate directory cannot be read or trusted`,
		Example: example(i.Name, `
{} status

# how many seconds the certificate has left
{} status --output=json | jq .certificate.remainingSeconds`),
		Args: cli.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			overview, err := i.overview()
			if err != nil {
				return err
			}
			out := describeOverview(overview)
			if format != cli.FormatText {
				if out, err = outputformat.Encode(format, overview); err != nil {
					return err
				}
			}
			if _, err := i.Stdout.Write(out); err != nil {
				return err
			}
			return overview.Failure()
		},
	}
	cli.OutputFlag(c, &format, cli.FormatText, outputformat.JSON, outputformat.YAML)
	return c
}

// overview reads the files as a run of the kubelet would now, with the flags and the cluster of the
// kubelet's kubeconfig.
func (i *invocation) overview() (*nodestatus.Overview, error) {
	a, _, taken, err := i.asKubelet()
	if a == nil {
		return nil, err
	}
	overview := a.Overview()
	overview.ExecFlags = taken
	return overview, nil
}

// asKubelet returns the Authenticator that a run of the kubelet would have now, with the flags and
// the cluster of the kubelet's kubeconfig. It also returns that kubeconfig, and the flags that it
// took from there. With an error, the Authenticator may still be set.
func (i *invocation) asKubelet() (*authenticator.Authenticator, kubelet.Kubeconfig, *nodestatus.ExecFlags, error) {
	kubeconfig, taken := i.takeExecFlags()
	config, loadErr := i.settings()
	info := i.Getenv(authenticator.ExecInfoVariable)
	if info == "" && kubeconfig.Kind == kubelet.Ours && kubeconfig.ClusterProblem == nil {
		asked, err := execInfo(kubeconfig.Cluster)
		if err != nil {
			return nil, kubeconfig, taken, err
		}
		info, i.askedBy = asked, kubeconfig.Path
	}
	a, err := i.newAuthenticator(config, loadErr, info, authenticator.ExecInfoVariable+"="+info)
	return a, kubeconfig, taken, err
}

// overviewTable is an overview for a terminal.
type overviewTable struct {
	*nodestatus.Overview
	out *tabwriter.Writer
}

// row prints a line, unless its value is empty. Parts of the value may be a peer's.
func (t overviewTable) row(name, format string, args ...any) {
	if value := text.Line(fmt.Sprintf(format, args...), cli.MaxLine); value != "" {
		_, _ = fmt.Fprintf(t.out, "%s:\t%s\n", name, value)
	}
}

func describeOverview(o *nodestatus.Overview) []byte {
	var out bytes.Buffer
	t := overviewTable{o, tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)}
	t.row("status", "%s: %s", o.State, o.Message)
	t.row("  hint", "%s", o.Hint)
	if o.Problem != "" && !strings.Contains(o.Message, o.Problem) {
		t.row("problem", "%s", o.Problem)
	}
	if o.ExecFlags != nil {
		t.row("flags", "%s", o.ExecFlags)
	}
	t.row("node", "%s, provider %s, signer %s", cmp.Or(o.NodeName, "unknown"), cmp.Or(o.Provider, "unknown"), cmp.Or(o.SignerName, "unknown"))
	t.row("  chosen", "%s", o.ProviderChosen)
	t.certificate()
	t.announcement()
	if o.EK != nil {
		const unknown = "unknown (the command identify reads it from the TPM)"
		t.row("EK", "template %s, fingerprint %s", cmp.Or(o.EK.Template, "unknown"), cmp.Or(o.EK.Fingerprint, unknown))
	}
	t.worker()
	t.pending()
	t.credential()
	_ = t.out.Flush() // cannot fail: the buffer is in memory
	return out.Bytes()
}

func (t overviewTable) certificate() {
	c := t.Certificate
	if c == nil {
		t.row("certificate", "none")
		return
	}
	t.row("certificate", "%s", c.File)
	t.row("  subject", "%s", c.Subject)
	t.row("  serial", "%s", c.Serial)
	t.row("  issuer", "%s", c.Issuer)
	t.row("  SHA-256", "%s", c.Fingerprint)
	t.row("  from", "%s", c.Server)
	t.row("  valid", "from %s to %s (%s)", rfc3339(c.NotBefore), rfc3339(c.NotAfter), relative(c.NotAfter.Sub(t.Time)))
	t.row("  not used", "%s", c.Unusable)
	switch {
	case c.Due != "":
		t.row("  renewal", "due: %s", c.Due)
	case c.RenewAt.IsZero():
		t.row("  renewal", "none: the provider does not renew")
	default:
		t.row("  renewal", "due at %s (%s)", rfc3339(c.RenewAt), relative(c.RenewAt.Sub(t.Time)))
	}
}

func (t overviewTable) announcement() {
	a := t.Announcement
	if a == nil {
		return
	}
	announced := "not known yet"
	switch {
	case a.Renewal != "":
		announced = fmt.Sprintf("%q, due at %s (%s)", a.Renewal, rfc3339(a.DueAt), relative(a.DueAt.Sub(t.Time)))
	case a.Exists:
		announced = "none for this certificate"
	case !a.Answered.IsZero():
		announced = "this cluster announces none"
	}
	t.row("announced renewal", "%s", announced)
	if !a.Checked.IsZero() {
		t.row("  last check", "%s (%s)", rfc3339(a.Checked), relative(a.Checked.Sub(t.Time)))
	}
	t.row("  problem", "%s", a.Problem)
	next := "now"
	if !a.NextCheck.IsZero() {
		next = fmt.Sprintf("%s (%s)", rfc3339(a.NextCheck), relative(a.NextCheck.Sub(t.Time)))
	}
	t.row("  next check", "%s", next)
	switch {
	case a.ReportProblem != "" && !a.Reported:
		t.row("  reported", "no: %s", a.ReportProblem)
	case a.Exists && a.Reported:
		t.row("  reported", "yes: the Node names this certificate")
	case a.Exists:
		t.row("  reported", "not yet")
	}
}

func (t overviewTable) worker() {
	switch w := t.Worker; {
	case w.Running:
		t.row("worker", "process %d, running for %s", w.PID, seconds(w.AgeSeconds))
	case w.Died:
		t.row("worker", "died without a result")
	default:
		t.row("worker", "none runs")
	}
	last := t.LastRun
	if last == nil {
		t.row("last run", "none")
		return
	}
	outcome := "nothing was to be done"
	switch {
	case last.Reason != "":
		outcome = "failed: " + last.Reason
	case last.Request != "":
		outcome = "a certificate was issued"
	}
	t.row("last run", "%s, ended %s (%s)", outcome, rfc3339(last.Finished), relative(last.Finished.Sub(t.Time)))
	t.row("  message", "%s", last.Message)
	t.row("  hint", "%s", last.Hint)
	t.row("  request", "%s", last.Request)
	t.row("  steps", "%s", describePhases(last.Phases))
	if t.Failures > 0 {
		t.row("  failures", "%d in a row", t.Failures)
	}
	if !t.NextAttempt.IsZero() {
		t.row("  next attempt", "not before %s (%s)", rfc3339(t.NextAttempt), relative(t.NextAttempt.Sub(t.Time)))
	}
}

// describePhases lists how long each step took.
func describePhases(phases []cache.Phase) string {
	steps := make([]string, 0, len(phases))
	for _, p := range phases {
		steps = append(steps, fmt.Sprintf("%s %.0f ms", p.Name, p.Milliseconds))
	}
	return strings.Join(steps, ", ")
}

func (t overviewTable) pending() {
	p := t.Pending
	if p == nil {
		t.row("pending request", "none")
		return
	}
	t.row("pending request", "%s", p.Name)
	t.row("  signer", "%s", p.SignerName)
	t.row("  server", "%s", p.Server)
	t.row("  waits for", "its %s, since %s (%s)", p.WaitsFor, rfc3339(p.Created), seconds(p.AgeSeconds))
	t.row("  because", "%s", p.Reason)
	t.row("  cure", "%s", p.Cure)
}

func (t overviewTable) credential() {
	c := t.Credential
	if c.Problem != "" {
		t.row("next credential", "none: %s", c.Problem)
		t.row("  hint", "%s", c.Hint)
	} else {
		t.row("next credential", "%s", c.Description)
	}
	t.row("  because", "%s", c.Why)
	if c.Server != "" {
		t.row("  server", "%s, named by %s", c.Server, c.Source)
	}
}

func rfc3339(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func seconds(n int64) time.Duration { return time.Duration(n) * time.Second }

// relative says how far in the future or in the past something is.
func relative(d time.Duration) string {
	switch d = d.Round(time.Second); {
	case d < 0:
		return fmt.Sprintf("%s ago", -d)
	case d == 0:
		return "now"
	}
	return fmt.Sprintf("in %s", d)
}
