// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// revokedRounds is how often each state is measured, in turn, so that what else the computer
	// does slows them all alike. revokedRequests is how many requests of each kind a requester
	// makes each time.
	revokedRounds, revokedRequests = 6, 500
	// settles is longer than the API server needs to notice a changed policy, or a changed file.
	settles = 5 * time.Second

	// renewedNode has a new certificate since its old one was revoked.
	renewedNode = "renewed"

	revocationPolicies = module + "/packaging/kubernetes-revocation/component/policies.yaml"
	revocationCRDs     = module + "/packaging/kubernetes-revocation/component/crd.yaml"
)

// leaseholder updates a Lease again and again, as a kubelet does, and reads it.
type leaseholder struct {
	name  string
	api   kubernetes.Interface
	lease *coordinationv1.Lease
}

// revokedState is how many certificates are revoked while requests are measured, and what refuses
// them.
type revokedState struct {
	name string
	// policies says that the policies of packaging/kubernetes-revocation are there, and authorizer
	// that the API server asks the authorizer.
	policies, authorizer bool
	certificates         int
}

var revokedStates = []revokedState{
	{name: "neither"}, {name: "policies as shipped", policies: true},
	{name: "policies, 1,000 revoked", policies: true, certificates: 1000},
	{name: "policies, 5,000 revoked", policies: true, certificates: 5000},
	{name: "authorizer, 1,000 revoked", authorizer: true, certificates: 1000},
	{name: "authorizer, 5,000 revoked", authorizer: true, certificates: 5000},
}

// revokedCost is the cost of one kind of request of one requester in one state.
type revokedCost struct {
	took []time.Duration
	// cpu is of the API server and the authorizer.
	cpu time.Duration
}

// leaseRequests are the kinds of requests that are measured.
var leaseRequests = []struct {
	name string
	send func(h *leaseholder, ctx context.Context) error
}{{"update", (*leaseholder).renew}, {"read", (*leaseholder).read}}

// revoked measures what requests cost with the policies for revoked certificates, with the
// authorizer, and with neither.
func revoked(ctx context.Context, b *bench) error {
	binary, err := b.controllerBinary(ctx)
	if err != nil {
		return err
	}
	dir, err := b.folder("authorizer")
	if err != nil {
		return err
	}
	authorizer, err := controllerprocess.NewAuthorizer(module, dir, binary)
	if err != nil {
		return err
	}
	defer func() { _ = authorizer.Kill() }()
	options := testbed.Options{AuditPolicy: []byte(noAudit), APIServerArgs: []string{authorizer.APIServerArg()}}
	return b.withControlPlane(ctx, options, func(cp *testbed.ControlPlane) error {
		holders, renewed, err := leaseholders(ctx, cp)
		if err != nil {
			return err
		}
		site, err := newRevokedSite(ctx, b, cp, authorizer, renewed)
		if err != nil {
			return err
		}
		costs := map[string]*revokedCost{}
		for round := range revokedRounds {
			for i := range revokedStates {
				at := round + i // each is first once
				if round%2 == 1 {
					// In the other direction: what a state leaves behind slows another one then.
					at = round + len(revokedStates) - i
				}
				s := revokedStates[at%len(revokedStates)]
				if err := site.establish(ctx, s); err != nil {
					return fmt.Errorf("%s: %w", s.name, err)
				}
				for _, h := range holders {
					for _, r := range leaseRequests {
						key := h.name + r.name + s.name
						if costs[key] == nil {
							costs[key] = &revokedCost{}
						}
						send := func() error { return r.send(h, ctx) }
						if err := costs[key].measure(b.sized(revokedRequests), send); err != nil {
							return fmt.Errorf("%s, %s of %s: %w", s.name, r.name, h.name, err)
						}
					}
				}
			}
			b.note("round %d of %d", round+1, revokedRounds)
		}
		return b.reportRevoked(holders, costs)
	})
}

// reportRevoked prints and draws the costs. Ratios are to those without policies and authorizer.
func (b *bench) reportRevoked(holders []*leaseholder, costs map[string]*revokedCost) error {
	var bars []plot.Bar
	for _, r := range leaseRequests {
		t := newTable(r.name+" of a Lease", "number", "median", "99 %", "a second", "CPU", "median, ratio", "99 %, ratio", "CPU, ratio")
		for i, h := range holders {
			base := costs[h.name+r.name+revokedStates[0].name]
			for _, s := range revokedStates {
				c := costs[h.name+r.name+s.name]
				median, slow := quantile(c.took, 0.5), quantile(c.took, 0.99)
				cpu := float64(c.cpu) / float64(base.cpu)
				t.row(h.name+", "+s.name, len(c.took), median, slow, c.rate(), c.cpu/time.Duration(len(c.took)),
					float64(median)/float64(quantile(base.took, 0.5)), float64(slow)/float64(quantile(base.took, 0.99)), cpu)
				if r.name == leaseRequests[0].name {
					bars = append(bars, plot.Bar{Name: h.name + ", " + s.name, Value: cpu, Group: i})
				}
			}
		}
		t.print()
	}
	return b.draw("revocation-cost.svg", plot.Bars{
		Title: "Processor time per write, by what refuses revoked certificates", Source: b.source("revoked"),
		Value: "processor time of API server and authorizer per update of a Lease, with neither = 1", Bars: bars,
	}.SVG())
}

// rate is how many requests a second one requester makes that sends one after the other.
func (c *revokedCost) rate() float64 {
	var sum time.Duration
	for _, took := range c.took {
		sum += took
	}
	return float64(len(c.took)) / sum.Seconds()
}

// measure makes some requests. Nobody else makes any meanwhile.
func (c *revokedCost) measure(count int, send func() error) error {
	if err := send(); err != nil { // connections, caches
		return err
	}
	before, err := readUsage()
	if err != nil {
		return err
	}
	for range count {
		began := time.Now()
		if err := send(); err != nil {
			return err
		}
		c.took = append(c.took, time.Since(began))
	}
	after, err := readUsage()
	used := after.since(before)
	c.cpu += used[apiServerProcess] + used[ourProcess]
	return err
}

func (h *leaseholder) renew(ctx context.Context) (err error) {
	h.lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
	h.lease, err = h.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Update(ctx, h.lease, metav1.UpdateOptions{})
	return err
}

func (h *leaseholder) read(ctx context.Context) error {
	_, err := h.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, h.lease.Name, metav1.GetOptions{})
	return err
}

// leaseholders returns a node with a client certificate, a node that has got a new certificate
// since its old one was revoked, and a service account. renewed is the fingerprint of the new
// certificate.
func leaseholders(ctx context.Context, cp *testbed.ControlPlane) (holders []*leaseholder, renewed string, err error) {
	for _, name := range []string{"measured", renewedNode} {
		h := &leaseholder{name: "node"}
		if h.api, renewed, err = newNode(cp, name); err != nil {
			return nil, "", err
		}
		holders = append(holders, h)
	}
	holders[1].name = "node that has renewed"
	account, err := accountConfig(ctx, cp)
	if err != nil {
		return nil, "", err
	}
	account.QPS = -1
	h := &leaseholder{name: "service account"}
	if h.api, err = kubernetes.NewForConfig(account); err != nil {
		return nil, "", err
	}
	holders = append(holders, h)
	for i, name := range []string{"measured", renewedNode, "account"} {
		h, lease := holders[i], &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if h.lease, err = h.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(ctx, lease, metav1.CreateOptions{}); err != nil {
			return nil, "", err
		}
	}
	return holders, renewed, nil
}

// accountConfig returns the credential of a service account that may do anything.
func accountConfig(ctx context.Context, cp *testbed.ControlPlane) (*rest.Config, error) {
	const name, namespace = "measured", metav1.NamespaceDefault
	api := cp.Client()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := api.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: name, Namespace: namespace}},
	}
	if _, err := api.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	token, err := api.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return clientcmd.RESTConfigFromKubeConfig(cp.Kubeconfig(testbed.TokenUser(token.Status.Token)))
}

// modesOnly is the API server's authorization without the authorizer.
const modesOnly = `apiVersion: apiserver.config.k8s.io/v1
kind: AuthorizationConfiguration
authorizers:
- {type: Node, name: node}
- {type: RBAC, name: rbac}
`

// revokedSite is a cluster in which states are established.
type revokedSite struct {
	cp         *testbed.ControlPlane
	admin      string // path of a kubeconfig
	objects    client.Client
	authorizer *controllerprocess.Authorizer
	withIt     []byte // the API server's authorization
	// renewed is the fingerprint of the measured node's new certificate.
	renewed string
}

func newRevokedSite(ctx context.Context, b *bench, cp *testbed.ControlPlane, authorizer *controllerprocess.Authorizer, renewed string) (*revokedSite, error) {
	dir, err := b.folder("revoked")
	if err != nil {
		return nil, err
	}
	site := &revokedSite{cp: cp, admin: filepath.Join(dir, "admin.kubeconfig"), authorizer: authorizer, renewed: renewed}
	if err := cp.WriteKubeconfig(site.admin, cp.AdminUser()); err != nil {
		return nil, err
	}
	if _, err := cp.RunKubectl(ctx, site.admin, "apply", "--server-side", "--filename="+revocationCRDs); err != nil {
		return nil, err
	}
	log.SetLogger(logr.Discard()) // else the client complains that nobody has set one
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	if site.objects, err = client.New(cp.AdminConfig(), client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	if site.withIt, err = os.ReadFile(authorizer.AuthorizationFile()); err != nil {
		return nil, err
	}
	return site, authorizer.Start(ctx, cp.AdminKubeconfig())
}

// establish makes policies, lists and authorization those of a state, and waits until they are in
// force.
func (site *revokedSite) establish(ctx context.Context, s revokedState) error {
	args := []string{"apply", "--server-side", "--force-conflicts"}
	if !s.policies {
		args = []string{"delete", "--ignore-not-found"}
	}
	if _, err := site.cp.RunKubectl(ctx, site.admin, append(args, "--filename="+revocationPolicies)...); err != nil {
		return err
	}
	authorization := []byte(modesOnly)
	if s.authorizer {
		authorization = site.withIt
	}
	if err := os.WriteFile(site.authorizer.AuthorizationFile(), authorization, 0o600); err != nil {
		return err
	}
	if err := site.objects.DeleteAllOf(ctx, &v1alpha1.RevocationSlice{}, client.InNamespace(controllerprocess.Namespace)); err != nil {
		return err
	}
	canary, sum, err := newNode(site.cp, "canary")
	if err != nil {
		return err
	}
	for i, list := range s.lists(sum, site.renewed) {
		if err := site.write(ctx, s, int32(i+1), list); err != nil { // #nosec G115 -- at most PolicyCount
			return err
		}
	}
	if s.certificates > 0 {
		if err := isRefused(ctx, canary); err != nil {
			return err
		}
	}
	// Nothing shows that policies are empty or gone, or that the authorizer is not asked anymore.
	select {
	case <-ctx.Done():
	case <-time.After(settles):
	}
	return ctx.Err()
}

// write puts a list into its policy, or where the authorizer reads it.
func (site *revokedSite) write(ctx context.Context, s revokedState, number int32, list v1alpha1.RevocationSliceSpec) error {
	if s.authorizer {
		list.Cluster, list.Number = controllerprocess.ClusterUID, number
		slice := &v1alpha1.RevocationSlice{ObjectMeta: metav1.ObjectMeta{Name: revocation.PolicyName(number), Namespace: controllerprocess.Namespace}, Spec: list}
		return site.objects.Create(ctx, slice)
	}
	spec, err := revocation.RenderPolicy(list, []string{attestation.HelloSignerName})
	if err != nil {
		return err
	}
	policies := site.cp.Client().AdmissionregistrationV1().ValidatingAdmissionPolicies()
	policy, err := policies.Get(ctx, revocation.PolicyName(number), metav1.GetOptions{})
	if err != nil {
		return err
	}
	policy.Spec = spec
	_, err = policies.Update(ctx, policy, metav1.UpdateOptions{})
	return err
}

// lists revoke a certificate of each of many nodes, which all have a new one. One of these nodes is
// measured. The canary's certificate is in the last list, and it has no new one. The lists are
// written in order, so all are in force once the canary is refused.
func (s revokedState) lists(canary, renewed string) (lists []v1alpha1.RevocationSliceSpec) {
	ends := metav1.NewTime(time.Now().Add(time.Hour))
	for first := 0; first < s.certificates; first += revocation.SliceCapacity {
		var list v1alpha1.RevocationSliceSpec
		for i := first; i < min(first+revocation.SliceCapacity, s.certificates); i++ {
			name := fmt.Sprintf("ip-10-0-0-%d.compute.internal", i)
			sum := sha256.Sum256(fmt.Appendf(nil, "certificate %d", i))
			list.Certificates = append(list.Certificates, v1alpha1.RevokedCertificate{SHA256: hex.EncodeToString(sum[:]), NodeName: name, NotAfter: ends})
			sum = sha256.Sum256(sum[:])
			list.Current = append(list.Current, v1alpha1.CurrentCertificate{SHA256: hex.EncodeToString(sum[:]), NodeName: name, NotAfter: ends})
		}
		last := len(list.Certificates) - 1
		if first == 0 {
			list.Certificates[last].NodeName = renewedNode
			list.Current[last] = v1alpha1.CurrentCertificate{SHA256: renewed, NodeName: renewedNode, NotAfter: ends}
		}
		if first+last+1 == s.certificates {
			list.Certificates[0].SHA256, list.Certificates[0].NodeName = canary, "canary"
			list.Current = list.Current[1:]
		}
		lists = append(lists, list)
	}
	return lists
}

// newNode returns a client with a certificate of a node, and the certificate's fingerprint.
func newNode(cp *testbed.ControlPlane, name string) (kubernetes.Interface, string, error) {
	pair, err := cp.ClientCA().IssueClient("system:node:"+name, []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		return nil, "", err
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(cp.Kubeconfig(testbed.CertificateUser(pair)))
	if err != nil {
		return nil, "", err
	}
	config.QPS = -1
	block, _ := pem.Decode(pair.CertPEM)
	sum := sha256.Sum256(block.Bytes)
	api, err := kubernetes.NewForConfig(config)
	return api, hex.EncodeToString(sum[:]), err
}

// isRefused waits until the policies refuse a requester.
func isRefused(ctx context.Context, api kubernetes.Interface) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "canary"}}
	for {
		_, err := api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(ctx, lease, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil && strings.Contains(err.Error(), attestation.MessageRevoked) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the canary is not refused: %w", err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
