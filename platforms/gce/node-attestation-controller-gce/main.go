// SPDX-License-Identifier: Apache-2.0

// node-attestation-controller-gce is node-attestation-controller for Cluster API on Google Compute
// Engine: it gets the endorsement keys of vTPMs from Compute Engine. Flags and configuration are
// the released program's, with clusterAPI.platform: gce (docs/platforms/gce.md).
package main

import (
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/platforms/gce"
)

var version, commit = "devel", "unknown"

func main() {
	platforms := map[string]clusterapi.OpenPlatform{"gce": gce.Open}
	os.Exit(command.Program{Version: version, Commit: commit, Management: clusterapi.Management{Platforms: platforms}}.Main())
}
