// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// inForce bounds the wait until API servers refuse, or accept, writes with a certificate.
const inForce = 30 * time.Second

// revoke revokes the node's certificate as an operator does. From then on the API server refuses
// its writes.
func (d *demo) revoke(ctx context.Context) error {
	title("the node renews its Lease, as kubelets do every 10 seconds")
	out, err := d.renewLease(ctx)
	shown(out)
	if err != nil {
		return err
	}
	args := []string{"revoke", node, "--reason=its key may have leaked", "--yes", "--wait=false"}
	title("kubectl attest %s", strings.Join(args, " "))
	if _, err := showRun(ctx, filepath.Join(d.bin, "kubectl-attest"), append(args, "--kubeconfig="+d.admin)...); err != nil {
		return err
	}
	title("the node renews its Lease again: a policy refuses the write")
	refusal, err := d.eventually(ctx, func() (string, bool) {
		_, err := d.renewLease(ctx)
		if err == nil {
			return "", false
		}
		return err.Error(), strings.Contains(err.Error(), "revoked")
	})
	shown(refusal)
	return err
}

// comeBack has the node attest again. A revoked key gets nothing but the chance to do that.
func (d *demo) comeBack(ctx context.Context) error {
	title("kubelet-authenticator renew: the machine attests again, and gets a certificate for a new key")
	if _, err := showRun(ctx, d.plugin, append([]string{"renew", "--timeout=1m", "--kubelet-kubeconfig=" + d.kubelet}, d.node.flags...)...); err != nil {
		return err
	}
	out, err := d.eventually(ctx, func() (string, bool) {
		out, err := d.renewLease(ctx)
		return out, err == nil
	})
	shown(out)
	if err != nil {
		return err
	}
	title("kubectl attest status")
	status, err := showRun(ctx, filepath.Join(d.bin, "kubectl-attest"), "status", "--kubeconfig="+d.admin)
	if err == nil && !strings.Contains(status, "Attested") {
		err = errors.New("the node is not attested again")
	}
	return err
}

// showRun runs a program, prints what it says, and returns that.
func showRun(ctx context.Context, program string, args ...string) (string, error) {
	output, err := exec.CommandContext(ctx, program, args...).CombinedOutput() //nolint:gosec // G204: one of the demo's programs
	shown(string(output))
	if err != nil {
		err = fmt.Errorf("%s %s: %w", filepath.Base(program), args[0], err)
	}
	return string(output), err
}

// renewLease writes the node's Lease with the node's certificate.
func (d *demo) renewLease(ctx context.Context) (string, error) {
	now := time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")
	lease := filepath.Join(d.dir, "lease.yaml")
	content := "apiVersion: coordination.k8s.io/v1\nkind: Lease\nmetadata: {name: " + node + ", namespace: kube-node-lease}\nspec: {holderIdentity: " + node + ", renewTime: " + now + "}\n"
	if err := os.WriteFile(lease, []byte(content), 0o600); err != nil {
		return "", err
	}
	return d.RunKubectl(ctx, d.kubelet, "apply", "--server-side", "--force-conflicts", "--filename="+lease)
}

// eventually tries until it succeeds, and returns what was said last.
func (d *demo) eventually(ctx context.Context, try func() (string, bool)) (string, error) {
	for end := time.Now().Add(inForce); ; {
		said, ok := try()
		if ok {
			return said, nil
		}
		if time.Now().After(end) {
			return said, errors.New("it did not take effect within " + inForce.String())
		}
		select {
		case <-ctx.Done():
			return said, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}
