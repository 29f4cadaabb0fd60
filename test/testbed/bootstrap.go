// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	// BootstrapGroup is the group that kubeadm puts bootstrap tokens in.
	BootstrapGroup = "system:bootstrappers:kubeadm:default-node-token"

	systemNamespace = "kube-system"
	effectTimeout   = 10 * time.Second
)

// CreateBootstrapToken makes a bootstrap token as `kubeadm token create` does
// and returns when the API server accepts it. A ttl of zero means for ever;
// expiry is cut to full seconds.
func (cp *ControlPlane) CreateBootstrapToken(ctx context.Context, ttl time.Duration) (string, error) {
	id := strings.ToLower(rand.Text()[:6])
	secret := strings.ToLower(rand.Text()[:16])
	data := map[string]string{
		"token-id":                       id,
		"token-secret":                   secret,
		"usage-bootstrap-authentication": "true",
		"auth-extra-groups":              BootstrapGroup,
	}
	if ttl != 0 {
		data["expiration"] = time.Now().Add(ttl).UTC().Format(time.RFC3339)
	}
	object := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id, Namespace: systemNamespace},
		Type:       corev1.SecretTypeBootstrapToken,
		StringData: data,
	}
	if _, err := cp.client.CoreV1().Secrets(systemNamespace).Create(ctx, object, metav1.CreateOptions{}); err != nil {
		return "", fmt.Errorf("create bootstrap token %s: %w", id, err)
	}
	token := id + "." + secret
	return token, cp.awaitToken(ctx, id, token)
}

// awaitToken waits for the API server's informer: right after the Secret's
// creation the token is still refused.
func (cp *ControlPlane) awaitToken(ctx context.Context, id, token string) error {
	ctx, cancel := context.WithTimeout(ctx, effectTimeout)
	defer cancel()
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host:            cp.ServerURL(),
		TLSClientConfig: rest.TLSClientConfig{CAData: cp.ServerCA()},
		BearerToken:     token,
		QPS:             -1,
	})
	if err != nil {
		return fmt.Errorf("make a client for bootstrap token %s: %w", id, err)
	}
	return poll(ctx, "bootstrap token "+id, func(ctx context.Context) error {
		_, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		return err
	})
}

// BindKubeadmBootstrap makes the bindings of `kubeadm init` for joining nodes. They may file
// requests, and the controller manager's approver approves first and renewed kubelet certificates.
// It returns when they are in effect.
func (cp *ControlPlane) BindKubeadmBootstrap(ctx context.Context) error {
	const getNodes = "kubeadm:get-nodes"
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: getNodes},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}}},
	}
	if _, err := cp.client.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create cluster role %s: %w", getNodes, err)
	}
	const approver = "system:certificates.k8s.io:certificatesigningrequests:"
	bindings := []struct{ name, role, group string }{
		{"kubeadm:kubelet-bootstrap", "system:node-bootstrapper", BootstrapGroup},
		{"kubeadm:node-autoapprove-bootstrap", approver + "nodeclient", BootstrapGroup},
		{"kubeadm:node-autoapprove-certificate-rotation", approver + "selfnodeclient", "system:nodes"},
		{getNodes, getNodes, BootstrapGroup},
	}
	for _, b := range bindings {
		if err := cp.BindGroup(ctx, b.name, b.role, b.group); err != nil {
			return err
		}
	}
	return nil
}

// BindGroup binds a cluster role to a group and returns when the authorizer
// knows it.
func (cp *ControlPlane) BindGroup(ctx context.Context, name, clusterRole, group string) error {
	role, err := cp.client.RbacV1().ClusterRoles().Get(ctx, clusterRole, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("bind cluster role %s: %w", clusterRole, err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: clusterRole},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: group}},
	}
	if _, err := cp.client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create cluster role binding %s: %w", name, err)
	}
	for _, rule := range role.Rules {
		if err := cp.awaitRule(ctx, name, "testbed-nobody", group, rule); err != nil {
			return err
		}
	}
	return nil
}

// awaitRule waits until the authorizer lets the user in that group use the first right of the rule.
func (cp *ControlPlane) awaitRule(ctx context.Context, binding, user, group string, rule rbacv1.PolicyRule) error {
	if len(rule.Resources) == 0 || len(rule.APIGroups) == 0 || len(rule.Verbs) == 0 {
		return nil // a rule about paths: none of the roles for nodes has one
	}
	ctx, cancel := context.WithTimeout(ctx, effectTimeout)
	defer cancel()
	resource, subresource, _ := strings.Cut(rule.Resources[0], "/")
	attributes := &authorizationv1.ResourceAttributes{
		Group:       rule.APIGroups[0],
		Resource:    resource,
		Subresource: subresource,
		Verb:        rule.Verbs[0],
	}
	if len(rule.ResourceNames) > 0 {
		attributes.Name = rule.ResourceNames[0]
	}
	return poll(ctx, "cluster role binding "+binding, func(ctx context.Context) error {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:               user,
			Groups:             []string{group},
			ResourceAttributes: attributes,
		}}
		answer, err := cp.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		if !answer.Status.Allowed {
			return errors.New("not in effect yet")
		}
		return nil
	})
}
