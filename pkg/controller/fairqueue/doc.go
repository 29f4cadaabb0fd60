// SPDX-License-Identifier: Apache-2.0

// Package fairqueue orders and limits the work of the controller. A flood of requests delays only
// its own requester. Within that requester, requests signed by a known TPM are delayed least.
// Requests of listed machines come next, then all others.
//
// Queue is a workqueue whose Get waits until the limits allow another reconciliation:
//
//	Add ──┬─ unlimited ─────┐ round robin
//	      └─ limited ───────┤   a token of the cluster and of the requester for each
//	                        └─ class: nodes, bootstrap tokens, others               round robin
//	                             └─ requester                                       round robin
//	                                  └─ share: attested, listed, other claims      4 to 3 to 1
//	                                       └─ first attempts, later attempts        round robin
//	                                            ├─ first attempts: every other time the newest
//	                                            └─ claim: AK, or EK and node name   round robin
//	                                                 └─ oldest
//
// A claim is attested if its AK is in a record. AK is the attestation key whose signature in the
// origin annotation covers the request. A claim is listed if a source names its EK or its node
// name. Only the listed part of such a claim counts.
//
// Reading order: flow.go defines the flow by which a request is ordered. order.go is the tree
// above, without a clock. queue.go adds locks and waiting. rates.go and bucket.go are the limits,
// and limiters.go applies them to other keys. retries.go says when a waiting request is retried,
// and budget.go how much memory waiting requests may use.
package fairqueue
