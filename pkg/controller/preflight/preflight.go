// SPDX-License-Identifier: Apache-2.0

// Package preflight checks a cluster before enforcement starts, and watches its admission policies
// afterwards. It decides nothing about requests.
package preflight

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// AnnotationEnforcingSince is set on the Secret of the challenge keys once enforcement has started.
// Its value is the time in RFC 3339.
const AnnotationEnforcingSince = "attestation.cluster.x-k8s.io/enforcing-since"

const (
	// awaitTimeout bounds how long Await tries to reach the API server. awaitRetry is the time
	// between two tries.
	awaitTimeout = 30 * time.Second
	awaitRetry   = time.Second
	// readTimeout bounds one call of the API server.
	readTimeout = 10 * time.Second
	// nodesInterval is the time between two checks for Nodes without a record, after the start.
	nodesInterval = 10 * time.Minute
)

// Preflight keeps enforcement from starting in a cluster with Nodes that it would lock out: those
// without a record that are not listed. It also requires the admission policies.
//
// It checks once, when enforcement starts, and not at each start of the controller. A stray Node or
// a deleted record must not end the renewals of all other nodes when the controller's pod moves. So
// an annotation on the Secret of the challenge keys remembers the start, until the controller runs
// in audit mode.
type Preflight struct {
	// Keys is the store whose Secret remembers that enforcement started.
	Keys *sources.KeyStore
	// Records reads records, and Nodes reads Nodes. They must not be caches. Default of Nodes:
	// Records.
	Records, Nodes client.Reader
	// Cluster is the cluster's UID in records. Namespace has the records.
	Cluster, Namespace string
	// Unattested returns the names of Nodes that need no record. Optional.
	Unattested func() []string
	// Policies are the admission policies that must be in force when enforcement starts. If it is
	// empty, none must be.
	Policies []*PolicyCheck
	// Audit only logs problems, and removes the mark that enforcement has started.
	Audit bool
	// Metrics gauge the Nodes without a record. Optional.
	Metrics *telemetry.ClusterMetrics
	// Log logs the findings.
	Log logr.Logger
	// Hints are the hints of errors. Default: those for a controller of one cluster.
	Hints Hints

	// reported has the Nodes of the last warning.
	reported telemetry.Once
}

// Error says why enforcement does not start. A retry does not help.
type Error struct {
	// Nodes are the Nodes without a record that are not listed, sorted by name, if they are the
	// cause.
	Nodes []string
	// Policies are the problems of the admission policies, if they are the cause. Unknown says what
	// is not known about static policies.
	Policies []PolicyProblem
	Unknown  []string
	// Hint says what can be done.
	Hint  string
	cause error
}

func (e *Error) Error() string {
	if e.cause != nil {
		return fmt.Sprintf("enforcement does not start: %v", e.cause)
	}
	if len(e.Policies) > 0 {
		return "enforcement does not start: admission policies are not in force: " + strings.Join(append([]string{describe(e.Policies)}, e.Unknown...), "; ")
	}
	return fmt.Sprintf("enforcement does not start: Nodes that have no record and are not in unattestedNodes: %s", text.Names(e.Nodes))
}

func (e *Error) Unwrap() error { return e.cause }

// Hints say what an operator can do when enforcement does not start.
type Hints struct {
	// Nodes is for Nodes without a record, and Record for a missing CRD. Policies is for admission
	// policies that are not in force, and Rights for missing RBAC rules.
	Nodes, Record, Policies, Rights string
}

// hints are for a controller of one cluster.
var hints = Hints{
	Nodes:  "attest them, list them in unattestedNodes, or start with audit: true",
	Record: "apply packaging/kubernetes/crd.yaml, list the Nodes in unattestedNodes, or start with audit: true",
	Policies: "apply packaging/kubernetes/policies.yaml, with your overlay if you have one, or copy its static form to each API server (docs/cluster-setup.md), " +
		"name other controllers in policies.controllers, or set policies.mode: Warn",
	Rights: "apply packaging/kubernetes/rbac.yaml: needed are list on nodes, nodeattestations, validatingadmissionpolicies and their bindings, " +
		"and get and update on the challenge keys' Secret, which has to be there where the controller may not create it",
}

func (p *Preflight) hints() Hints {
	if p.Hints == (Hints{}) {
		return hints
	}
	return p.Hints
}

// Await returns nil once enforcement may start, and at once in audit mode. An *Error says why
// enforcement may not start. Any other error means that the API server did not answer in time. Call
// Await before the manager starts.
func (p *Preflight) Await(ctx context.Context) error {
	if p.Keys == nil || p.Records == nil {
		return &Error{cause: errors.New("Preflight.Keys and Preflight.Records must be set")}
	}
	ctx, cancel := context.WithTimeout(ctx, awaitTimeout)
	defer cancel()
	for {
		err := p.try(ctx)
		var refused *Error
		if err == nil || errors.As(err, &refused) {
			return p.unlessAudit(err)
		}
		select {
		case <-ctx.Done():
			return p.unlessAudit(err)
		case <-time.After(awaitRetry):
			p.Log.Info("cannot check the cluster yet", "cause", text.Line(err.Error(), telemetry.MaxLogged))
		}
	}
}

// unlessAudit only logs an error in audit mode.
func (p *Preflight) unlessAudit(err error) error {
	if err == nil || !p.Audit {
		return err
	}
	p.Log.Info("in audit mode, only a warning", "problem", text.Line(err.Error(), telemetry.MaxLogged))
	return nil
}

// try checks once.
func (p *Preflight) try(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if p.Audit {
		if err := p.forget(ctx); err != nil {
			return err
		}
		return p.check(ctx)
	}
	secret, err := p.secret(ctx)
	if err != nil {
		return err
	}
	if enforcing(secret) {
		if err := p.check(ctx); err != nil {
			p.Log.Error(nil, "cannot read the Nodes", "cause", text.Line(err.Error(), telemetry.MaxLogged))
		}
		return nil
	}
	without, err := p.without(ctx)
	if err != nil {
		return err
	}
	if len(without) > 0 {
		return &Error{Nodes: without, Hint: p.hints().Nodes}
	}
	if err := p.policiesInForce(ctx); err != nil {
		return err
	}
	return p.remember(ctx)
}

// policiesInForce returns an *Error if admission policies are missing, altered or not denying.
func (p *Preflight) policiesInForce(ctx context.Context) error {
	for _, check := range p.Policies {
		state, err := check.Check(ctx)
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			return &Error{Hint: p.hints().Policies, cause: fmt.Errorf("the API server does not serve ValidatingAdmissionPolicy (admissionregistration.k8s.io/v1), Kubernetes 1.31 or later is needed: %w", err)}
		}
		if err != nil {
			return p.failed("policies", err)
		}
		if len(state.Problems) > 0 {
			return &Error{Policies: state.Problems, Unknown: state.Unknown, Hint: p.hints().Policies}
		}
	}
	return nil
}

// Start checks for Nodes without a record until ctx ends, for the log and the gauge. A manager runs
// it on the leader.
func (p *Preflight) Start(ctx context.Context) error {
	ticker := time.NewTicker(nodesInterval)
	defer ticker.Stop()
	for {
		if err := p.check(ctx); err != nil && ctx.Err() == nil {
			p.Log.Error(nil, "cannot read the Nodes", "cause", text.Line(err.Error(), telemetry.MaxLogged))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// check logs the Nodes that have no record and are not listed, at first and when they have changed.
// Operators wait for the line that says that there are none.
func (p *Preflight) check(ctx context.Context) error {
	without, err := p.without(ctx)
	if err != nil {
		return err
	}
	nodes := ""
	if len(without) > 0 {
		nodes = text.Names(without)
	}
	if !p.reported.MarkReported("", nodes, time.Now(), 0) {
		return nil
	}
	const missing = "Nodes have no record and are not in unattestedNodes: their certificates are not renewed"
	switch {
	case nodes == "":
		p.Log.Info("each Node has a record or is listed")
	case p.Audit:
		p.Log.Info(missing, "nodes", nodes, "audit", true)
	default:
		p.Log.Error(nil, missing, "nodes", nodes)
	}
	return nil
}

// without returns the names of the Nodes that have no record and are not listed.
func (p *Preflight) without(ctx context.Context) ([]string, error) {
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	reader := p.Nodes
	if reader == nil {
		reader = p.Records
	}
	if err := reader.List(ctx, nodes); err != nil {
		return nil, p.failed("nodes", err)
	}
	var without, unattested []string
	if p.Unattested != nil {
		unattested = p.Unattested()
	}
	for _, node := range nodes.Items {
		if !slices.Contains(unattested, node.Name) {
			without = append(without, node.Name)
		}
	}
	if len(without) > 0 {
		attested, err := p.attested(ctx)
		if err != nil {
			p.Metrics.NodesWithoutRecord(len(without))
			return nil, err
		}
		without = slices.DeleteFunc(without, func(name string) bool { return attested[name] })
	}
	slices.Sort(without)
	p.Metrics.NodesWithoutRecord(len(without))
	return without, nil
}

// attested returns the node names that have a record.
func (p *Preflight) attested(ctx context.Context) (map[string]bool, error) {
	records := &v1alpha1.NodeAttestationList{}
	err := p.Records.List(ctx, records, client.InNamespace(p.Namespace))
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil, &Error{Hint: p.hints().Record, cause: fmt.Errorf("there are Nodes, and the kind NodeAttestation for their records is not there: %w", err)}
	}
	if err != nil {
		return nil, p.failed("records", err)
	}
	names := map[string]bool{}
	for i := range records.Items {
		if records.Items[i].Spec.Cluster == p.Cluster {
			names[records.Items[i].Spec.NodeName] = true
		}
	}
	return names, nil
}

// failed returns an *Error for a missing right, since a retry does not help.
func (p *Preflight) failed(what string, err error) error {
	err = fmt.Errorf("%s: %w", what, err)
	if apierrors.IsForbidden(err) {
		return &Error{Hint: p.hints().Rights, cause: err}
	}
	return err
}

// secret returns the challenge keys' Secret, nil if there is none.
func (p *Preflight) secret(ctx context.Context) (*corev1.Secret, error) {
	secret, err := p.Keys.Secret(ctx)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, p.failed(fmt.Sprintf("secret %s", p.Keys.SecretName()), err)
	}
	return secret, nil
}

// enforcing reports whether enforcement has started. A value that is not a time was written by
// somebody else, and does not count.
func enforcing(secret *corev1.Secret) bool {
	if secret == nil {
		return false
	}
	_, err := time.Parse(time.RFC3339, secret.Annotations[AnnotationEnforcingSince])
	return err == nil
}

// remember notes in the Secret that enforcement has started. The store makes the Secret and its
// keys first, so that this writes only the annotation. Of two replicas that write at once, the
// later one gets a conflict and checks everything again.
func (p *Preflight) remember(ctx context.Context) error {
	refreshErr := p.Keys.Refresh(ctx)
	secret, err := p.secret(ctx)
	switch {
	case err != nil:
		return err
	case secret == nil && refreshErr == nil:
		return fmt.Errorf("secret %s: it was deleted meanwhile", p.Keys.SecretName())
	case secret == nil:
		return p.failed("cannot store that enforcement has started", refreshErr)
	case enforcing(secret):
		return nil // another replica has started enforcement
	}
	metav1.SetMetaDataAnnotation(&secret.ObjectMeta, AnnotationEnforcingSince, time.Now().UTC().Format(time.RFC3339))
	return p.write(ctx, secret)
}

// forget removes the annotation.
func (p *Preflight) forget(ctx context.Context) error {
	secret, err := p.secret(ctx)
	if err != nil || secret == nil {
		return err
	}
	if _, there := secret.Annotations[AnnotationEnforcingSince]; !there {
		return nil
	}
	delete(secret.Annotations, AnnotationEnforcingSince)
	return p.write(ctx, secret)
}

// write updates the version of the Secret that was read.
func (p *Preflight) write(ctx context.Context, secret *corev1.Secret) error {
	if err := p.Keys.UpdateSecret(ctx, secret); err != nil {
		return p.failed(fmt.Sprintf("secret %s: annotation %s", p.Keys.SecretName(), AnnotationEnforcingSince), err)
	}
	return nil
}
