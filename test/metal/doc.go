// SPDX-License-Identifier: Apache-2.0

// Package metal is an infrastructure provider for Cluster API, contract v1beta2. Tests run their
// machines with it, and authors of providers can copy from it: machine.go has all that node
// attestation asks of a provider. Its platform is a Hosts.
//
//	crds, err := metal.CRDs()                                  // install them
//	err = metal.AddToScheme(scheme)                            // as well as clusterv1 and corev1
//	err = metal.Add(ctx, manager, metal.Options{Hosts: hosts}) // before the manager starts
//
// Control planes are somebody else's: a HostedControlPlane says that there is one, once the Secret
// with its kubeconfig is there.
package metal
