// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"errors"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
)

// answered returns a prober whose last answers are these. It asks nobody meanwhile.
func answered(inAPI bool, servers ...apiServer) *StaticProber {
	return &StaticProber{answers: staticAnswers{servers: servers}, asked: time.Now(), inAPI: inAPI}
}

// identityOf describes the static policies of this release.
func identityOf(t *testing.T, scope policyset.Scope, withRevocation bool, controllers ...string) *policyset.Identity {
	t.Helper()
	release, err := policyset.ReleaseDigest(scope, withRevocation)
	if err != nil {
		t.Fatal(err)
	}
	return &policyset.Identity{Digest: "1", Release: release, Scope: scope.String(), Controllers: controllers}
}

// The policies are in force if each API server has them in one of the forms.
func TestEachAPIServerHasAForm(t *testing.T) {
	const api, static = "the policies and their bindings are the release's", "the policies are the release's; API servers with static policies: a"
	good := identityOf(t, policyset.Alone, false, shippedController)
	altered := func(change func(*policyset.Identity)) *policyset.Identity {
		identity := *good
		change(&identity)
		return &identity
	}
	older := altered(func(p *policyset.Identity) { p.Release = "older" })
	a, b, lacks := apiServer{address: "a", static: good}, apiServer{address: "b", static: good}, apiServer{address: "b"}
	down := apiServer{address: "b", unknown: "no connection"}
	for title, c := range map[string]struct {
		inAPI   bool
		servers []apiServer
		// says is the state. Without problems it is complete, else it begins and ends so.
		says, remedy string
		problems     int
	}{
		"API alone":                            {inAPI: true, servers: []apiServer{lacks}, says: api},
		"API, and nobody may ask":              {inAPI: true, servers: []apiServer{{address: "b", unknown: "forbidden", forbidden: true}}, says: api},
		"API, nothing asked":                   {inAPI: true, says: api},
		"static alone":                         {servers: []apiServer{a}, says: static},
		"static on both":                       {servers: []apiServer{a, b}, says: static + ", b"},
		"both forms":                           {inAPI: true, servers: []apiServer{a, b}, says: api + "; API servers with static policies: a, b"},
		"both forms, on the way":               {inAPI: true, servers: []apiServer{a, lacks}, says: api + "; API servers with static policies: a; without: b"},
		"static, one is down":                  {servers: []apiServer{a, down}, says: static + "; static policies of b are not known: no connection"},
		"static with the guards of revocation": {servers: []apiServer{{address: "a", static: identityOf(t, policyset.Alone, true, shippedController)}}, says: static},
		"neither":                              {servers: []apiServer{lacks}, says: "node-attestation-approval: Missing: ", remedy: remedyAPI, problems: 14},
		"neither, nothing asked":               {says: "node-attestation-approval: Missing: ", remedy: remedyAPI, problems: 14},
		"one lacks both":                       {servers: []apiServer{a, lacks}, says: policyset.IdentityName + ": Missing: these API servers have no static policies: b", remedy: remedyStatic, problems: 1},
		"another release": {servers: []apiServer{a, {address: "b", static: older}},
			says: policyset.IdentityName + ": Altered: the static policies of these API servers are those of another release: b", remedy: remedyStatic, problems: 1},
		"another release on both": {servers: []apiServer{{address: "a", static: older}, {address: "b", static: older}},
			says: policyset.IdentityName + ": Altered: the static policies of these API servers are those of another release: a, b", remedy: remedyStatic, problems: 1},
		"another release, and the API": {inAPI: true, servers: []apiServer{{address: "b", static: older}},
			says: policyset.IdentityName + ": Altered: the static policies of these API servers are those of another release: b", remedy: remedyStatic, problems: 1},
		"another controller": {servers: []apiServer{a, {address: "b", static: altered(func(p *policyset.Identity) { p.Controllers = []string{"system:admin"} })}},
			says: policyset.IdentityName + `: Altered: the static policies of these API servers name the controller "system:admin", which is not configured: b`, remedy: remedyStatic, problems: 1},
		"a controller more": {servers: []apiServer{{address: "b", static: altered(func(p *policyset.Identity) { p.Controllers = []string{shippedController, "x"} })}},
			says: policyset.IdentityName + `: Altered: the static policies of these API servers name the controller "x"`, remedy: remedyStatic, problems: 1},
		"no controller": {servers: []apiServer{{address: "b", static: altered(func(p *policyset.Identity) { p.Controllers = nil })}},
			says: policyset.IdentityName + `: Altered: the static policies of these API servers do not name the controller "` + shippedController, remedy: remedyStatic, problems: 1},
		"another kind of cluster": {servers: []apiServer{{address: "b", static: identityOf(t, policyset.Workload, false, shippedController)}},
			says: policyset.IdentityName + `: Altered: the static policies of these API servers are written with --scope "workload", not alone: b`, remedy: remedyStatic, problems: 1},
		"each problem": {servers: []apiServer{{address: "a", static: older}, lacks},
			says: policyset.IdentityName + ": Missing: ", remedy: remedyStatic, problems: 2},
	} {
		set := &policyset.Set{}
		if c.inAPI {
			set = release(t, policyset.Alone)
		}
		check := &PolicyCheck{Scope: policyset.Alone, User: shippedController, Static: answered(c.inAPI, c.servers...)}
		state, err := check.assess(t.Context(), set.Policies, set.Bindings)
		switch {
		case err != nil || len(state.Problems) != c.problems:
			t.Errorf("%s: %v, %v", title, err, state)
		case c.problems == 0 && state.String() != c.says:
			t.Errorf("%s: %s", title, state)
		case c.problems > 0 && (!strings.HasPrefix(state.String(), c.says) || !strings.HasSuffix(state.String(), ": "+c.remedy)):
			t.Errorf("%s: %s", title, state)
		}
	}
}

// A user who may not ask for static policies does not know of a problem.
func TestForbiddenToAsk(t *testing.T) {
	forbidden := apiServer{address: "a", unknown: "patch is forbidden", forbidden: true}
	check := &PolicyCheck{Scope: policyset.Alone, User: shippedController, Static: answered(false, forbidden)}
	state, err := check.assess(t.Context(), nil, nil)
	if err != nil || !state.Forbidden || len(state.Problems) == 0 || !strings.Contains(state.String(), "; static policies of a are not known: patch is forbidden. ") {
		t.Errorf("%v, %v", state, err)
	}
	set := release(t, policyset.Alone)
	check.Static = answered(true, forbidden)
	if state, err = check.assess(t.Context(), set.Policies, set.Bindings); err != nil || state.Forbidden || len(state.Problems) > 0 {
		t.Errorf("%v, %v", state, err)
	}
}

// While an API server restarts, it is not known whether it has static policies. That is no problem
// of the policies, unless another API server has none. With the policies in the API it does not
// matter.
func TestNoAPIServerAnswers(t *testing.T) {
	set := release(t, policyset.Alone)
	away := apiServer{address: "a", unknown: "no connection", unreached: true}
	for title, c := range map[string]struct {
		servers          []apiServer
		inAPI            bool
		unknown, problem bool
	}{
		"nobody":                  {servers: []apiServer{away}, unknown: true},
		"nobody, and the API has": {servers: []apiServer{away}, inAPI: true},
		"another has none":        {servers: []apiServer{away, {address: "b"}}, problem: true},
		"it answers otherwise":    {servers: []apiServer{{address: "a", unknown: "a webhook is in the way"}}, problem: true},
	} {
		check := &PolicyCheck{Scope: policyset.Alone, User: shippedController, Static: answered(c.inAPI, c.servers...)}
		policies, bindings := set.Policies, set.Bindings
		if !c.inAPI {
			policies, bindings = nil, nil
		}
		state, err := check.assess(t.Context(), policies, bindings)
		if (err != nil) != c.unknown || err == nil && (len(state.Problems) > 0) != c.problem {
			t.Errorf("%s: %v, %v", title, state, err)
		}
	}
}

// Static policies that are in force let enforcement start. An API server without them does not.
func TestStaticPoliciesLetEnforcementStart(t *testing.T) {
	has, lacks := apiServer{address: "a", static: identityOf(t, policyset.Alone, false, shippedController)}, apiServer{address: "b"}
	for _, servers := range [][]apiServer{{has}, {has, lacks}, {lacks}} {
		p := &Preflight{Policies: []*PolicyCheck{{Scope: policyset.Alone, Client: fake.NewClientBuilder().Build(), User: shippedController, Static: answered(false, servers...)}}}
		err := p.policiesInForce(t.Context())
		var refused *Error
		if starts := err == nil; starts != (len(servers) == 1 && servers[0].hasStatic()) || !starts && !errors.As(err, &refused) {
			t.Errorf("%v: %v", servers, err)
		}
	}
}

// The guards of revocation may be static, too. What the controller fills stays in the API.
func TestStaticGuardsOfRevocation(t *testing.T) {
	set, err := policyset.Revocation(policyset.Alone)
	if err != nil {
		t.Fatal(err)
	}
	filled := &policyset.Set{Bindings: set.Bindings}
	for _, p := range set.Policies {
		if policyset.IsFilled(&p) {
			filled.Policies = append(filled.Policies, p)
		}
	}
	with, without := identityOf(t, policyset.Alone, true, shippedController), identityOf(t, policyset.Alone, false, shippedController)
	for title, c := range map[string]struct {
		servers []apiServer
		guarded bool
	}{
		"each has them":              {[]apiServer{{address: "a", static: with}, {address: "b", static: with}}, true},
		"one is unknown":             {[]apiServer{{address: "a", static: with}, {address: "b", unknown: "no connection"}}, true},
		"one has none":               {[]apiServer{{address: "a", static: with}, {address: "b", static: without}}, false},
		"one has no policies at all": {[]apiServer{{address: "a", static: with}, {address: "b"}}, false},
		"not asked":                  {nil, false},
	} {
		check := &PolicyCheck{Scope: policyset.Alone, User: shippedController, Rendered: func(string) *admissionv1.ValidatingAdmissionPolicySpec { return nil }}
		problems, err := check.assessRevocation(t.Context(), &PolicyState{static: staticAnswers{servers: c.servers}}, filled.Policies, filled.Bindings)
		if err != nil || (len(problems) == 0) != c.guarded {
			t.Errorf("%s: %v, %v", title, problems, err)
		}
		problems, err = check.assessRevocation(t.Context(), &PolicyState{static: staticAnswers{servers: c.servers}}, nil, nil)
		if err != nil || len(problems) < 2*len(filled.Policies) {
			t.Errorf("%s, and nothing in the API: %v, %v", title, problems, err)
		}
	}
}

// In audit mode the controller approves nothing. So the policy that lets only controllers approve
// is a problem, if it is in force and names no other controller.
func TestPoliciesLockOutInAuditMode(t *testing.T) {
	none := func(s *policyset.Set) { s.Policies = nil }
	static := func(controllers ...string) *StaticProber {
		return answered(false, apiServer{address: "a", static: identityOf(t, policyset.Alone, false, controllers...)}, apiServer{address: "b"})
	}
	for title, c := range map[string]struct {
		audit   bool
		others  []string
		change  func(*policyset.Set)
		static  *StaticProber
		problem bool
	}{
		"audit":                    {audit: true, problem: true},
		"enforcement":              {},
		"another controller":       {audit: true, others: []string{"system:serviceaccount:acme:controller"}},
		"no policy":                {audit: true, change: none},
		"no binding":               {audit: true, change: func(s *policyset.Set) { s.Bindings = nil }},
		"the binding warns":        {audit: true, change: func(s *policyset.Set) { setActions(s, admissionv1.Warn) }},
		"the policy names another": {audit: true, change: func(s *policyset.Set) { s.Policies[0].Spec.Variables[0].Expression = "['admin']" }},

		"static on one API server":     {audit: true, change: none, static: static(shippedController), problem: true},
		"static, enforcement":          {change: none, static: static(shippedController)},
		"static, names another":        {audit: true, change: none, static: static("admin")},
		"static, another controller":   {audit: true, others: []string{"admin"}, change: none, static: static(shippedController, "admin")},
		"static, and no policy at all": {audit: true, change: none, static: answered(false, apiServer{address: "b"})},
	} {
		t.Run(title, func(t *testing.T) {
			set := release(t, policyset.Alone).Clone()
			if c.change != nil {
				c.change(set)
			}
			check := &PolicyCheck{Scope: policyset.Alone, User: shippedController, Others: c.others, Audit: c.audit, Static: c.static}
			state, err := check.assess(t.Context(), set.Policies, set.Bindings)
			if err != nil || LocksOut(state.Problems) != c.problem {
				t.Errorf("%v, %v", state, err)
			}
		})
	}
}

func setActions(s *policyset.Set, actions ...admissionv1.ValidationAction) {
	for i := range s.Bindings {
		s.Bindings[i].Spec.ValidationActions = actions
	}
}
