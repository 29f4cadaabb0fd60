// SPDX-License-Identifier: Apache-2.0

// Package authorizer refuses requests with revoked certificates, reads too. It is a webhook
// authorizer that API servers ask about each request of a node, and of a token that was issued for
// a node.
//
// It answers from memory, so it needs no API server to start or to answer. It never allows a
// request: it denies, or it has no opinion, and then the next authorizer decides.
//
// Reading order:
//   - decide.go decides, without I/O
//   - lists.go has the lists that a decision reads
//   - authorizer.go answers one SubjectAccessReview, and says what happens if a list may be stale
//   - watch.go keeps the lists up to date, and recordreader.go reads one node's records
//   - statefile.go keeps the lists across a restart
//   - server.go answers API servers
package authorizer
