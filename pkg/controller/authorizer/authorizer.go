// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	authorizationv1 "k8s.io/api/authorization/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// Strict says what happens to a node whose certificate no record names.
type Strict string

// The modes.
const (
	// StrictOff denies revoked certificates and suspended machines only.
	StrictOff Strict = "off"
	// StrictRehearse denies nothing more, but counts and logs what StrictOn would deny.
	StrictRehearse Strict = "rehearse"
	// StrictOn also denies each node whose certificate no record names.
	StrictOn Strict = "on"
)

// reportInterval is the time between two log lines about denials for the same reason of the same
// requester.
const reportInterval = 10 * time.Minute

// errNoClient says why a record cannot be read.
var errNoClient = errors.New("there is no client of the API server yet")

// Config configures an Authorizer. A field is required unless its comment says optional or Default.
type Config struct {
	// Namespace has the NodeAttestations, NodeSuspensions and RevocationSlices.
	Namespace string
	// Cluster selects objects by their spec.cluster. Optional: without it, all objects of the
	// namespace count.
	Cluster string
	// Connect returns a client for these objects, which must have no timeout of its own, since it
	// watches. Connect is called again after an error.
	Connect func() (client.WithWatch, error)
	// StateFile keeps the lists across a restart.
	StateFile string
	Strict    Strict
	// Unattested says which nodes need no record in strict mode. Optional.
	Unattested func(node string) bool
	// Metrics are optional.
	Metrics *telemetry.AuthorizerMetrics
	Log     logr.Logger
	// Now is the clock. Default: the system's.
	Now func() time.Time
}

// Authorizer answers API servers.
type Authorizer struct {
	Config
	lists atomic.Pointer[Lists]
	// watches keep the lists up to date. It is nil until Connect returned a client.
	watches atomic.Pointer[watches]
	// upToDateAt is when the lists were last known to be up to date, in Unix nanoseconds, 0 if they
	// never were.
	upToDateAt atomic.Int64
	reported   telemetry.Once
}

// New returns an Authorizer with the lists of the state file. A damaged file is logged, and the
// lists are empty until Run has read the objects: a node must not wait for this program.
func New(config Config) (*Authorizer, error) {
	a := &Authorizer{Config: config}
	if a.Now == nil {
		a.Now = time.Now
	}
	if a.Unattested == nil {
		a.Unattested = func(string) bool { return false }
	}
	a.lists.Store(&Lists{})
	lists, upToDateAt, err := readState(a.StateFile)
	switch {
	case err != nil:
		a.Log.Error(nil, "cannot use the state file: nothing is denied until the lists are read from an API server", "file", a.StateFile, "cause", text.Line(err.Error(), telemetry.MaxLogged))
	case lists == nil:
		a.Log.Info("there is no state file yet: nothing is denied until the lists are read from an API server", "file", a.StateFile)
	default:
		a.lists.Store(lists)
		a.upToDateAt.Store(upToDateAt.UnixNano())
		a.Log.Info("read the lists from the state file", "file", a.StateFile, "age", a.age().Round(time.Second).String())
	}
	return a, a.Metrics.Lists(a.age, func() int { return a.lists.Load().unrecorded() })
}

// age returns the age of the lists: the time since they were last known to be up to date. It is
// negative if they never were.
func (a *Authorizer) age() time.Duration {
	if a.isLive() {
		return 0
	}
	upToDateAt := a.upToDateAt.Load()
	if upToDateAt == 0 {
		return -1 * time.Second
	}
	return max(0, a.Now().Sub(time.Unix(0, upToDateAt)))
}

// Authorize answers an API server's question.
func (a *Authorizer) Authorize(ctx context.Context, spec authorizationv1.SubjectAccessReviewSpec) authorizationv1.SubjectAccessReviewStatus {
	r, lists := newRequest(spec), a.lists.Load()

	// 1. Is the certificate revoked, or the machine suspended?
	decision := a.resolve(ctx, r, lists.Decide(r), lists.recordNames)
	if decision.Verdict == Deny {
		a.report(r, decision, false)
		return deny(decision)
	}

	// 2. In strict mode, does a record name the certificate?
	if a.Strict == StrictOff {
		return authorizationv1.SubjectAccessReviewStatus{}
	}
	decision = a.resolve(ctx, r, lists.DecideStrict(r, a.Unattested), lists.remembers)
	if decision.Verdict != Deny {
		return authorizationv1.SubjectAccessReviewStatus{}
	}
	a.report(r, decision, a.Strict == StrictRehearse)
	if a.Strict == StrictRehearse {
		return authorizationv1.SubjectAccessReviewStatus{}
	}
	return deny(decision)
}

func deny(d Decision) authorizationv1.SubjectAccessReviewStatus {
	return authorizationv1.SubjectAccessReviewStatus{Denied: true, Reason: d.Cause.message()}
}

// resolve decides on a certificate that the lists do not know. It is new, or it is a thief's: a
// certificate can be encoded in another way, and a stolen CA key can issue one. known reports what
// the lists know of the records. After that, one live read of the node's records decides.
//
// If the read fails, the lists may be old: a watch whose connection is lost looks live for up to a
// minute, and it is lost for the same reasons as the read. The node may have come back since: no
// opinion. To stop it would be worse, since nothing could let it in again. Decide denies revoked
// certificates before this. A thief with another certificate has to stop this program from
// reading, which takes rights on the control plane, and admission policies go on refusing writes of
// revoked nodes.
//
// There is one exception: a thief can cause more reads than the limit. An API server that is not
// asked says nothing about the watches, so live ones decide: deny.
func (a *Authorizer) resolve(ctx context.Context, r Request, d Decision, known func(node string, credentials []string) bool) Decision {
	node, _ := r.node()
	switch {
	case d.Verdict != Unlisted:
		return d
	case known(node, r.Credentials):
		return Decision{Verdict: NoOpinion}
	}
	isNamed, err := false, errNoClient
	if w := a.watches.Load(); w != nil {
		isNamed, err = w.reader.isNamed(ctx, node, r.Credentials)
	}
	switch {
	case err == nil && isNamed:
		return Decision{Verdict: NoOpinion}
	case err == nil, errors.Is(err, errTooMany) && a.isLive():
		return Decision{Deny, d.Cause}
	}
	a.Metrics.Unresolved()
	if a.reported.MarkReported("unresolved "+node, "", a.Now(), reportInterval) {
		a.Log.Error(nil, "the lists may be old, and the node's record cannot be read: a certificate that the lists do not know is not denied",
			"node", text.Line(node, telemetry.MaxLogged), "cause", text.Line(err.Error(), telemetry.MaxLogged))
	}
	return Decision{Verdict: NoOpinion}
}

// report counts a denial, and logs it once in a while.
func (a *Authorizer) report(r Request, d Decision, rehearsal bool) {
	a.Metrics.Denied(string(d.Cause), rehearsal)
	user := text.Line(r.User, telemetry.MaxLogged)
	if !a.reported.MarkReported(user, string(d.Cause), a.Now(), reportInterval) {
		return
	}
	message := "denied"
	if rehearsal {
		message = "strict mode would deny"
	}
	var verb, resource string
	if r.Resource != nil {
		verb, resource = text.Line(r.Resource.Verb, telemetry.MaxLogged), text.Line(r.Resource.Resource, telemetry.MaxLogged)
	}
	credential := ""
	if len(r.Credentials) > 0 {
		credential = text.Line(r.Credentials[0], telemetry.MaxLogged)
	}
	a.Log.Info(message, "cause", d.Cause, "user", user, "credential", credential, "verb", verb, "resource", resource)
}
