// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
)

// What kube-controller-manager's own signer issues is denied under ours, though the TPM and the name are right.
func TestOddRequests(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "odd")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	document, err := hello(t, p).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	requests, err := oddrequest.All(m.name, "test://"+m.name)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range requests {
		t.Run(r.Title, func(t *testing.T) {
			for signer, data := range map[string][]byte{attestation.HelloSignerName: document, tpm.SignerName: f.lonelyProof(t, "node-csr-nowhere")} {
				object, err := r.Object(signer, data)
				if err != nil {
					t.Fatal(err)
				}
				f.refused(t, p.file(t, object), string(r.Reason))
			}
		})
	}
	f.onlyFor(t, m.enrols(t).leaf)
}
