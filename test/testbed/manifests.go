// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Kustomize returns the objects of a kustomization.
func (cp *ControlPlane) Kustomize(ctx context.Context, folder string) ([]*unstructured.Unstructured, error) {
	rendered, err := cp.RunKubectl(ctx, "", "kustomize", folder)
	if err != nil {
		return nil, err
	}
	return ReadObjects([]byte(rendered))
}

// ReadObjects reads a stream of YAML documents.
func ReadObjects(stream []byte) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(stream), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		if len(object.Object) > 0 { // else the document has only comments
			all = append(all, object)
		}
	}
}

// CreateObjects creates objects, CustomResourceDefinitions first: see InstallCRDs. It costs less
// than kubectl, which reads the API server's whole schema before it writes.
func (cp *ControlPlane) CreateObjects(ctx context.Context, objects []*unstructured.Unstructured) error {
	var crds []*apiextensionsv1.CustomResourceDefinition
	var others []*unstructured.Unstructured
	for _, object := range objects {
		if object.GetKind() != "CustomResourceDefinition" {
			others = append(others, object)
			continue
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(object.Object, crd, true); err != nil {
			return fmt.Errorf("%s: %w", object.GetName(), err)
		}
		crds = append(crds, crd)
	}
	if err := cp.InstallCRDs(ctx, crds...); err != nil {
		return err
	}
	config := cp.AdminConfig()
	// such as that a version of a kind is deprecated
	config.WarningHandlerWithContext = rest.NoWarnings{}
	c, err := client.New(config, client.Options{})
	if err != nil {
		return fmt.Errorf("make a client to create objects: %w", err)
	}
	for _, object := range others {
		if err := c.Create(ctx, object); err != nil {
			return fmt.Errorf("create %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return nil
}
