// SPDX-License-Identifier: Apache-2.0

package controllerprocess

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// Container is what a pod of the module's manifest gives to the controller.
type Container struct {
	// Memory is the limit on memory, in bytes.
	Memory int64

	env []corev1.EnvVar
}

// ReadContainer reads the manifest of the module in a folder.
func ReadContainer(module string) (*Container, error) {
	content, err := os.ReadFile(filepath.Join(module, "packaging", "kubernetes", "deployment.yaml"))
	if err != nil {
		return nil, err
	}
	first, _, _ := bytes.Cut(content, []byte("\n---\n"))
	deployment := &appsv1.Deployment{}
	if err := yaml.UnmarshalStrict(first, deployment); err != nil {
		return nil, err
	}
	if n := len(deployment.Spec.Template.Spec.Containers); n != 1 {
		return nil, fmt.Errorf("the deployment has %d containers", n)
	}
	c := deployment.Spec.Template.Spec.Containers[0]
	limits := c.Resources.Limits
	if limits.Memory().IsZero() || !limits.Cpu().IsZero() {
		return nil, errors.New("the container has no limit on memory, or one on processor time, which nothing here sets")
	}
	return &Container{Memory: limits.Memory().Value(), env: c.Env}, nil
}

// Env returns the container's environment, as the kubelet makes it for a limit on memory, without
// what it takes from the pod.
func (c *Container) Env(memory int64) (env []string) {
	for _, v := range c.env {
		switch from := v.ValueFrom; {
		case from == nil:
			value := v.Value
			for _, before := range env {
				name, known, _ := strings.Cut(before, "=")
				value = strings.ReplaceAll(value, "$("+name+")", known)
			}
			env = append(env, v.Name+"="+value)
		case from.ResourceFieldRef != nil && from.ResourceFieldRef.Resource == "limits.memory":
			divisor := max(from.ResourceFieldRef.Divisor.Value(), 1)
			env = append(env, fmt.Sprintf("%s=%d", v.Name, (memory+divisor-1)/divisor))
		}
	}
	return env
}
