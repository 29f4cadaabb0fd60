// SPDX-License-Identifier: Apache-2.0

// Package testbed starts a real control plane (etcd, kube-apiserver,
// kube-controller-manager) on loopback for end-to-end tests, and offers what
// such tests need beside it: certificate authorities, kubeconfigs, a CSR
// signer, the audit log and a proxy that breaks connections on demand.
//
// Nothing is downloaded as a binary: the components are built from source, as
// pinned in test/components, and cached outside the tree. Linux only, because
// that no process outlives a test rests on PR_SET_PDEATHSIG.
package testbed
