// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// lateWait is how long an object is missing. The queue's back-off would be long by then.
const lateWait = 7 * time.Second

// late is an object that is created after the machine has requested its certificate.
type late struct {
	what string
	// without removes it from the objects to create, and then creates it.
	without func(*machine)
	then    func(*testing.T, *machine)
}

var lates = []late{
	{"machine", func(m *machine) {
		m.late.object, m.object = m.object, nil
	}, func(t *testing.T, m *machine) {
		m.object = m.late.object
		m.put(t)
	}},
	{"provider-id", func(m *machine) {
		m.object.Spec.ProviderID = ""
	}, func(t *testing.T, m *machine) {
		update(t, m.client, m.object, func(object *clusterv1.Machine) { object.Spec.ProviderID = m.providerID })
	}},
	{"bootstrap-data", func(m *machine) {
		m.object.Spec.Bootstrap.DataSecretName, m.object.Status.Initialization.BootstrapDataSecretCreated = nil, nil
	}, func(t *testing.T, m *machine) {
		update(t, m.client, m.object, func(object *clusterv1.Machine) { object.Spec.Bootstrap.DataSecretName = &m.name })
		updateStatus(t, m.client, m.object, func(object *clusterv1.Machine) { object.Status.Initialization.BootstrapDataSecretCreated = new(true) })
	}},
	{"infrastructure", func(m *machine) {
		m.object.Status.Initialization.InfrastructureProvisioned = new(false)
	}, func(t *testing.T, m *machine) {
		updateStatus(t, m.client, m.object, func(object *clusterv1.Machine) { object.Status.Initialization.InfrastructureProvisioned = new(true) })
	}},
	{"ek", func(m *machine) {
		m.object.Annotations = nil
	}, func(t *testing.T, m *machine) {
		update(t, m.client, m.object, func(object *clusterv1.Machine) {
			metav1.SetMetaDataAnnotation(&object.ObjectMeta, attestation.AnnotationEK, m.ek)
		})
	}},
	{"ek-of-infra", func(m *machine) {
		m.object.Annotations = nil
	}, func(t *testing.T, m *machine) {
		update(t, m.client, m.infra, func(infra *unstructured.Unstructured) {
			infra.SetAnnotations(map[string]string{attestation.AnnotationEK: m.ek})
		})
	}},
	{"ek-repaired", func(m *machine) {
		m.object.Annotations[attestation.AnnotationEK] = "SHA256:" + m.ek
	}, func(t *testing.T, m *machine) {
		update(t, m.client, m.object, func(object *clusterv1.Machine) { object.Annotations[attestation.AnnotationEK] = m.ek })
	}},
	{"infra-machine", func(m *machine) {
		onInfra(m)
		m.late.infra, m.infra = m.infra, nil
	}, func(t *testing.T, m *machine) {
		m.infra = m.late.infra
		m.putInfra(t)
	}},
	{"kubeadm-config", func(m *machine) {
		m.late.config, m.config = m.config, nil
	}, func(t *testing.T, m *machine) {
		m.config = m.late.config
		m.putConfig(t, m.config, m.owner())
	}},
	// As Cluster API does it: the config is there, and a token is put into it when the control
	// plane is.
	{"token", func(m *machine) {
		m.config.Spec.JoinConfiguration.Discovery.BootstrapToken.Token = ""
	}, func(t *testing.T, m *machine) {
		update(t, m.client, m.config, func(config *bootstrapv1.KubeadmConfig) {
			config.Spec.JoinConfiguration.Discovery.BootstrapToken.Token = m.token
		})
	}},
}

// A request waits for an object that is created late, and is decided soon after. So a slow platform
// does not cause a denial.
func TestLate(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	w.start(t, nil)
	attempts := make([]*attempt, len(lates))
	for i, late := range lates {
		attempts[i] = c.newMachine(t, late.what, late.without).begins(t)
	}
	time.Sleep(lateWait) // nothing may be decided on any of them
	for i, late := range lates {
		t.Run(late.what, func(t *testing.T) {
			a := attempts[i]
			a.waits(t, 0)
			since := time.Now()
			late.then(t, a.machine)
			a.follows(t, late.what, since)
		})
	}
}

// A cluster is served soon after the last object that it needs exists.
func TestClusterIsLate(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	w.start(t, nil)
	for _, late := range []struct {
		what    string
		without func(*cluster)
		then    func(*testing.T, *cluster)
	}{
		{"control-plane", func(c *cluster) {
			c.kubeconfig = nil
			c.object.Status.Initialization = clusterv1.ClusterInitializationStatus{InfrastructureProvisioned: new(true)}
		}, func(t *testing.T, c *cluster) { // in the order in which Cluster API does it
			c.putKubeconfig(t)
			updateStatus(t, c.client, c.object, func(object *clusterv1.Cluster) {
				object.Status.Initialization.ControlPlaneInitialized = new(true)
			})
		}},
		{"ca", func(c *cluster) { c.lateCA, c.ca = c.ca, nil }, func(t *testing.T, c *cluster) {
			c.ca = c.lateCA
			c.putSecret(t, c.ca)
		}},
		{"infrastructure", func(c *cluster) {
			c.object.Status.Initialization = clusterv1.ClusterInitializationStatus{}
		}, func(t *testing.T, c *cluster) {
			updateStatus(t, c.client, c.object, func(object *clusterv1.Cluster) {
				object.Status.Initialization = clusterv1.ClusterInitializationStatus{InfrastructureProvisioned: new(true), ControlPlaneInitialized: new(true)}
			})
		}},
	} {
		t.Run(late.what, func(t *testing.T) {
			c := w.newCluster(t, late.what, late.without)
			a := c.newMachine(t, "m-"+late.what, nil).begins(t)
			a.waits(t, lateWait)
			c.untouched(t)
			since := time.Now()
			late.then(t, c)
			a.follows(t, late.what, since)
		})
	}
}
