// SPDX-License-Identifier: Apache-2.0

// Package contract defines the fields with which an infrastructure provider names the signers of a
// Cluster's node certificates. A bootstrap provider reads them. They are in the status of the
// InfraCluster, which the infrastructure provider's controller writes:
//
//	status:
//	  kubeletClientCertificateSigner: cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm
//	  kubeletServingCertificateSigner: cluster.x-k8s.io/kubelet-serving-tpm
//
// Both fields are optional strings. If a field is empty or missing, Kubernetes' own signer issues.
// The InfraCluster's CRD must have both fields in its schema, and the subresource status.
package contract

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// The fields of an InfraCluster's status.
const (
	ClientField  = "kubeletClientCertificateSigner"
	ServingField = "kubeletServingCertificateSigner"
)

// Signers are names of signers (certificates.k8s.io/v1, spec.signerName). An empty one means
// Kubernetes' own signer.
type Signers struct {
	// Client issues the certificates with which kubelets talk to the API server.
	Client string
	// Serving issues those that kubelets serve with.
	Serving string
}

// check returns an error for a name that the API server refuses in a request, and for one of
// Kubernetes' own signers that issues for another purpose.
func (s Signers) check() error {
	for _, f := range []struct{ field, name, builtin string }{
		{ClientField, s.Client, certificatesv1.KubeAPIServerClientKubeletSignerName},
		{ServingField, s.Serving, certificatesv1.KubeletServingSignerName},
	} {
		if f.name == "" {
			continue
		}
		if err := csr.CheckSignerName("status."+f.field, f.name); err != nil {
			return err
		}
		if strings.HasPrefix(f.name, "kubernetes.io/") && f.name != f.builtin {
			return fmt.Errorf("status.%s: %.128q does not issue such certificates; use %s", f.field, f.name, f.builtin)
		}
	}
	return nil
}

// SignersOf returns the signers in the status of an InfraCluster. It returns the zero value if the
// provider does not implement this contract.
func SignersOf(infraCluster *unstructured.Unstructured) (Signers, error) {
	signers, err := signersIn(infraCluster.Object)
	if err == nil {
		err = signers.check()
	}
	if err != nil {
		return Signers{}, fmt.Errorf("%s %s: %w", infraCluster.GetKind(), client.ObjectKeyFromObject(infraCluster), err)
	}
	return signers, nil
}

func signersIn(object map[string]any) (s Signers, err error) {
	if s.Client, _, err = unstructured.NestedString(object, "status", ClientField); err != nil {
		return Signers{}, err
	}
	s.Serving, _, err = unstructured.NestedString(object, "status", ServingField)
	return s, err
}

// SetSigners writes the signers into the status of an InfraCluster, under the version that the
// provider's controller has read. It returns a Conflict if the object was written since. It writes
// only these two fields, and only if they differ. It does not change infraCluster, so that the
// controller can still write its own changes.
func SetSigners(ctx context.Context, c client.Client, infraCluster client.Object, signers Signers) error {
	gvk, err := apiutil.GVKForObject(infraCluster, c.Scheme())
	if err != nil {
		return fmt.Errorf("InfraCluster %s: %w", client.ObjectKeyFromObject(infraCluster), err)
	}
	if err := setSigners(ctx, c, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": gvk.GroupVersion().String(), "kind": gvk.Kind,
		"metadata": map[string]any{"name": infraCluster.GetName(), "namespace": infraCluster.GetNamespace()},
	}}, infraCluster, signers); err != nil {
		return fmt.Errorf("%s %s: %w", gvk.Kind, client.ObjectKeyFromObject(infraCluster), err)
	}
	return nil
}

func setSigners(ctx context.Context, c client.Client, target *unstructured.Unstructured, infraCluster client.Object, signers Signers) error {
	if err := signers.check(); err != nil {
		return err
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(infraCluster)
	if err != nil {
		return err
	}
	now, err := signersIn(object)
	if err == nil && now == signers {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": infraCluster.GetResourceVersion()},
		"status":   map[string]any{ClientField: orNull(signers.Client), ServingField: orNull(signers.Serving)},
	})
	if err != nil {
		return err
	}
	if err := c.Status().Patch(ctx, target, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("write status.%s and status.%s: %w", ClientField, ServingField, err)
	}
	// The API server drops fields that the schema does not have, and returns no error.
	if now, err = signersIn(target.Object); err != nil || now != signers {
		return fmt.Errorf("status.%s and status.%s were not stored: add them to the CRD's schema, as strings", ClientField, ServingField)
	}
	return nil
}

// orNull returns null for an empty name, which removes the field.
func orNull(name string) any {
	if name == "" {
		return nil
	}
	return name
}
