// SPDX-License-Identifier: Apache-2.0

// Package controlplanev1 is the API group controlplane.cluster.x-k8s.io of the provider Metal, by
// Cluster API's contract v1beta2. scripts/generate makes deep copies and CRDs from it.
//
// +kubebuilder:object:generate=true
// +groupName=controlplane.cluster.x-k8s.io
// +versionName=v1beta1
package controlplanev1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// GroupVersion is the group and version of these types.
var GroupVersion = schema.GroupVersion{Group: "controlplane.cluster.x-k8s.io", Version: "v1beta1"}

// AddToScheme makes the types known to a scheme.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&HostedControlPlane{}, &HostedControlPlaneList{}, &HostedControlPlaneTemplate{}, &HostedControlPlaneTemplateList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}

// HostedControlPlane is a control plane without Machines, which somebody else runs.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=hostedcontrolplanes,categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta1"
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
type HostedControlPlane struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec HostedControlPlaneSpec `json:"spec,omitempty"`
	// +optional
	Status HostedControlPlaneStatus `json:"status,omitempty"`
}

// HostedControlPlaneSpec is what a user or a ClusterClass writes.
type HostedControlPlaneSpec struct {
	// +optional
	ControlPlaneEndpoint clusterv1.APIEndpoint `json:"controlPlaneEndpoint,omitempty,omitzero"`
	// Version is that of Kubernetes.
	// +optional
	Version string `json:"version,omitempty"`
}

// HostedControlPlaneStatus is what the provider says.
type HostedControlPlaneStatus struct {
	// +optional
	Initialization ControlPlaneInitialization `json:"initialization,omitempty,omitzero"`
	// ExternalManagedControlPlane says that the control plane has no Machines, and that Cluster
	// API must not wait for its Nodes.
	// +optional
	ExternalManagedControlPlane *bool `json:"externalManagedControlPlane,omitempty"`
	// +optional
	Version string `json:"version,omitempty"`
}

// ControlPlaneInitialization says that the API server answers. It never becomes false again.
type ControlPlaneInitialization struct {
	// +optional
	ControlPlaneInitialized *bool `json:"controlPlaneInitialized,omitempty"`
}

// HostedControlPlaneList has HostedControlPlanes.
//
// +kubebuilder:object:root=true
type HostedControlPlaneList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []HostedControlPlane `json:"items"`
}

// HostedControlPlaneTemplate is for ClusterClasses.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=hostedcontrolplanetemplates,categories=cluster-api
// +kubebuilder:metadata:labels="cluster.x-k8s.io/v1beta2=v1beta1"
// +kubebuilder:metadata:labels="clusterctl.cluster.x-k8s.io="
type HostedControlPlaneTemplate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec HostedControlPlaneTemplateSpec `json:"spec"`
}

// HostedControlPlaneTemplateSpec has the template.
type HostedControlPlaneTemplateSpec struct {
	Template HostedControlPlaneTemplateResource `json:"template"`
}

// HostedControlPlaneTemplateResource is what a HostedControlPlane is made of.
type HostedControlPlaneTemplateResource struct {
	// +optional
	ObjectMeta clusterv1.ObjectMeta `json:"metadata,omitempty,omitzero"`
	// +optional
	Spec HostedControlPlaneSpec `json:"spec,omitempty"`
}

// HostedControlPlaneTemplateList has HostedControlPlaneTemplates.
//
// +kubebuilder:object:root=true
type HostedControlPlaneTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []HostedControlPlaneTemplate `json:"items"`
}
