// SPDX-License-Identifier: Apache-2.0

package controller

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
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// AnnotationEnforcingSince is on the challenge keys' Secret once enforcement has started, with the time in RFC 3339.
const AnnotationEnforcingSince = "attestation.cluster.x-k8s.io/enforcing-since"

const (
	// gateTimeout is how long the gate tries to reach the API server, gatePause the time between two tries.
	gateTimeout = 30 * time.Second
	gatePause   = time.Second
	// gateInterval is how often Nodes are looked at once the gate is behind us.
	gateInterval = 10 * time.Minute
	// maxNamed is how many Nodes are named in a message.
	maxNamed = 20
)

// Gate keeps enforcement from starting in a cluster whose Nodes it would lock out: those that have no record and are not listed. It is judged
// when enforcement starts, not each time that the controller does: a stray Node that appears later, or a record that was deleted
// for a reset, must not take away the renewals of all others when the controller's pod is moved. So having passed is remembered, as an
// annotation on the Secret of the challenge keys, until the controller starts in audit mode.
type Gate struct {
	// Keys is the store whose Secret remembers, and whose clients are used, for records too. Its reader must not be a cache.
	Keys *KeyStore
	// Nodes reads Nodes. Default: as Keys does.
	Nodes client.Reader
	// Cluster and Namespace are the UID in records and where they are.
	Cluster, Namespace string
	// Unattested are the names of Nodes that are left alone.
	Unattested []string
	// Policies are the admission policies that have to be in force when enforcement starts. None:
	// it starts without them.
	Policies []*PolicyCheck
	// Audit refuses nothing, and forgets that enforcement had started.
	Audit bool
	// Metrics gauge the Nodes. Optional.
	Metrics *telemetry.ClusterMetrics
	// Log says what is found.
	Log logr.Logger
	// Hints are what can be done. Default: what is for a controller of one cluster.
	Hints Hints

	// said are the Nodes that were last warned about.
	said string
}

// GateError is why enforcement does not start. Trying again does not help, other than the faults of an API server.
type GateError struct {
	// Nodes are those without a record that are not listed, if that is why, in the order of their names.
	Nodes []string
	// Policies are the admission policies that are not in force, if that is why.
	Policies []PolicyProblem
	// Hint is what can be done.
	Hint  string
	cause error
}

func (e *GateError) Error() string {
	if e.cause != nil {
		return fmt.Sprintf("enforcement does not start: %v", e.cause)
	}
	if len(e.Policies) > 0 {
		return "enforcement does not start: admission policies are not in force: " + describe(e.Policies)
	}
	return fmt.Sprintf("enforcement does not start: Nodes that have no record and are not in unattestedNodes: %s", named(e.Nodes))
}

func (e *GateError) Unwrap() error { return e.cause }

// named returns how many names there are, and the first of them.
func named(names []string) string {
	text := fmt.Sprintf("%d: %s", len(names), strings.Join(names[:min(len(names), maxNamed)], ", "))
	if more := len(names) - maxNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// Hints are what an operator can do where enforcement does not start.
type Hints struct {
	// Nodes is for Nodes that have no record, Record for a kind of records that is not there,
	// Policies for admission policies that are not in force, Rights for what is forbidden.
	Nodes, Record, Policies, Rights string
}

// hints are for a controller of one cluster.
var hints = Hints{
	Nodes:  "attest them, list them in unattestedNodes, or start with audit: true",
	Record: "apply packaging/kubernetes/crd.yaml, list the Nodes in unattestedNodes, or start with audit: true",
	Policies: "apply packaging/kubernetes/policies.yaml, with your overlay if you have one, name other controllers in policies.controllers, " +
		"or set policies.mode: Warn",
	Rights: "apply packaging/kubernetes/rbac.yaml: needed are list on nodes, nodeattestations, validatingadmissionpolicies and their bindings, " +
		"and get and update on the challenge keys' Secret, which has to be there where the controller may not create it",
}

func (g *Gate) hints() Hints {
	if g.Hints == (Hints{}) {
		return hints
	}
	return g.Hints
}

// Open returns nil once enforcement may start, at once in audit mode. A *GateError says why it may not; other errors are those of an
// API server that did not answer in time. Call it before the manager starts.
func (g *Gate) Open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, gateTimeout)
	defer cancel()
	for {
		err := g.try(ctx)
		var refused *GateError
		if err == nil || errors.As(err, &refused) {
			return g.unlessAudit(err)
		}
		select {
		case <-ctx.Done():
			return g.unlessAudit(err)
		case <-time.After(gatePause):
			g.Log.Info("cannot look at the cluster yet", "cause", text.Line(err.Error(), telemetry.MaxLogged))
		}
	}
}

// unlessAudit only logs an error in audit mode.
func (g *Gate) unlessAudit(err error) error {
	if err == nil || !g.Audit {
		return err
	}
	g.Log.Info("in audit mode, only a warning", "problem", text.Line(err.Error(), telemetry.MaxLogged))
	return nil
}

// try goes through it once.
func (g *Gate) try(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if g.Audit {
		if err := g.forget(ctx); err != nil {
			return err
		}
		return g.look(ctx)
	}
	secret, err := g.secret(ctx)
	if err != nil {
		return err
	}
	if enforcing(secret) {
		if err := g.look(ctx); err != nil {
			g.Log.Info("cannot look at the Nodes", "cause", text.Line(err.Error(), telemetry.MaxLogged))
		}
		return nil
	}
	without, err := g.without(ctx)
	if err != nil {
		return err
	}
	if len(without) > 0 {
		return &GateError{Nodes: without, Hint: g.hints().Nodes}
	}
	if err := g.policiesInForce(ctx); err != nil {
		return err
	}
	return g.remember(ctx)
}

// policiesInForce returns a *GateError where admission policies are missing, altered or deny
// nothing.
func (g *Gate) policiesInForce(ctx context.Context) error {
	for _, check := range g.Policies {
		problems, err := check.Check(ctx)
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			return &GateError{Hint: g.hints().Policies, cause: fmt.Errorf("the API server does not serve ValidatingAdmissionPolicy (admissionregistration.k8s.io/v1), Kubernetes 1.31 or later is needed: %w", err)}
		}
		if err != nil {
			return g.failed("policies", err)
		}
		if len(problems) > 0 {
			return &GateError{Policies: problems, Hint: g.hints().Policies}
		}
	}
	return nil
}

// Start goes on looking at the Nodes until ctx ends, for the log and the gauge. A manager runs it, on the leader.
func (g *Gate) Start(ctx context.Context) error {
	ticker := time.NewTicker(gateInterval)
	defer ticker.Stop()
	for {
		if err := g.look(ctx); err != nil && ctx.Err() == nil {
			g.Log.Info("cannot look at the Nodes", "cause", text.Line(err.Error(), telemetry.MaxLogged))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// look warns about Nodes that have no record and are not listed, if they are not those of the last time.
func (g *Gate) look(ctx context.Context) error {
	without, err := g.without(ctx)
	if err != nil {
		return err
	}
	said := ""
	if len(without) > 0 {
		said = named(without)
	}
	if said == g.said {
		return nil
	}
	g.said = said
	if said == "" {
		g.Log.Info("each Node has a record or is listed")
	} else {
		g.Log.Info("Nodes have no record and are not in unattestedNodes: their certificates are not renewed", "nodes", said, "audit", g.Audit)
	}
	return nil
}

// without returns the names of Nodes that have no record and are not listed.
func (g *Gate) without(ctx context.Context) ([]string, error) {
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	reader := g.Nodes
	if reader == nil {
		reader = g.Keys.reader
	}
	if err := reader.List(ctx, nodes); err != nil {
		return nil, g.failed("nodes", err)
	}
	var without []string
	for _, node := range nodes.Items {
		if !slices.Contains(g.Unattested, node.Name) {
			without = append(without, node.Name)
		}
	}
	if len(without) > 0 {
		attested, err := g.attested(ctx)
		if err != nil {
			g.Metrics.NodesWithoutRecord(len(without))
			return nil, err
		}
		without = slices.DeleteFunc(without, func(name string) bool { return attested[name] })
	}
	slices.Sort(without)
	g.Metrics.NodesWithoutRecord(len(without))
	return without, nil
}

// attested returns the node names in records.
func (g *Gate) attested(ctx context.Context) (map[string]bool, error) {
	records := &v1alpha1.NodeAttestationList{}
	err := g.Keys.reader.List(ctx, records, client.InNamespace(g.Namespace))
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil, &GateError{Hint: g.hints().Record, cause: fmt.Errorf("there are Nodes, and the kind NodeAttestation for their records is not there: %w", err)}
	}
	if err != nil {
		return nil, g.failed("records", err)
	}
	names := map[string]bool{}
	for i := range records.Items {
		if records.Items[i].Spec.Cluster == g.Cluster {
			names[records.Items[i].Spec.NodeName] = true
		}
	}
	return names, nil
}

// failed tells what the API server does not allow from what it does not do now.
func (g *Gate) failed(what string, err error) error {
	err = fmt.Errorf("%s: %w", what, err)
	if apierrors.IsForbidden(err) {
		return &GateError{Hint: g.hints().Rights, cause: err}
	}
	return err
}

// secret returns the challenge keys' Secret, nil if there is none.
func (g *Gate) secret(ctx context.Context) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	err := g.Keys.reader.Get(ctx, g.Keys.secret, secret)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, g.failed(fmt.Sprintf("secret %s", g.Keys.secret), err)
	}
	return secret, nil
}

// enforcing reports whether enforcement has started. What is not a time was not written here.
func enforcing(secret *corev1.Secret) bool {
	if secret == nil {
		return false
	}
	_, err := time.Parse(time.RFC3339, secret.Annotations[AnnotationEnforcingSince])
	return err == nil
}

// remember notes that enforcement has started. The store makes the Secret, and the keys in it: only annotations are written here. Of two
// that write at once the later one finds a conflict, and tries all of it again.
func (g *Gate) remember(ctx context.Context) error {
	made := g.Keys.Refresh(ctx)
	secret, err := g.secret(ctx)
	switch {
	case err != nil:
		return err
	case secret == nil && made == nil:
		return fmt.Errorf("secret %s: somebody deleted it", g.Keys.secret)
	case secret == nil:
		return g.failed("no place to remember it", made)
	case enforcing(secret):
		return nil // another replica has passed
	}
	metav1.SetMetaDataAnnotation(&secret.ObjectMeta, AnnotationEnforcingSince, time.Now().UTC().Format(time.RFC3339))
	return g.write(ctx, secret)
}

// forget takes the annotation away.
func (g *Gate) forget(ctx context.Context) error {
	secret, err := g.secret(ctx)
	if err != nil || secret == nil {
		return err
	}
	if _, there := secret.Annotations[AnnotationEnforcingSince]; !there {
		return nil
	}
	delete(secret.Annotations, AnnotationEnforcingSince)
	return g.write(ctx, secret)
}

// write updates the version of the Secret that was read.
func (g *Gate) write(ctx context.Context, secret *corev1.Secret) error {
	if err := g.Keys.writer.Update(ctx, secret); err != nil {
		return g.failed(fmt.Sprintf("secret %s: annotation %s", g.Keys.secret, AnnotationEnforcingSince), err)
	}
	return nil
}
