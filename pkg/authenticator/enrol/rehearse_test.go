// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"crypto/x509"
	"encoding/base64"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

func verdict(reason, text string) func(int, *csrObject) {
	return func(_ int, o *csrObject) {
		annotate(o, attestation.AnnotationVerdict, attestation.Statement{Reason: reason, Text: text}.String())
	}
}

// rehearse rehearses, and ends when a request stays without an answer.
func (n *testNode) rehearse(kubeconfig string) (*Rehearsal, []string, error) {
	n.t.Helper()
	ctx, cancel := n.untilItStalls()
	defer cancel()
	var remarks []string
	passed, err := n.Rehearse(ctx, kubeconfig, func(r error) { remarks = append(remarks, r.Error()) })
	return passed, remarks, err
}

// A rehearsal asks the signers that issue nothing, and ends as the controller says. It leaves
// nothing in the certificate directory.
func TestRehearse(t *testing.T) {
	t.Parallel()
	passed := verdict(attestation.ReasonRehearsalPassed, "it would get one from example.com/signer, and so on")
	for name, c := range map[string]struct {
		hello, proof func(int, *csrObject)
		proofs       int
		want         reason.Reason // "": it passes
		says         string
	}{
		"passes":                   {challenge, passed, 1, "", "it would get one from example.com/signer, and so on"},
		"the hello fails":          {verdict("MachineDeleting", "gone"), nil, 0, reason.RequestDenied, "MachineDeleting: gone"},
		"the proof fails":          {challenge, verdict("ProviderIDMismatch", "another"), 1, reason.RequestDenied, "ProviderIDMismatch: another"},
		"no controller":            {func(int, *csrObject) {}, nil, 0, reason.WaitingForSigner, "has not sent a challenge yet"},
		"a controller, no verdict": {challenge, func(int, *csrObject) {}, 1, reason.WaitingForSigner, "has not given its verdict yet"},
		"a hello cannot pass":      {func(_ int, o *csrObject) { passed(0, o) }, nil, 0, reason.WaitingForSigner, "has not sent a challenge yet"},
		"denied by somebody":       {challenge, deny("Because"), 1, reason.RequestFailed, "ended without a verdict"},
		"deleted by somebody":      {remove, nil, 0, reason.RequestFailed, "ended without a verdict"},
		"a verdict of no form":     {func(_ int, o *csrObject) { annotate(o, attestation.AnnotationVerdict, "RehearsalPassed") }, nil, 0, reason.WaitingForSigner, ""},
		"a certificate":            {challenge, func(n int, o *csrObject) { o.Status.Certificate = []byte("x") }, 1, reason.RequestFailed, "ended without a verdict"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.api.hello, n.api.proof = c.hello, c.proof
			got, _, err := n.rehearse(filepath.Join(t.TempDir(), "none"))
			switch {
			case c.want == "" && (err != nil || got.NodeName != "a" || got.Text != c.says || got.Credential == "" || got.OtherSigner != ""):
				t.Errorf("%+v, %v", got, err)
			case c.want != "" && (got != nil || reason.AsFailure(err).Reason != c.want || reason.AsFailure(err).Hint == "" || !strings.Contains(err.Error(), c.says)):
				t.Errorf("%+v, %s: %v", got, reason.AsFailure(err).Reason, err)
			}
			n.wantFiled(1, c.proofs)
			for _, o := range n.api.filed {
				if !attestation.IsRehearsalSigner(o.Spec.SignerName) {
					t.Errorf("filed for %s", o.Spec.SignerName)
				}
			}
			for _, request := range slices.Concat(n.tpm.hellos, n.tpm.proofs) {
				if request.SignerName != attestation.RehearsalSignerName {
					t.Errorf("evidence for %s", request.SignerName)
				}
			}
			if entries, err := os.ReadDir(n.Node.Dir().Path()); len(entries) > 0 || err != nil && !os.IsNotExist(err) {
				t.Errorf("left behind: %v, %v", entries, err)
			}
		})
	}
}

// What a rehearsal waits for is remarked once, and is the hint if no verdict comes.
func TestRehearsalSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.api.hello = func(_ int, o *csrObject) {
		annotate(o, attestation.AnnotationWaiting, "MachineNotFound: list the machine")
	}
	_, remarks, err := n.rehearse(filepath.Join(t.TempDir(), "none"))
	if failure := reason.AsFailure(err); failure.Reason != reason.WaitingForSigner || failure.Hint != "list the machine" || len(remarks) != 1 || !strings.Contains(remarks[0], "MachineNotFound") {
		t.Errorf("%v, %q", err, remarks)
	}
}

// The certificate on disk is the credential, as for a real request. Without one it is the
// kubelet's, whose node must be the one that this machine would claim.
func TestCredentialOfARehearsal(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.api.proof = verdict(attestation.ReasonRehearsalPassed, "yes")
	bootstrap, err := os.ReadFile(n.Node.Access.Bootstrap)
	if err != nil {
		t.Fatal(err)
	}
	kubeletOf := func(node string) string {
		pair := plugintest.NewPair(t, func(c *x509.Certificate) { c.Subject.CommonName = node })
		user := "client-certificate-data: " + base64.StdEncoding.EncodeToString(pair.Chain) + "\n    client-key-data: " + base64.StdEncoding.EncodeToString(pair.Key)
		return plugintest.WriteFile(t, t.TempDir(), "kubelet.conf", strings.Replace(string(bootstrap), "token: abc", user, 1))
	}
	for name, c := range map[string]struct{ kubeconfig, credential, fails string }{
		"the kubelet's":              {kubeletOf("system:node:a"), "the kubelet's kubeconfig", ""},
		"another node's":             {kubeletOf("system:node:b"), "", "is that of the node b"},
		"an administrator's":         {kubeletOf("kubernetes-admin"), "the kubelet's kubeconfig", ""},
		"no kubelet has joined":      {filepath.Join(t.TempDir(), "none"), "bootstrap kubeconfig", ""},
		"a kubeconfig that is no":    {plugintest.WriteFile(t, t.TempDir(), "x.conf", "x"), "", "cannot be read as a kubeconfig"},
		"this program's, without it": {plugintest.WriteFile(t, t.TempDir(), "ours.conf", strings.Replace(string(bootstrap), "token: abc", "exec: {apiVersion: client.authentication.k8s.io/v1, command: /usr/bin/kubelet-authenticator}", 1)), "bootstrap kubeconfig", ""},
	} {
		got, _, err := n.rehearse(c.kubeconfig)
		if c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails)) || c.fails == "" && (err != nil || !strings.Contains(got.Credential, c.credential)) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	pair := plugintest.NewPair(t, nil)
	pair.Origin = &cache.Origin{Server: "https://192.0.2.1", CertificateAuthorityData: plugintest.NewCA(t)}
	plugintest.InstallPair(t, n.Node.Dir(), pair)
	if to, err := n.rehearsalAccess(n.Node.Load(), kubeletOf("system:node:b")); err != nil || !to.Own {
		t.Errorf("with a certificate: %+v, %v", to, err)
	}
}

// A provider without a challenge has nothing to rehearse.
func TestRehearsalNeedsAChallenge(t *testing.T) {
	t.Parallel()
	a := testEnroller(t)
	if _, err := a.Rehearse(t.Context(), "", func(error) {}); err == nil || reason.AsFailure(err).Reason != reason.Configuration || !strings.Contains(err.Error(), "fake") {
		t.Errorf("%v", err)
	}
}
