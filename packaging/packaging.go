// SPDX-License-Identifier: Apache-2.0

// Package packaging has the manifests of a release that the controller compares with what a cluster
// has.
package packaging

import _ "embed"

// Policies is kubernetes/policies.yaml: the admission policies of each flavour, told apart by the
// label attestation.cluster.x-k8s.io/cluster-api.
//
//go:embed kubernetes/policies.yaml
var Policies []byte

// ManagementPolicies is cluster-api/management/policy.yaml, which only a Cluster API management
// cluster has.
//
//go:embed cluster-api/management/policy.yaml
var ManagementPolicies []byte
