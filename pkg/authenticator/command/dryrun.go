// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
)

// printDryRun shows a person what would be sent, and fails as the report does.
func (i *invocation) printDryRun(ctx context.Context, a *authenticator.Authenticator) error {
	ctx, cancel := context.WithTimeout(ctx, i.deadline())
	defer cancel()
	report := a.DryRun(ctx)
	var out []byte
	var err error
	switch {
	case i.output == "":
		out, err = readable(report)
	case report.Request != nil:
		out, err = outputformat.Encode(i.output, report.Request)
	}
	if err != nil {
		return err
	}
	if _, err := i.Stdout.Write(out); err != nil {
		return err
	}
	if report.Failure != nil {
		return report.Failure
	}
	return nil
}

// readable formats the report for a terminal, with the request decoded.
func readable(report *enrol.Report) ([]byte, error) {
	var out bytes.Buffer
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	// parts of a value may be a peer's
	row := func(name, value string) { _, _ = fmt.Fprintf(table, "%s:\t%s\n", name, text.Line(value, len(value))) }
	_, _ = fmt.Fprintln(&out, text.Line(report.Verdict, cli.MaxLine))
	row("certificate", report.Certificate)
	row("pending request", report.Pending)
	row("a run would", report.Next)
	if report.Request != nil {
		if err := describeRequest(report, row); err != nil {
			return nil, err
		}
		row("to", orNone(report.Server))
		row("credential", orNone(report.Credential))
		row("API server's check", report.Check)
	}
	if err := table.Flush(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// describeRequest prints the request, decoded.
func describeRequest(report *enrol.Report, row func(name, value string)) error {
	spec := report.Request.Spec
	content, err := attestation.Parse(spec.Request)
	if err != nil {
		return err
	}
	pkcs10, err := x509.ParseCertificateRequest(content.PKCS10)
	if err != nil {
		return fmt.Errorf("built request: %w", err)
	}
	usages := make([]string, 0, len(spec.Usages))
	for _, u := range spec.Usages {
		usages = append(usages, string(u))
	}
	expiration := "left to the signer"
	if spec.ExpirationSeconds != nil {
		expiration = (time.Duration(*spec.ExpirationSeconds) * time.Second).String()
	}
	row("request", report.Request.Name+" (each run uses a new name and a new key)")
	row("  subject", pkcs10.Subject.String())
	row("  key", pkcs10.PublicKeyAlgorithm.String())
	row("  provider ID", orNone(report.ProviderID))
	row("  signer", spec.SignerName)
	row("  usages", strings.Join(usages, ", "))
	row("  lifetime", expiration)
	row("  provider", content.Provider)
	if len(report.Evidence) == 0 {
		row("  evidence", string(content.Data))
	}
	for _, fact := range report.Evidence {
		row("  evidence, "+text.Line(fact.Name, cli.MaxLine), fact.Value)
	}
	row("  size", fmt.Sprintf("%d bytes", len(spec.Request)))
	return nil
}

func orNone(s string) string { return cmp.Or(s, "none") }
