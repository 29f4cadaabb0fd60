// SPDX-License-Identifier: Apache-2.0

// Package testbed starts a real control plane (etcd, kube-apiserver, kube-controller-manager) on
// loopback for end-to-end tests. It also has certificate authorities, kubeconfigs, a CSR signer,
// the audit log, and a proxy that breaks connections on demand.
//
// It downloads no binaries. It builds the components from source, in the versions of
// test/components, and caches them outside the tree. Linux only, because that no process outlives a
// test rests on PR_SET_PDEATHSIG.
package testbed
