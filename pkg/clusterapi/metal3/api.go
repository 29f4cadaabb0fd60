// SPDX-License-Identifier: Apache-2.0

package metal3

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
)

const (
	// pageSize and maxPages limit a list, and maxPage the bytes of a page.
	pageSize, maxPages = 500, 100
	maxPage            = 64 << 20
)

// metal3Cluster has the fields of a Metal3Cluster that are used.
type metal3Cluster struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		// NoCloudProvider is the negation of CloudProviderEnabled in v1beta1.
		CloudProviderEnabled *bool `json:"cloudProviderEnabled"`
		NoCloudProvider      *bool `json:"noCloudProvider"`
	} `json:"spec"`
}

// bareMetalHost has the fields of a BareMetalHost that are used. Metadata are not enough, because
// the consumer is in the spec.
type bareMetalHost struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		ConsumerRef *struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
			Namespace  string `json:"namespace"`
			Name       string `json:"name"`
		} `json:"consumerRef"`
	} `json:"spec"`
	Status struct {
		Provisioning struct {
			State string `json:"state"`
		} `json:"provisioning"`
	} `json:"status"`
}

// kind is a kind of object, and how to read it.
type kind struct {
	schema.GroupKind
	// version is empty for the version that the API server prefers.
	version string
	// metadata says that only metadata are read.
	metadata bool
}

var (
	clustersOf = kind{GroupKind: schema.GroupKind{Group: infraGroup, Kind: clusterKind}}
	machinesOf = kind{GroupKind: schema.GroupKind{Group: infraGroup, Kind: machineKind}, metadata: true}
	hostsOf    = kind{GroupKind: schema.GroupKind{Group: "metal3.io", Kind: "BareMetalHost"}, version: "v1alpha1"}
)

// api asks the management cluster's API server itself, and no cache. It does not use a client of
// client-go or controller-runtime: those retry, follow redirects, and read answers of any size.
type api struct {
	url    *url.URL
	client *http.Client
	kinds  meta.RESTMapper
}

// newAPI returns an api with the credential of a configuration. A server that can answer in the API
// server's place decides which machine joins, so TLS is required.
func newAPI(config *rest.Config, kinds meta.RESTMapper, budget *platformkit.Budget) (*api, error) {
	config = rest.CopyConfig(config)
	config.Wrap(budget.Transport)
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, err
	}
	if server.Scheme != "https" || config.Insecure {
		return nil, errors.New("the connection to the management cluster does not verify its API server")
	}
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	httpClient.CheckRedirect = platformkit.NoRedirect
	return &api{server, httpClient, kinds}, nil
}

// list returns the objects of a kind in a namespace, by name. selector is the query's parameter
// labelSelector or fieldSelector, with its value.
func list[T any, P interface {
	*T
	metav1.Object
}](ctx context.Context, a *api, k kind, namespace, selector, value string) (map[string]T, error) {
	var versions []string
	if k.version != "" {
		versions = []string{k.version}
	}
	mapping, err := a.kinds.RESTMapping(k.GroupKind, versions...)
	if err != nil {
		return nil, err
	}
	var (
		resource = mapping.Resource
		at       = a.url.JoinPath("apis", resource.Group, resource.Version, "namespaces", namespace, resource.Resource)
		accept   = "application/json"
		listKind = schema.GroupVersion{Group: resource.Group, Version: resource.Version}.WithKind(k.Kind + "List")
	)
	if k.metadata {
		accept = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
		listKind = metav1.SchemeGroupVersion.WithKind("PartialObjectMetadataList")
	}
	all, next := map[string]T{}, ""
	for range maxPages {
		query := url.Values{selector: {value}, "limit": {strconv.Itoa(pageSize)}}
		if next != "" {
			query.Set("continue", next)
		}
		at.RawQuery = query.Encode()
		var page struct {
			metav1.TypeMeta `json:",inline"`
			Metadata        metav1.ListMeta `json:"metadata"`
			Items           []T             `json:"items"`
		}
		if err := a.get(ctx, at, accept, &page); err != nil {
			return nil, fmt.Errorf("list %s: %w", resource.GroupResource(), err)
		}
		if page.GroupVersionKind() != listKind {
			return nil, fmt.Errorf("list %s: the answer is a %.128s", resource.GroupResource(), page.GroupVersionKind())
		}
		for n := range page.Items {
			object := P(&page.Items[n])
			if _, twice := all[object.GetName()]; twice || object.GetName() == "" || object.GetNamespace() != namespace {
				return nil, fmt.Errorf("list %s: the answer has %.253q twice, or from another namespace", resource.GroupResource(), object.GetName())
			}
			all[object.GetName()] = page.Items[n]
		}
		if next = page.Metadata.Continue; next == "" {
			return all, nil
		}
	}
	return nil, fmt.Errorf("list %s: there are more than %d", resource.GroupResource(), pageSize*maxPages)
}

// get reads an answer.
func (a *api) get(ctx context.Context, at *url.URL, accept string, into any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return err
	}
	request.Header.Set("Accept", accept)
	response, err := a.client.Do(request)
	if err != nil {
		return err
	}
	body, err := platformkit.ReadBody(response, maxPage)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return errors.New("the answer is not valid JSON")
	}
	return nil
}
