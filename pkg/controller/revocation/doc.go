// SPDX-License-Identifier: Apache-2.0

// Package revocation refuses certificates in use: those that an operator revoked, and those of
// machines that are suspended. Kubernetes has no revocation. The API server says with which
// certificate a request came, and admission policies refuse the writes of those on a list.
//
// The lists are RevocationSlice objects. (A kind that ends in "List" is taken for a collection, and
// clusterctl does not find it.) They outlive the records that the certificates were taken from, and
// lose a certificate only after it has ended. Each list has one policy, which has the fingerprints
// as literals. Reads are not refused: admission does not see them.
//
// Reading order:
//   - plan.go decides, without I/O, what is revoked, which lists have it, and what is announced
//   - policy.go renders the policy of a list
//   - enforcer.go carries a plan out
package revocation
