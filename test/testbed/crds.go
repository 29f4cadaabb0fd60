// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

// ReadCRDs returns the CustomResourceDefinitions in files. Each file must have exactly one. A path
// may have wildcards.
func ReadCRDs(paths ...string) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	var all []*apiextensionsv1.CustomResourceDefinition
	for _, path := range paths {
		files, err := filepath.Glob(path)
		if err != nil || len(files) == 0 {
			return nil, errors.Join(fmt.Errorf("no CustomResourceDefinitions in %s", path), err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			crd := &apiextensionsv1.CustomResourceDefinition{}
			if err := yaml.UnmarshalStrict(content, crd); err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			all = append(all, crd)
		}
	}
	return all, nil
}

// InstallCRDs creates CustomResourceDefinitions, and returns when each is established, its objects
// are served, and clients that look for its kind find it.
func (cp *ControlPlane) InstallCRDs(ctx context.Context, crds ...*apiextensionsv1.CustomResourceDefinition) error {
	client, err := apiextensions.NewForConfig(cp.AdminConfig())
	if err != nil {
		return fmt.Errorf("make a client for CustomResourceDefinitions: %w", err)
	}
	for _, crd := range crds {
		if _, err := client.CustomResourceDefinitions().Create(ctx, crd, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create %s: %w", crd.Name, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for _, crd := range crds {
		if err := poll(ctx, crd.Name, func(ctx context.Context) error {
			return cp.established(ctx, client, crd)
		}); err != nil {
			return err
		}
	}
	return nil
}

// established is nil when the API server says so, serves the version that is stored, and lists each
// version that is served.
func (cp *ControlPlane) established(ctx context.Context, client apiextensions.ApiextensionsV1Interface, crd *apiextensionsv1.CustomResourceDefinition) error {
	now, err := client.CustomResourceDefinitions().Get(ctx, crd.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(now.Status.Conditions, func(c apiextensionsv1.CustomResourceDefinitionCondition) bool {
		return c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue
	}) {
		return fmt.Errorf("not established: %+v", now.Status.Conditions)
	}
	// Clients find a kind in a list that is made later.
	_, listed, _, err := cp.client.GroupsAndMaybeResources()
	if err != nil {
		return err
	}
	for _, version := range crd.Spec.Versions {
		group := schema.GroupVersion{Group: crd.Spec.Group, Version: version.Name}
		if version.Served && !lists(listed[group], crd.Spec.Names.Plural) {
			return fmt.Errorf("%s is not listed in %s", crd.Spec.Names.Plural, group)
		}
		if version.Storage {
			path := "/apis/" + group.String() + "/" + crd.Spec.Names.Plural
			if err := cp.client.RESTClient().Get().AbsPath(path).Param("limit", "1").Do(ctx).Error(); err != nil {
				return err
			}
		}
	}
	return nil
}

// lists reports whether a list, nil if there is none, has a resource.
func lists(list *metav1.APIResourceList, plural string) bool {
	return list != nil && slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == plural })
}
