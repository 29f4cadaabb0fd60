// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
)

// sum returns a fingerprint, and id its credential ID.
func sum(n int) string { return fmt.Sprintf("%064x", n) }
func id(n int) string  { return revocation.X509Prefix + sum(n) }

func revokedCertificate(node string, n int) v1alpha1.RevokedCertificate {
	return v1alpha1.RevokedCertificate{NodeName: node, SHA256: sum(n)}
}

func currentCertificate(node string, n int) v1alpha1.CurrentCertificate {
	return v1alpha1.CurrentCertificate{NodeName: node, SHA256: sum(n)}
}

func listsFor(t testing.TB, specs ...v1alpha1.RevocationSliceSpec) *Lists {
	t.Helper()
	l := listsOf(specs, nil, nil)
	if l.problem != nil {
		t.Fatal(l.problem)
	}
	return l
}

// asks returns a request of a node with certificates. what is "verb group/resource/subresource
// namespace/name", or a verb and a path.
func asks(node, what string, credentials ...int) Request {
	r := Request{User: "system:node:" + node, Groups: []string{"system:nodes", "system:authenticated"}}
	for _, n := range credentials {
		r.Credentials = append(r.Credentials, id(n))
	}
	fields := strings.Fields(what)
	if strings.HasPrefix(fields[1], "/healthz") {
		return r
	}
	a := &authorizationv1.ResourceAttributes{Verb: fields[0]}
	resource := strings.Split(fields[1], "/")
	a.Group, a.Resource = resource[0], resource[1]
	if len(resource) > 2 {
		a.Subresource = resource[2]
	}
	if len(fields) > 2 {
		a.Namespace, a.Name, _ = strings.Cut(fields[2], "/")
	}
	r.Resource = a
	return r
}

// A node with a revoked certificate may attest with it, and nothing else. A suspended one may do
// nothing. Its current certificate may do everything.
func TestDecide(t *testing.T) {
	t.Parallel()
	lists := listsFor(t,
		v1alpha1.RevocationSliceSpec{
			Number: 1,
			Certificates: []v1alpha1.RevokedCertificate{
				revokedCertificate("revoked", 1), {NodeName: "suspended", SHA256: sum(2), Suspended: true, NodeSuspended: true},
				{NodeName: "replaced", SHA256: sum(3), Suspended: true},
			},
			Current: []v1alpha1.CurrentCertificate{currentCertificate("revoked", 11), currentCertificate("suspended", 12)},
		},
		v1alpha1.RevocationSliceSpec{Number: revocation.PolicyCount + 1, Certificates: []v1alpha1.RevokedCertificate{revokedCertificate("revoked", 4)}},
		v1alpha1.RevocationSliceSpec{Number: revocation.PolicyCount + 2,
			Certificates: []v1alpha1.RevokedCertificate{revokedCertificate("no-room", 6)}, Current: []v1alpha1.CurrentCertificate{currentCertificate("no-room", 16)},
		})
	lists.revoked[id(7)] = true // a record says so, and no list has its node
	const get, lease = "get /secrets apps/password", "update coordination.k8s.io/leases kube-node-lease/revoked"
	for name, c := range map[string]struct {
		request Request
		verdict Verdict
		cause   Cause
	}{
		"another node":                        {asks("other", get, 21), NoOpinion, ""},
		"revoked in a record":                 {asks("no-list", get, 7), Deny, Revoked},
		"revoked in a record, create request": {asks("no-list", "create certificates.k8s.io/certificatesigningrequests", 7), NoOpinion, ""},
		"another of that node":                {asks("no-list", get, 8), NoOpinion, ""},
		"read":                                {asks("revoked", get, 1), Deny, Revoked},
		"write":                               {asks("revoked", lease, 1), Deny, Revoked},
		"logs":                                {asks("revoked", "get /pods/log apps/web", 1), Deny, Revoked},
		"proxy":                               {asks("revoked", "get /nodes/proxy /revoked", 1), Deny, Revoked},
		"path":                                {asks("revoked", "get /healthz", 1), Deny, Revoked},
		"another of its certificates":         {asks("revoked", get, 4), Deny, Revoked},
		"current":                             {asks("revoked", get, 11), NoOpinion, ""},
		"unknown":                             {asks("revoked", get, 99), Unlisted, Revoked},
		"impersonated":                        {asks("revoked", get), Deny, Revoked},
		"a current one of another node":       {asks("revoked", get, 16), Unlisted, Revoked},
		"create request":                      {asks("revoked", "create certificates.k8s.io/certificatesigningrequests", 1), NoOpinion, ""},
		"approve request":                     {asks("revoked", "update certificates.k8s.io/certificatesigningrequests/approval /r", 1), Deny, Revoked},
		"delete request":                      {asks("revoked", "delete certificates.k8s.io/certificatesigningrequests /r", 1), Deny, Revoked},
		"create request of another group":     {asks("revoked", "create example.com/certificatesigningrequests", 1), Deny, Revoked},
		"get request":                         {asks("revoked", "get certificates.k8s.io/certificatesigningrequests /r", 1), NoOpinion, ""},
		"watch request":                       {asks("revoked", "watch certificates.k8s.io/certificatesigningrequests /r", 1), NoOpinion, ""},
		"list request":                        {asks("revoked", "list certificates.k8s.io/certificatesigningrequests /r", 1), NoOpinion, ""},
		"list all requests":                   {asks("revoked", "list certificates.k8s.io/certificatesigningrequests", 1), Deny, Revoked},
		"watch all requests":                  {asks("revoked", "watch certificates.k8s.io/certificatesigningrequests", 1), Deny, Revoked},
		"who am I":                            {asks("revoked", "create authentication.k8s.io/selfsubjectreviews", 1), NoOpinion, ""},
		"what may I":                          {asks("revoked", "create authorization.k8s.io/selfsubjectaccessreviews", 1), Deny, Revoked},
		"announcement":                        {asks("revoked", "get /configmaps kube-public/node-attestation-renewal", 1), NoOpinion, ""},
		"watch announcement":                  {asks("revoked", "watch /configmaps kube-public/node-attestation-renewal", 1), Deny, Revoked},
		"another ConfigMap":                   {asks("revoked", "get /configmaps kube-public/cluster-info", 1), Deny, Revoked},
		"announcement elsewhere":              {asks("revoked", "get /configmaps apps/node-attestation-renewal", 1), Deny, Revoked},
		"suspended":                           {asks("suspended", get, 2), Deny, Suspended},
		"suspended, unknown":                  {asks("suspended", get, 99), Unlisted, Suspended},
		"suspended, create request":           {asks("suspended", "create certificates.k8s.io/certificatesigningrequests", 2), Deny, Suspended},
		"suspended, who am I":                 {asks("suspended", "create authentication.k8s.io/selfsubjectreviews", 2), Deny, Suspended},
		"suspended, current":                  {asks("suspended", get, 12), NoOpinion, ""},
		"machine of a replaced node":          {asks("replaced", "create certificates.k8s.io/certificatesigningrequests", 3), Deny, Suspended},
		"replaced, with another":              {asks("replaced", "create certificates.k8s.io/certificatesigningrequests", 99), NoOpinion, ""},
		"no room in policies":                 {asks("no-room", get, 6), Deny, Revoked},
		"no room in policies, current one":    {asks("no-room", get, 16), NoOpinion, ""},
	} {
		if d := lists.Decide(c.request); d != (Decision{c.verdict, c.cause}) {
			t.Errorf("%s: %v", name, d)
		}
	}
}

func TestTokensOfSuspendedNodes(t *testing.T) {
	t.Parallel()
	lists := listsOf(nil, []string{"a"}, nil)
	for node, want := range map[string]Decision{"a": {Deny, SuspendedToken}, "b": {NoOpinion, ""}} {
		// The controller's own token is as good for a thief. The policy refuses it, too.
		for _, user := range []string{"system:serviceaccount:apps:web", "system:serviceaccount:node-attestation-system:node-attestation-controller"} {
			r := Request{User: user, TokenNodes: []string{node}}
			if d := lists.Decide(r); d != want {
				t.Errorf("%s on %s: %v", user, node, d)
			}
		}
	}
	if d := lists.Decide(asks("a", "get /secrets a/b", 1)); d.Verdict != NoOpinion {
		t.Errorf("the name alone makes no certificate void: %v", d)
	}
}

// What a policy refuses, the authorizer denies, and the reverse: for writes, except those of the
// node's return. The policy's literals are read from what the API server gets.
func TestDecideIsWhatPoliciesSay(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	refused := map[Cause]int{}
	for range 300 {
		specs := randomLists(random)
		var policies []admissionv1.ValidatingAdmissionPolicySpec
		for _, spec := range specs {
			policy, err := revocation.RenderPolicy(spec, []string{attestation.HelloSignerName})
			if err != nil {
				t.Fatal(err)
			}
			policies = append(policies, policy)
		}
		lists := listsFor(t, specs...)
		for _, node := range []string{"a", "b", "c", "d"} {
			for n := range 14 {
				request := asks(node, "update /nodes /"+node, n)
				if n == 0 {
					request.Credentials = nil
				}
				if n == 13 {
					request = asks(node, "create certificates.k8s.io/certificatesigningrequests", random.IntN(13))
				}
				var want Cause
				for _, policy := range policies {
					if cause := refusal(t, policy, request, n == 13); cause != "" && want != Suspended {
						want = cause
					}
				}
				if len(lists.byUser[request.User]) == 0 && request.has(lists.revoked) {
					continue // there is no such certificate: it would be of two nodes
				}
				d := lists.Decide(request)
				if d.Cause != want || (d.Verdict == NoOpinion) != (want == "") {
					t.Fatalf("%+v: %v, but policies say %q: %+v", request, d, want, specs)
				}
				refused[want]++
			}
		}
	}
	if refused[Revoked] < 100 || refused[Suspended] < 100 || refused[""] < 100 {
		t.Errorf("too little was compared: %v", refused)
	}
}

// randomLists returns lists with policies. Their content need not make sense.
func randomLists(random *rand.Rand) (specs []v1alpha1.RevocationSliceSpec) {
	for number := range random.IntN(3) {
		spec := v1alpha1.RevocationSliceSpec{Number: int32(number) + 1}
		for range random.IntN(4) {
			c := revokedCertificate(string(rune('a'+random.IntN(4))), 1+random.IntN(6))
			c.Suspended = random.IntN(2) == 0
			c.NodeSuspended = c.Suspended && random.IntN(2) == 0
			spec.Certificates = append(spec.Certificates, c)
		}
		for range random.IntN(3) {
			spec.Current = append(spec.Current, currentCertificate("a", 6+random.IntN(6)))
		}
		specs = append(specs, spec)
	}
	return specs
}

var literals = regexp.MustCompile(`\[(?:'[^']*',?)*\]`)

// refusal returns the message of a policy for a write, as its cause. attesting says that the write
// creates a request for one of the policy's signers. The form of each expression is fixed here: a
// change of its meaning must change Decide, too.
func refusal(t *testing.T, policy admissionv1.ValidatingAdmissionPolicySpec, r Request, attesting bool) Cause {
	t.Helper()
	in := func(expression, form, value string) bool {
		if is := literals.ReplaceAllString(expression, "LIST"); is != form && expression != "false" {
			t.Fatalf("%q is not %q", is, form)
		}
		return strings.Contains(literals.FindString(expression), "'"+value+"'")
	}
	hasCredential := func(expression string) bool {
		const form = "variables.credentials.exists(id, id in LIST)"
		return in(expression, form, "X") || slices.ContainsFunc(r.Credentials, func(id string) bool { return in(expression, form, id) })
	}
	if !in(policy.MatchConditions[0].Expression, "has(request.userInfo.username) && request.userInfo.username in LIST", r.User) {
		return ""
	}
	suspended, current := false, false
	for _, v := range policy.Variables {
		switch {
		case v.Name == "suspendedNode":
			suspended = in(v.Expression, "request.userInfo.username in LIST", r.User)
		case v.Name == "suspended":
			suspended = hasCredential(strings.TrimPrefix(v.Expression, "variables.suspendedNode || ")) || suspended
		case strings.HasPrefix(v.Name, "current"):
			current = current || hasCredential(v.Expression)
		}
	}
	one, two := policy.Validations[0], policy.Validations[1]
	isCurrent := strings.TrimPrefix(one.Expression, "!variables.suspended || ")
	if two.Expression != "variables.suspended || variables.attesting || "+isCurrent || one.Message != Suspended.message() || two.Message != Revoked.message() {
		t.Fatalf("%+v", policy.Validations)
	}
	switch {
	case suspended && !current:
		return Suspended
	case !suspended && !attesting && !current:
		return Revoked
	}
	return ""
}

// The requester is what the API server says, and a list of another user says nothing.
func TestRequest(t *testing.T) {
	t.Parallel()
	r := newRequest(authorizationv1.SubjectAccessReviewSpec{User: "system:node:a", Extra: map[string]authorizationv1.ExtraValue{
		"authentication.kubernetes.io/credential-id": {id(1)}, "authentication.kubernetes.io/node-name": {"b"},
	}})
	if node, ok := r.node(); node != "a" || !ok || !slices.Equal(r.Credentials, []string{id(1)}) || !slices.Equal(r.TokenNodes, []string{"b"}) {
		t.Errorf("%+v", r)
	}
	if d := (&Lists{}).Decide(r); d.Verdict != NoOpinion {
		t.Errorf("empty lists: %v", d)
	}
}

func TestDecideStrict(t *testing.T) {
	t.Parallel()
	lists := listsOf(nil, nil, map[string]Certificate{id(1): {"a", time.Now()}})
	const get = "get /secrets apps/password"
	unnamed := asks("a", get, 1)
	unnamed.User = "somebody"
	token := Request{User: "system:serviceaccount:a:b", TokenNodes: []string{"a"}, Groups: []string{"system:serviceaccounts"}}
	for name, c := range map[string]struct {
		request Request
		verdict Verdict
	}{
		"recorded":                        {asks("a", get, 1), NoOpinion},
		"another certificate":             {asks("a", get, 2), Unlisted},
		"another node's certificate":      {asks("b", get, 1), Unlisted},
		"impersonated":                    {asks("a", get), Deny},
		"a member of the group":           {unnamed, Deny},
		"unattested":                      {asks("control-plane", get, 3), NoOpinion},
		"unattested, another name":        {asks("control-plane-2", get, 3), Unlisted},
		"create request":                  {asks("a", "create certificates.k8s.io/certificatesigningrequests", 2), NoOpinion},
		"announcement":                    {asks("a", "get /configmaps kube-public/node-attestation-renewal", 2), NoOpinion},
		"write, which tells it to attest": {asks("a", "patch /nodes /a", 2), Unlisted},
		"token":                           {token, NoOpinion},
		"another user":                    {Request{User: "admin", Groups: []string{"system:masters"}}, NoOpinion},
	} {
		d := lists.DecideStrict(c.request, func(node string) bool { return node == "control-plane" })
		if d.Verdict != c.verdict || (d.Cause == Unrecorded) != (c.verdict != NoOpinion) {
			t.Errorf("%s: %v", name, d)
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	var specs []v1alpha1.RevocationSliceSpec
	for number := range 10 {
		spec := v1alpha1.RevocationSliceSpec{Number: int32(number) + 1}
		for i := range 1000 {
			node := fmt.Sprintf("node-%d-%d", number, i)
			spec.Certificates = append(spec.Certificates, revokedCertificate(node, 10_000*number+i))
			spec.Current = append(spec.Current, currentCertificate(node, 1_000_000+10_000*number+i))
		}
		specs = append(specs, spec)
	}
	lists := listsFor(b, specs...)
	r := asks("node-9-999", "get /secrets a/b", 90_999)
	for b.Loop() {
		if d := lists.Decide(r); d.Verdict != Deny {
			b.Fatal(d)
		}
	}
}
