// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/watch"
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
	return r.enforcer.Rendered(policy)
}

// newEnforcer returns the enforcer, nil without Config.Revocation. In audit mode there is none,
// since an enforcer writes.
func (c *Controller) newEnforcer(clients Clients) (*revocation.Enforcer, error) {
	r := c.Revocation
	if r == nil || c.Audit {
		return nil, nil
	}
	if clients.Joined == nil || r.Version == nil {
		return nil, errors.New("controller: revocation needs Clients.Joined and Revocation.Version")
	}
	var err error
	r.enforcer, err = revocation.New(revocation.Config{
		Cluster: r.Cluster, Namespace: c.Namespace, SlicePrefix: r.SlicePrefix, Labels: r.Labels, Owners: r.Owners,
		Signers: c.Rules.AttestingSigners(), Objects: clients.Records, Joined: clients.Joined, Version: r.Version,
		Records: c.records, StatusNamespace: r.StatusNamespace, Events: c.reporter.Events, Mirror: r.Mirror, Applied: c.reporter.Applied,
		Metrics: c.ClusterMetrics, Log: r.Log, Now: c.Now,
	})
	return r.enforcer, err
}

// revocation runs the enforcer.
func (c *Controller) revocation() source.Source {
	return watch.InBackground(func(ctx context.Context, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) {
		if c.enforcer != nil {
			c.enforcer.Run(ctx)
		}
	})
}
