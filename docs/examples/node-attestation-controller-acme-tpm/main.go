// SPDX-License-Identifier: Apache-2.0

// node-attestation-controller-acme-tpm is node-attestation-controller for Cluster API on the
// imaginary platform Acme, which says what TPMs its instances have. Flags and configuration are the
// released program's, with clusterAPI.platform: acme (docs/providers.md).
package main

import (
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/node-attestation-controller-acme-tpm/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
)

var version, commit = "devel", "unknown"

func main() {
	platforms := map[string]clusterapi.OpenPlatform{"acme": fleet.Open}
	os.Exit(command.Program{Version: version, Commit: commit, Management: clusterapi.Management{Platforms: platforms}}.Main())
}
