// SPDX-License-Identifier: Apache-2.0

// Package infrav1 is the API group infrastructure.cluster.x-k8s.io of the provider Metal, by
// Cluster API's contract v1beta2. scripts/generate makes deep copies and CRDs from it. Fields
// without a comment have the name, type and meaning that the contract gives them.
//
// +kubebuilder:object:generate=true
// +groupName=infrastructure.cluster.x-k8s.io
// +versionName=v1beta1
package infrav1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// GroupVersion is the group and version of these types.
var GroupVersion = schema.GroupVersion{Group: "infrastructure.cluster.x-k8s.io", Version: "v1beta1"}

// AddToScheme makes the types known to a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&MetalCluster{}, &MetalClusterList{}, &MetalClusterTemplate{}, &MetalClusterTemplateList{},
		&MetalMachine{}, &MetalMachineList{}, &MetalMachineTemplate{}, &MetalMachineTemplateList{},
		&MetalMachinePool{}, &MetalMachinePoolList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}

// Initialization says that the infrastructure is there. It never becomes false again.
type Initialization struct {
	// +optional
	Provisioned *bool `json:"provisioned,omitempty"`
}

// MetalCluster is the infrastructure of a Cluster. Its machines share none, so it is ready at once.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=metalclusters,categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta1"
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
type MetalCluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec MetalClusterSpec `json:"spec,omitempty"`
	// +optional
	Status MetalClusterStatus `json:"status,omitempty"`
}

// MetalClusterSpec is what a user writes.
type MetalClusterSpec struct {
	// +optional
	ControlPlaneEndpoint clusterv1.APIEndpoint `json:"controlPlaneEndpoint,omitempty,omitzero"`
}

// MetalClusterStatus is what the provider says.
type MetalClusterStatus struct {
	// +optional
	Initialization Initialization `json:"initialization,omitempty,omitzero"`
	// KubeletClientCertificateSigner is the signer of the kubelets' client certificates, for
	// bootstrap providers.
	// +optional
	// +kubebuilder:validation:MaxLength=571
	KubeletClientCertificateSigner string `json:"kubeletClientCertificateSigner,omitempty"`
	// KubeletServingCertificateSigner is the signer of the kubelets' serving certificates.
	// +optional
	// +kubebuilder:validation:MaxLength=571
	KubeletServingCertificateSigner string `json:"kubeletServingCertificateSigner,omitempty"`
}

// MetalClusterList has MetalClusters.
//
// +kubebuilder:object:root=true
type MetalClusterList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []MetalCluster `json:"items"`
}

// MetalClusterTemplate is for ClusterClasses.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=metalclustertemplates,categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta1"
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
type MetalClusterTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec MetalClusterTemplateSpec `json:"spec"`
}

// MetalClusterTemplateSpec has the template.
type MetalClusterTemplateSpec struct {
	Template MetalClusterTemplateResource `json:"template"`
}

// MetalClusterTemplateResource is what a MetalCluster is made of.
type MetalClusterTemplateResource struct {
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`
	// +optional
	Spec MetalClusterSpec `json:"spec,omitempty"`
}

// MetalClusterTemplateList has MetalClusterTemplates.
//
// +kubebuilder:object:root=true
type MetalClusterTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []MetalClusterTemplate `json:"items"`
}

// MetalMachine is the host of a Machine. It keeps its provider ID: another one would be a host that
// was never allocated for it, and that is wiped with it.
//
// +kubebuilder:validation:XValidation:rule=`oldSelf.?spec.?providerID.orValue("") in ["", self.?spec.?providerID.orValue("")]`,message="a MetalMachine keeps its host"
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=metalmachines,categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta1"
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
// +kubebuilder:printcolumn:name="Provider ID",type=string,JSONPath=`.spec.providerID`
// +kubebuilder:printcolumn:name="Provisioned",type=boolean,JSONPath=`.status.initialization.provisioned`
type MetalMachine struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec MetalMachineSpec `json:"spec,omitempty"`
	// +optional
	Status MetalMachineStatus `json:"status,omitempty"`
}

// MetalMachineSpec is written by the provider. It survives clusterctl move. A user leaves it empty.
type MetalMachineSpec struct {
	// ProviderID is metal:// and the host's ID. It never becomes that of another host.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	ProviderID string `json:"providerID,omitempty"`
	// Addresses are the host's. The status has them for Cluster API. They are here, too, since
	// clusterctl move loses the status.
	// +optional
	Addresses []clusterv1.MachineAddress `json:"addresses,omitempty"`
}

// MetalMachineStatus is what the provider can say again at any time.
type MetalMachineStatus struct {
	// +optional
	Initialization Initialization `json:"initialization,omitempty,omitzero"`
	// +optional
	Addresses []clusterv1.MachineAddress `json:"addresses,omitempty"`
	// +optional
	FailureDomain string `json:"failureDomain,omitempty"`
}

// MetalMachineList has MetalMachines.
//
// +kubebuilder:object:root=true
type MetalMachineList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []MetalMachine `json:"items"`
}

// MetalMachineTemplate is for MachineDeployments, and for all others that create Machines.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=metalmachinetemplates,categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta1"
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
type MetalMachineTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec MetalMachineTemplateSpec `json:"spec"`
}

// MetalMachineTemplateSpec has the template.
type MetalMachineTemplateSpec struct {
	Template MetalMachineTemplateResource `json:"template"`
}

// MetalMachineTemplateResource is what a MetalMachine is made of.
type MetalMachineTemplateResource struct {
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`
	// +optional
	Spec MetalMachineTemplateMachineSpec `json:"spec,omitempty"`
}

// MetalMachineTemplateMachineSpec is empty: a user cannot say anything about a host. It must not
// have the provider ID: the user would then choose a host, and the platform would not have vouched
// for its EKs.
type MetalMachineTemplateMachineSpec struct{}

// MetalMachineTemplateList has MetalMachineTemplates.
//
// +kubebuilder:object:root=true
type MetalMachineTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []MetalMachineTemplate `json:"items"`
}

// MetalMachinePool is the hosts of a MachinePool: a MetalMachine for each replica.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=metalmachinepools,categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta1"
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
type MetalMachinePool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec MetalMachinePoolSpec `json:"spec,omitempty"`
	// +optional
	Status MetalMachinePoolStatus `json:"status,omitempty"`
}

// MetalMachinePoolSpec is what the provider writes.
type MetalMachinePoolSpec struct {
	// +optional
	ProviderIDList []string `json:"providerIDList,omitempty"`
}

// MetalMachinePoolStatus is what the provider says.
type MetalMachinePoolStatus struct {
	// Ready is what Cluster API v1.14 reads of pools, in both contracts.
	// +optional
	Ready bool `json:"ready,omitempty"`
	// +optional
	Initialization Initialization `json:"initialization,omitempty,omitzero"`
	// +optional
	Replicas int32 `json:"replicas"`
	// InfrastructureMachineKind has Cluster API make a Machine for each MetalMachine with the
	// pool's label.
	// +optional
	InfrastructureMachineKind string `json:"infrastructureMachineKind,omitempty"`
}

// MetalMachinePoolList has MetalMachinePools.
//
// +kubebuilder:object:root=true
type MetalMachinePoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []MetalMachinePool `json:"items"`
}
