// SPDX-License-Identifier: Apache-2.0

// Package clusterapi has node-attestation-controller serve the workload clusters of a Cluster API management cluster: machines, bootstrap
// tokens, endorsement keys and CAs come from its objects. Nothing that a node writes is an input.
package clusterapi
