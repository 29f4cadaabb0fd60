// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/report"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// ReasonIssuedWithoutAttestation is the reason of the Event on such a request and on the Node that
// the certificate names.
const ReasonIssuedWithoutAttestation = "IssuedWithoutAttestation"

// Values of the metrics label for certificates that no record names.
const (
	// namedAttested says that the node in the certificate has a record, namedOther that it has
	// none.
	namedAttested, namedOther = "attested", "other"
	// namedUnattested says that an unattested node asked for its own name.
	namedUnattested = "unattested"
	// namedForgotten says that the controller approved the request, and that its record was deleted
	// since.
	namedForgotten = "forgotten"
)

// Issued reports certificates that were issued without attestation.
type Issued struct {
	Rules    *verifier.Rules
	Audit    bool
	Metrics  *telemetry.Metrics
	Now      func() time.Time
	Live     client.Reader
	Records  *records.Store
	Actor    *act.Actor
	Reporter *report.Reporter
	// counted has the UIDs of the requests that were counted.
	counted telemetry.Once
}

// Notice reports once that a certificate was issued without attestation: no record names the
// request. It reads the request and the records live before that, since the cached records may be
// stale. Live records suffice, since a record names its request before the certificate is issued.
func (w *Issued) Notice(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (ctrl.Result, error) {
	if !w.needsLiveCheck(object) {
		return ctrl.Result{}, nil
	}
	request := &certificatesv1.CertificateSigningRequest{}
	if err := w.Live.Get(ctx, client.ObjectKeyFromObject(object), request); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if request.UID != object.UID || !intake.IssuedToNode(request) || w.Rules.IsServingRequest(request) {
		return ctrl.Result{}, nil
	}
	leaf, err := signing.Leaf(request.Status.Certificate)
	// the API server accepts only certificates that parse, so a retry would not help
	if err != nil {
		log.FromContext(ctx).Error(err, "a certificate was issued that does not parse", "request", request.Name)
		return ctrl.Result{}, nil
	}
	if w.Now().After(leaf.NotAfter) { // records drop expired certificates
		return ctrl.Result{}, nil
	}
	node := nodeOf(leaf)
	var found []v1alpha1.NodeAttestation
	if node != "" {
		if found, err = w.Records.Find(ctx, v1alpha1.FieldNodeName, node); err != nil {
			return ctrl.Result{}, err
		}
	}
	if slices.ContainsFunc(found, func(r v1alpha1.NodeAttestation) bool { return names(&r, request.UID) }) {
		return ctrl.Result{}, nil
	}
	return w.reportIssued(ctx, request, leaf, node, found)
}

// needsLiveCheck reports whether the certificate may have been issued without attestation, judging
// by the caches. It also counts the requests of unattested nodes.
func (w *Issued) needsLiveCheck(object *certificatesv1.CertificateSigningRequest) bool {
	if _, only := object.Annotations[intake.CachedIssued]; only && len(object.Status.Certificate) == 0 {
		return true
	}
	if !intake.IssuedToNode(object) || w.Rules.IsServingRequest(object) {
		return false
	}
	leaf, err := signing.Leaf(object.Status.Certificate)
	if err != nil || !w.Records.InSync() {
		return true
	}
	node := nodeOf(leaf)
	found, err := w.Records.FindCached(v1alpha1.FieldNodeName, node)
	if err != nil {
		return true
	}
	if len(found) == 0 && w.isUnattested(object, node) {
		w.countIssued(object, namedUnattested)
		return false
	}
	return !slices.ContainsFunc(found, func(r v1alpha1.NodeAttestation) bool { return names(&r, object.UID) })
}

// nodeOf returns the name of the node that a certificate authenticates, "" if it authenticates no
// node.
func nodeOf(leaf *x509.Certificate) string {
	node, ok := strings.CutPrefix(leaf.Subject.CommonName, "system:node:")
	if !ok {
		return ""
	}
	return node
}

// names reports whether a record names a request.
func names(record *v1alpha1.NodeAttestation, request types.UID) bool {
	return records.IsOf(record, request) || records.HasCertificateFor(record, request)
}

// isUnattested reports whether a node that the policy lists as unattested requested a certificate
// for its own name.
func (w *Issued) isUnattested(request *certificatesv1.CertificateSigningRequest, node string) bool {
	return node != "" && request.Spec.Username == "system:node:"+node && w.Rules.IsUnattestedNode(node)
}

// reportIssued writes the request's annotation first, since other replicas read it. Then it reports
// in the log, in Events and in the metrics.
func (w *Issued) reportIssued(ctx context.Context, request *certificatesv1.CertificateSigningRequest, leaf *x509.Certificate, node string, found []v1alpha1.NodeAttestation) (ctrl.Result, error) {
	sum := sha256.Sum256(leaf.Raw)
	line := []any{
		"request", request.Name, "signer", request.Spec.SignerName, "requester", request.Spec.Username,
		"subject", text.Line(leaf.Subject.CommonName, 256), "sha256", hex.EncodeToString(sum[:]), "notAfter", leaf.NotAfter.UTC().Format(time.RFC3339), "audit", w.Audit,
	}
	name := namedOther
	switch {
	case len(found) == 0 && w.isUnattested(request, node):
		w.countIssued(request, namedUnattested)
		return ctrl.Result{}, nil
	case len(found) > 0:
		name = namedAttested
	}
	if w.Rules.Matches(request) && forgotten(request, found) {
		name = namedForgotten
	}
	if w.Audit || name == namedForgotten {
		if w.countIssued(request, name) {
			log.FromContext(ctx).Info("a certificate was issued that no record names", append(line, "name", name)...)
		}
		return ctrl.Result{}, nil
	}
	_, err := w.Actor.Annotate(ctx, request, map[string]any{intake.AnnotationIssuedWithoutAttestation: "sha256:" + hex.EncodeToString(sum[:])})
	switch {
	case apierrors.IsConflict(err):
		return ctrl.Result{RequeueAfter: act.ConflictDelay}, nil
	case err != nil && !apierrors.IsForbidden(err):
		// without the right to annotate, each leader reports the request
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !w.countIssued(request, name) {
		return ctrl.Result{}, nil
	}
	message := fmt.Sprintf("signer %s issued a certificate for %s to %s without attestation: no record names it (sha256 %x, until %s)",
		request.Spec.SignerName, text.Line(leaf.Subject.CommonName, 256), text.Line(request.Spec.Username, 256), sum, leaf.NotAfter.UTC().Format(time.RFC3339))
	if name == namedAttested {
		message = fmt.Sprintf("the node name %s has a record, of machine %s, and somebody has got another certificate for it: %s", node, found[0].Spec.Machine.Name, message)
	}
	log.FromContext(ctx).Error(nil, message, line...)
	w.Reporter.Event(ctx, request, node, corev1.EventTypeWarning, ReasonIssuedWithoutAttestation, message)
	return ctrl.Result{}, nil
}

// forgotten reports whether the controller approved a request and its record was deleted since. A
// record that is younger than the approval is not the one of that time. Only an approver could
// forge this.
func forgotten(request *certificatesv1.CertificateSigningRequest, found []v1alpha1.NodeAttestation) bool {
	return slices.ContainsFunc(request.Status.Conditions, func(condition certificatesv1.CertificateSigningRequestCondition) bool {
		return condition.Type == certificatesv1.CertificateApproved && condition.Reason == string(act.ReasonApproved) &&
			!slices.ContainsFunc(found, func(r v1alpha1.NodeAttestation) bool {
				return !r.CreationTimestamp.After(condition.LastUpdateTime.Time)
			})
	})
}

// countIssued counts a request, and reports false if it has counted it before.
func (w *Issued) countIssued(request *certificatesv1.CertificateSigningRequest, name string) bool {
	if !w.counted.MarkReported(string(request.UID), "", w.Now(), 0) {
		return false
	}
	w.Metrics.IssuedWithoutAttestation(request.Spec.SignerName, w.Rules.Matches(request), name)
	return true
}
