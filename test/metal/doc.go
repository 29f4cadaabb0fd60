// SPDX-License-Identifier: Apache-2.0

// Package metal is an infrastructure provider for Cluster API, contract v1beta2. Tests run their
// machines with it, and authors of providers can copy from it: machine.go has all that node
// attestation asks of a provider. The interface Hosts is its platform.
//
//	crds, err := metal.CRDs()                                  // install them
//	err = metal.AddToScheme(scheme)                            // as well as clusterv1 and corev1
//	err = metal.Add(ctx, manager, metal.Options{Hosts: hosts}) // before the manager starts
//
// The manager needs leader election if several replicas run. Its service account needs rights to
// the provider's kinds, to Clusters, Machines and MachinePools, and to read Secrets. Cluster API's
// managers need rights to the provider's kinds, too: see metalRights in test/clusterapi/stories.
//
// The provider makes no control planes. A HostedControlPlane becomes initialized once the Secret
// with the kubeconfig of its Cluster is there.
package metal
