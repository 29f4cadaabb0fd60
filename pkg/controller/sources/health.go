// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// ConditionUsable is the type of the condition on the Namespace's status that says whether the
// sources are usable.
const ConditionUsable = telemetry.ConditionSources

// Reasons of that condition. Those with which it is True or False are reasons of Events, too.
const (
	ReasonSourcesUsable  = "SourcesUsable"
	ReasonSourceUnusable = "SourceUnusable"
	ReasonCANotTrusted   = "CANotTrusted"
	// ReasonCANotCompared says that all sources are usable, but that it is not known whether the
	// API server trusts the CA.
	ReasonCANotCompared = "CANotCompared"
)

// The names of sources in metrics and messages. A source may have parts with other names.
const (
	NameCA            = "ca"
	NameInventory     = "inventory"
	NameConflicts     = "inventory-conflicts"
	NameChallengeKeys = "challenge-keys"
	NameAnnotations   = "annotations"
	NamePlatform      = "platform"
	NameConfiguration = "configuration"
	// nameMachines has a problem while the machines are not known although each source of them is
	// usable.
	nameMachines = "machines"
)

// remedies has the hints for operators, by the name of the source.
var remedies = map[string]string{
	NameCA:            "correct the Secret or the files of the field signing",
	NameInventory:     "correct the inventory",
	NameConflicts:     "run node-attestation-controller inventory check, and leave each value with one machine",
	NameChallengeKeys: "correct the Secret, or remove its data and the controller makes a key",
	NameAnnotations:   "correct the annotations, or grant the right that is named",
	NamePlatform:      "look at the platform's API",
	NameConfiguration: "correct the configuration file; until then the last valid unattestedNodes is in force",
}

const remedyTrust = "put the CA into kube-apiserver's --client-ca-file, or use a CA that is there. Requests wait until then"

const (
	// healthInterval is the time between two checks of the sources.
	healthInterval = 5 * time.Second
	// healthDelay is the delay of the first check, so that each source has begun to read.
	healthDelay = time.Second
)

// State is the state of a source, or of a part of one.
type State struct {
	// Name is the value of a metrics label, so there must be few different names.
	Name string
	// Problem is why the latest content is not used. The last known good content is used, if there
	// is one.
	Problem error
	// LastRead is the time when valid content was last read, zero if never.
	LastRead time.Time
}

// MachineSource is a source of machines whose state is watched.
type MachineSource interface {
	Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error)
}

// sharedMachines is a MachineSource that need not copy its machines.
type sharedMachines interface {
	Shared(ctx context.Context, now time.Time) ([]verifier.Machine, error)
}

// Refresher is a source that only Health reads, so Health refreshes it.
type Refresher interface{ Refresh(now time.Time) }

// HealthConfig configures a Health.
type HealthConfig struct {
	// CA is nil if another signer issues. If it is a *ComparedCA, Health reports the result of the
	// comparison.
	CA       signing.Source
	Machines MachineSource
	Keys     *KeyStore
	// Configuration is read again with each check, nil if it need not be.
	Configuration Refresher
	// API writes the condition on the status of Namespace.
	API       client.Client
	Namespace string
	Events    events.EventRecorder
	// Leads is closed when this replica becomes the leader, which writes the condition and Events.
	// If it is nil, this replica writes at once.
	Leads <-chan struct{}
	// Interval is the time between two checks. Default: 5 s.
	Interval time.Duration
	// Remind is the time until a lasting problem is reported again. Default: 15 minutes.
	Remind time.Duration
	// Metrics gauge the sources. Optional.
	Metrics *telemetry.ClusterMetrics
	// Mirror gets the content of each Event on the Namespace, to report it elsewhere too. Optional.
	Mirror func(kind, reason, message string)
	Log    logr.Logger
}

// Health watches the sources of one cluster: the CA, the machines and the challenge keys. It
// reports unusable sources, and whether the API server trusts the CA, in the log, metrics, a
// condition and Events. It decides nothing.
type Health struct {
	HealthConfig
	reporter *telemetry.Reporter

	// The fields below belong to Start's goroutine.
	leads bool
	// logged has the problems that were last logged, by source.
	logged map[string]string
	// trust is the result of the last comparison.
	trust error
}

// NewHealth returns a Health, which Start runs.
func NewHealth(config HealthConfig) *Health {
	h := &Health{HealthConfig: config, logged: map[string]string{}}
	h.Interval, h.Remind = cmp.Or(h.Interval, healthInterval), cmp.Or(h.Remind, telemetry.RemindInterval)
	h.Events = telemetry.NewDedupRecorder(h.Events)
	h.reporter = &telemetry.Reporter{
		Condition: &telemetry.Condition{API: h.API, Namespace: h.Namespace, Type: ConditionUsable, Remind: h.Remind, Log: h.Log},
		Events:    h.Events, Action: "Read", Mirror: h.Mirror,
	}
	return h
}

// NeedLeaderElection returns false, so that standby replicas check the sources, too.
func (*Health) NeedLeaderElection() bool { return false }

// Start checks the sources until ctx ends. A manager runs it.
func (h *Health) Start(ctx context.Context) error {
	leads := h.Leads
	if leads == nil {
		h.leads = true
	}
	var compared <-chan struct{}
	if ca, ok := h.CA.(*ComparedCA); ok {
		compared = ca.changed
	}
	for next := time.NewTimer(min(healthDelay, h.Interval)); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-leads:
			h.leads, leads = true, nil
		case <-compared:
		case <-next.C:
		}
		if v := h.check(ctx); ctx.Err() == nil {
			h.report(ctx, v)
		}
		next.Reset(min(h.Interval, h.Remind))
	}
}

// check reads all sources, gauges them, logs changes, and returns the verdict on all of them.
func (h *Health) check(ctx context.Context) telemetry.Verdict {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	now := time.Now()
	machines, unlisted := h.machines(ctx, now)
	if unlisted == nil {
		h.Metrics.Machines(machines)
	}
	if h.Configuration != nil {
		h.Configuration.Refresh(now)
	}
	trust, states := h.compare(ctx, now), h.states()
	// the configuration has no machines, so it cannot be the cause
	if unlisted != nil && !slices.ContainsFunc(states, func(s State) bool { return s.Problem != nil && s.Name != NameConfiguration }) {
		states = append(states, State{Name: nameMachines, Problem: unlisted})
	}
	problems := map[string]string{}
	for _, s := range states {
		h.Metrics.Source(s.Name, s.Problem == nil, s.LastRead)
		problems[s.Name] = ""
		if s.Problem != nil {
			problems[s.Name] = text.Line(s.Problem.Error(), telemetry.MaxLogged)
		}
	}
	h.log(problems, trust)
	return h.verdict(problems, trust)
}

// verdict returns the verdict on the problems, by source, and on the API server's trust in the CA.
func (h *Health) verdict(problems map[string]string, trust error) telemetry.Verdict {
	var messages []string
	if errors.Is(trust, ErrCANotTrusted) {
		messages = append(messages, text.Line(trust.Error(), telemetry.MaxLogged)+": "+remedyTrust)
	}
	for _, name := range slices.Sorted(maps.Keys(problems)) {
		if problems[name] != "" {
			problem := strings.TrimPrefix(problems[name], name+": ") // some errors begin with the name
			messages = append(messages, name+": "+problem+": "+cmp.Or(remedies[name], remedies[NameInventory]))
		}
	}
	message := strings.Join(messages, "; ")
	switch {
	case errors.Is(trust, ErrCANotTrusted):
		return telemetry.Verdict{Status: corev1.ConditionFalse, Reason: ReasonCANotTrusted, Message: message}
	case len(messages) > 0:
		return telemetry.Verdict{Status: corev1.ConditionFalse, Reason: ReasonSourceUnusable, Message: message}
	case trust != nil:
		return telemetry.Verdict{Status: corev1.ConditionUnknown, Reason: ReasonCANotCompared, Message: "all sources are usable; it is not known whether the API server trusts the CA: " + text.Line(trust.Error(), telemetry.MaxLogged)}
	case h.CA == nil:
		return telemetry.Verdict{Status: corev1.ConditionTrue, Reason: ReasonSourcesUsable, Message: "machines and challenge keys are usable; another signer issues"}
	}
	return telemetry.Verdict{Status: corev1.ConditionTrue, Reason: ReasonSourcesUsable, Message: "CA, machines and challenge keys are usable; the API server trusts the CA"}
}

// machines returns the number of machines.
func (h *Health) machines(ctx context.Context, now time.Time) (int, error) {
	list := h.Machines.Machines
	if s, ok := h.Machines.(sharedMachines); ok {
		list = s.Shared
	}
	machines, err := list(ctx, now)
	return len(machines), err
}

// compare gauges the CA. It returns ErrCANotTrusted if the API server does not trust the CA, and
// another error if that is not known. Without a CA it returns nil.
func (h *Health) compare(ctx context.Context, now time.Time) error {
	ca := h.ca(ctx, now)
	if ca == nil {
		h.Metrics.CA(time.Time{}, nil)
		return nil
	}
	err := errors.New("there is no comparison")
	if compared, ok := h.CA.(*ComparedCA); ok {
		err = compared.Compare(ctx, ca, now)
	}
	var trusted *bool
	if err == nil || errors.Is(err, ErrCANotTrusted) {
		trusted = new(err == nil)
	}
	h.Metrics.CA(ca.NotAfter(), trusted)
	return err
}

// ca returns the CA. It returns nil if another signer issues, or if no CA is available: then its
// Problem says why.
func (h *Health) ca(ctx context.Context, now time.Time) *signing.CA {
	if h.CA == nil {
		return nil
	}
	ca, err := Uncompared(h.CA).CA(ctx, now)
	if err != nil {
		return nil
	}
	return ca
}

// states returns the states of all sources. A source with parts has one state for each part.
func (h *Health) states() (all []State) {
	add := func(name string, source any) {
		if parts, ok := source.(interface{ States() []State }); ok {
			all = append(all, parts.States()...)
			return
		}
		s := State{Name: name}
		if p, ok := source.(interface{ Problem() error }); ok {
			s.Problem = p.Problem()
		}
		if r, ok := source.(interface{ LastRead() time.Time }); ok {
			s.LastRead = r.LastRead()
		}
		all = append(all, s)
	}
	if h.CA != nil {
		add(NameCA, Uncompared(h.CA))
	}
	add(NameInventory, h.Machines)
	add(NameChallengeKeys, h.Keys)
	if h.Configuration != nil {
		add(NameConfiguration, h.Configuration)
	}
	return all
}

// log logs changes: the problems of sources, and whether the API server trusts the CA. It also
// removes the gauges of sources that no longer exist.
func (h *Health) log(problems map[string]string, trust error) {
	for name := range h.logged {
		if _, there := problems[name]; !there {
			h.Metrics.SourceGone(name)
			delete(h.logged, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(problems)) {
		problem, before := problems[name], h.logged[name]
		h.logged[name] = problem
		switch {
		case problem == before:
		case problem == "":
			h.Log.Info("the source is usable again", "source", name)
		case name == NameConflicts:
			h.Log.Error(nil, "entries of the inventory contradict each other: first certificates of their machines wait", "problem", problem, "hint", remedies[name])
		default:
			h.Log.Error(nil, "the source is invalid or cannot be read; the last good content is used, if there is one", "source", name, "problem", problem)
		}
	}
	before := h.trust
	switch h.trust = trust; {
	case trust == nil && before == nil, trust != nil && before != nil && trust.Error() == before.Error():
	case trust == nil:
		h.Log.Info("the API server trusts the signing CA, or there is none")
	case errors.Is(trust, ErrCANotTrusted):
		h.Log.Error(nil, "the API server does not trust the signing CA: requests wait", "problem", text.Line(trust.Error(), telemetry.MaxLogged), "hint", remedyTrust)
	default:
		h.Log.Info("it is not known whether the API server trusts the signing CA, which signs", "cause", text.Line(trust.Error(), telemetry.MaxLogged))
	}
}

// report reports the verdict, on the leader.
func (h *Health) report(ctx context.Context, v telemetry.Verdict) {
	if h.leads {
		h.reporter.Report(ctx, v)
	}
}
