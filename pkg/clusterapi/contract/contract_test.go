// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

var acme = schema.GroupVersion{Group: "infrastructure.cluster.x-k8s.io", Version: "v1beta1"}

// AcmeCluster is an InfraCluster as a provider's own Go type.
type AcmeCluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Status            AcmeClusterStatus `json:"status"`
}

type AcmeClusterStatus struct {
	Ready   bool   `json:"ready,omitempty"`
	Client  string `json:"kubeletClientCertificateSigner,omitempty"`
	Serving string `json:"kubeletServingCertificateSigner,omitempty"`
}

func (a *AcmeCluster) DeepCopyObject() runtime.Object {
	c := *a
	a.DeepCopyInto(&c.ObjectMeta)
	return &c
}

var ours = Signers{Client: "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm", Serving: "cluster.x-k8s.io/kubelet-serving-tpm"}

// api is an API server with one InfraCluster, and how often its status was written.
type api struct {
	client.Client
	writes int
	// prune has it drop the signers, as one whose CRD does not have them.
	prune bool
}

func newAPI() *api {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(acme, &AcmeCluster{})
	a := &api{}
	a.Client = fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&AcmeCluster{}).
		WithObjects(&AcmeCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one"}, Status: AcmeClusterStatus{Ready: true}}).
		WithInterceptorFuncs(interceptor.Funcs{SubResourcePatch: func(ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch, opts ...client.SubResourcePatchOption) error {
			a.writes++
			if a.prune {
				return c.Get(ctx, client.ObjectKeyFromObject(o), o)
			}
			return c.SubResource(sub).Patch(ctx, o, p, opts...)
		}}).Build()
	return a
}

func (a *api) get(t *testing.T) *AcmeCluster {
	t.Helper()
	object := &AcmeCluster{}
	if err := a.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "one"}, object); err != nil {
		t.Fatal(err)
	}
	return object
}

func (a *api) want(t *testing.T, signers Signers, writes int) {
	t.Helper()
	now := a.get(t)
	if got := (Signers{now.Status.Client, now.Status.Serving}); got != signers || !now.Status.Ready || a.writes != writes {
		t.Errorf("%+v after %d writes, not %+v after %d", now.Status, a.writes, signers, writes)
	}
}

func TestSetSigners(t *testing.T) {
	a := newAPI()
	object := a.get(t)
	before := object.DeepCopyObject().(*AcmeCluster)
	object.Status.Ready = false // not written yet, by the provider
	if err := SetSigners(t.Context(), a, object, ours); err != nil {
		t.Fatal(err)
	}
	a.want(t, ours, 1)
	if object.ResourceVersion != before.ResourceVersion || object.Status.Ready || object.Status.Client != "" {
		t.Errorf("the object given was changed: %+v", object)
	}
	// It was written since it was read.
	if err := SetSigners(t.Context(), a, before, Signers{Serving: ours.Serving}); !apierrors.IsConflict(err) {
		t.Errorf("on an old object: %v", err)
	}
	a.want(t, ours, 2)
	if err := SetSigners(t.Context(), a, a.get(t), ours); err != nil {
		t.Error(err)
	}
	a.want(t, ours, 2) // nothing to write
	if err := SetSigners(t.Context(), a, a.get(t), Signers{Client: ours.Client}); err != nil {
		t.Error(err)
	}
	a.want(t, Signers{Client: ours.Client}, 3)

	untyped := &unstructured.Unstructured{}
	untyped.SetGroupVersionKind(acme.WithKind("AcmeCluster"))
	if err := a.Get(t.Context(), client.ObjectKeyFromObject(before), untyped); err != nil {
		t.Fatal(err)
	}
	if got, err := SignersOf(untyped); err != nil || got != (Signers{Client: ours.Client}) {
		t.Errorf("%+v %v", got, err)
	}
	for range 2 {
		if err := SetSigners(t.Context(), a, untyped, Signers{Client: ours.Client}); err != nil {
			t.Error(err)
		}
	}
	a.want(t, Signers{Client: ours.Client}, 3)
	if err := SetSigners(t.Context(), a, untyped, Signers{}); err != nil {
		t.Error(err)
	}
	a.want(t, Signers{}, 4)
}

func TestSetSignersRefuses(t *testing.T) {
	long := "example.com/" + strings.Repeat("a", 400)
	for name, row := range map[string]struct {
		signers Signers
		says    string
	}{
		"no domain":                       {Signers{Client: "kubelet-tpm"}, ClientField},
		"a domain without a dot":          {Signers{Client: "local/kubelet-tpm"}, ClientField},
		"no path":                         {Signers{Serving: "example.com/"}, ServingField},
		"two slashes":                     {Signers{Serving: "example.com/a/b"}, ServingField},
		"capitals":                        {Signers{Client: "example.com/Kubelet"}, ClientField},
		"too long":                        {Signers{Client: long}, ClientField},
		"a domain that is too long":       {Signers{Client: strings.Repeat("abcdefg.", 32) + "com/a"}, ClientField},
		"the two confused":                {Signers{Client: "kubernetes.io/kubelet-serving", Serving: "kubernetes.io/kube-apiserver-client-kubelet"}, "kube-apiserver-client-kubelet"},
		"one for users":                   {Signers{Client: "kubernetes.io/kube-apiserver-client"}, "does not issue"},
		"the client's for serving, alone": {Signers{Serving: "kubernetes.io/kube-apiserver-client-kubelet"}, "kubernetes.io/kubelet-serving"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI()
			err := SetSigners(t.Context(), a, a.get(t), row.signers)
			if err == nil || !strings.Contains(err.Error(), row.says) || !strings.Contains(err.Error(), "AcmeCluster default/one") || len(err.Error()) > 400 {
				t.Errorf("%v", err)
			}
			a.want(t, Signers{}, 0)
		})
	}
	t.Run("a CRD without the fields", func(t *testing.T) {
		a := newAPI()
		a.prune = true
		if err := SetSigners(t.Context(), a, a.get(t), ours); err == nil || !strings.Contains(err.Error(), "CRD's schema") {
			t.Error(err)
		}
	})
	t.Run("a kind that the client does not know", func(t *testing.T) {
		if err := SetSigners(t.Context(), newAPI(), &struct{ AcmeCluster }{}, ours); err == nil {
			t.Error("no error")
		}
	})
}

func TestSignersOf(t *testing.T) {
	for name, row := range map[string]struct {
		status any
		want   Signers
		fails  bool
	}{
		"both":                   {map[string]any{ClientField: ours.Client, ServingField: ours.Serving}, ours, false},
		"Kubernetes' own, named": {map[string]any{ClientField: "kubernetes.io/kube-apiserver-client-kubelet"}, Signers{Client: "kubernetes.io/kube-apiserver-client-kubelet"}, false},
		"none":                   {map[string]any{"ready": true}, Signers{}, false},
		"no status":              {nil, Signers{}, false},
		"not a string":           {map[string]any{ServingField: int64(1)}, Signers{}, true},
		"no name":                {map[string]any{ClientField: "x y"}, Signers{}, true},
		"the status is no map":   {"ready", Signers{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			object := &unstructured.Unstructured{Object: map[string]any{"kind": "AcmeCluster", "metadata": map[string]any{"namespace": "default", "name": "one"}}}
			if row.status != nil {
				object.Object["status"] = row.status
			}
			got, err := SignersOf(object)
			if got != row.want || (err != nil) != row.fails || err != nil && !strings.Contains(err.Error(), "AcmeCluster default/one") {
				t.Errorf("%+v %v", got, err)
			}
		})
	}
}
