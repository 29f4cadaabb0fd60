// SPDX-License-Identifier: Apache-2.0

// Package clusterapi serves the workload clusters of a Cluster API management cluster. Machines,
// bootstrap tokens, endorsement keys and CAs come from its objects. No input comes from a node.
package clusterapi
