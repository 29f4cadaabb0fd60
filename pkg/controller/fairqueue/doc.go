// SPDX-License-Identifier: Apache-2.0

// Package fairqueue orders and limits the work of the controller, so that a flood of requests
// delays nobody but its requester, and there least of all the machines that a source names.
//
// Queue is a workqueue whose Get waits until the limits allow another request to be looked at:
//
//	Add ──┬─ unlimited ─────┐ in turn
//	      └─ limited ───────┤   a token of the cluster and of the requester for each
//	                        └─ class: nodes, bootstrap tokens, others               in turn
//	                             └─ requester                                       in turn
//	                                  └─ share: attested, listed, other claims      4 to 3 to 1
//	                                       └─ first looks, further looks            in turn
//	                                            └─ claim: AK, or EK and node name   in turn
//	                                                 └─ newest, oldest              in turn
//
// An attested claim is that of an AK which has signed the request, and which a record has. Of a listed
// claim only the part counts that is listed, its EK or its node name.
//
// Reading order: flow.go says what a request is ordered by, order.go is the tree above and knows no
// clock, queue.go adds locks and waiting. rates.go and bucket.go are the limits, and limiters.go
// applies them to other keys. retries.go says when a waiting request is looked at again, and
// budget.go how much memory waiting requests may use.
package fairqueue
