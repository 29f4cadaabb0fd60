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

// RevocationPolicies is kubernetes-revocation/component/policies.yaml: the policies that the
// controller fills with revoked certificates, empty.
//
//go:embed kubernetes-revocation/component/policies.yaml
var RevocationPolicies []byte

// RevocationGuards is kubernetes-revocation/component/guards.yaml: the policies that let only the
// controller write what revocation depends on.
//
//go:embed kubernetes-revocation/component/guards.yaml
var RevocationGuards []byte

// StaticGuards is static/guards.yaml: the policies, of the static form alone, that keep everybody
// from undoing the others.
//
//go:embed static/guards.yaml
var StaticGuards []byte

// StaticRevocationGuards is static/revocation-guards.yaml: the same for what revocation keeps in
// the API.
//
//go:embed static/revocation-guards.yaml
var StaticRevocationGuards []byte
