// SPDX-License-Identifier: Apache-2.0

package static

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The addresses of two API servers, as the cluster knows them. An EndpointSlice may not have the
// loopback addresses on which they really listen.
const firstAddress, secondAddress = "192.0.2.11:6443", "192.0.2.12:6443"

// Of two API servers, one has no static policies. The condition, an Event, the log and a metric say
// which, within a minute, and enforcement does not start. Once that API server has the file, or
// the API has the policies, they are in force.
func TestAnAPIServerWithoutTheFile(t *testing.T) {
	t.Parallel()
	with, without := newFolder(t), newFolder(t)
	policies(t, with)
	policies(t, without)
	file := filepath.Join(without, policyset.PoliciesFile)
	content, err := os.ReadFile(file)
	harness.Must(t, err)
	harness.Must(t, os.Remove(file))
	c := newCluster(t, with, testbed.Options{APIServerArgs: []string{readsFrom(with)}})
	second, err := c.AddAPIServer(t.Context(), readsFrom(without))
	harness.Must(t, err)
	c.apply(t, "kubernetes/namespace.yaml", "kubernetes/rbac.yaml")
	c.publishAPIServers(t)
	connection := c.asController(map[string]string{firstAddress: c.ServerURL(), secondAddress: second.URL()})
	check := c.checkOf(t, connection)

	// 1. It is named.
	log := watch(t, connection, check)
	const problem = policyset.IdentityName + ": Missing: these API servers have no static policies: " + secondAddress
	c.policiesBecome(t, corev1.ConditionFalse, preflight.ReasonPoliciesNotInForce, problem+". Requests can be approved without attestation")
	harness.Eventually(t, harness.Soon, "Event, log and metric name it", func() bool {
		events, err := c.admin.EventsV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{FieldSelector: "reason=" + preflight.ReasonPoliciesNotInForce})
		harness.Must(t, err)
		return len(events.Items) > 0 && strings.Contains(events.Items[0].Note, problem) && log.has(problem) && problemGauge(t) == 1
	})
	state, err := check.Check(t.Context())
	if err != nil || len(state.Problems) != 1 {
		t.Errorf("enforcement starts: %v, %v", state, err)
	}

	// 2. It gets the file, and loses it.
	const both = "API servers with static policies: " + firstAddress + ", " + secondAddress
	harness.Must(t, os.WriteFile(file, content, 0o600))
	c.policiesBecome(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, both)
	if problemGauge(t) != 0 {
		t.Error("the metric still has the problem")
	}
	if state, err = check.Check(t.Context()); err != nil || len(state.Problems) > 0 {
		t.Errorf("enforcement does not start: %v, %v", state, err)
	}
	harness.Must(t, os.Remove(file))
	c.policiesBecome(t, corev1.ConditionFalse, preflight.ReasonPoliciesNotInForce, problem)

	// 3. The policies of the API hold on each API server.
	c.apply(t, "kubernetes/policies.yaml")
	c.policiesBecome(t, corev1.ConditionTrue, preflight.ReasonPoliciesInForce, "API servers with static policies: "+firstAddress+"; without: "+secondAddress)
}

// publishAPIServers writes the addresses as API servers do that have an endpoint reconciler.
func (c *cluster) publishAPIServers(t *testing.T) {
	t.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: new("https"), Port: new(int32(6443))}},
	}
	for _, address := range []string{firstAddress, secondAddress} {
		host, _, err := net.SplitHostPort(address)
		harness.Must(t, err)
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{host}})
	}
	_, err := c.admin.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Create(t.Context(), slice, metav1.CreateOptions{})
	harness.Must(t, err)
}

// asController returns the controller's connection, with the rights in the manifests. urls are of
// the API servers that listen at addresses.
func (c *cluster) asController(urls map[string]string) *rest.Config {
	config := c.AdminConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: controllerUser, Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}}
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if url, ok := urls[address]; ok {
			address = strings.TrimPrefix(url, "https://")
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	return config
}

// checkOf returns what checks the policies.
func (c *cluster) checkOf(t *testing.T, connection *rest.Config) *preflight.PolicyCheck {
	t.Helper()
	api, err := client.New(connection, client.Options{Scheme: clientgoscheme.Scheme})
	harness.Must(t, err)
	return &preflight.PolicyCheck{Scope: policyset.Alone, Client: api, Static: &preflight.StaticProber{Config: connection, Namespace: namespace}}
}

// lines is a log.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) write(_, args string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, strings.ReplaceAll(args, `\`, ""))
}

func (l *lines) has(part string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(strings.Join(l.all, "\n"), part)
}

// watch watches the policies until the test ends.
func watch(t *testing.T, connection *rest.Config, check *preflight.PolicyCheck) *lines {
	t.Helper()
	log := &lines{}
	manager, err := ctrl.NewManager(connection, ctrl.Options{
		Scheme: clientgoscheme.Scheme, Metrics: server.Options{BindAddress: "0"}, Logger: funcr.New(log.write, funcr.Options{}),
	})
	harness.Must(t, err)
	gauges, err := telemetry.NewClusterMetrics()
	harness.Must(t, err)
	// A shorter Remind makes it look every 20 s, and not every 30 s.
	_, err = preflight.AddPolicyWatch(manager, preflight.WatchConfig{Check: check, Namespace: namespace, Remind: 20 * time.Second, Metrics: gauges.For("static")})
	harness.Must(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		harness.Must(t, <-ended)
	})
	return log
}

// policiesBecome waits for the condition, for a minute.
func (c *cluster) policiesBecome(t *testing.T, status corev1.ConditionStatus, reason, says string) {
	t.Helper()
	began, found := time.Now(), corev1.NamespaceCondition{}
	defer func() {
		if t.Failed() {
			t.Logf("%+v", found)
		}
	}()
	harness.Eventually(t, time.Minute, reason+": "+says, func() bool {
		object, err := c.admin.CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{})
		harness.Must(t, err)
		for _, condition := range object.Status.Conditions {
			switch condition.Type {
			case preflight.ConditionPolicies:
				found = condition
			case policyset.ConditionStatic:
				t.Fatal("the question was written")
			}
		}
		return found.Status == status && found.Reason == reason && strings.Contains(found.Message, says)
	})
	t.Logf("%s after %s: %s", found.Reason, time.Since(began).Round(100*time.Millisecond), found.Message)
}

// problemGauge returns the metric of the problem.
func problemGauge(t *testing.T) float64 {
	t.Helper()
	families, err := metrics.Registry.Gather()
	harness.Must(t, err)
	for _, family := range families {
		if family.GetName() != "node_attestation_policy_problems" {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := map[string]string{}
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			if labels["policy"] == policyset.IdentityName && labels["problem"] == preflight.PolicyMissing {
				return metric.GetGauge().GetValue()
			}
		}
	}
	return 0
}
