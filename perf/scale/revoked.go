// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// revokedRounds is how often each state of the policies is measured, in turn, so that what else
	// the computer does slows them all alike. revokedUpdates is how many updates a requester makes
	// each time.
	revokedRounds, revokedUpdates = 6, 500
	// policySettles is longer than the API server needs to notice a changed policy: a second.
	policySettles = 3 * time.Second

	// renewedNode has a new certificate since its old one was revoked.
	renewedNode = "renewed"

	revocationPolicies = module + "/packaging/kubernetes-revocation/component/policies.yaml"
)

// leaseholder updates a Lease again and again, as a kubelet does.
type leaseholder struct {
	name  string
	api   kubernetes.Interface
	lease *coordinationv1.Lease
}

// revokedState is how many certificates are revoked while updates are measured.
type revokedState struct {
	name string
	// policies says that the policies of packaging/kubernetes-revocation are there.
	policies     bool
	certificates int
}

// cost of one requester in one state.
type revokedCost struct {
	took []time.Duration
	cpu  time.Duration
}

// revoked measures what an update of a Lease costs with and without the policies for revoked
// certificates.
func revoked(ctx context.Context, b *bench) error {
	states := []revokedState{{"no policies", false, 0}, {"policies as shipped", true, 0}, {"1,000 revoked", true, 1000}, {"5,000 revoked", true, 5000}}
	return b.withControlPlane(ctx, testbed.Options{AuditPolicy: []byte(noAudit)}, func(cp *testbed.ControlPlane) error {
		holders, renewed, err := leaseholders(ctx, cp)
		if err != nil {
			return err
		}
		costs := map[string]*revokedCost{}
		for round := range revokedRounds {
			for _, s := range states {
				if err := s.establish(ctx, b, cp, renewed); err != nil {
					return fmt.Errorf("%s: %w", s.name, err)
				}
				for _, h := range holders {
					key := h.name + s.name
					if costs[key] == nil {
						costs[key] = &revokedCost{}
					}
					if err := h.measure(ctx, b.sized(revokedUpdates), costs[key]); err != nil {
						return fmt.Errorf("%s, %s: %w", s.name, h.name, err)
					}
				}
			}
			b.note("round %d of %d", round+1, revokedRounds)
		}
		t := newTable("updates of a Lease", "number", "median", "99 %", "API server CPU", "median, ratio", "CPU, ratio")
		var bars []plot.Bar
		for i, h := range holders {
			base := costs[h.name+states[0].name]
			for _, s := range states {
				c := costs[h.name+s.name]
				median := quantile(c.took, 0.5)
				t.row(h.name+", "+s.name, len(c.took), median, quantile(c.took, 0.99), c.cpu/time.Duration(len(c.took)),
					float64(median)/float64(quantile(base.took, 0.5)), float64(c.cpu)/float64(base.cpu))
				bars = append(bars, plot.Bar{Name: h.name + ", " + s.name, Value: float64(c.cpu) / float64(base.cpu), Group: i})
			}
		}
		t.print()
		return b.draw("revocation-cost.svg", plot.Bars{
			Title: "API server's processor time per write, by revoked certificates", Source: b.source("revoked"),
			Value: "processor time per update of a Lease, without policies = 1", Bars: bars,
		}.SVG())
	})
}

// measure makes some updates. No other process writes meanwhile.
func (h *leaseholder) measure(ctx context.Context, count int, cost *revokedCost) error {
	if err := h.renew(ctx); err != nil { // connections, caches
		return err
	}
	before, err := readUsage()
	if err != nil {
		return err
	}
	for range count {
		began := time.Now()
		if err := h.renew(ctx); err != nil {
			return err
		}
		cost.took = append(cost.took, time.Since(began))
	}
	after, err := readUsage()
	cost.cpu += after[apiServerProcess] - before[apiServerProcess]
	return err
}

func (h *leaseholder) renew(ctx context.Context) (err error) {
	h.lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
	h.lease, err = h.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Update(ctx, h.lease, metav1.UpdateOptions{})
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

// establish makes the policies those of a state, and waits until they are in force.
func (s revokedState) establish(ctx context.Context, b *bench, cp *testbed.ControlPlane, renewed string) error {
	dir, err := b.folder("revoked")
	if err != nil {
		return err
	}
	admin := filepath.Join(dir, "admin.kubeconfig")
	if err := cp.WriteKubeconfig(admin, cp.AdminUser()); err != nil {
		return err
	}
	args := []string{"apply", "--server-side", "--force-conflicts"}
	if !s.policies {
		args = []string{"delete", "--ignore-not-found"}
	}
	if _, err := cp.RunKubectl(ctx, admin, append(args, "--filename="+revocationPolicies)...); err != nil {
		return err
	}
	canary, sum, err := newNode(cp, "canary")
	if err != nil {
		return err
	}
	if err := s.fill(ctx, cp.Client(), sum, renewed); err != nil {
		return err
	}
	if s.certificates > 0 {
		if err := isRefused(ctx, canary); err != nil {
			return err
		}
	}
	select { // that policies are empty or gone shows in nothing
	case <-ctx.Done():
	case <-time.After(policySettles):
	}
	return ctx.Err()
}

// fill revokes a certificate of each of many nodes, which all have a new one. One of these nodes is
// measured. The canary's certificate is revoked last, and it has no new one. The policies are
// changed in order, so all are in force once the canary is refused.
func (s revokedState) fill(ctx context.Context, api kubernetes.Interface, canary, renewed string) error {
	policies := api.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	for first := 0; first < s.certificates; first += revocation.SliceCapacity {
		var list v1alpha1.RevocationSliceSpec
		for i := first; i < min(first+revocation.SliceCapacity, s.certificates); i++ {
			sum := sha256.Sum256(fmt.Appendf(nil, "certificate %d", i))
			list.Certificates = append(list.Certificates, v1alpha1.RevokedCertificate{SHA256: hex.EncodeToString(sum[:]), NodeName: fmt.Sprintf("ip-10-0-0-%d.compute.internal", i)})
			sum = sha256.Sum256(sum[:])
			list.Current = append(list.Current, v1alpha1.CurrentCertificate{SHA256: hex.EncodeToString(sum[:])})
		}
		last := len(list.Certificates) - 1
		if first == 0 {
			list.Certificates[last].NodeName, list.Current[last].SHA256 = renewedNode, renewed
		}
		if first+last+1 == s.certificates {
			list.Certificates[0].SHA256, list.Certificates[0].NodeName = canary, "canary"
			list.Current = list.Current[1:]
		}
		spec, err := revocation.RenderPolicy(list, []string{attestation.HelloSignerName})
		if err != nil {
			return err
		}
		policy, err := policies.Get(ctx, revocation.PolicyName(int32(first/revocation.SliceCapacity+1)), metav1.GetOptions{}) // #nosec G115 -- at most Policies
		if err != nil {
			return err
		}
		policy.Spec = spec
		if _, err := policies.Update(ctx, policy, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	return nil
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
