// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/workload"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// recordSource is the source of machines in records.
	recordSource = "cluster-api"
	// restartDelay is how long an engine waits after it failed, and refusedDelay after enforcement
	// was refused.
	restartDelay, refusedDelay = 5 * time.Second, 30 * time.Second
	// stopTimeout is how long one attempt to stop an engine waits for it.
	stopTimeout = 500 * time.Millisecond
	// liveQPS and liveBurst limit one cluster's calls to the management cluster's API server, so
	// that a flood in one cluster does not delay others.
	liveQPS, liveBurst = 200, 400
	// keysInterval is how stale the Secret of challenge keys may be. Only a rotation of keys
	// changes it. The health of the sources is checked at the same interval.
	keysInterval = 30 * time.Second
)

// enginePlan is what an engine is made from. A changed plan needs another engine.
type enginePlan struct {
	cluster *clusterv1.Cluster
	// uid identifies the cluster in records and challenges.
	uid string
	// connection is how to connect to the cluster.
	connection *rest.Config
	// approveOnly says that there is no CA key to sign with.
	approveOnly bool
	// unattestedNodes may renew without evidence. forbiddenAddresses are addresses that no
	// serving certificate may have.
	unattestedNodes, forbiddenAddresses []string
}

// engine serves one workload cluster until it is stopped: it runs what node-attestation-controller
// runs for a single cluster. No engine waits for another one's cluster.
type engine struct {
	engineDeps
	plan enginePlan
	log  logr.Logger

	cancel context.CancelFunc
	// stopping says that stop was called. Hold clusterReconciler.mu to read or write it.
	stopping bool
	// done is closed once the engine decides nothing any more.
	done chan struct{}
}

// engineDeps are the dependencies that all engines share.
type engineDeps struct {
	settings *config.Settings
	// management is how to connect to the management cluster. cached reads Cluster API's objects
	// there. live reads Secrets and records, and writes.
	management *rest.Config
	cached     client.Client
	live       client.Client
	events     events.EventRecorder
	// infra and inventory are nil if they are not sources of EKs, and platform if there is none.
	infra     *infraAnnotations
	inventory *sources.Inventory
	platform  *platformPoller

	decisionMetrics *telemetry.Metrics
	clusterMetrics  *telemetry.ClusterMetrics
	// policies compares the management cluster's admission policies with the release's.
	policies *preflight.PolicyCheck
}

// startEngine starts an engine, which ends when ctx ends or stop is called.
func startEngine(ctx context.Context, deps engineDeps, plan enginePlan, log logr.Logger) *engine {
	e := &engine{engineDeps: deps, plan: plan, log: log, done: make(chan struct{})}
	ctx, e.cancel = context.WithCancel(ctx)
	go func() {
		defer close(e.done)
		e.run(ctx)
	}()
	return e
}

// stop ends the engine, and reports whether it has ended. A call to the workload cluster may take a
// while.
func (e *engine) stop() bool {
	e.cancel()
	select {
	case <-e.done:
		return true
	case <-time.After(stopTimeout):
		return false
	}
}

// name is the cluster's name in metrics.
func (e *engine) name() string { return client.ObjectKeyFromObject(e.plan.cluster).String() }

// run serves the cluster, and starts again after a failure.
func (e *engine) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := e.serve(ctx)
		e.clusterMetrics.For(e.name()).Forget()
		if ctx.Err() != nil {
			return
		}
		pause := restartDelay
		var refused *preflight.Error
		if errors.As(err, &refused) {
			pause = refusedDelay
			e.events.Eventf(e.plan.cluster, nil, corev1.EventTypeWarning, "EnforcementRefused", "Enforce", "%s; %s", text.Line(err.Error(), maxNote), refused.Hint)
		}
		e.log.Error(nil, "the cluster is not served", "cause", text.Line(err.Error(), text.MaxProblem), "again", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// hints are what an operator can do for a cluster that is not served. They affect no other cluster.
var hints = preflight.Hints{
	Nodes:  "attest them, or list them in the Cluster's annotation " + annotationUnattestedNodes,
	Record: "apply packaging/cluster-api/management to the management cluster",
	Policies: "apply packaging/cluster-api/workload to the workload cluster, and packaging/cluster-api/management to the management cluster, " +
		"with your overlays if you have some, name other controllers in policies.controllers, or set policies.mode: Warn",
	Rights: "apply packaging/cluster-api/workload to the workload cluster, and packaging/cluster-api/management to the management cluster",
}

// maxNote limits the part of an Event's note that comes from others, in bytes.
const maxNote = 700

// serve assembles the cluster's controller, and runs it until ctx ends or a part of it fails.
func (e *engine) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	settings, err := e.settings.ForWorkload(config.Workload{
		UID: e.plan.uid, Namespace: e.plan.cluster.Namespace, KeySecret: keySecret(client.ObjectKeyFromObject(e.plan.cluster)).Name,
		ApproveOnly: e.plan.approveOnly, ForbiddenAddresses: e.plan.forbiddenAddresses, UnattestedNodes: e.plan.unattestedNodes,
	})
	if err != nil {
		return err
	}
	live, err := e.newLiveClient()
	if err != nil {
		return err
	}
	w, err := e.connect(settings)
	if err != nil {
		return err
	}
	defer w.broadcaster.Shutdown() // NewBroadcaster has started its goroutine
	challengeKeys, clusterMetrics := settings.Keys(live, live), e.clusterMetrics.For(e.name())
	challengeKeys.Interval, challengeKeys.Existing = keysInterval, true
	gate := settings.Preflight(challengeKeys, live, clusterMetrics, e.log.WithName("preflight"), settings.PolicyCheck(w.live, w.unbounded), e.policies)
	gate.Nodes, gate.Hints = w.live, hints
	if err := gate.Await(ctx); err != nil {
		return err
	}
	parts := e.controllerConfig(settings, challengeKeys, live, w.live)
	parts.ClusterMetrics, parts.Requests = clusterMetrics, w.requests
	cluster := e.plan.cluster
	runnables, err := settings.Runnables(config.Cluster{
		Controller: parts, Keys: challengeKeys, Preflight: gate,
		Clients: controller.Clients{Client: w.client, Live: w.live, Events: w.recorder, RecordEvents: e.events, Records: live, Joined: w.watching},
		API:     w.live, Cache: w.cache, Connection: w.unbounded, CacheOptions: w.options, Log: e.log,
		SlicePrefix: cluster.Name + "-revoked",
		// the Cluster owns its RevocationSlices, so they are deleted and moved with it
		SliceOwners: []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: cluster.Name, UID: cluster.UID}},
		Mirror:      e.event, HealthInterval: keysInterval,
	})
	if err != nil {
		return err
	}
	e.log.Info("serving the cluster", "uid", e.plan.uid, "approveOnly", parts.CA == nil)
	return runAll(ctx, cancel, append(runnables, w.cache, manager.RunnableFunc(w.recordEvents), e.newRecordGC(live))...)
}

// event reports in an Event on the Cluster what concerns the workload cluster. Users who remove
// policies there may remove Events there, too.
func (e *engine) event(kind, reason, message string) {
	e.events.Eventf(e.plan.cluster, nil, kind, reason, "Compare", "%s", message)
}

// runAll runs all runnables until ctx ends, which happens when one fails. It returns the first
// error.
func runAll(ctx context.Context, cancel context.CancelFunc, runnables ...manager.Runnable) error {
	var running sync.WaitGroup
	failed := make(chan error, len(runnables))
	for _, r := range runnables {
		running.Go(func() {
			if err := r.Start(ctx); err != nil {
				failed <- err
				cancel()
			}
		})
	}
	running.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return ctx.Err()
	}
}

// controllerConfig returns the controller's configuration for the cluster.
func (e *engine) controllerConfig(settings *config.Settings, challengeKeys *sources.KeyStore, live client.Client, workload client.Reader) controller.Config {
	cluster := client.ObjectKeyFromObject(e.plan.cluster)
	machines := newMachineSource(e.machineSourceConfig())
	var ca signing.Source
	if !e.plan.approveOnly {
		ca = sources.NewComparedCA(sources.NewSecretCA(live, caSecret(cluster)), workload)
	}
	parts := settings.Assemble(challengeKeys, machines, ca)
	parts.Metrics = e.decisionMetrics.For(e.name())
	parts.Decisions.Cluster.Name = e.name()
	parts.Owned = &records.Owned{
		Source: recordSource, Cluster: e.plan.uid, Owner: machines.Owner,
		Labels: map[string]string{clusterv1.ClusterNameLabel: cluster.Name},
	}
	return parts
}

// machineSourceConfig returns the configuration of the cluster's source of machines.
func (e *engine) machineSourceConfig() machineSourceConfig {
	c := machineSourceConfig{
		Reader: e.cached, Cluster: client.ObjectKeyFromObject(e.plan.cluster),
		Annotations: e.infra != nil, Infra: e.infra, Platform: e.platform, Inventory: e.inventory,
	}
	for _, kind := range e.settings.Config().ClusterAPI.ServingAddresses {
		c.ServingAddresses = append(c.ServingAddresses, clusterv1.MachineAddressType(kind))
	}
	if e.plan.uid != string(e.plan.cluster.UID) { // the object is younger than the cluster
		c.MovedAt = e.plan.cluster.CreationTimestamp.Time
	}
	return c
}

func (e *engine) newRecordGC(live client.Client) *recordGC {
	return &recordGC{
		cached: e.cached, live: live, cluster: client.ObjectKeyFromObject(e.plan.cluster), uid: e.plan.uid, events: e.events,
		log: e.log.WithName("record-gc"), now: time.Now,
	}
}

// workloadClients are the clients of one workload cluster.
type workloadClients struct {
	// unbounded is for watches, which have no timeout.
	unbounded *rest.Config
	options   cache.Options
	cache     cache.Cache
	// requests bounds the memory of cache.
	requests *intake.RequestCache
	// client reads requests from the cache, live from the API server.
	client, live client.Client
	// watching has no timeout and no cache.
	watching    client.WithWatch
	broadcaster events.EventBroadcaster
	recorder    events.EventRecorder
}

// newLiveClient returns a client of the management cluster with a rate limit of its own.
func (e *engine) newLiveClient() (client.WithWatch, error) {
	own := rest.CopyConfig(e.management)
	own.QPS, own.Burst = liveQPS, liveBurst
	return client.NewWithWatch(own, client.Options{Scheme: e.live.Scheme(), Mapper: e.live.RESTMapper()})
}

// connect makes the clients of one engine. The cache ends with the engine.
func (e *engine) connect(settings *config.Settings) (*workloadClients, error) {
	scheme, mapper, connection := e.live.Scheme(), workloadRESTMapper(), workload.WithBounds(e.plan.connection)
	unbounded := rest.CopyConfig(connection)
	unbounded.Timeout = 0
	w := &workloadClients{
		unbounded: unbounded, options: cache.Options{Scheme: scheme, Mapper: mapper}, requests: intake.NewRequestCache(settings.Rules()),
	}
	options := w.options
	w.requests.Configure(&options)
	var err error
	if w.cache, err = cache.New(unbounded, options); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	if w.live, err = client.New(connection, client.Options{Scheme: scheme, Mapper: mapper}); err != nil {
		return nil, err
	}
	w.client, err = client.New(connection, client.Options{Scheme: scheme, Mapper: mapper, Cache: &client.CacheOptions{Reader: w.cache}})
	if err != nil {
		return nil, err
	}
	if w.watching, err = client.NewWithWatch(unbounded, client.Options{Scheme: scheme, Mapper: mapper}); err != nil {
		return nil, err
	}
	sink, err := eventsclient.NewForConfig(connection)
	if err != nil {
		return nil, err
	}
	w.broadcaster = events.NewBroadcaster(&events.EventSinkImpl{Interface: sink})
	w.recorder = w.broadcaster.NewRecorder(scheme, controller.Name)
	return w, nil
}

// workloadRESTMapper has the kinds that are used in workload clusters, so that discovery is not
// needed.
func workloadRESTMapper() meta.RESTMapper {
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(certificatesv1.SchemeGroupVersion.WithKind("CertificateSigningRequest"), meta.RESTScopeRoot)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Namespace"), meta.RESTScopeRoot)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("ConfigMap"), meta.RESTScopeNamespace)
	mapper.Add(rbacv1.SchemeGroupVersion.WithKind("ClusterRoleBinding"), meta.RESTScopeRoot)
	mapper.Add(admissionv1.SchemeGroupVersion.WithKind("ValidatingAdmissionPolicy"), meta.RESTScopeRoot)
	mapper.Add(admissionv1.SchemeGroupVersion.WithKind("ValidatingAdmissionPolicyBinding"), meta.RESTScopeRoot)
	return mapper
}

// recordEvents sends Events until ctx ends.
func (w *workloadClients) recordEvents(ctx context.Context) error {
	if err := w.broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
