// SPDX-License-Identifier: Apache-2.0

// Package metal is an infrastructure provider for Cluster API, for tests, and the worked example for authors of providers: how a provider gives
// node attestation what it needs. Its hosts are those of a Hosts.
package metal
