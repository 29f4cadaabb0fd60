// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// ClusterAPIOptions say how Cluster API differs from the usual one. The zero value is fine.
type ClusterAPIOptions struct {
	// Components to use; nil means those that compile.ClusterAPI returns.
	Components *compile.ClusterAPIComponents
	// BootstrapTokenTTL is the lifetime of bootstrap tokens. Zero means 15 minutes, Cluster API's
	// default.
	BootstrapTokenTTL time.Duration
	// FeatureGates are added to clusterAPIGates, and win over them.
	FeatureGates map[string]bool
	// Controllers are added to the two controllers that the controller manager has to run.
	Controllers []string
}

// clusterAPIGates are the feature gates of both managers. The rate limit delays a second reconcile
// of an object by at least a second. Without it the tests take half of the time.
var clusterAPIGates = map[string]bool{"ClusterTopology": true, "ReconcilerRateLimiting": false}

// ClusterAPI is a running core manager and kubeadm bootstrap provider.
type ClusterAPI struct {
	Core, KubeadmBootstrap *Manager

	ports []*Port
}

// The managers have their webhooks' certificate in this folder, below the control plane's.
const webhookCertDir = "cluster-api-webhooks"

// StartClusterAPI makes a control plane a management cluster, as `clusterctl init` does. It
// installs the manifests of Cluster API's core and of its kubeadm bootstrap provider, with their
// webhooks, conversions and rights. The managers run as processes, each with its service account's
// credential. It returns when both are ready.
//
// It also starts the control plane's controller manager: this aggregates the core manager's rights,
// and collects objects without an owner.
func StartClusterAPI(ctx context.Context, cp *ControlPlane, opts ClusterAPIOptions) (_ *ClusterAPI, err error) {
	components := opts.Components
	if components == nil {
		built, err := compile.ClusterAPI(ctx, nil)
		if err != nil {
			return nil, err
		}
		components = &built
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	c := &ClusterAPI{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	controllers := append([]string{"garbage-collector-controller", "clusterrole-aggregation-controller"}, opts.Controllers...)
	if err := cp.StartControllerManager(ctx, "--controllers="+strings.Join(controllers, ",")); err != nil {
		return nil, err
	}
	ca, err := cp.writeWebhookCertificate()
	if err != nil {
		return nil, err
	}
	gates := maps.Clone(clusterAPIGates)
	maps.Copy(gates, opts.FeatureGates)
	c.Core = &Manager{
		cp: cp, path: components.Core, manifests: filepath.Join(components.Source, "core"), provider: "cluster-api", kind: "CoreProvider",
		namespace: "capi-system", account: "capi-manager", args: []string{gatesFlag(gates)},
	}
	c.KubeadmBootstrap = &Manager{
		cp: cp, path: components.KubeadmBootstrap, manifests: filepath.Join(components.Source, "bootstrap/kubeadm"), provider: "kubeadm", kind: "BootstrapProvider",
		namespace: "capi-kubeadm-bootstrap-system", account: "capi-kubeadm-bootstrap-manager",
		args: []string{gatesFlag(gates), tokenFlag(opts.BootstrapTokenTTL)},
	}
	if err := c.install(ctx, cp, ca, components); err != nil {
		return nil, fmt.Errorf("install Cluster API: %w", err)
	}
	for _, m := range c.managers() {
		if err := m.Start(ctx); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Stop kills the managers. No state is kept, so they need no graceful shutdown.
func (c *ClusterAPI) Stop() error {
	var errs []error
	for _, m := range c.managers() {
		errs = append(errs, m.Kill())
	}
	for _, p := range c.ports {
		p.Free()
	}
	return errors.Join(errs...)
}

// Logs returns the ends of the managers' logs, for the message of a failed test.
func (c *ClusterAPI) Logs() string {
	var b strings.Builder
	for _, m := range c.managers() {
		b.WriteString(m.LogTail())
	}
	return b.String()
}

func (c *ClusterAPI) managers() []*Manager {
	return slices.DeleteFunc([]*Manager{c.Core, c.KubeadmBootstrap}, func(m *Manager) bool { return m == nil })
}

// RestartKubeadmBootstrap restarts the kubeadm bootstrap provider with another life of bootstrap
// tokens: see BootstrapTokenTTL.
func (c *ClusterAPI) RestartKubeadmBootstrap(ctx context.Context, tokenTTL time.Duration) error {
	m := c.KubeadmBootstrap
	m.args[len(m.args)-1] = tokenFlag(tokenTTL)
	return m.Restart(ctx)
}

func tokenFlag(ttl time.Duration) string {
	return "--bootstrap-token-ttl=" + cmp.Or(ttl, 15*time.Minute).String()
}

func gatesFlag(gates map[string]bool) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(gates)) {
		all = append(all, fmt.Sprintf("%s=%t", name, gates[name]))
	}
	return "--feature-gates=" + strings.Join(all, ",")
}

// writeWebhookCertificate makes the certificate of all webhooks, and returns its authority, PEM.
func (cp *ControlPlane) writeWebhookCertificate() ([]byte, error) {
	ca, err := NewCA(webhookCertDir)
	if err != nil {
		return nil, err
	}
	pair, err := ca.IssueServer(nil, []net.IP{net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cp.path(webhookCertDir), 0o700); err != nil {
		return nil, fmt.Errorf("make the folder for the webhooks' certificate: %w", err)
	}
	return ca.CertPEM(), errors.Join(
		cp.write(filepath.Join(webhookCertDir, "tls.crt"), pair.CertPEM), cp.write(filepath.Join(webhookCertDir, "tls.key"), pair.KeyPEM),
	)
}

// install creates what the managers need, and returns when their rights are in effect.
func (c *ClusterAPI) install(ctx context.Context, cp *ControlPlane, ca []byte, components *compile.ClusterAPIComponents) error {
	providers, err := ReadCRDs(filepath.Join(components.Source, "cmd/clusterctl/config/crd/bases/*_providers.yaml"))
	if err != nil {
		return err
	}
	if err := cp.InstallCRDs(ctx, providers...); err != nil {
		return err
	}
	var all []*unstructured.Unstructured
	for _, m := range c.managers() {
		for _, port := range []**Port{&m.health, &m.diagnostics, &m.webhook} {
			if *port, err = TakePort(); err != nil {
				return err
			}
			c.ports = append(c.ports, *port)
		}
		objects, err := m.objects(ctx, ca)
		if err != nil {
			return err
		}
		all = append(append(all, objects...), m.inventory(components.Version))
	}
	if err := cp.CreateObjects(ctx, all); err != nil {
		return err
	}
	return c.awaitRights(ctx, cp)
}

// awaitRights waits until the core manager's aggregated role has rules that are in effect. The
// managers' other rights were created before it.
func (c *ClusterAPI) awaitRights(ctx context.Context, cp *ControlPlane) error {
	const aggregated = "capi-aggregated-manager-role"
	role, err := cp.client.RbacV1().ClusterRoles().Get(ctx, aggregated, metav1.GetOptions{})
	for err == nil && len(role.Rules) == 0 && ctx.Err() == nil {
		time.Sleep(pollInterval)
		role, err = cp.client.RbacV1().ClusterRoles().Get(ctx, aggregated, metav1.GetOptions{})
	}
	if err != nil {
		return fmt.Errorf("wait for the rights of %s: %w", c.Core.account, err)
	}
	for _, rule := range role.Rules {
		user := "system:serviceaccount:" + c.Core.namespace + ":" + c.Core.account
		if err := cp.awaitRule(ctx, aggregated, user, "system:serviceaccounts", rule); err != nil {
			return err
		}
	}
	return nil
}

// Manager is one of Cluster API's managers. Its methods are for one goroutine at a time.
type Manager struct {
	cp                 *ControlPlane
	path, manifests    string
	provider, kind     string // as clusterctl names it
	namespace, account string
	args               []string

	health, diagnostics, webhook *Port
	process                      *Process
}

// objects returns the provider's manifests without what needs pods: the API server reaches the
// webhooks by their port on loopback.
func (m *Manager) objects(ctx context.Context, ca []byte) ([]*unstructured.Unstructured, error) {
	objects, err := m.cp.Kustomize(ctx, filepath.Join(m.manifests, "config/default"))
	if err != nil {
		return nil, err
	}
	bundle := base64.StdEncoding.EncodeToString(ca)
	return slices.DeleteFunc(objects, func(object *unstructured.Unstructured) bool {
		switch object.GetKind() {
		case "Deployment", "Service", "Certificate", "Issuer":
			return true
		case "CustomResourceDefinition":
			labels := object.GetLabels()
			// as clusterctl init has it: clusterctl move looks for it
			labels["clusterctl.cluster.x-k8s.io"] = ""
			object.SetLabels(labels)
			if conversion, found, _ := unstructured.NestedMap(object.Object, "spec", "conversion", "webhook"); found {
				m.direct(conversion, bundle)
				// it was just read there
				_ = unstructured.SetNestedMap(object.Object, conversion, "spec", "conversion", "webhook")
			}
		case "ValidatingWebhookConfiguration", "MutatingWebhookConfiguration":
			for _, webhook := range object.Object["webhooks"].([]any) {
				m.direct(webhook.(map[string]any), bundle)
			}
		}
		return false
	}), nil
}

// direct replaces the Service in a webhook's client configuration.
func (m *Manager) direct(webhook map[string]any, bundle string) {
	path, _, _ := unstructured.NestedString(webhook, "clientConfig", "service", "path")
	webhook["clientConfig"] = map[string]any{"url": "https://" + m.webhook.Addr() + path, "caBundle": bundle}
}

// inventory returns the object by which clusterctl knows the provider.
func (m *Manager) inventory(version string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{"providerName": m.provider, "type": m.kind, "version": version}}
	object.SetGroupVersionKind(schema.GroupVersionKind{Group: "clusterctl.cluster.x-k8s.io", Version: "v1alpha3", Kind: "Provider"})
	object.SetNamespace(m.namespace)
	object.SetName(strings.TrimSuffix(m.namespace, "-system"))
	return object
}

// ServiceAccount returns the manager's service account.
func (m *Manager) ServiceAccount() (namespace, name string) { return m.namespace, m.account }

// Start starts the manager, and returns when it is ready and its webhooks answer. It may be called
// again after the manager has ended.
func (m *Manager) Start(ctx context.Context) error {
	if m.process != nil && !m.process.ended() {
		return fmt.Errorf("start %s: it is running", m.account)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	day := int64((24 * time.Hour).Seconds())
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &day}}
	token, err := m.cp.client.CoreV1().ServiceAccounts(m.namespace).CreateToken(ctx, m.account, request, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make a token for %s: %w", m.account, err)
	}
	kubeconfig := m.cp.path(m.account + ".kubeconfig")
	if err := m.cp.WriteKubeconfig(kubeconfig, TokenUser(token.Status.Token)); err != nil {
		return err
	}
	_, webhookPort, err := net.SplitHostPort(m.webhook.Addr())
	if err != nil {
		return err
	}
	m.process, err = StartProcess(Command{
		Path: m.path,
		Args: append([]string{
			"--kubeconfig=" + kubeconfig, "--webhook-port=" + webhookPort, "--webhook-cert-dir=" + m.cp.path(webhookCertDir),
			"--health-addr=" + m.health.Addr(), "--diagnostics-address=" + m.diagnostics.Addr(), "--insecure-diagnostics",
		}, m.args...),
		LogFile: m.LogFile(),
	})
	if err != nil {
		return err
	}
	return pollWhile(ctx, m.process, m.account, func(ctx context.Context) error {
		return getOK(ctx, http.DefaultClient, "http://"+m.health.Addr()+"/readyz")
	})
}

// Stop ends the manager as its pod is ended, with SIGTERM. Start may follow.
func (m *Manager) Stop() error {
	if m.process == nil {
		return nil
	}
	return m.process.Stop(defaultGrace)
}

// Kill ends the manager as a crash does. Start may follow.
func (m *Manager) Kill() error {
	if m.process == nil {
		return nil
	}
	return m.process.Kill()
}

// Restart is Stop and Start.
func (m *Manager) Restart(ctx context.Context) error {
	if err := m.Stop(); err != nil {
		return err
	}
	return m.Start(ctx)
}

// PID returns the manager's process ID.
func (m *Manager) PID() int { return m.process.PID() }

// MetricsURL is where the manager serves its metrics.
func (m *Manager) MetricsURL() string { return "http://" + m.diagnostics.Addr() + "/metrics" }

// LogFile is the path of the manager's log. Each start appends to it.
func (m *Manager) LogFile() string { return m.cp.path(m.account + ".log") }

// LogTail returns the end of the log.
func (m *Manager) LogTail() string {
	if m.process == nil {
		return "(" + m.account + " was not started)\n"
	}
	return m.process.LogTail()
}
