// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A thief has the key of the CA, and issues a certificate for a node's name. In strict mode the
// certificate is useless, for that node and for an invented one. Attested nodes work at once with
// each new certificate, and nodes of unattestedNodes work, too. A rehearsal denies nothing.
func TestStolenCAKeyIsUseless(t *testing.T) {
	t.Parallel()
	ctx, dir := t.Context(), t.TempDir()
	a, err := controllerprocess.NewAuthorizer(module, dir, built.Controller)
	harness.Must(t, err)
	server, err := shared.AddAPIServer(ctx, a.APIServerArg())
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, errors.Join(a.Kill(), server.Stop())) })
	kubeconfig, err := controllerprocess.AuthorizerKubeconfig(shared.ControlPlane, server)
	harness.Must(t, err)
	unattested := filepath.Join(dir, "unattested.yaml")
	harness.WriteFile(t, unattested, []byte("apiVersion: "+config.APIVersion+"\nkind: "+config.Kind+"\nunattestedNodes: [control-plane]\n"))
	start := func(mode string) {
		t.Helper()
		harness.Must(t, a.Kill())
		harness.Must(t, a.Start(ctx, kubeconfig, "--strict="+mode, "--unattested-nodes-from="+unattested))
		awaitLive(t, a)
	}
	reads := func(node string) error {
		read, _ := try(t, shared.forged(t, node, server))
		return read()
	}
	v := shared.newVictim(t, "recorded", server)

	start("rehearse")
	for _, node := range []string{v.Name, "invented", "control-plane"} {
		harness.Must(t, reads(node))
	}
	metrics, err := a.Metrics(ctx)
	if err != nil || !strings.Contains(metrics, `node_attestation_authorizer_denials_total{cause="unrecorded",mode="rehearse"}`) {
		t.Errorf("the rehearsal counts nothing: %v", err)
	}
	log, err := os.ReadFile(filepath.Join(dir, "authorizer.log"))
	if err != nil || strings.Count(string(log), "strict mode would deny") != 2 || !strings.Contains(string(log), "system:node:invented") {
		t.Errorf("the rehearsal names nobody: %v, %s", err, log)
	}

	start("on")
	for _, node := range []string{v.Name, "invented"} {
		if err := reads(node); !harness.IsRefused(err, attestation.MessageUnrecorded) {
			t.Errorf("a certificate of a stolen CA key reads as %s: %v", node, err)
		}
	}
	harness.Must(t, reads("control-plane"))
	for range 3 {
		v.attest(t) // through this API server: its certificate may attest
		read, _ := v.try(t)
		if err := read(); err != nil {
			t.Errorf("a new certificate: %v", err)
		}
	}
}
