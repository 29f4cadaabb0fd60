// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	caSecret  = "node-attestation-ca"
	keySecret = "node-attestation-controller-key"
	inventory = "node-attestation-inventory"
	eventsAPI = "events.k8s.io"
	recordAPI = "attestation.cluster.x-k8s.io"
	admission = "admissionregistration.k8s.io"

	// noWatchList has client-go list before it watches, as it does with API servers before
	// Kubernetes 1.32.
	noWatchList = "KUBE_FEATURE_WatchListClient"
)

// role is one that the controller's service account is bound to. namespace is empty for a
// ClusterRole.
type role struct {
	namespace, name string
	rules           []rbacv1.PolicyRule
}

// roles are all that the account is bound to, under any name.
func (l *live) roles(t *testing.T) []role {
	t.Helper()
	return l.rolesOf(t, account, namespace)
}

// rolesOf are all that a subject is bound to. A group has no namespace.
func (l *live) rolesOf(t *testing.T, name, namespace string) (all []role) {
	t.Helper()
	api := l.admin.RbacV1()
	ours := func(subjects []rbacv1.Subject) bool {
		return slices.ContainsFunc(subjects, func(s rbacv1.Subject) bool { return s.Name == name && s.Namespace == namespace })
	}
	clusterBindings, err := api.ClusterRoleBindings().List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	for _, b := range clusterBindings.Items {
		if ours(b.Subjects) {
			found, err := api.ClusterRoles().Get(t.Context(), b.RoleRef.Name, metav1.GetOptions{})
			harness.Must(t, err)
			all = append(all, role{name: found.Name, rules: found.Rules})
		}
	}
	bindings, err := api.RoleBindings("").List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	for _, b := range bindings.Items {
		if ours(b.Subjects) {
			found, err := api.Roles(b.Namespace).Get(t.Context(), b.RoleRef.Name, metav1.GetOptions{})
			harness.Must(t, err)
			all = append(all, role{b.Namespace, found.Name, found.Rules})
		}
	}
	return all
}

// write replaces the rules of a role.
func (l *live) write(t *testing.T, r role) {
	t.Helper()
	meta := metav1.ObjectMeta{Name: r.name, Namespace: r.namespace}
	var err error
	if r.namespace == "" {
		_, err = l.admin.RbacV1().ClusterRoles().Update(t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: r.rules}, metav1.UpdateOptions{})
	} else {
		_, err = l.admin.RbacV1().Roles(r.namespace).Update(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: r.rules}, metav1.UpdateOptions{})
	}
	harness.Must(t, err)
}

// atoms are the smallest rights in a role: one verb on one resource, of one name if the rule has
// names.
func (r role) atoms() (all []right) {
	for _, rule := range r.rules {
		for _, verb := range rule.Verbs {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, name := range append(rule.ResourceNames, "")[:max(1, len(rule.ResourceNames))] {
						all = append(all, right{verb, group, resource, r.namespace, name})
					}
				}
			}
		}
	}
	return all
}

// without returns the role without one atom.
func (r role) without(missing right) role {
	left := role{namespace: r.namespace, name: r.name}
	for _, a := range r.atoms() {
		if a == missing {
			continue
		}
		rule := rbacv1.PolicyRule{Verbs: []string{a.verb}, APIGroups: []string{a.group}, Resources: []string{a.resource}}
		if a.name != "" {
			rule.ResourceNames = []string{a.name}
		}
		left.rules = append(left.rules, rule)
	}
	return left
}

// covers reports whether a rule allows a request.
func (r right) covers(asked right) bool {
	return r.verb == asked.verb && r.group == asked.group && r.resource == asked.resource &&
		(r.name == "" || r.name == asked.name) && (r.namespace == "" || r.namespace == asked.namespace)
}

// askedFor returns the right that a request needs. It returns false if the request is for no
// resource.
func askedFor(e testbed.AuditEvent) (right, bool) {
	if e.Resource == "" {
		return right{}, false
	}
	r := right{verb: e.Verb, resource: e.Resource, name: e.Name}
	if e.Subresource != "" {
		r.resource += "/" + e.Subresource
	}
	path, _, _ := strings.Cut(e.RequestURI, "?")
	parts := strings.Split(strings.Trim(path, "/"), "/")
	if parts[0] == "apis" { // /apis/<group>/<version>/..., /api/<version>/...
		r.group, parts = parts[1], parts[1:]
	}
	if parts = parts[2:]; parts[0] == "namespaces" && len(parts) > 2 {
		r.namespace = parts[1]
	}
	if r.verb == "create" {
		r.name = "" // RBAC is not told
	}
	return r, true
}

// asked returns the controller's requests since a mark, and the refused ones.
func (l *live) asked(t *testing.T, mark testbed.AuditMark) (used map[right]bool, forbidden []testbed.AuditEvent) {
	t.Helper()
	return l.askedBy(t, controllerUser, mark)
}

func (l *live) askedBy(t *testing.T, user string, mark testbed.AuditMark) (used map[right]bool, forbidden []testbed.AuditEvent) {
	t.Helper()
	events, err := l.AuditSince(mark)
	harness.Must(t, err)
	used = map[right]bool{}
	for _, e := range events {
		r, ok := askedFor(e)
		switch {
		case e.User != user || !ok:
		case r.verb == "patch" && r.resource == requests+"/approval" && strings.Contains(e.RequestURI, "dryRun=All"):
			// A policy refuses it, which is what it is for. That there is the right to patch is
			// shown by the approvals.
		case e.Code == 403:
			forbidden = append(forbidden, e)
		default:
			used[r] = true
			// The API server's own admission asks for these on the controller's behalf.
			if verb := map[string]string{requests + "/approval": "approve", requests + "/status": "sign"}[r.resource]; verb != "" && e.Code == 200 {
				used[right{verb: verb, group: certs, resource: "signers", name: l.get(t, r.name).Spec.SignerName}] = true
			}
		}
	}
	return used, forbidden
}

// approveOnly leaves the signing to kube-controller-manager.
func approveOnly(c *config.Config) {
	c.Signers = []config.Signer{{Name: builtinSigner, Shared: true}}
	c.Signing = config.Signing{Mode: config.ApproveOnly}
}

// The shipped controller does everything that it can do, with the shipped rights. The API server
// refuses nothing, and no right is unused. Then each right is removed once, the controller
// does what needs it, and is refused exactly that.
func TestRBACIsLeast(t *testing.T) {
	t.Parallel()
	l := newLive(t)
	m := l.newMachine(t, "walk")
	early := l.file(t, tpmSigner, hopeless)
	harness.Must(t, decide(t.Context(), l.admin, early, certificatesv1.CertificateApproved, nil))
	l.install(t)
	l.inventoried(t, m)
	t.Run("as it is", func(t *testing.T) { l.usesEverything(t, m, early) })
	t.Run("less by one", func(t *testing.T) { l.missesEach(t, m) })
	t.Run("refused writes", func(t *testing.T) { l.reportsRefusedWrites(t, m) })
}

// usesEverything makes the controller do everything that it can do.
func (l *live) usesEverything(t *testing.T, m *machine, early string) {
	// Its key, leader election, and an enrolment.
	l.startReady(t, nil)
	m.begin(t).succeeds(t)
	l.unbind(t)(t)
	// Requests that others approved before the policies, and contradictory ones.
	if reason := l.reasonOf(t, early, certificatesv1.CertificateFailed); reason != "ApprovedWithoutAttestation" {
		t.Errorf("failed: %s", reason)
	}
	nodes := l.admin.CoreV1().Nodes()
	_, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	harness.Must(t, err)
	denied := l.file(t, tpmSigner, hopeless)
	for _, name := range []string{denied, m.filesHopeless(t)} {
		l.reasonOf(t, name, certificatesv1.CertificateDenied)
	}
	// The record has the name of its machine.
	for about, in := range map[string]string{denied: metav1.NamespaceDefault, nodeName: metav1.NamespaceDefault, m.Name: namespace} {
		harness.Eventually(t, patience, "an Event on "+about, func() bool {
			list, err := l.admin.EventsV1().Events(in).List(t.Context(), metav1.ListOptions{FieldSelector: "regarding.name=" + about})
			harness.Must(t, err)
			return len(list.Items) > 0
		})
	}
	// with a Node without a record, the controller does not start
	harness.Must(t, nodes.Delete(t.Context(), nodeName, metav1.DeleteOptions{}))
	// The machine has lost its certificate.
	m.begin(t).succeeds(t)
	for _, hello := range l.ofNode(t, helloSigner, m.Name) {
		l.reasonOf(t, hello.Name, certificatesv1.CertificateDenied)
	}
	// Another signer issues.
	l.startReady(t, approveOnly)
	harness.Must(t, l.StartControllerManager(t.Context()))
	m.Signer = builtinSigner
	m.begin(t).succeeds(t)
	m.Signer = tpmSigner
	harness.Eventually(t, patience, "the certificate is noted", func() bool {
		return strings.Count(l.kubectl(t, "get", "nodeattestations", m.Name, "--namespace="+namespace, "--output=jsonpath={.status.certificates[*].sha256}"), " ") == 2
	})
	harness.Must(t, l.StopControllerManager())
	// Nothing is touched. In passing, the API server is one that does not send what there is at the
	// start of a watch.
	l.setEnv(t, noWatchList+"=false")
	l.startReady(t, func(c *config.Config) { c.Audit = true })
	untouched := l.file(t, tpmSigner, hopeless)
	harness.Eventually(t, patience, "it is decided on in the log", func() bool { return strings.Contains(l.log(t, 0), untouched) })
	l.stop(t)
	if csr := l.get(t, untouched); len(csr.Status.Conditions) > 0 {
		t.Errorf("touched in audit mode: %+v", csr.Status)
	}

	l.rightsAreExact(t)
}

// rightsAreExact checks that the controller was refused nothing so far, and has used each right
// that it has.
func (l *live) rightsAreExact(t *testing.T) {
	t.Helper()
	used, forbidden := l.asked(t, 0)
	for _, e := range forbidden {
		t.Errorf("refused: %s %s", e.Verb, e.RequestURI)
	}
	// Every authenticated user may ask who it is, by the API server's own role system:basic-user.
	granted := []right{{"create", "authentication.k8s.io", "selfsubjectreviews", "", ""}}
	for _, r := range l.roles(t) {
		granted = append(granted, r.atoms()...)
	}
	for r := range used {
		if !slices.ContainsFunc(granted, func(g right) bool { return g.covers(r) }) {
			t.Errorf("used, and not granted: %s", r)
		}
	}
	for _, g := range granted {
		if !g.isForClouds() && !slices.ContainsFunc(slices.Collect(maps.Keys(used)), g.covers) {
			t.Errorf("granted, and not used: %s", g)
		}
	}
	t.Logf("%d rights are granted, %d kinds of requests were made", len(granted), len(used))
}

// log returns the controller's log from a byte on, without the backslashes of quoted quotes.
func (l *live) log(t *testing.T, from int) string {
	t.Helper()
	data, err := os.ReadFile(l.controller.LogFile())
	harness.Must(t, err)
	return strings.ReplaceAll(string(data[min(from, len(data)):]), `\`, "")
}

// refusal returns the API server's message about a missing right.
func (r right) refusal() string {
	if r.resource == "signers" {
		return fmt.Sprintf("user not permitted to %s requests with signerName %q", r.verb, r.name)
	}
	return fmt.Sprintf("User %q cannot %s resource %q in API group %q", controllerUser, r.verb, r.resource, r.group)
}

// isForClouds reports whether a right is for the evidence of clouds, which this controller does not
// accept. TestInstanceBecomesReady of test/cloud uses these.
func (r right) isForClouds() bool {
	return r.resource == "signers" && slices.Contains(clouds, r.name)
}

// request returns the request that shows that the right is missing.
func (r right) request() right {
	if r.resource != "signers" {
		return r
	}
	return right{verb: "patch", group: certs, resource: requests + map[string]string{"approve": "/approval", "sign": "/status"}[r.verb]}
}

// provocation makes the controller do something that needs a missing right. The returned function
// is called when the controller has the right again. It checks that the controller recovers.
type provocation func(t *testing.T) (goesOn func(t *testing.T))

// missesEach removes each right of the controller while it runs.
func (l *live) missesEach(t *testing.T, m *machine) {
	nothing := func(*testing.T) {}
	enrol := func(t *testing.T) func(*testing.T) {
		// A record that was deleted by hand is made again.
		l.kubectl(t, "delete", "nodeattestations", "--all", "--namespace="+namespace)
		e := m.begin(t)
		return func(t *testing.T) { e.succeeds(t) }
	}
	refuse := func(signer string) provocation {
		return func(t *testing.T) func(*testing.T) {
			name := l.file(t, signer, hopeless)
			return func(t *testing.T) { l.reasonOf(t, name, certificatesv1.CertificateDenied) }
		}
	}
	// The hello of this proof is not in the cache.
	refuseProof := func(t *testing.T) func(*testing.T) {
		name := l.file(t, tpmSigner, hopelessProof)
		return func(t *testing.T) { l.reasonOf(t, name, certificatesv1.CertificateDenied) }
	}
	// A value from an object is used for half a second.
	unread := func(then provocation) provocation {
		return func(t *testing.T) func(*testing.T) {
			time.Sleep(600 * time.Millisecond)
			return then(t)
		}
	}
	waitFor := func(*testing.T) func(*testing.T) { return nothing } // it is done every other second
	restart := func(t *testing.T) func(*testing.T) {
		l.start(t, nil)
		return func(t *testing.T) { harness.Must(t, l.controller.Ready(t.Context())) }
	}
	restartListing := func(t *testing.T) func(*testing.T) {
		l.setEnv(t, noWatchList+"=false")
		return restart(t)
	}
	loseLease := func(t *testing.T) func(*testing.T) {
		l.kubectl(t, "delete", "leases", account, "--namespace="+namespace)
		return func(t *testing.T) {
			harness.Eventually(t, patience, "the lease is there", func() bool {
				_, err := l.admin.CoordinationV1().Leases(namespace).Get(t.Context(), account, metav1.GetOptions{})
				return err == nil
			})
		}
	}
	type row struct {
		right
		provoke provocation
	}
	running := []row{
		{right{"approve", certs, "signers", "", helloSigner}, refuse(helloSigner)},
		{right{"approve", certs, "signers", "", tpmSigner}, refuse(tpmSigner)},
		{right{"patch", certs, requests + "/approval", "", ""}, refuse(helloSigner)},
		{right{"create", eventsAPI, "events", "default", ""}, func(t *testing.T) func(*testing.T) {
			refuse(helloSigner)(t)
			return nothing // a refused Event is not written again
		}},
		{right{"create", eventsAPI, "events", namespace, ""}, func(t *testing.T) func(*testing.T) {
			m.filesHopeless(t)
			return nothing
		}},
		{right{"get", "", "configmaps", namespace, inventory}, unread(refuse(tpmSigner))},
		// it is compared every few seconds
		{right{"get", "", "configmaps", "kube-system", "extension-apiserver-authentication"}, waitFor},
		{right{"list", recordAPI, "nodeattestations", namespace, ""}, refuse(tpmSigner)},
		{right{"get", "", "nodes", "", ""}, refuse(tpmSigner)},
		{right{"patch", certs, requests, "", ""}, enrol},
		{right{"get", certs, requests, "", ""}, refuseProof},
		{right{"create", recordAPI, "nodeattestations", namespace, ""}, enrol},
		{right{"update", recordAPI, "nodeattestations", namespace, ""}, enrol},
		{right{"patch", certs, requests + "/status", "", ""}, enrol},
		{right{"sign", certs, "signers", "", tpmSigner}, enrol},
		{right{"get", "", "secrets", namespace, caSecret}, unread(enrol)},
		{right{"get", "", "secrets", namespace, keySecret}, waitFor},
		{right{"update", "", "secrets", namespace, keySecret}, func(t *testing.T) func(*testing.T) {
			l.kubectl(t, "patch", "secret", keySecret, "--namespace="+namespace, "--type=json", `--patch=[{"op": "remove", "path": "/data"}]`)
			return func(t *testing.T) {
				harness.Eventually(t, patience, "there is a key again", func() bool {
					secret, err := l.admin.CoreV1().Secrets(namespace).Get(t.Context(), keySecret, metav1.GetOptions{})
					harness.Must(t, err)
					return len(secret.Data) > 0
				})
			}
		}},
		{right{"update", lease, "leases", namespace, account}, waitFor},
		{right{"get", lease, "leases", namespace, account}, loseLease},
		{right{"create", lease, "leases", namespace, ""}, loseLease},
		{right{"get", "", "namespaces/status", "", namespace}, l.unbind},
		{right{"patch", "", "namespaces/status", "", namespace}, l.unbind},
		{right{"get", "discovery.k8s.io", "endpointslices", "", "kubernetes"}, l.unbind},
	}
	starting := []row{
		{right{"create", "", "events", namespace, ""}, restart}, // that it leads
		{right{"watch", certs, requests, "", ""}, restart},
		{right{"list", certs, requests, "", ""}, restartListing},
		{right{"watch", recordAPI, "nodeattestations", namespace, ""}, restart},
		{right{"watch", rbac, "clusterrolebindings", "", ""}, restart},
		{right{"list", rbac, "clusterrolebindings", "", ""}, restartListing},
		{right{"list", "", "nodes", "", ""}, restart},
		{right{"watch", admission, "validatingadmissionpolicies", "", ""}, restart},
		{right{"watch", admission, "validatingadmissionpolicybindings", "", ""}, restart},
		{right{"list", admission, "validatingadmissionpolicies", "", ""}, restartListing},
		{right{"list", admission, "validatingadmissionpolicybindings", "", ""}, restartListing},
	}
	approving := []row{{right{"approve", certs, "signers", "", builtinSigner}, refuse(builtinSigner)}}

	left := map[right]role{}
	for _, r := range l.roles(t) {
		for _, a := range r.atoms() {
			left[a] = r
		}
	}
	each := func(rows []row) {
		for _, row := range rows {
			from, granted := left[row.right]
			if !granted {
				t.Errorf("not in rbac.yaml, or twice in this test: %s", row.right)
				continue
			}
			delete(left, row.right)
			t.Run(row.String(), func(t *testing.T) { l.misses(t, from, row.right, row.provoke) })
		}
	}
	l.startReady(t, nil)
	each(running)
	each(starting)
	l.startReady(t, approveOnly)
	each(approving)
	maps.DeleteFunc(left, func(r right, _ role) bool { return r.isForClouds() })
	for r := range left {
		t.Errorf("in rbac.yaml, and nothing shows that it is missed: %s", r)
	}
}

// unbind deletes a binding. Then the condition on the namespace changes, and the API servers are
// asked for static policies.
func (l *live) unbind(t *testing.T) (rebind func(*testing.T)) {
	inForce := func(status string) {
		l.kubectl(t, "wait", "--for=condition=NodeAttestationPoliciesInForce="+status, "namespace/"+namespace, "--timeout=20s")
	}
	harness.Must(t, l.admin.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(t.Context(), sizePolicy, metav1.DeleteOptions{}))
	return func(t *testing.T) {
		l.kubectl(t, "annotate", "validatingadmissionpolicy", sizePolicy, "test=again", "--overwrite")
		inForce("false")
		l.kubectl(t, "apply", "--server-side", "--filename="+filepath.Join(manifests, "policies.yaml"))
		inForce("true")
	}
}

// misses removes a right. The API server's audit log must show that the controller was refused
// that call and nothing else. The controller's log must report it.
func (l *live) misses(t *testing.T, from role, missing right, provoke provocation) {
	mark, err := l.AuditMark()
	harness.Must(t, err)
	before := l.controller
	logged := len(l.log(t, 0))
	l.write(t, from.without(missing))
	l.await(t, missing, false)
	goesOn := provoke(t)
	if l.controller != before {
		logged = 0
	}
	harness.Eventually(t, patience, "it is refused, and says so", func() bool {
		_, forbidden := l.asked(t, mark)
		return len(forbidden) > 0 && strings.Contains(l.log(t, logged), missing.refusal())
	})
	l.write(t, from)
	l.await(t, missing, true)
	goesOn(t)
	_, forbidden := l.asked(t, mark)
	for _, e := range forbidden {
		if r, _ := askedFor(e); !missing.request().covers(r) {
			t.Errorf("refused, too: %s", r)
		}
	}
}

// await waits until the authorizer applies that the controller has, or lacks, a right.
func (l *live) await(t *testing.T, r right, has bool) {
	t.Helper()
	harness.Eventually(t, patience, fmt.Sprintf("%s is %v", r, has), func() bool {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: controllerUser, ResourceAttributes: r.attributes()}}
		answer, err := l.admin.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
		harness.Must(t, err)
		return answer.Status.Allowed == has
	})
}
