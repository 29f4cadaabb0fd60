// SPDX-License-Identifier: Apache-2.0

// Package metal3 names the TPMs of machines that Metal3's infrastructure provider for Cluster API
// (CAPM3) provisions. No API of Metal3 has endorsement keys. So the operator writes them into the
// annotation attestation.AnnotationEK of the BareMetalHost, which stays when the host is deployed
// again (docs/platforms/metal3.md).
package metal3

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const (
	infraGroup  = "infrastructure.cluster.x-k8s.io"
	machineKind = "Metal3Machine"
	clusterKind = "Metal3Cluster"
	// callsPerSecond and burst bound the calls to the API server. A poll of a Cluster is one call
	// for its Metal3Cluster, and two for each 500 machines.
	callsPerSecond, burst = 100, 200
	// provisioned is the state of a BareMetalHost that runs its image.
	provisioned = "provisioned"
)

// name is an object's name: a DNS subdomain.
const name = `([a-z0-9](?:[-.a-z0-9]*[a-z0-9])?)`

var (
	providerIDForm = regexp.MustCompile(`^metal3://` + name + `/` + name + `/` + name + `$`)
	legacyForm     = regexp.MustCompile(`^metal3://[^/]*$`)
)

// Open implements clusterapi.OpenPlatform.
func Open(_ context.Context, mgr manager.Manager) (clusterapi.EKTrust, error) {
	api, err := newAPI(mgr.GetConfig(), mgr.GetRESTMapper(), platformkit.NewBudget(callsPerSecond, burst))
	if err != nil {
		return nil, err
	}
	return newTrust(&platform{api: api, clusters: mgr.GetClient()}, platformkit.Options{}), nil
}

// trust is a clusterapi.ProviderIDs: CAPM3 sets the provider ID of most Machines only when their
// Node exists.
type trust struct{ *platformkit.Kit }

var _ clusterapi.ProviderIDs = trust{}

func newTrust(p *platform, options platformkit.Options) trust {
	return trust{platformkit.New(p, options)}
}

// KnowsProviderIDs implements clusterapi.ProviderIDs.
func (trust) KnowsProviderIDs() {}

// platform is a platformkit.Platform.
type platform struct {
	api *api
	// clusters reads Clusters. It may be a cache.
	clusters client.Reader
}

// location has the names of a Machine's Metal3Machine, and of the BareMetalHost in its provider ID.
// It also has the Machine's UID, because the name of a Metal3Machine can be used again.
type location struct {
	machine string
	// host is empty for a Machine without a provider ID.
	host string
	uid  types.UID
}

func (l location) String() string { return l.machine + "/" + l.host + "/" + string(l.uid) }

func parseLocation(s string) (location, error) {
	parts := strings.SplitN(s, "/", 3)
	if len(parts) != 3 {
		return location{}, fmt.Errorf("%.128q is no location", s)
	}
	return location{parts[0], parts[1], types.UID(parts[2])}, nil
}

// Location refuses Machines that are not CAPM3's, or whose provider ID names other objects.
func (*platform) Location(m clusterapi.PlatformMachine) (string, error) {
	l := location{machine: m.Infrastructure.Name, uid: m.UID}
	switch {
	case m.MachinePool:
		return "", errors.New("Metal3 has no MachinePools")
	case m.Infrastructure.GroupKind() != schema.GroupKind{Group: infraGroup, Kind: machineKind}:
		return "", fmt.Errorf("its infrastructure is a %.128s, and no %s", m.Infrastructure.GroupKind(), machineKind)
	case l.machine == "" || l.uid == "":
		return "", errors.New("it has no UID, or no name of its infrastructure")
	case m.ProviderID == "":
		return l.String(), nil
	case legacyForm.MatchString(m.ProviderID):
		return "", fmt.Errorf("the provider ID %.128q has the legacy form, which names no Metal3Machine: the kubelet's provider-id must be metal3://{{ ds.meta_data.providerid }}", m.ProviderID)
	}
	parts, err := platformkit.Match(m.ProviderID, providerIDForm)
	switch {
	case err != nil:
		return "", err
	case parts[0] != m.Cluster.Namespace:
		return "", fmt.Errorf("the provider ID %.128q names another namespace than its Cluster's, %s", m.ProviderID, m.Cluster.Namespace)
	case parts[2] != l.machine:
		return "", fmt.Errorf("the provider ID %.128q names another Metal3Machine than the Machine, %s", m.ProviderID, l.machine)
	}
	l.host = parts[1]
	return l.String(), nil
}

// Find reads live what decides which host a Machine has. An instance is a BareMetalHost. Its EKs
// and its consumer come from the same version of the object. So a host that gets another consumer
// between two calls never has the EKs of one version with the consumer of the other.
func (p *platform) Find(ctx context.Context, cluster types.NamespacedName, locations []string) ([]platformkit.Instance, error) {
	// 1. Does CAPM3 make the provider IDs of this Cluster? If not, no Machine has an answer.
	refused, err := p.clusterRefused(ctx, cluster)
	if err != nil {
		return nil, err
	}
	var all []platformkit.Instance
	if refused != nil {
		for _, at := range locations {
			all = append(all, platformkit.Instance{Location: at, Refused: refused})
		}
		return all, nil
	}

	// 2. Read its Metal3Machines, then its hosts.
	o, err := p.read(ctx, cluster)
	if err != nil {
		return nil, err
	}

	// 3. Which host is at each location?
	for _, at := range locations {
		l, err := parseLocation(at)
		if err != nil {
			return nil, err
		}
		host, err := o.hostOf(l)
		switch {
		case err != nil:
			all = append(all, platformkit.Instance{Location: at, Refused: err})
		case host != nil:
			all = append(all, host.instance(l))
		}
	}
	return all, nil
}

// clusterRefused returns why no Machine of a Cluster has an answer.
//
// With an external cloud provider, CAPM3 takes provider IDs from Nodes, which write them. Releases
// of CAPM3 have different defaults, so the Metal3Cluster must have the field.
func (p *platform) clusterRefused(ctx context.Context, cluster types.NamespacedName) (refused, err error) {
	object := &clusterv1.Cluster{}
	if err := p.clusters.Get(ctx, cluster, object); err != nil {
		return nil, fmt.Errorf("cluster %s: %w", cluster, err)
	}
	ref := object.Spec.InfrastructureRef
	if (ref.GroupKind() != schema.GroupKind{Group: infraGroup, Kind: clusterKind}) || ref.Name == "" {
		return fmt.Errorf("the infrastructure of Cluster %s is no %s", cluster, clusterKind), nil
	}
	clusters, err := list[metal3Cluster](ctx, p.api, clustersOf, cluster.Namespace, "fieldSelector", "metadata.name="+ref.Name)
	if err != nil {
		return nil, err
	}
	spec := clusters[ref.Name].Spec
	switch cloud, none := spec.CloudProviderEnabled, spec.NoCloudProvider; {
	case clusters[ref.Name].UID == "":
		return fmt.Errorf("the %s %s/%s does not exist", clusterKind, cluster.Namespace, ref.Name), nil
	case cloud == nil && none == nil, cloud != nil && *cloud, none != nil && !*none:
		return fmt.Errorf("the %s %s/%s does not have cloudProviderEnabled: false: then CAPM3 may take provider IDs from Nodes", clusterKind, cluster.Namespace, ref.Name), nil
	}
	return nil, nil
}

// objects are a Cluster's Metal3Machines and BareMetalHosts.
type objects struct {
	namespace string
	machines  map[string]metav1.PartialObjectMetadata
	hosts     map[string]bareMetalHost
	// consumed are the hosts, by the Metal3Machine in their spec.consumerRef.
	consumed map[string][]bareMetalHost
}

// read reads a Cluster's objects. Cluster API and CAPM3 label them with the Cluster's name.
func (p *platform) read(ctx context.Context, cluster types.NamespacedName) (o objects, err error) {
	o = objects{namespace: cluster.Namespace, consumed: map[string][]bareMetalHost{}}
	label := clusterv1.ClusterNameLabel + "=" + cluster.Name
	if o.machines, err = list[metav1.PartialObjectMetadata](ctx, p.api, machinesOf, cluster.Namespace, "labelSelector", label); err != nil {
		return objects{}, err
	}
	if o.hosts, err = list[bareMetalHost](ctx, p.api, hostsOf, cluster.Namespace, "labelSelector", label); err != nil {
		return objects{}, err
	}
	for _, h := range o.hosts {
		if consumer := h.consumer(); consumer != "" {
			o.consumed[consumer] = append(o.consumed[consumer], h)
		}
	}
	return o, nil
}

// hostOf returns the host of a Machine, nil if there is none yet, or why the Machine must not have
// an answer. For a Machine without a provider ID, objects that do not exist yet are normal.
func (o objects) hostOf(l location) (*bareMetalHost, error) {
	// The Metal3Machine is this Machine's.
	m, exists := o.machines[l.machine]
	owner := metav1.GetControllerOf(&m)
	switch {
	case !exists, owner == nil && l.host == "":
		return nil, nil
	case owner == nil || owner.UID != l.uid || owner.Kind != "Machine" || groupOf(owner.APIVersion) != clusterv1.GroupVersion.Group:
		return nil, fmt.Errorf("the %s %s/%s is not controlled by this Machine", machineKind, o.namespace, l.machine)
	}

	// One host says that this Metal3Machine consumes it, and the provider ID says so, too.
	consumed := o.consumed[l.machine]
	named, exists := o.hosts[l.host]
	switch {
	case len(consumed) > 1:
		return nil, fmt.Errorf("the %s %s/%s is the consumer of %d BareMetalHosts", machineKind, o.namespace, l.machine, len(consumed))
	case len(consumed) == 0 && !exists:
		return nil, nil
	case len(consumed) == 0:
		return nil, fmt.Errorf("the BareMetalHost %s/%s is not consumed by the %s %s", o.namespace, named.Name, machineKind, l.machine)
	case l.host != "" && consumed[0].Name != l.host:
		return nil, fmt.Errorf("the %s %s/%s is the consumer of the BareMetalHost %s, and the provider ID names %s", machineKind, o.namespace, l.machine, consumed[0].Name, l.host)
	}
	host := consumed[0]

	// The answer gives a Machine its provider ID, and so says that the host runs its image.
	if l.host == "" && host.Status.Provisioning.State != provisioned {
		return nil, nil
	}
	annotation, annotated := host.Annotations[attestation.AnnotationEK]
	if !annotated {
		return nil, fmt.Errorf("the BareMetalHost %s/%s has no annotation %s", o.namespace, host.Name, attestation.AnnotationEK)
	}
	// A changed annotation takes the old keys back, also if it is invalid: an operator may write
	// "revoked" there.
	if _, err := clusterapi.EKsInAnnotation(annotation); err != nil {
		return nil, fmt.Errorf("the BareMetalHost %s/%s: %w", o.namespace, host.Name, err)
	}
	return &host, nil
}

// consumer returns the name of the Metal3Machine that consumes a host, empty if there is none.
func (h *bareMetalHost) consumer() string {
	c := h.Spec.ConsumerRef
	if c == nil || c.Kind != machineKind || groupOf(c.APIVersion) != infraGroup || c.Namespace != h.Namespace {
		return ""
	}
	return c.Name
}

// instance returns the host as the instance at a location. EKs must belong to one host of a
// namespace. The domain is the namespace, because tenants may annotate their hosts with any EK.
func (h *bareMetalHost) instance(l location) platformkit.Instance {
	annotation := h.Annotations[attestation.AnnotationEK]
	sum := sha256.Sum256([]byte(annotation))
	return platformkit.Instance{
		Location: l.String(), ID: string(h.UID), Version: hex.EncodeToString(sum[:]), Domain: h.Namespace,
		ProviderID: "metal3://" + h.Namespace + "/" + h.Name + "/" + l.machine, Data: annotation,
	}
}

// EndorsementKeys makes no call: Find has read the annotation.
func (*platform) EndorsementKeys(_ context.Context, i platformkit.Instance) ([]tpm.Fingerprint, error) {
	annotation, ok := i.Data.(string)
	if !ok {
		return nil, errors.New("the instance is not one that Find returned")
	}
	return clusterapi.EKsInAnnotation(annotation)
}

// groupOf returns the API group of an apiVersion, empty if it has none.
func groupOf(apiVersion string) string {
	group, _, ok := strings.Cut(apiVersion, "/")
	if !ok {
		return ""
	}
	return group
}
