// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"context"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/bindings"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// Cluster is a cluster that nodes join, and how to serve it. A field is required unless its comment
// says Optional or Default.
type Cluster struct {
	// Controller comes from Settings.Controller or Assemble. The caller adds Metrics,
	// ClusterMetrics and Requests. Runnables sets Revocation and Challenged.
	Controller controller.Config
	// Keys is the KeyStore that Controller was made with.
	Keys *sources.KeyStore
	// Preflight.Await has returned nil.
	Preflight *preflight.Preflight
	// Clients are the Controller's. Joined is required.
	Clients controller.Clients
	// API is a client of the cluster that nodes join, without a cache. Its calls may have a
	// timeout, unlike those of Clients.Joined.
	API client.Client
	// Cache has the requests, and Clients.Client reads it.
	Cache cache.Cache
	// Connection, with the HTTP client of CacheOptions, reads the server's version. Both make the
	// cache of ClusterRoleBindings. Connection must have no timeout, since a watch has none. It
	// also asks each API server for static policies.
	Connection   *rest.Config
	CacheOptions cache.Options
	Log          logr.Logger

	// SlicePrefix is the prefix of the names of RevocationSlices. They get the labels of
	// Controller.Owned. Default: node-attestation-revoked.
	SlicePrefix string
	// SliceOwners own the RevocationSlices. Optional.
	SliceOwners []metav1.OwnerReference
	// Mirror gets the content of each Event on the Namespace with the conditions. Optional.
	Mirror func(kind, reason, message string)
	// Configuration is refreshed with each check of the sources. Optional.
	Configuration sources.Refresher
	// Leads is closed when this replica becomes the leader. Default: it leads.
	Leads <-chan struct{}
	// HealthInterval is the time between two checks of the sources. Default: 5 s.
	HealthInterval time.Duration
}

// Runnables returns what serves a cluster: the controller's queue, the challenge keys, the
// preflight, and the watches of policies, sources and bindings. In a manager, keys and sources run
// on each replica, and the others on the leader. The caller also runs c.Cache. To serve the cluster
// again, make a new Cluster.
func (s *Settings) Runnables(c Cluster) ([]manager.Runnable, error) {
	decider, metrics := c.Controller, c.Controller.ClusterMetrics
	check := s.PolicyCheck(c.API, c.Connection)
	if s.config.Revocation.Enabled {
		var err error
		if decider.Revocation, err = s.revocation(c); err != nil {
			return nil, err
		}
		check.Rendered = decider.Revocation.Rendered
	}
	policyConfig := s.PolicyWatch(check, metrics)
	policyConfig.Mirror = c.Mirror
	policies, err := preflight.NewPolicyWatch(policyConfig, c.Clients.Joined, c.Clients.Events, c.Log.WithName("policies"))
	if err != nil {
		return nil, err
	}
	decider.Challenged = policies.Challenged
	reconciler, err := controller.New(decider, c.Clients)
	if err != nil {
		return nil, err
	}
	queue, err := reconciler.NewUnmanaged(c.Cache, c.Log)
	if err != nil {
		return nil, err
	}
	health := sources.NewHealth(sources.HealthConfig{
		CA: decider.CA, Machines: decider.Machines, Keys: c.Keys, Configuration: c.Configuration,
		API: c.API, Namespace: s.conditionNamespace(), Events: c.Clients.Events, Mirror: c.Mirror,
		Leads: c.Leads, Interval: c.HealthInterval, Metrics: metrics, Log: c.Log.WithName("sources"),
	})
	return []manager.Runnable{
		queue, c.Keys, c.Preflight, policies, health,
		// a RunnableFunc runs on the leader alone
		manager.RunnableFunc(func(ctx context.Context) error {
			return bindings.Run(ctx, s.bindings(metrics), bindings.Clients{
				Config: c.Connection, Cache: c.CacheOptions, Events: c.Clients.Events, Log: c.Log.WithName("bindings"),
			})
		}),
	}, nil
}

func (s *Settings) bindings(metrics *telemetry.ClusterMetrics) bindings.Config {
	return bindings.Config{Audit: s.config.Audit, Metrics: metrics}
}

// revocation returns the configuration of revocation in the cluster.
func (s *Settings) revocation(c Cluster) (*controller.Revocation, error) {
	version, err := revocation.ServerVersion(c.Connection, c.CacheOptions.HTTPClient)
	if err != nil {
		return nil, err
	}
	r := &controller.Revocation{
		Cluster: s.config.ClusterUID, SlicePrefix: cmp.Or(c.SlicePrefix, "node-attestation-revoked"), Owners: c.SliceOwners, StatusNamespace: s.conditionNamespace(),
		Mirror: c.Mirror, Version: version, Log: c.Log.WithName("revocation"),
	}
	if owned := c.Controller.Owned; owned != nil {
		r.Labels = owned.Labels
	}
	return r, nil
}
