// SPDX-License-Identifier: Apache-2.0

// Package controller decides on the CertificateSigningRequests of one cluster's nodes. It
// challenges hellos, judges proofs by the rules of pkg/verifier, keeps a record of each machine,
// approves, and signs. An infrastructure provider embeds it in a manager of its own.
//
// Reconcile tells the way of a request in ten steps, and docs/architecture.md has them, too. Each
// step may be repeated. After a crash, the next call starts at step 1, and reaches the missing step
// from what is stored. It may sign a second certificate.
//
// Reading order:
//   - reconcile.go, here: the ten steps; finish.go: what is missing after a crash
//   - package evidence: what an infrastructure provider implements
//   - package intake: what is queued; package fairqueue: in which order
//   - package collect: what a decision is made from, and how stale that may be
//   - package act: what is written
//   - package report: log, metrics, Events and decision records
//   - package watch: what else is watched
//
// Each of these packages imports only those before it.
package controller

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	runtimeconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/report"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/watch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Config configures a Controller. A field is required unless its comment says Optional or Default.
type Config struct {
	// Rules are the policy.
	Rules *verifier.Rules
	// Providers judge evidence.
	Providers []evidence.Provider
	// Machines knows the machines of the cluster.
	Machines evidence.MachineSource
	// TrustUnnamed trusts an EK on first use, although no source names it and no manufacturer's CA
	// has certified it. Any software can then pass for a TPM. Default: false.
	TrustUnnamed bool
	// CA signs. If it is nil, another signer issues the certificates that this Controller approves.
	CA signing.Source
	// Limits bound the lifetimes of certificates. They are required with a CA.
	Limits signing.Limits
	// Namespace is where records are kept.
	Namespace string
	// AcceptedEKChanges are the operator's acknowledgements of changed endorsement keys, such as
	// those of a *sources.KeyStore. Default: none.
	AcceptedEKChanges watch.Acknowledgements
	// Revocation has API servers refuse writes with revoked certificates, and denies all requests
	// of suspended machines. Optional: nothing is revoked.
	Revocation *Revocation
	// Owned sets the machines as owners of their records. Optional: needed only if machines are
	// objects of an API.
	Owned *records.Owned
	// Requests bounds the memory of the cache that Clients.Client reads. Optional: without it, the
	// cache holds whole requests, and the queue does not know their claims.
	Requests *intake.RequestCache
	// Rates limit how often requests are decided on (rule R1). Default: fairqueue.DefaultRates.
	Rates fairqueue.Rates
	// Audit decides and reports, and changes no request or record. It writes Events, and answers
	// rehearsals. Optional.
	Audit bool
	// Concurrency is the number of requests that are decided on at the same time. A decision mostly
	// waits for the API server. Default: 16.
	Concurrency int
	// Decisions says where final decisions are recorded. Default: the process log.
	Decisions decisionlog.Config
	// Metrics count decisions. Optional.
	Metrics *telemetry.Metrics
	// ClusterMetrics gauge waiting requests and records. Optional.
	ClusterMetrics *telemetry.ClusterMetrics
	// Challenged is called with the name of each hello that was challenged. It must not block.
	// Optional.
	Challenged func(name string)
	// Now is the clock. Default: the system's.
	Now func() time.Time
}

// Controller is a reconciler of CertificateSigningRequests.
type Controller struct {
	*Config
	providers map[string]evidence.Provider
	issuer    signing.Issuer
	client    client.Client
	// live reads from the API server.
	live    client.Reader
	records *records.Store
	queue   *fairqueue.Queue
	retries *fairqueue.Retries[collect.WaitingEvidence]
	listed  atomic.Pointer[watch.ListedMachines]

	// enforcer is nil without Config.Revocation, and in audit mode.
	enforcer     *revocation.Enforcer
	intake       *intake.Intake
	collector    *collect.Collector
	actor        *act.Actor
	reporter     *report.Reporter
	issuedWatch  *watch.Issued
	noEvidence   *watch.NoEvidence
	machineWatch *watch.Machines
	ekChanges    *watch.EKChanges
}

// Name is the controller's name in events and metrics.
const Name = telemetry.Component

// Clients are a Controller's clients of two clusters: the one that nodes join, and the one with the
// records. Most often both are the same cluster.
type Clients struct {
	// Client reads requests from the cache that NewUnmanaged watches, and writes to the API server.
	Client client.Client
	// Live reads from the API server.
	Live client.Reader
	// Events records Events on requests and Nodes. The Controller wraps it in
	// telemetry.NewDedupRecorder.
	Events events.EventRecorder
	// RecordEvents records Events on records and on the machines that own them, in the cluster with
	// the records. The Controller wraps it in telemetry.NewDedupRecorder. Default: Events.
	RecordEvents events.EventRecorder
	// Records reads, watches and writes records, without a cache.
	Records client.WithWatch
	// Joined reads, watches and writes in the cluster that nodes join, without a cache. Required
	// with Config.Revocation.
	Joined client.WithWatch
}

// ManagerClients returns the clients of a manager's cluster, which also has the records.
func ManagerClients(m ctrl.Manager) (Clients, error) {
	api, err := client.NewWithWatch(m.GetConfig(), client.Options{HTTPClient: m.GetHTTPClient(), Scheme: m.GetScheme(), Mapper: m.GetRESTMapper()})
	return Clients{Client: m.GetClient(), Live: m.GetAPIReader(), Events: m.GetEventRecorder(Name), Records: api, Joined: api}, err
}

// Add makes a Controller of config and adds its queue to a manager. The manager's scheme must have
// certificates.k8s.io/v1, core/v1 and attestation.cluster.x-k8s.io/v1alpha1. Records are in the
// same cluster as the requests.
func Add(m ctrl.Manager, config Config) error {
	clients, err := ManagerClients(m)
	if err != nil {
		return err
	}
	c, err := New(config, clients)
	if err != nil {
		return err
	}
	queue, err := c.newQueue(m.GetCache(), m.GetLogger(), m.GetControllerOptions())
	if err != nil {
		return err
	}
	return m.Add(queue)
}

// New makes a Controller. NewUnmanaged returns the queue that calls it.
func New(config Config, clients Clients) (*Controller, error) {
	c, err := newController(config)
	if err != nil {
		return nil, err
	}
	if clients.RecordEvents == nil {
		clients.RecordEvents = clients.Events
	}
	c.client, c.live = clients.Client, clients.Live
	c.records = records.NewStore(clients.Records, c.Namespace, c.Owned)
	c.reporter = report.New(c.reporting(clients))
	if c.enforcer, err = c.newEnforcer(clients); err != nil {
		return nil, err
	}
	c.intake = &intake.Intake{Rules: c.Rules, Queue: c.queue, Cached: c.client, Summarized: c.Requests != nil, Now: c.Now}
	writes := collect.NewLastWrites()
	c.collector = &collect.Collector{
		Rules: c.Rules, Providers: c.providers, Machines: c.Machines, Owned: c.Owned != nil, TrustUnnamed: c.TrustUnnamed,
		Cached: c.client, Live: c.live, Records: c.records, Retries: c.retries, Intake: c.intake, LastWrites: writes, Suspended: c.enforcer.Suspended, Issuer: c.issuer,
	}
	c.actor = &act.Actor{
		Rules: c.Rules, Client: c.client, Records: c.records, Issuer: c.issuer, Operator: c.Limits, Revocations: c.enforcer, Challenged: c.Challenged, Now: c.Now,
		MachineLimits: fairqueue.NewLimiters(c.Rates.Machine), LastWrites: writes, Retries: c.retries, Queue: c.queue, WaitingLimits: fairqueue.NewLimiters(act.EventRate),
	}
	c.issuedWatch = &watch.Issued{Rules: c.Rules, Audit: c.Audit, Metrics: c.Metrics, Now: c.Now, Live: c.live, Records: c.records, Actor: c.actor, Reporter: c.reporter}
	c.noEvidence = &watch.NoEvidence{Intake: c.intake, Cached: c.client, Now: c.Now}
	c.machineWatch = &watch.Machines{Machines: c.Machines, Now: c.Now, Queue: c.queue, Retries: c.retries, Listed: &c.listed, Records: c.records}
	c.ekChanges = &watch.EKChanges{
		Rules: c.Rules, Machines: c.Machines, Acknowledgements: c.AcceptedEKChanges, Audit: c.Audit, Metrics: c.Metrics, Now: c.Now,
		Records: c.records, Actor: c.actor, Reporter: c.reporter,
	}
	if c.Requests != nil {
		c.Requests.Providers = c.providers
	}
	return c, nil
}

// reporting returns what the reporter uses of the configuration.
func (c *Controller) reporting(clients Clients) report.Config {
	config := report.Config{
		Rules: c.Rules, Issuer: c.issuer, Audit: c.Audit, Decisions: c.Decisions, Source: records.SourceInventory,
		Metrics: c.Metrics, Events: clients.Events, RecordEvents: clients.RecordEvents, Live: c.live, Retries: c.retries, Now: c.Now,
	}
	if c.Owned != nil {
		config.Source = c.Owned.Source
	}
	if c.Revocation != nil {
		config.RevocationLog = c.Revocation.Log
	}
	return config
}

// NewUnmanaged returns the queue of the requests in a cache. Its Start runs the Controller, in a
// manager or without one. Call NewUnmanaged once.
func (c *Controller) NewUnmanaged(requests cache.Cache, log logr.Logger) (controller.Controller, error) {
	// each cluster has a Controller of this name
	return c.newQueue(requests, log, runtimeconfig.Controller{SkipNameValidation: new(true)})
}

func (c *Controller) newQueue(requests cache.Cache, log logr.Logger, defaults runtimeconfig.Controller) (controller.Controller, error) {
	options := c.options(log)
	options.DefaultFromConfig(defaults)
	options.Reconciler = c
	queue, err := controller.NewUnmanaged(Name, options)
	if err != nil {
		return nil, err
	}
	watch, err := c.watchRecords(log.WithName("records"))
	if err != nil {
		return nil, err
	}
	for _, source := range []source.Source{watch, c.machineWatch.Source(log.WithName("machines")), c.ekChanges.Source(log.WithName("ek-changes")), c.revocation(), c.noEvidence.Source(log.WithName("no-evidence"))} {
		if err := queue.Watch(source); err != nil {
			return nil, err
		}
	}
	return queue, queue.Watch(source.Kind[client.Object](requests, &certificatesv1.CertificateSigningRequest{}, &handler.EnqueueRequestForObject{}, c.intake.Observed()))
}

// watchRecords returns the source that fills the cache of records. Metrics read that cache, too.
func (c *Controller) watchRecords(log logr.Logger) (source.Source, error) {
	watch, err := c.records.Watch(log)
	if err == nil {
		c.ClusterMetrics.Observe(telemetry.State{Waiting: func() map[string]int { return c.noEvidence.AddTo(c.retries.Causes()) }, Records: c.records.Gauged})
	}
	return watch, err
}

func (c *Controller) options(log logr.Logger) controller.Options {
	log = log.WithValues("controller", Name)
	return controller.Options{
		// controller-runtime's own constructor logs a name that klog does not quote.
		LogConstructor: func(request *reconcile.Request) logr.Logger {
			if request == nil {
				return log
			}
			return log.WithValues("request", request.Name)
		},
		MaxConcurrentReconciles: c.Concurrency,
		NewQueue:                c.queue.NewQueue,
		// controller-runtime's own back-off grows to a quarter of an hour. That is too long if an
		// inventory or a CRD is created meanwhile.
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryDelay/100, retryDelay),
	}
}

// newController checks a configuration. A missing field is an error: it must never disable a rule.
func newController(config Config) (*Controller, error) {
	c := &Controller{Config: &config, providers: map[string]evidence.Provider{}, issuer: signing.NewIssuer(config.CA)}
	switch {
	case c.Rules == nil:
		return nil, errors.New("controller: there are no rules")
	case c.Machines == nil:
		return nil, errors.New("controller: there is no source of machines")
	case c.Namespace == "":
		return nil, errors.New("controller: there is no namespace for records")
	case c.Owned != nil && (c.Owned.Source == "" || c.Owned.Cluster == "" || c.Owned.Owner == nil):
		return nil, errors.New("controller: owned: records have a source, a cluster, and owners")
	case len(c.Providers) == 0:
		return nil, errors.New("controller: there is no provider")
	}
	if c.CA != nil {
		if err := c.Limits.Check(); err != nil {
			return nil, fmt.Errorf("controller: %w", err)
		}
	}
	for _, p := range c.Providers {
		if c.providers[p.Name()] != nil {
			return nil, fmt.Errorf("controller: provider %q is listed twice", p.Name())
		}
		c.providers[p.Name()] = p
	}
	wanted, tokens := c.Rules.Needs()
	for _, w := range wanted {
		p := c.providers[w.Name]
		if p == nil {
			return nil, fmt.Errorf("controller: the rules know a provider %q, and there is none of that name", w.Name)
		}
		if _, challenges := p.(evidence.Challenger); challenges != w.Challenges {
			return nil, fmt.Errorf("controller: provider %q: rules and provider do not agree on whether it challenges", w.Name)
		}
	}
	if _, ok := c.Machines.(evidence.TokenSource); tokens && !ok {
		return nil, errors.New("controller: the rules ask which machine a bootstrap token was made for, and the source of machines does not know")
	}
	if c.Rates == (fairqueue.Rates{}) {
		c.Rates = fairqueue.DefaultRates()
	}
	if err := c.Rates.Check(); err != nil {
		return nil, fmt.Errorf("controller: rates: %w", err)
	}
	c.queue = fairqueue.New(c.Rates, func(claim fairqueue.Claim) bool { return c.listed.Load().Has(claim) },
		func(ak string) bool { return c.records.HasAK(ak) })
	c.retries = fairqueue.NewRetries[collect.WaitingEvidence]()
	if c.Concurrency == 0 {
		c.Concurrency = 16
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Challenged == nil {
		c.Challenged = func(string) {}
	}
	return c, nil
}
