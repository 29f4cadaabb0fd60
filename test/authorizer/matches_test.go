// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"strconv"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// sum adds up the series of a metric of the first API server.
func sum(t *testing.T, metric string) (total float64) {
	t.Helper()
	text, err := shared.Client().CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	harness.Must(t, err)
	for line := range strings.Lines(string(text)) {
		if rest, found := strings.CutPrefix(line, metric+"{"); found {
			_, value, _ := strings.Cut(rest, "} ")
			number, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			harness.Must(t, err)
			total += number
		}
	}
	return total
}

// The API server asks about nodes, and about tokens that were issued for a node. Others pay
// nothing, and the conditions that say so never fail. It does not run beside the other tests, which
// have nodes.
func TestOnlyNodesAreAskedAbout(t *testing.T) {
	const asked, failed = "apiserver_authorization_webhook_evaluations_total", "apiserver_authorization_match_condition_evaluation_errors_total"
	ctx, api, server := t.Context(), shared.Client(), shared.servers[0]
	node, err := shared.ClientCA().IssueClient("system:node:asked", []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	bootstrap, err := shared.CreateBootstrapToken(ctx, time.Hour)
	harness.Must(t, err)
	_, err = api.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "asked"}}, metav1.CreateOptions{})
	harness.Must(t, err)
	pod, err := api.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "asked"},
		Spec:       corev1.PodSpec{NodeName: "asked", ServiceAccountName: "asked", Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = api.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "asked"}}, metav1.CreateOptions{})
	harness.Must(t, err)
	token := func(bound *authenticationv1.BoundObjectReference) *rest.Config {
		t.Helper()
		made, err := api.CoreV1().ServiceAccounts(metav1.NamespaceDefault).CreateToken(ctx, "asked", &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound},
		}, metav1.CreateOptions{})
		harness.Must(t, err)
		return tokenConfig(server.AdminConfig(), made.Status.Token)
	}
	for _, c := range []struct {
		name   string
		config *rest.Config
		asks   bool
	}{
		{"node", configOf(server, node), true},
		{"token of a pod on a node", token(&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}), true},
		{"token of no pod", token(nil), false},
		{"bootstrap token", tokenConfig(server.AdminConfig(), bootstrap), false},
		{"administrator", server.AdminConfig(), false},
		{"nobody", tokenConfig(server.AdminConfig(), ""), false},
	} {
		before := sum(t, asked)
		client := harness.Credential{Config: c.config}.Client(t)
		_, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{}) // allowed or not
		if asks := sum(t, asked) > before; asks != c.asks {
			t.Errorf("%s: the API server asked: %v (%v)", c.name, asks, err)
		}
	}
	if n := sum(t, failed); n > 0 {
		t.Errorf("%v evaluations of matchConditions failed", n)
	}
}

// tokenConfig is a client's configuration with a token in place of a certificate.
func tokenConfig(config *rest.Config, token string) *rest.Config {
	config.CertData, config.KeyData, config.BearerToken = nil, nil, token
	return config
}
