// SPDX-License-Identifier: Apache-2.0

package node

import (
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The static credential is a service account that may create, get and watch requests, and nothing
// else.
const (
	staticAccount = "machines"
	staticGroup   = "system:serviceaccounts:" + controllerprocess.Namespace
	staticUser    = "system:serviceaccount:" + controllerprocess.Namespace + ":" + staticAccount
	requesterRole = "node-attestation-requester"
)

// allowStatic has the controller take first requests from the static credential, too.
func allowStatic(c *config.Config) {
	c.Bootstrappers = append(c.Bootstrappers, config.Bootstrapper{Username: staticUser, Group: staticGroup})
}

// staticKubeconfig returns a kubeconfig with the static credential, made at the first call.
func (c *cluster) staticKubeconfig(t *testing.T) []byte {
	t.Helper()
	accounts := c.Client().CoreV1().ServiceAccounts(controllerprocess.Namespace)
	_, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: staticAccount}}, metav1.CreateOptions{})
	if err == nil {
		_, err = c.Client().RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: staticAccount},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: requesterRole},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: controllerprocess.Namespace, Name: staticAccount}},
		}, metav1.CreateOptions{})
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	day := int64(24 * time.Hour / time.Second)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &day}}
	token, err := accounts.CreateToken(t.Context(), staticAccount, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return c.Kubeconfig(testbed.TokenUser(token.Status.Token))
}
