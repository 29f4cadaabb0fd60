// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
)

// printDryRun shows a person what would be sent, and fails if the API server would refuse it.
func (i *invocation) printDryRun(ctx context.Context, a *authenticator.Authenticator) error {
	ctx, cancel := context.WithTimeout(ctx, i.deadline())
	defer cancel()
	report, err := a.DryRun(ctx)
	if err != nil {
		return err
	}
	var out []byte
	switch i.output {
	case "json":
		out, err = json.MarshalIndent(report.Request, "", "  ")
		out = append(out, '\n')
	case "yaml":
		out, err = yaml.Marshal(report.Request)
	default:
		out, err = readable(report)
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
func readable(report *authenticator.Report) ([]byte, error) {
	var out bytes.Buffer
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	row := func(name, value string) { _, _ = fmt.Fprintf(table, "%s:\t%s\n", name, value) }
	orNone := func(s string) string {
		if s == "" {
			return "none"
		}
		return s
	}
	spec := report.Request.Spec
	content, err := attestation.Parse(spec.Request)
	if err != nil {
		return nil, err
	}
	pkcs10, err := x509.ParseCertificateRequest(content.PKCS10)
	if err != nil {
		return nil, fmt.Errorf("built request: %w", err)
	}
	usages := make([]string, 0, len(spec.Usages))
	for _, u := range spec.Usages {
		usages = append(usages, string(u))
	}
	expiration := "left to the signer"
	if spec.ExpirationSeconds != nil {
		expiration = (time.Duration(*spec.ExpirationSeconds) * time.Second).String()
	}
	row("certificate", report.Certificate)
	row("pending request", report.Pending)
	row("a run would", report.Next)
	row("request", report.Request.Name+" (the name and the key are made anew each time)")
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
		row("  evidence, "+fact.Name, fact.Value)
	}
	row("  size", fmt.Sprintf("%d bytes", len(spec.Request)))
	row("to", orNone(report.Server))
	row("credential", orNone(report.Credential))
	row("API server's check", report.Check)
	if err := table.Flush(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
