// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
)

// Revocation configures how revoked certificates are refused.
type Revocation struct {
	// Cluster is the cluster's UID, as in records.
	Cluster string
	// SlicePrefix begins the names of RevocationSlices. Labels are their labels, and Owners their
	// owners. Both are optional.
	SlicePrefix string
	Labels      map[string]string
	Owners      []metav1.OwnerReference
	// StatusNamespace is a Namespace in the cluster that nodes join. Its status says whether
	// revocation is in force.
	StatusNamespace string
	// Mirror gets the content of each Event on StatusNamespace, to report it elsewhere, too.
	// Optional.
	Mirror func(kind, reason, message string)
	// Version returns the version of the API server that nodes join.
	Version func(context.Context) (*version.Info, error)
	Log     logr.Logger

	// enforcer is nil until New is called, and in audit mode.
	enforcer *revocation.Enforcer
}

// Rendered returns the desired spec of an admission policy, nil if it is not known yet.
func (r *Revocation) Rendered(policy string) *admissionv1.ValidatingAdmissionPolicySpec {
	if r.enforcer == nil {
		return nil
	}
	return r.enforcer.Rendered(policy)
}

// untilAccepted returns how long to wait until API servers accept writes with a new certificate, 0
// if they do.
func (r *Revocation) untilAccepted(node, fingerprint string) time.Duration {
	if r == nil || r.enforcer == nil {
		return 0
	}
	return r.enforcer.UntilAccepted(node, fingerprint)
}

// isRevoked reports whether an issued certificate is revoked.
func (r *Revocation) isRevoked(fingerprint string) bool {
	return r != nil && r.enforcer != nil && r.enforcer.Revoked(fingerprint)
}

// lastBefore returns the number of the last revocation that is older than both the proof and the
// hello that the record names.
func (r *Revocation) lastBefore(record *v1alpha1.NodeAttestation) int64 {
	if r == nil || r.enforcer == nil {
		return 0
	}
	return r.enforcer.LastBefore(requestsIn(record)...)
}

// requestsIn returns the UIDs of the proof and the hello that a record names.
func requestsIn(record *v1alpha1.NodeAttestation) (uids []types.UID) {
	if proof := record.Status.Request; proof != nil {
		uids = append(uids, proof.UID)
	}
	if hello := record.Status.Hello; hello != nil {
		uids = append(uids, hello.UID)
	}
	return uids
}

// revokedSince reports whether the proof, or its hello, may be older than a revocation of the node.
func (r *Revocation) revokedSince(node string, proof, hello *certificatesv1.CertificateSigningRequest) bool {
	if r == nil || r.enforcer == nil {
		return false
	}
	uids := []types.UID{proof.UID}
	if hello != nil {
		uids = append(uids, hello.UID)
	}
	return r.enforcer.RevokedSince(node, uids...)
}

// addEnforcer makes the enforcer. In audit mode it makes none, since an enforcer writes.
func (c *Controller) addEnforcer(clients Clients) error {
	r := c.Revocation
	if r == nil || c.Audit {
		return nil
	}
	if clients.Joined == nil || r.Version == nil {
		return errors.New("controller: revocation needs Clients.Joined and Revocation.Version")
	}
	var err error
	r.enforcer, err = revocation.New(revocation.Config{
		Cluster: r.Cluster, Namespace: c.Namespace, SlicePrefix: r.SlicePrefix, Labels: r.Labels, Owners: r.Owners,
		Signers: c.Rules.AttestingSigners(), Objects: clients.Records, Joined: clients.Joined, Version: r.Version,
		Records: c.records, StatusNamespace: r.StatusNamespace, Events: c.reporter.events, Mirror: r.Mirror, Applied: c.reporter.reportApplied,
		Metrics: c.ClusterMetrics, Log: r.Log, Now: c.Now,
	})
	if err != nil {
		return err
	}
	c.collector.suspended = r.enforcer.Suspended
	return nil
}

// revocation runs the enforcer as long as the Controller runs, on the leader.
func (c *Controller) revocation() source.Source {
	return source.Func(func(ctx context.Context, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		if r := c.Revocation; r != nil && r.enforcer != nil {
			go r.enforcer.Run(ctx)
		}
		return nil
	})
}

// reportApplied reports in the logs and in Events that certificates were revoked, or that a machine
// was suspended or resumed. The Events are on the record, its machine, and the Node.
func (r *reporter) reportApplied(ctx context.Context, a revocation.Application) {
	kind, reason, message := corev1.EventTypeWarning, v1alpha1.ReasonRevoked, "from now on API servers refuse writes with "+text.Count(len(a.Certificates), "certificate")
	switch a.Action {
	case revocation.Suspended:
		reason, message = v1alpha1.ReasonSuspended, "the machine gets no certificate, and API servers refuse its writes"
	case revocation.Resumed:
		kind, reason, message = corev1.EventTypeNormal, v1alpha1.ReasonResumed, "the machine may attest again"
	}
	if a.Object != "" {
		message += fmt.Sprintf(", by %s: %s", a.Object, a.Reason)
	}
	line := []any{"action", a.Action, "node", a.Record.Spec.NodeName, "machine", a.Record.Spec.Machine.Name, "reason", reason, "message", message}
	if document := r.recorder.recordApplied(a); document != nil {
		line = append(line, "record", document)
	}
	r.Revocation.Log.Info("applied", line...)
	r.eventOnRecord(a.Record, kind, reason, message)
	r.eventOnNamedNode(ctx, a.Record.Spec.NodeName, kind, reason, message)
}
