// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
)

// By hand: there is little to copy, and a test finds what was forgotten.

// DeepCopyInto copies the record into out.
func (in *NodeAttestation) DeepCopyInto(out *NodeAttestation) {
	*out = *in
	in.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	in.Spec.DeepCopyInto(&out.Spec)
	in.Status.DeepCopyInto(&out.Status)
}

// DeepCopy returns a copy that shares nothing with the record.
func (in *NodeAttestation) DeepCopy() *NodeAttestation {
	if in == nil {
		return nil
	}
	out := new(NodeAttestation)
	in.DeepCopyInto(out)
	return out
}

// DeepCopyObject is DeepCopy, as runtime.Object wants it.
func (in *NodeAttestation) DeepCopyObject() runtime.Object {
	if in == nil {
		return nil
	}
	return in.DeepCopy()
}

// DeepCopyInto copies the spec into out.
func (in *NodeAttestationSpec) DeepCopyInto(out *NodeAttestationSpec) {
	*out = *in
	out.EK = copyOf(in.EK)
}

// DeepCopyInto copies the status into out.
func (in *NodeAttestationStatus) DeepCopyInto(out *NodeAttestationStatus) {
	*out = *in
	out.LastAttested = in.LastAttested.DeepCopy()
	out.Boot = copyOf(in.Boot)
	out.Hello = copyOf(in.Hello)
	out.Request = copyOf(in.Request)
	// metav1.Time holds a time.Time, which is a value but for the time zone, which nobody changes.
	out.Certificates = slices.Clone(in.Certificates)
	out.EKReplaced = copyOf(in.EKReplaced)
	if in.EKReplaced != nil {
		out.EKReplaced.EKs = slices.Clone(in.EKReplaced.EKs)
	}
	out.EKHistory = slices.Clone(in.EKHistory)
}

// DeepCopyInto copies the list into out.
func (in *NodeAttestationList) DeepCopyInto(out *NodeAttestationList) {
	*out = *in
	in.ListMeta.DeepCopyInto(&out.ListMeta)
	if in.Items != nil {
		out.Items = make([]NodeAttestation, len(in.Items))
		for i := range in.Items {
			in.Items[i].DeepCopyInto(&out.Items[i])
		}
	}
}

// DeepCopy returns a copy that shares nothing with the list.
func (in *NodeAttestationList) DeepCopy() *NodeAttestationList {
	if in == nil {
		return nil
	}
	out := new(NodeAttestationList)
	in.DeepCopyInto(out)
	return out
}

// DeepCopyObject is DeepCopy, as runtime.Object wants it.
func (in *NodeAttestationList) DeepCopyObject() runtime.Object {
	if in == nil {
		return nil
	}
	return in.DeepCopy()
}

// copyOf copies a struct that has no pointers of its own.
func copyOf[T any](in *T) *T {
	if in == nil {
		return nil
	}
	out := *in
	return &out
}
