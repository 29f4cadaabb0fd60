// SPDX-License-Identifier: Apache-2.0

// Package revocation refuses certificates in use: those that an operator revoked, and those of
// suspended machines. Kubernetes has no revocation. But the API server passes the fingerprint of a
// requester's certificate to admission. So admission policies can refuse writes.
//
// The lists are RevocationSlice objects. Their kind does not end in "List", since clusterctl treats
// such a kind as a collection, and does not find it. They outlive the records that the certificates
// came from. A certificate is removed only after it has expired. Each list has one policy. It has
// the names of the nodes and their current certificates as literals, and refuses each write of
// these nodes, except with a current certificate. Reads are not refused, since admission does not
// see them.
//
// Reading order:
//   - plan.go decides, without I/O, what is revoked, which lists have it, and what is announced
//   - order.go says which requests are older than a revocation
//   - policy.go renders the policy of a list, and tokenpolicy.go the optional one for tokens
//   - enforcer.go carries a plan out, with effects.go
//   - accepted.go says when API servers accept a new certificate
//   - version.go says which API servers are new enough
package revocation
