// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/bindings"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The names of objects in packaging/kubernetes.
const (
	configMapName = telemetry.Component
	configKey     = "config.yaml"
	accountName   = telemetry.Component
)

// caWarning is the time before a CA's end from which on the CA is reported.
const caWarning = 30 * 24 * time.Hour

// examination is one run of the checks.
type examination struct {
	*access
	now time.Time
	// settings are nil if they cannot be read.
	settings *config.Config
	// audit says that the controller changes no request, by its configuration or its Deployment.
	audit bool
	// guarded says that the policies are in force: then only the controller can approve.
	guarded bool
}

type check struct {
	name string
	run  func(context.Context) checkup.Result
}

// checks returns the checks, in order: the first one reads what others need.
func (e *examination) checks() []check {
	all := []check{
		{"configuration", e.checkConfiguration},
		{"controller", e.checkController},
		{"lease", e.checkLease},
		{"policies", e.checkPolicies},
	}
	if e.cluster != "" {
		all = append(all, check{"cluster", e.checkCluster}, check{"management-policies", e.checkManagementPolicies})
	}
	return append(all,
		check{"bindings", e.checkBindings},
		check{"ca", e.checkCA},
		check{"inventory", e.checkInventory},
		check{"ek-sources", e.checkEKSources},
		check{"nodes", e.checkNodes},
		check{"kubelets", e.checkKubelets},
		check{"policies-condition", func(ctx context.Context) checkup.Result { return e.checkCondition(ctx, telemetry.ConditionPolicies) }},
		check{"sources-condition", func(ctx context.Context) checkup.Result { return e.checkCondition(ctx, telemetry.ConditionSources) }},
		check{"revocation", e.checkRevocation},
	)
}

// config returns the configuration, or the defaults.
func (e *examination) config() config.Config {
	if e.settings == nil {
		return config.Default()
	}
	return *e.settings
}

func (e *examination) checkConfiguration(ctx context.Context) checkup.Result {
	const remedy = "create the ConfigMap " + configMapName + " with the key " + configKey + " (docs/controller-configuration.md)"
	object := &corev1.ConfigMap{}
	if err := e.records.Get(ctx, client.ObjectKey{Namespace: e.controllerNamespace, Name: configMapName}, object); err != nil {
		return unread(err, remedy)
	}
	settings, err := config.Parse([]byte(object.Data[configKey]))
	if err != nil {
		return failed("correct the ConfigMap "+configMapName+", then restart the controller", "%s: %v", configKey, err)
	}
	e.settings = &settings
	deployment, err := e.readDeployment(ctx)
	if err != nil && !apierrors.IsNotFound(err) {
		return unread(err, "")
	}
	e.audit = settings.Audit || hasAuditFlag(deployment)
	switch {
	case e.cluster == "" && settings.ClusterAPI != nil:
		return failed("name one with --workload-cluster and --namespace", "the controller serves the workload clusters of Cluster API, and none is named")
	case e.cluster != "" && settings.ClusterAPI == nil:
		return failed("leave --workload-cluster out", "the controller does not serve Cluster API")
	case slices.Contains(usualClusterNames, strings.ToLower(settings.ClusterUID)):
		return warning("in a cluster without records, set a random UUID; with records, do not change it: they are bound to it",
			"clusterUID: many clusters are called %s, and evidence for one of them is valid in the others", settings.ClusterUID)
	case e.audit:
		return warning("enforce when each node is ready for it (docs/adopting.md)", "audit mode: the controller reports its decisions, and changes no request")
	}
	return ok("the controller enforces")
}

// usualClusterNames are names that kubeadm and others give to every cluster.
var usualClusterNames = []string{"kubernetes", "cluster", "cluster.local", "default", "local"}

func (a *access) readDeployment(ctx context.Context) (*appsv1.Deployment, error) {
	deployment := &appsv1.Deployment{}
	err := a.records.Get(ctx, client.ObjectKey{Namespace: a.controllerNamespace, Name: telemetry.Component}, deployment)
	return deployment, err
}

// hasAuditFlag reports whether the controller is started with --audit, as by
// packaging/kubernetes-audit. Then its configuration cannot make it enforce.
func hasAuditFlag(deployment *appsv1.Deployment) bool {
	return slices.ContainsFunc(deployment.Spec.Template.Spec.Containers, func(c corev1.Container) bool {
		return slices.Contains(c.Args, "--audit") || slices.Contains(c.Args, "--audit=true")
	})
}

func (e *examination) checkController(ctx context.Context) checkup.Result {
	const remedy = "apply packaging/kubernetes"
	deployment, err := e.readDeployment(ctx)
	if err != nil {
		return unread(err, remedy)
	}
	wanted := int32(1)
	if deployment.Spec.Replicas != nil {
		wanted = *deployment.Spec.Replicas
	}
	look := fmt.Sprintf("kubectl -n %s get pods; kubectl -n %[1]s logs deployment/%s", e.controllerNamespace, telemetry.Component)
	switch ready := deployment.Status.ReadyReplicas; {
	case ready == 0:
		return failed(look, "none of %d pods is ready", wanted)
	case ready < wanted:
		return warning(look, "%d of %d pods are ready", ready, wanted)
	default:
		return ok("%d of %d pods are ready", ready, wanted)
	}
}

func (e *examination) checkLease(ctx context.Context) checkup.Result {
	const remedy = "start the controller; its log says what keeps it from leading"
	election := e.config().LeaderElection
	if !election.Enabled {
		return ok("leader election is off")
	}
	lease := &coordinationv1.Lease{}
	if err := e.records.Get(ctx, client.ObjectKey{Namespace: e.controllerNamespace, Name: election.LeaseName}, lease); err != nil {
		return unread(err, remedy)
	}
	spec := lease.Spec
	if spec.HolderIdentity == nil || *spec.HolderIdentity == "" || spec.RenewTime == nil || spec.LeaseDurationSeconds == nil {
		return failed(remedy, "nobody holds the Lease %s", election.LeaseName)
	}
	// The clocks of this machine and of the controller's machine may differ by this.
	const skew = 30 * time.Second
	holder := *spec.HolderIdentity
	if age := e.now.Sub(spec.RenewTime.Time); age > time.Duration(*spec.LeaseDurationSeconds)*time.Second+skew {
		return failed(remedy, "the Lease %s was last renewed %s ago, by %s", election.LeaseName, age.Round(time.Second), holder)
	}
	return ok("%s leads", holder)
}

// checkCluster checks whether the controller ignores the Cluster. The controller then writes
// nothing about the Cluster, so no request says why it waits.
func (e *examination) checkCluster(ctx context.Context) checkup.Result {
	cluster := &clusterv1.Cluster{}
	if err := e.records.Get(ctx, client.ObjectKey{Namespace: e.namespace, Name: e.cluster}, cluster); err != nil {
		return unread(err, "see kubectl get clusters -A; --namespace is that of the Cluster")
	}
	if annotations.IsPaused(cluster, cluster) {
		return failed("when the work on it is done, set its spec.paused to false and remove its annotation "+clusterv1.PausedAnnotation,
			"the Cluster is paused: nothing is decided for it, not even renewals")
	}
	return ok("the Cluster is not paused")
}

// user returns the controller's user name in the cluster that nodes join.
func (e *examination) user() string {
	settings := e.config()
	switch {
	case e.cluster != "" && settings.ClusterAPI != nil && settings.ClusterAPI.User != "":
		return settings.ClusterAPI.User
	case e.cluster != "":
		return config.DefaultUser
	}
	return e.account()
}

// account returns the service account of the controller.
func (e *examination) account() string {
	return "system:serviceaccount:" + e.controllerNamespace + ":" + accountName
}

func (e *examination) checkPolicies(ctx context.Context) checkup.Result {
	scope := policyset.Alone
	if e.cluster != "" {
		scope = policyset.Workload
	}
	f := e.comparePolicies(ctx, &preflight.PolicyCheck{Scope: scope, Client: e.nodes, Static: prober(e.nodesConfig, e.conditionNamespace()), User: e.user()})
	e.guarded = f.Status == checkup.OK
	return f
}

func (e *examination) checkManagementPolicies(ctx context.Context) checkup.Result {
	return e.comparePolicies(ctx, &preflight.PolicyCheck{Scope: policyset.Management, Client: e.records, Static: prober(e.recordsConfig, e.controllerNamespace), User: e.account()})
}

// prober returns what asks a cluster's API servers for static policies.
func prober(connection *rest.Config, namespace string) *preflight.StaticProber {
	if connection == nil { // a test without an API server
		return nil
	}
	return &preflight.StaticProber{Config: connection, Namespace: namespace, AskEach: true}
}

// comparePolicies compares the cluster's policies with those of this program's release.
func (e *examination) comparePolicies(ctx context.Context, c *preflight.PolicyCheck) checkup.Result {
	c.Others, c.Audit = e.config().Policies.Controllers, e.audit
	state, err := c.Check(ctx)
	if err != nil {
		return unread(err, "ValidatingAdmissionPolicy needs Kubernetes 1.31 or later")
	}
	switch says := describePolicies(state); {
	case len(state.Problems) == 0:
		return ok("%s", says)
	case preflight.LocksOut(state.Problems):
		return failed(preflight.LockOutRemedy, "no node gets a certificate: %s", says)
	case state.Forbidden && !e.audit:
		return unknown("see policies-condition, or have somebody run it who may patch the status of Namespace "+c.Static.Namespace, "not in force through the API, and perhaps as static policies: %s", says)
	default:
		return e.unlessAudit(state.Remedy, "%s. %s", says, state.Consequence)
	}
}

// describePolicies returns a state in one line. Of the policies that are missing in the API, it
// lists the names alone.
func describePolicies(s *preflight.PolicyState) string {
	if len(s.Problems) == 0 {
		return s.String()
	}
	var missing, all []string
	for _, p := range s.Problems {
		if p.Problem != preflight.PolicyMissing || p.Policy == policyset.IdentityName {
			all = append(all, p.String())
		} else if !slices.Contains(missing, p.Policy) {
			missing = append(missing, p.Policy)
		}
	}
	if len(missing) > 0 {
		all = append(all, "missing, or without a binding: "+text.Names(missing))
	}
	return strings.Join(append(all, s.Unknown...), "; ")
}

// unlessAudit returns a failure. In audit mode nothing depends on it yet, so it returns a warning.
func (e *examination) unlessAudit(remedy, format string, arguments ...any) checkup.Result {
	if e.audit {
		return warning(remedy, format, arguments...)
	}
	return failed(remedy, format, arguments...)
}

func (e *examination) checkBindings(ctx context.Context) checkup.Result {
	var found []string
	err := readEach(ctx, e.nodes, func(b *rbacv1.ClusterRoleBinding) {
		if bindings.ApprovesByItself(b) {
			found = append(found, b.Name)
		}
	})
	switch {
	case err != nil:
		return unread(err, "")
	case len(found) > 0:
		remedy := "when all nodes have attested, delete them: kubectl delete clusterrolebinding " + text.Arguments(found)
		if e.guarded {
			return warning(remedy, "only the policies keep kube-controller-manager from approving without attestation by these ClusterRoleBindings: %s", text.Names(found))
		}
		return e.unlessAudit(remedy, "with these ClusterRoleBindings kube-controller-manager approves without attestation: %s", text.Names(found))
	}
	return ok("no ClusterRoleBinding approves without attestation")
}

// clientCA is the ConfigMap in which an API server publishes the CAs that it trusts for clients.
var clientCA = client.ObjectKey{Namespace: "kube-system", Name: "extension-apiserver-authentication"}

func (e *examination) checkCA(ctx context.Context) checkup.Result {
	key := client.ObjectKey{Namespace: e.namespace, Name: secret.Name(e.cluster, secret.ClusterCA)}
	if e.cluster == "" {
		key = client.ObjectKey{Namespace: e.controllerNamespace, Name: e.config().Signing.SecretName}
		switch signs := e.config().Signing; {
		case e.settings == nil:
			return unknown("", "without the configuration it is not known where the CA is")
		case signs.Mode == config.ApproveOnly:
			return ok("another signer issues")
		case signs.SecretName == "":
			return unknown("see sources-condition", "the CA is in files of the controller's pod")
		}
	}
	object := &corev1.Secret{}
	if err := e.records.Get(ctx, key, object); err != nil {
		f := unread(err, "create the Secret with the CA (docs/cluster-setup.md)")
		if f.Status == checkup.Unknown {
			f.Remedy = "it holds the CA's private key, so few may read it: see sources-condition"
		}
		return f
	}
	if e.cluster != "" && len(object.Data[corev1.TLSPrivateKeyKey]) == 0 {
		return ok("the Secret %s has no key: kube-controller-manager signs", key.Name)
	}
	ca, err := signing.FromSecret(object.Data, e.now)
	if err != nil {
		return failed("put a CA and its key into the Secret (docs/cluster-setup.md)", "secret %s: %v", key, err)
	}
	if err := e.compareCA(ctx, object.Data[corev1.TLSCertKey]); err != nil {
		if errors.Is(err, errNotTrusted) {
			return failed("put this CA into the file of kube-apiserver's --client-ca-file, or the CA of that file into the Secret", "secret %s: %v", key, err)
		}
		return unread(err, "the API server publishes it if it has --client-ca-file")
	}
	if end := ca.NotAfter(); end.Before(e.now.Add(caWarning)) {
		return warning("rotate it: docs/operations.md, CA rotation", "the CA ends at %s", end.UTC().Format(time.RFC3339))
	}
	return ok("the API server trusts the CA, until %s", ca.NotAfter().UTC().Format(time.RFC3339))
}

var errNotTrusted = errors.New("the API server does not trust this CA: nodes could not use certificates that it signs")

// compareCA compares the CA with those that the API server trusts. It does not need the CA's key.
func (e *examination) compareCA(ctx context.Context, chain []byte) error {
	object := &corev1.ConfigMap{}
	if err := e.nodes.Get(ctx, clientCA, object); err != nil {
		return err
	}
	trusted, err := cert.ParseCertsPEM([]byte(object.Data["client-ca-file"]))
	if err != nil {
		return fmt.Errorf("configmap %s: client-ca-file: %w", clientCA, err)
	}
	certificates, err := cert.ParseCertsPEM(chain)
	if err != nil {
		return err
	}
	options := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), CurrentTime: e.now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	for _, c := range trusted {
		options.Roots.AddCert(c)
	}
	for _, c := range certificates[1:] {
		options.Intermediates.AddCert(c)
	}
	if _, err := certificates[0].Verify(options); err != nil {
		return errNotTrusted
	}
	return nil
}

var errNoInventory = errors.New("the configuration names no ConfigMap with an inventory")

// readInventory returns the inventory that the controller has.
func (a *access) readInventory(ctx context.Context) (*inventory.Inventory, error) {
	object := &corev1.ConfigMap{}
	if err := a.records.Get(ctx, client.ObjectKey{Namespace: a.controllerNamespace, Name: configMapName}, object); err != nil {
		return nil, err
	}
	settings, err := config.Parse([]byte(object.Data[configKey]))
	if err != nil {
		return nil, err
	}
	return a.parseInventory(ctx, settings)
}

func (a *access) parseInventory(ctx context.Context, settings config.Config) (*inventory.Inventory, error) {
	entries := settings.Inventory.Entries()
	if len(entries) == 0 {
		return nil, errNoInventory
	}
	var parts []*inventory.Part
	var problems []error
	for _, entry := range entries {
		object := &corev1.ConfigMap{}
		if err := a.records.Get(ctx, client.ObjectKey{Namespace: a.controllerNamespace, Name: entry.Name}, object); err != nil {
			problems = append(problems, err)
			continue
		}
		part, err := inventory.ParsePart(entry.Name+"/"+entry.Key, []byte(object.Data[entry.Key]+string(object.BinaryData[entry.Key])))
		parts, problems = append(parts, part), append(problems, err)
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	return inventory.Merge(parts...), nil
}

func (e *examination) checkInventory(ctx context.Context) checkup.Result {
	settings := e.config()
	switch {
	case e.settings == nil:
		return unknown("", "without the configuration it is not known where the inventory is")
	case settings.ClusterAPI != nil && !slices.Contains(settings.ClusterAPI.EKSources, verifier.EKInventory):
		return ok("none is configured")
	case len(settings.Inventory.Entries()) == 0:
		return unknown("see sources-condition", "the inventory is in files of the controller's pod")
	}
	machines, err := e.parseInventory(ctx, settings)
	var invalid *inventory.Error
	switch {
	case errors.As(err, &invalid):
		return failed("correct it (docs/inventory.md); meanwhile the last good inventory counts, until the controller restarts", "%v", err)
	case err != nil:
		return unread(err, "create the ConfigMap (docs/inventory.md)")
	case len(machines.Conflicts()) > 0:
		var all []string
		for _, conflict := range machines.Conflicts() {
			all = append(all, conflict.String())
		}
		return failed("correct the entries: meanwhile the machines in them get no first certificate", "%s", text.Names(all))
	}
	return ok("%s", text.Count(machines.Len(), "machine"))
}

func (e *examination) checkEKSources(ctx context.Context) checkup.Result {
	settings := e.config()
	switch {
	case e.settings == nil:
		return unknown("", "without the configuration it is not known which sources there are")
	case settings.ClusterAPI != nil:
		return e.checkMachines(ctx, settings.ClusterAPI)
	}
	machines, err := e.parseInventory(ctx, settings)
	if err != nil {
		return unknown("see inventory", "the inventory names the endorsement keys, and it cannot be read")
	}
	named := 0
	for _, m := range machines.All() {
		if len(m.EKs) > 0 {
			named++
		}
	}
	if named == 0 {
		return warning("add machines: kubectl attest pending -o inventory, and docs/inventory.md", "the inventory names no endorsement key: no machine gets in")
	}
	return ok("the inventory names endorsement keys of %s", text.Count(named, "machine"))
}

// checkMachines finds Machines for which no source names an endorsement key. For some Machines this
// is not known: an annotation may be on the InfraMachine, and only the controller asks a platform.
func (e *examination) checkMachines(ctx context.Context, settings *config.ClusterAPI) checkup.Result {
	sources := make([]string, len(settings.EKSources))
	for i, s := range settings.EKSources {
		sources[i] = string(s)
	}
	if settings.TrustOnFirstUse {
		sources = append(sources, "trust on first use")
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return unread(err, "apply packaging/kubernetes/crd.yaml")
	}
	recorded := map[string]bool{}
	for i := range records {
		recorded[records[i].Spec.Machine.Name] = true
	}
	var without []string
	err = readEach(ctx, e.records, func(m *clusterv1.Machine) {
		if m.Annotations[attestation.AnnotationEK] == "" && !recorded[m.Name] {
			without = append(without, m.Name)
		}
	}, client.InNamespace(e.namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: e.cluster})
	all := strings.Join(sources, ", ")
	switch {
	case err != nil:
		return unread(err, "install Cluster API")
	case len(without) == 0 || settings.TrustOnFirstUse:
		return ok("sources: %s", all)
	case slices.Equal(settings.EKSources, []verifier.EKSource{verifier.EKAnnotation}):
		return warning("annotate them, or their InfraMachines, with "+attestation.AnnotationEK, "sources: %s; Machines without a record and without the annotation: %s", all, text.Names(without))
	}
	return ok("sources: %s; Machines without a record: %s", all, text.Names(without))
}

// checkNodes looks for Nodes that have no record.
func (e *examination) checkNodes(ctx context.Context) checkup.Result {
	records, err := e.readRecords(ctx)
	if err != nil {
		return unread(err, "apply packaging/kubernetes/crd.yaml")
	}
	attested := map[string]bool{}
	for i := range records {
		attested[records[i].Spec.NodeName] = true
	}
	nodes, err := e.nodeNames(ctx)
	without := slices.DeleteFunc(nodes, func(name string) bool { return attested[name] || slices.Contains(e.config().UnattestedNodes, name) })
	switch {
	case err != nil:
		return unread(err, "")
	case len(without) > 0:
		return warning("attest them, or list them in unattestedNodes: their certificates are not renewed otherwise", "Nodes that have no record and are not listed: %s", text.Names(without))
	}
	return ok("each Node has a record or is listed")
}

// checkKubelets looks for kubelets that request their certificates by themselves. The controller
// ignores such requests, and while it enforces, the policies let nobody else approve them.
func (e *examination) checkKubelets(ctx context.Context) checkup.Result {
	if e.audit {
		return ok("not checked in audit mode: others may approve requests without evidence")
	}
	requests, err := e.readRequests(ctx, e.now)
	if err != nil {
		return unread(err, "")
	}
	var nodes []string
	for _, r := range requests {
		if r.Reason == telemetry.ReasonNoEvidence && !slices.Contains(nodes, r.NodeName) && !slices.Contains(e.config().UnattestedNodes, r.NodeName) {
			nodes = append(nodes, r.NodeName)
		}
	}
	if len(nodes) == 0 {
		return ok("no kubelet requests without evidence")
	}
	return warning("run kubelet-authenticator doctor on each of them", "kubelets of these nodes request by themselves, without evidence, and nobody may approve that: %s", text.Names(nodes))
}

// conditionNamespace returns the Namespace with the controller's conditions, in the cluster that
// nodes join.
func (e *examination) conditionNamespace() string {
	if e.cluster == "" {
		return e.controllerNamespace
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(e.user(), "system:serviceaccount:"), ":")
	return name
}

// readCondition returns a condition of the controller's Namespace, nil if there is none, and the
// Namespace's name.
func (e *examination) readCondition(ctx context.Context, kind string) (*corev1.NamespaceCondition, string, error) {
	name := e.conditionNamespace()
	namespace := &corev1.Namespace{}
	if err := e.nodes.Get(ctx, client.ObjectKey{Name: name}, namespace); err != nil {
		return nil, name, err
	}
	for i := range namespace.Status.Conditions {
		if c := &namespace.Status.Conditions[i]; string(c.Type) == kind {
			return c, name, nil
		}
	}
	return nil, name, nil
}

// checkCondition returns the finding for a condition that the controller wrote.
func (e *examination) checkCondition(ctx context.Context, kind string) checkup.Result {
	c, name, err := e.readCondition(ctx, kind)
	switch {
	case err != nil:
		return unread(err, "apply packaging/kubernetes")
	case c == nil:
		return unknown("start the controller: it writes the condition within seconds", "namespace %s has no condition %s", name, kind)
	}
	says := sprintf("%s: %s", c.Reason, c.Message)
	switch {
	case c.Status == corev1.ConditionTrue, c.Reason == preflight.ReasonPoliciesAudit:
		return ok("%s", says)
	case c.Status == corev1.ConditionFalse:
		return failed("do what the message says; docs/reasons.md has the reason "+text.Line(c.Reason, maxName), "%s", says)
	default:
		return unknown("docs/reasons.md has the reason "+text.Line(c.Reason, maxName), "%s", says)
	}
}

// listsWarning is the fill level of the lists, in percent, from which on the lists are reported.
const listsWarning = 80

// checkRevocation checks whether revoked certificates are refused. The feature is off by default.
func (e *examination) checkRevocation(ctx context.Context) checkup.Result {
	records, err := e.readRecords(ctx)
	if err != nil {
		return unread(err, "apply packaging/kubernetes/crd.yaml")
	}
	if _, err := e.readSuspensions(ctx); lacksRevocation(err) {
		return ok("it is switched off: " + overlay + " switches it on")
	} else if err != nil {
		return unread(err, "apply "+overlay)
	}
	lists := map[string]*Lists{}
	for i := range records {
		cluster := records[i].Spec.Cluster
		if lists[cluster] != nil {
			continue
		}
		if lists[cluster], err = e.readLists(ctx, cluster); err != nil {
			return unread(err, "apply "+overlay)
		}
	}
	if f := e.checkCondition(ctx, telemetry.ConditionRevocation); f.Status != checkup.OK {
		if f.Status == checkup.Unknown {
			f.Remedy = "start the controller with --revocation: " + overlay + " does so"
		}
		return f
	}
	problems, err := e.revocationPolicies(ctx)
	switch {
	case err != nil:
		return unread(err, "apply "+overlay)
	case len(problems) > 0:
		return failed("apply "+overlay+" again: the controller fills the policies within seconds", "%s", text.Names(problems))
	}
	total, used, certificates, beyond := 0, 0, 0, 0
	for _, l := range lists {
		total, used, certificates, beyond = max(total, l.Capacity), max(used, l.places), max(certificates, l.Certificates), beyond+l.NotInForce
	}
	const remedy = "shorten lifetimes, so that certificates leave the lists earlier (docs/controller-configuration.md)"
	switch {
	case beyond > 0:
		return failed(remedy, "the lists are full, and do not refuse %d of the revoked certificates", beyond)
	case total > 0 && used*100 >= total*listsWarning:
		return warning(remedy, "%d of %d places on the lists are used", used, total)
	}
	return ok("it is in force: certificates on the lists: %d", certificates)
}

// revocationPolicies returns the problems of the admission policies for revoked certificates.
func (e *examination) revocationPolicies(ctx context.Context) (problems []string, err error) {
	bound := map[string]bool{}
	err = readEach(ctx, e.nodes, func(b *admissionv1.ValidatingAdmissionPolicyBinding) {
		if slices.Contains(b.Spec.ValidationActions, admissionv1.Deny) && b.Spec.ParamRef == nil && b.Spec.MatchResources == nil {
			bound[b.Spec.PolicyName] = true
		}
	})
	if err != nil {
		return nil, err
	}
	there := map[string]bool{}
	err = readEach(ctx, e.nodes, func(p *admissionv1.ValidatingAdmissionPolicy) { there[p.Name] = true })
	for number := int32(1); number <= revocation.PolicyCount; number++ {
		name := revocation.PolicyName(number)
		switch {
		case !there[name]:
			problems = append(problems, name+" is missing")
		case !bound[name]:
			problems = append(problems, name+" has no binding that denies")
		}
	}
	return problems, err
}
