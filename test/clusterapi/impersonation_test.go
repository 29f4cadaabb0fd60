// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"slices"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The identity in the kubeconfig need not be an administrator. With constrained impersonation
// (KEP-5284, on since Kubernetes 1.36) its rights are those that docs/integration/cluster-api.md
// lists: to act as the controller's service account, for what that account may do. A machine
// enrols. The identity becomes no other account, and does nothing else as this one.
func TestConstrainedImpersonation(t *testing.T) {
	t.Parallel()
	const account, namespace, user = "node-attestation-controller", "node-attestation-system", "node-attestation-kubeconfig"
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "narrow", func(c *cluster) { c.kubeconfig = nil })
	rbac := c.workload.Client().RbacV1()
	isAccount := func(s rbacv1.Subject) bool {
		return s.Kind == rbacv1.ServiceAccountKind && s.Name == account && s.Namespace == namespace
	}
	subjects := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}}
	onlyAs := func(rules []rbacv1.PolicyRule) []rbacv1.PolicyRule {
		rules = slices.Clone(rules)
		for i := range rules {
			rules[i].Verbs = slices.Clone(rules[i].Verbs)
			for j, verb := range rules[i].Verbs {
				rules[i].Verbs[j] = "impersonate-on:serviceaccount:" + verb
			}
		}
		return rules
	}
	_, err := rbac.Roles(namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"serviceaccounts"}, ResourceNames: []string{account}, Verbs: []string{"impersonate:serviceaccount"},
	}}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = rbac.RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: user}, Subjects: subjects,
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	// The account of that name in another namespace may list requests, too: only the namespace
	// keeps it from being impersonated.
	_, err = rbac.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "namesake"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: metav1.NamespaceSystem, Name: account}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	var all []rbacv1.PolicyRule
	clusterBindings, err := rbac.ClusterRoleBindings().List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	for _, b := range clusterBindings.Items {
		// as an authenticated user, the account may look which APIs there are
		if slices.ContainsFunc(b.Subjects, isAccount) || b.RoleRef.Name == "system:discovery" {
			role, err := rbac.ClusterRoles().Get(t.Context(), b.RoleRef.Name, metav1.GetOptions{})
			harness.Must(t, err)
			all = append(all, onlyAs(role.Rules)...)
		}
	}
	if len(all) < 2 {
		t.Fatalf("the controller has no rights: %v", all)
	}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: all}
	_, err = rbac.ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = rbac.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user}, Subjects: subjects,
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	bindings, err := rbac.RoleBindings("").List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	for _, b := range bindings.Items {
		if !slices.ContainsFunc(b.Subjects, isAccount) {
			continue
		}
		if b.RoleRef.Kind != "Role" {
			t.Fatalf("RoleBinding %s/%s is of a %s", b.Namespace, b.Name, b.RoleRef.Kind)
		}
		role, err := rbac.Roles(b.Namespace).Get(t.Context(), b.RoleRef.Name, metav1.GetOptions{})
		harness.Must(t, err)
		_, err = rbac.Roles(b.Namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: user + "-" + b.Name}, Rules: onlyAs(role.Rules)}, metav1.CreateOptions{})
		harness.Must(t, err)
		_, err = rbac.RoleBindings(b.Namespace).Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: user + "-" + b.Name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: user + "-" + b.Name}, Subjects: subjects,
		}, metav1.CreateOptions{})
		harness.Must(t, err)
	}
	pair, err := c.workload.ClientCA().IssueClient(user, nil, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	harness.Must(t, err)
	config, err := clientcmd.RESTConfigFromKubeConfig(c.workload.Kubeconfig(testbed.CertificateUser(pair)))
	harness.Must(t, err)
	requests := func(as string) error {
		config.Impersonate.UserName = as
		client, err := kubernetes.NewForConfig(config)
		harness.Must(t, err)
		_, err = client.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
		return err
	}
	harness.Eventually(t, harness.Soon, "the API server knows the rights", func() bool {
		return requests("system:serviceaccount:"+namespace+":"+account) == nil
	})
	c.kubeconfigOf(t, testbed.CertificateUser(pair))
	w.start(t, nil)
	m := c.newMachine(t, "narrow", nil)
	m.enrols(t)

	for _, as := range []string{"", "system:serviceaccount:kube-system:" + account, "system:serviceaccount:" + namespace + ":default", "system:node:" + m.name, administrator} {
		if err := requests(as); !apierrors.IsForbidden(err) {
			t.Errorf("as %q: %v", as, err)
		}
	}
	config.Impersonate.UserName = "system:serviceaccount:" + namespace + ":" + account
	client, err := kubernetes.NewForConfig(config)
	harness.Must(t, err)
	if _, err := client.CoreV1().Secrets("kube-system").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "impersonate-on") && !strings.Contains(err.Error(), "secrets") {
		t.Errorf("secrets: %v", err)
	}
}
