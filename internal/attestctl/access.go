// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/workload"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const (
	// defaultNamespace is the namespace in packaging/kubernetes.
	defaultNamespace = "node-attestation-system"
	// callTimeout bounds a call of an API server, unless --request-timeout says otherwise.
	callTimeout = 30 * time.Second
	// pageSize is how many objects are read at once: a request has up to 128 KiB.
	pageSize = 250
	// maxKubeconfig bounds the file of --workload-kubeconfig, in bytes.
	maxKubeconfig = 1 << 20
)

var errUnreachable = errors.New("the API server cannot be reached")

// access has the clients and namespaces with which the commands reach a cluster.
type access struct {
	// records is the cluster with the records and the controller. nodes is the cluster that the
	// nodes join, with their requests. Without Cluster API both are the same.
	records, nodes client.Client
	// recordsConfig and nodesConfig are connections to these clusters.
	recordsConfig, nodesConfig *rest.Config
	// namespace is where the records are, controllerNamespace where the controller runs.
	namespace, controllerNamespace string
	// cluster is the name of the Cluster object, empty without Cluster API.
	cluster string
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme, clusterv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// open reads the kubeconfigs. The only call to an API server is for the Secret with a kubeconfig.
func (i *invocation) open(ctx context.Context) (*access, error) {
	if i.access != nil {
		return i.access, nil
	}
	if i.workloadKubeconfig != "" && i.workloadCluster == "" {
		return nil, cli.Usage(errors.New("--workload-kubeconfig needs --workload-cluster, which selects the records to read"))
	}
	config, err := i.flags.ToRESTConfig()
	if err != nil {
		return nil, cli.Usage(err)
	}
	a := &access{cluster: i.workloadCluster, namespace: defaultNamespace}
	namespace, explicit, err := i.flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return nil, cli.Usage(err)
	}
	// As in clusterctl the namespace of the kubeconfig's context is that of Clusters. The
	// controller is hardly ever in it.
	if explicit || a.cluster != "" {
		a.namespace = namespace
	}
	switch {
	case i.controllerNamespace != "":
		a.controllerNamespace = i.controllerNamespace
	case a.cluster != "":
		a.controllerNamespace = defaultNamespace
	default:
		a.controllerNamespace = a.namespace
	}
	a.recordsConfig = i.bounded(config)
	if a.records, err = newClient(a.recordsConfig); err != nil {
		return nil, err
	}
	if a.cluster == "" {
		a.nodes, a.nodesConfig = a.records, a.recordsConfig
		return a, nil
	}
	if config, err = i.workloadConfig(ctx, a); err != nil {
		return nil, err
	}
	a.nodesConfig = i.bounded(workload.WithBounds(config))
	a.nodes, err = newClient(a.nodesConfig)
	return a, err
}

// workloadConfig returns the connection to the workload cluster. A file is the user's own. The
// Secret is not: it must not run programs, or send files elsewhere.
func (i *invocation) workloadConfig(ctx context.Context, a *access) (*rest.Config, error) {
	if i.workloadKubeconfig != "" {
		content, err := bounded.ReadFile(i.workloadKubeconfig, maxKubeconfig)
		if err != nil {
			return nil, cli.Usage(err)
		}
		config, err := clientcmd.RESTConfigFromKubeConfig(content)
		if err != nil {
			return nil, cli.Usage(fmt.Errorf("--workload-kubeconfig %s: %w", i.workloadKubeconfig, err))
		}
		return config, nil
	}
	object := &corev1.Secret{}
	key := client.ObjectKey{Namespace: a.namespace, Name: secret.Name(a.cluster, secret.Kubeconfig)}
	if err := a.records.Get(ctx, key, object); apierrors.IsNotFound(err) {
		return nil, cli.Fail(codeNotFound, "see kubectl get clusters -A; --namespace is that of the Cluster", fmt.Errorf("secret %s: there is none: is there such a Cluster?", key))
	} else if err != nil {
		return nil, cli.Fail(classifyError(reached(err)).Code, "with --workload-kubeconfig this Secret is not needed", fmt.Errorf("kubeconfig of cluster %s: %w", a.cluster, err))
	}
	parsed, err := workload.ParseKubeconfig(object.Data[secret.KubeconfigDataName])
	if err != nil {
		return nil, cli.Fail(codeUnexpected, "look at that Secret, or name a kubeconfig that you trust with --workload-kubeconfig", fmt.Errorf("secret %s: %w", key, err))
	}
	return clientcmd.NewDefaultClientConfig(*parsed, &clientcmd.ConfigOverrides{}).ClientConfig()
}

// bounded returns a copy of a connection with this program's name and limits.
func (i *invocation) bounded(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.UserAgent = Name + "/" + i.Version
	config.QPS, config.Burst = 50, 300 // as kubectl
	if config.Timeout == 0 {
		config.Timeout = callTimeout
	}
	return config
}

func newClient(config *rest.Config) (client.Client, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, reached(err)
	}
	return c, nil
}

// reached marks errors of the network.
func reached(err error) error {
	var network net.Error
	if errors.As(err, &network) {
		return fmt.Errorf("%w: %w", errUnreachable, err)
	}
	return err
}

// readEach lists the objects of a kind, and calls visit with each.
func readEach[T any, P interface {
	*T
	client.Object
}](ctx context.Context, c client.Client, visit func(P), options ...client.ListOption) error {
	kind, err := c.GroupVersionKindFor(P(new(T)))
	if err != nil {
		return err
	}
	empty, err := c.Scheme().New(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err != nil {
		return err
	}
	return readPages(ctx, c, empty.(client.ObjectList), func(item runtime.Object) { visit(item.(P)) }, options...)
}

// readPages lists in pages, each into a copy of the empty list, and calls visit with each object.
func readPages(ctx context.Context, c client.Client, empty client.ObjectList, visit func(runtime.Object), options ...client.ListOption) error {
	for next := ""; ; {
		list := empty.DeepCopyObject().(client.ObjectList)
		if err := c.List(ctx, list, append(options, client.Limit(pageSize), client.Continue(next))...); err != nil {
			return reached(err)
		}
		_ = meta.EachListItem(list, func(item runtime.Object) error { // nil: visit does not fail
			visit(item)
			return nil
		})
		if next = list.GetContinue(); next == "" {
			return nil
		}
	}
}

// readRecords returns the records of the cluster that match.
func (a *access) readRecords(ctx context.Context, options ...client.ListOption) (all []v1alpha1.NodeAttestation, err error) {
	options = append(options, client.InNamespace(a.namespace))
	if a.cluster != "" {
		options = append(options, client.MatchingLabels{clusterv1.ClusterNameLabel: a.cluster})
	}
	err = readEach(ctx, a.records, func(r *v1alpha1.NodeAttestation) { all = append(all, *r) }, options...)
	return all, err
}

// recordsOf returns the records of these nodes, by the name of the node.
func (a *access) recordsOf(ctx context.Context, nodes []string) (map[string][]v1alpha1.NodeAttestation, error) {
	records := map[string][]v1alpha1.NodeAttestation{}
	if len(nodes) > manyNodes {
		all, err := a.readRecords(ctx)
		for i := range all {
			records[all[i].Spec.NodeName] = append(records[all[i].Spec.NodeName], all[i])
		}
		return records, err
	}
	for _, name := range nodes {
		of, err := a.readRecords(ctx, client.MatchingFields{v1alpha1.FieldNodeName: name})
		if err != nil {
			return nil, err
		}
		records[name] = of
	}
	return records, nil
}

// nodeNames returns the names of the Nodes. It reads them without their spec and status.
func (a *access) nodeNames(ctx context.Context, options ...client.ListOption) (names []string, err error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	err = readPages(ctx, a.nodes, list, func(node runtime.Object) { names = append(names, node.(client.Object).GetName()) }, options...)
	return names, err
}

func newNode(name string) *metav1.PartialObjectMetadata {
	node := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	node.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	return node
}

// readNode returns a Node's metadata, nil if there is no such Node.
func (a *access) readNode(ctx context.Context, name string) (*metav1.PartialObjectMetadata, error) {
	node := newNode(name)
	if err := a.nodes.Get(ctx, client.ObjectKey{Name: name}, node); apierrors.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, reached(err)
	}
	return node, nil
}

// labelledNodes returns the names of the Nodes with these labels.
func (a *access) labelledNodes(ctx context.Context, selector string) ([]string, error) {
	parsed, err := labels.Parse(selector)
	if err != nil {
		return nil, cli.Usage(fmt.Errorf("--selector: %w", err))
	}
	return a.nodeNames(ctx, client.MatchingLabelsSelector{Selector: parsed})
}

// nodeState is what a plan needs to know of a Node.
type nodeState struct {
	ready bool
	// reports says that the node reports its certificate. So its plugin looks for announcements.
	reports bool
}

// If there are more than manyNodes nodes, all are listed instead of read one by one.
const manyNodes = 20

// readNodes returns the Nodes of these names.
func (a *access) readNodes(ctx context.Context, names []string) (map[string]nodeState, error) {
	states := map[string]nodeState{}
	add := func(node *corev1.Node) {
		_, reports := node.Annotations[attestation.AnnotationCertificate]
		states[node.Name] = nodeState{isReady(node), reports}
	}
	if len(names) > manyNodes {
		return states, readEach(ctx, a.nodes, add)
	}
	for _, name := range names {
		node := &corev1.Node{}
		if err := a.nodes.Get(ctx, client.ObjectKey{Name: name}, node); err == nil {
			add(node)
		} else if client.IgnoreNotFound(err) != nil {
			return nil, reached(err)
		}
	}
	return states, nil
}

func isReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// clusterOf returns the cluster's UID. The records have it.
func (a *access) clusterOf(records []v1alpha1.NodeAttestation) (string, error) {
	var all []string
	for i := range records {
		all = append(all, records[i].Spec.Cluster)
	}
	slices.Sort(all)
	switch all = slices.Compact(all); len(all) {
	case 0:
		where := "namespace " + a.namespace
		if a.cluster != "" {
			where += ", cluster " + a.cluster
		}
		return "", cli.Fail(codeNotFound, "see kubectl attest status, --namespace and --workload-cluster", fmt.Errorf("%s: there are no records", where))
	case 1:
		return all[0], nil
	}
	return "", cli.Usage(fmt.Errorf("the records are of several clusters: %s", text.Names(all)))
}

// objectMeta returns the metadata of an object that a command creates.
func (a *access) objectMeta() metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: a.namespace}
	if a.cluster != "" {
		m.Labels = map[string]string{clusterv1.ClusterNameLabel: a.cluster}
	}
	return m
}
