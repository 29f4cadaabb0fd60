// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	certutil "k8s.io/client-go/util/cert"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Rehearsal is a rehearsal that passed.
type Rehearsal struct {
	// NodeName is the node name that this machine would get.
	NodeName string
	// Server and Credential say where and with which credential it was filed.
	Server, Credential string
	// Text is the controller's text, with its warnings. OtherSigner is the signer that this
	// machine's settings name, if the text does not name it. Otherwise it is empty.
	Text, OtherSigner string
}

// Rehearse attests like a worker, under signers that issue no certificate, and returns the
// controller's verdict. It writes no file but the provider's lock. It uses the certificate on disk,
// or else the kubelet's kubeconfig, or else the bootstrap kubeconfig. The Failure is RequestDenied
// if a real request would be denied, and WaitingForSigner if ctx ends before the verdict. Until
// then Rehearse calls remark with the reason for which the rehearsal waits, at each change.
func (e *Enroller) Rehearse(ctx context.Context, kubeconfig string, remark func(error)) (*Rehearsal, error) {
	status := e.Node.Load()
	if failure := e.cannotRequest(status); failure != nil {
		return nil, failure
	}
	e, _, err := e.Decided(ctx)
	if err != nil {
		return nil, reason.AsFailure(err)
	}
	if _, challenges := e.Provider.(provider.Challenger); !challenges {
		return nil, reason.Configuration.Failure("set --provider=tpm", fmt.Errorf("provider %s has no evidence that can be rehearsed", e.Provider.Name()))
	}
	to, err := e.rehearsalAccess(status, kubeconfig)
	if err != nil {
		return nil, reason.AsFailure(err)
	}
	client, err := csr.NewClient(to.Config)
	if err != nil {
		return nil, reason.Configuration.Failure("check the kubeconfig", err)
	}
	builder := e.requestBuilder()
	builder.signerName = attestation.RehearsalSignerName
	pending, key, err := builder.first(ctx, status.NodeName, to.Cluster, "", nodestate.ReadState(e.Node.Dir()).Remembered[e.Provider.Name()])
	if err != nil {
		return nil, reason.AsFailure(err)
	}
	for {
		last, waits := pending.Last(), &cache.State{}
		request, err := client.File(ctx, csr.Object(last.Name, nodestate.SignerOf(pending), last.Request, key, pending.ExpirationSeconds))
		if err != nil {
			return nil, reason.BlameClock(reason.ClassifyAPIError(err, to.Credential), e.Node.Now(), e.Built)
		}
		last.UID = string(request.UID)
		decision, err := client.Wait(ctx, request, func(object *certificatesv1.CertificateSigningRequest) csr.Decision {
			if annotation := object.Annotations[attestation.AnnotationWaiting]; annotation != "" {
				waits.Waiting = &cache.Waiting{Request: last.Name, Annotation: annotation}
				remark(StillWaiting(pending, waits))
			}
			return csr.ClassifyRehearsal(object)
		})
		switch {
		case ctx.Err() != nil:
			failure := StillWaiting(pending, waits)
			if waits.Waiting == nil {
				failure.Hint = "see whether node-attestation-controller runs in this cluster, in a release that knows rehearsals"
			}
			return nil, failure
		case err != nil:
			return nil, reason.BlameClock(reason.ClassifyAPIError(err, to.Credential), e.Node.Now(), e.Built)
		}
		switch decision.Outcome {
		case csr.Answered:
			if err := builder.proof(ctx, pending, decision.Challenge, true); err != nil {
				return nil, reason.AsFailure(err)
			}
		case csr.Judged:
			if decision.Reason != attestation.ReasonRehearsalPassed {
				return nil, reason.RequestDenied.Failure("kubectl attest explain "+decision.Reason+" says what to do; then rehearse again",
					fmt.Errorf("this machine would get no certificate: %q", text.WithReason(decision.Reason, decision.Message)))
			}
			passed := &Rehearsal{NodeName: status.NodeName, Server: to.Config.Host, Credential: to.Credential, Text: decision.Message}
			if !namesSigner(decision.Message, e.SignerName) {
				passed.OtherSigner = e.SignerName
			}
			return passed, nil
		default:
			return nil, reason.RequestFailed.Failure("find who denies or deletes CertificateSigningRequests",
				fmt.Errorf("CertificateSigningRequest %s: ended without a verdict: %q", last.Name, text.WithReason(decision.Reason, decision.Message)))
		}
	}
}

// namesSigner reports whether the text of a verdict names a signer. The verdict has no field for
// signers, only its text for people. act.PassedText of the controller writes that text.
func namesSigner(verdict, signer string) bool {
	words := strings.FieldsFunc(verdict, func(r rune) bool { return r == ' ' || r == ',' })
	return slices.Contains(words, signer)
}

// rehearsalAccess returns the credential for a rehearsal: that of the next real request, if there
// is a certificate on disk, else the kubelet's. The kubelet's node must be the one that this
// machine would claim.
func (e *Enroller) rehearsalAccess(status nodestate.Status, kubeconfig string) (nodeaccess.Access, error) {
	if status.Pair != nil {
		to, _, err := status.Access()
		return to, err
	}
	to, err := e.Node.Access.KubeletAccess(kubeconfig)
	if err != nil {
		return to, err
	}
	if node := nodeOfCertificate(to.Config.CertData); node != "" && node != status.NodeName {
		return to, reason.Configuration.Failure("set nodeName, as the kubelet has it with --hostname-override",
			fmt.Errorf("this machine would ask for the node name %s, but %s is that of the node %s", status.NodeName, to.Credential, node))
	}
	return to, nil
}

// nodeOfCertificate returns the node whose client certificate is first in PEM data, "" if there is
// none.
func nodeOfCertificate(data []byte) string {
	certificates, err := certutil.ParseCertsPEM(data)
	if err != nil {
		return ""
	}
	return cache.NodeName(certificates[0])
}
