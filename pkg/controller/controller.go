// SPDX-License-Identifier: Apache-2.0

// Package controller decides on the CertificateSigningRequests of one cluster's nodes: it challenges hellos, judges proofs by the rules
// of pkg/verifier, keeps a record of each machine, approves, and signs. An infrastructure provider embeds it in a manager of its own.
//
// A decision is written in steps that may each be repeated: the record first, then the approval, the certificate into the record, and last the
// certificate into the request. Whatever is killed in between, the next round goes on from there. How old what it is made from may be is in
// reading.go. Reading order: reconcile.go, reading.go, gather.go, act.go.
package controller

import (
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/lru"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Config is what a Controller is made of. A field that is not said to be optional must be set.
type Config struct {
	// Rules are the policy.
	Rules *verifier.Rules
	// Providers judge evidence.
	Providers []Provider
	// Machines are those of the cluster.
	Machines MachineSource
	// TrustUnnamed says that nothing else has to vouch for an EK which the rules trust on first
	// use, such as its maker's CAs. Any software can then pass for a TPM. Default: something
	// has to.
	TrustUnnamed bool
	// CA signs. Nil: another signer issues what is approved here.
	CA signing.Source
	// Limits bound lifetimes; needed with a CA.
	Limits signing.Limits
	// Namespace is where records are kept.
	Namespace string
	// AcceptedEKChanges are the operator's acknowledgements of changed endorsement keys, such as a
	// *KeyStore's. Optional: there are none.
	AcceptedEKChanges Acknowledgements
	// Owned has records be owned by their machines. Optional: machines that are no objects own nothing.
	Owned *records.Owned
	// Rates bound how often. Default: fairqueue.DefaultRates.
	Rates fairqueue.Rates
	// Audit decides, reports, and touches nothing. Optional.
	Audit bool
	// Concurrency is how many requests are decided on at a time. Most of the time they wait for the API server. Default: 16.
	Concurrency int
	// Metrics count decisions. Optional.
	Metrics *telemetry.Metrics
	// Challenged is called with the name of each hello that was challenged. It must not block.
	// Optional.
	Challenged func(name string)
	// Now is the clock. Default: the system's.
	Now func() time.Time
}

// Controller is a reconciler of CertificateSigningRequests.
type Controller struct {
	Config
	providers map[string]Provider
	client    client.Client
	// live reads from the API server itself.
	live    client.Reader
	events  events.EventRecorder
	records *records.Store
	waits   waits
	turns   *turns
	// requesters are of the requests in the queue.
	requesters *requesters
	// said is when what was last said of Nodes.
	said *lru.Cache
}

// Name is the controller's, in events and metrics.
const Name = telemetry.Component

// Clients are how a Controller reaches the cluster that nodes join, and where the records are.
type Clients struct {
	// Client reads requests from a cache, which NewQueue watches, and writes.
	Client client.Client
	// Live reads from the API server itself.
	Live client.Reader
	// Events are about requests and Nodes. telemetry.NewDedupRecorder is applied to it.
	Events events.EventRecorder
	// Records reads records from the API server itself, watches and writes them.
	Records client.WithWatch
}

// Add makes a Controller of config and adds it to a manager, whose scheme has certificates.k8s.io/v1, core/v1 and
// attestation.cluster.x-k8s.io/v1alpha1. Records are in the same cluster as the requests.
func Add(manager ctrl.Manager, config Config) error {
	api, err := client.NewWithWatch(manager.GetConfig(), client.Options{
		HTTPClient: manager.GetHTTPClient(), Scheme: manager.GetScheme(), Mapper: manager.GetRESTMapper(),
	})
	if err != nil {
		return err
	}
	c, err := New(config, Clients{Client: manager.GetClient(), Live: manager.GetAPIReader(), Events: manager.GetEventRecorder(Name), Records: api})
	if err != nil {
		return err
	}
	watch, err := c.records.Watch(manager.GetLogger().WithName("records"))
	if err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(manager).Named(Name).
		For(&certificatesv1.CertificateSigningRequest{}, builder.WithPredicates(c.requesters.watched())).
		WatchesRawSource(watch).
		WatchesRawSource(c.ekChanges(manager.GetLogger().WithName("ek-changes"))).
		WithOptions(c.options()).
		Complete(c)
}

// New makes a Controller of config for whoever has no manager in the cluster that nodes join: NewQueue gives it requests.
func New(config Config, clients Clients) (*Controller, error) {
	c, err := newController(config)
	if err != nil {
		return nil, err
	}
	c.client, c.live, c.events = clients.Client, clients.Live, telemetry.NewDedupRecorder(clients.Events)
	c.records = records.NewStore(clients.Records, c.Namespace, c.Owned)
	return c, nil
}

// NewQueue returns a queue of the requests in a cache, on which the Controller decides, in no manager. Start runs it.
func (c *Controller) NewQueue(requests cache.Cache, log logr.Logger) (controller.Controller, error) {
	options := c.options()
	options.Reconciler, options.SkipNameValidation = c, new(true) // there is one for each cluster
	options.LogConstructor = func(request *reconcile.Request) logr.Logger {
		if request == nil {
			return log
		}
		return log.WithValues("request", request.Name)
	}
	queue, err := controller.NewUnmanaged(Name, options)
	if err != nil {
		return nil, err
	}
	watch, err := c.records.Watch(log.WithName("records"))
	if err != nil {
		return nil, err
	}
	for _, source := range []source.Source{watch, c.ekChanges(log.WithName("ek-changes"))} {
		if err := queue.Watch(source); err != nil {
			return nil, err
		}
	}
	return queue, queue.Watch(source.Kind[client.Object](requests, &certificatesv1.CertificateSigningRequest{}, &handler.EnqueueRequestForObject{}, c.requesters.watched()))
}

func (c *Controller) options() controller.Options {
	return controller.Options{
		MaxConcurrentReconciles: c.Concurrency,
		NewQueue:                c.requesters.newFairQueue,
		// The default's pauses grow to a quarter of an hour: so long after an inventory or a CRD has appeared nobody may wait.
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](lookAgain/100, lookAgain),
	}
}

// newController checks a configuration: what is missing is an error, never a rule that does not hold.
func newController(config Config) (*Controller, error) {
	c := &Controller{Config: config, providers: map[string]Provider{}, requesters: &requesters{byName: map[string]string{}}}
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
			return nil, fmt.Errorf("controller: provider %q stands twice", p.Name())
		}
		c.providers[p.Name()] = p
	}
	wanted, tokens := c.Rules.Needs()
	for _, w := range wanted {
		p := c.providers[w.Name]
		if p == nil {
			return nil, fmt.Errorf("controller: the rules know a provider %q, and there is none of that name", w.Name)
		}
		if _, challenges := p.(Challenger); challenges != w.Challenges {
			return nil, fmt.Errorf("controller: provider %q: rules and provider do not agree on whether it challenges", w.Name)
		}
	}
	if _, ok := c.Machines.(TokenSource); tokens && !ok {
		return nil, errors.New("controller: the rules ask which machine a bootstrap token was made for, and the source of machines does not know")
	}
	if c.Rates == (fairqueue.Rates{}) {
		c.Rates = fairqueue.DefaultRates()
	}
	if err := c.Rates.Check(); err != nil {
		return nil, fmt.Errorf("controller: rates: %w", err)
	}
	c.turns, c.said = newTurns(c.Rates), lru.New(maxLimiters)
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
