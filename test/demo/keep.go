// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

// keep says what to try, and waits until the demo is interrupted.
func (d *demo) keep(ctx context.Context) error {
	for name, m := range map[string]*machine{"demo-node": d.node, "demo-impostor": d.impostor} {
		script := "#!/bin/sh\nexec " + d.plugin + ` "$@" ` + strings.Join(m.flags, " ") + "\n"
		if err := os.WriteFile(filepath.Join(d.bin, name), []byte(script), 0o700); err != nil { //nolint:gosec // G306: a program
			return err
		}
	}
	if err := os.Symlink(d.Kubectl(), filepath.Join(d.bin, "kubectl")); err != nil {
		return err
	}
	commands := [][]string{
		{"kubectl attest status", "# each node, and the last decision about it"},
		{"kubectl attest pending", "# which requests wait, and why"},
		{"kubectl attest check || true", "# what attestation depends on; there is no Deployment: here the controller is a process"},
		{"kubectl get csr", "# everybody's requests"},
		{"kubectl get nodeattestations -n " + controllerprocess.Namespace + " -o yaml", "# the record, with each certificate"},
		{"kubectl get events", "# what the controller says of its decisions"},
		{"kubectl --kubeconfig " + d.kubelet + " auth whoami", "# as the kubelet: client-go runs the plugin"},
		{"kubectl attest describe demo-node", "# what became of the node, its certificates and their revocation"},
		{"kubectl attest revocations", "# what was revoked"},
		{"demo-node status", "# the node's certificate, its renewal, the last attempt"},
		{"demo-impostor identify", "# the other TPM: put it into the inventory, and it is a machine, too"},
		{"demo-impostor --dry-run", "# what the impostor would send"},
		{"kubectl edit configmap " + controllerprocess.Inventory + " -n " + controllerprocess.Namespace, "# the inventory, which is read again within seconds"},
		{"curl -s " + d.controller.MetricsURL() + " | grep ^node_attestation", "# all metrics"},
		{"tail -f " + d.controller.LogFile(), "# what the controller does meanwhile"},
	}
	title("everything is left running; in another terminal, try:")
	fmt.Printf("\n    export KUBECONFIG=%s PATH=%s:$PATH\n\n", d.admin, d.bin)
	for _, command := range commands {
		fmt.Printf("    %s\n    %s\n", paint(bold, command[1]), command[0])
	}
	fmt.Println("\nCtrl-C here ends it all, and leaves nothing behind.")
	<-ctx.Done()
	return nil
}
