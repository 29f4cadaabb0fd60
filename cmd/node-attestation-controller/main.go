// SPDX-License-Identifier: Apache-2.0

// node-attestation-controller decides on the certificate requests of nodes that attest which
// machine they run on.
package main

import (
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/metal3"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
)

// version and commit are set by the linker.
var version, commit = "devel", "unknown"

func main() {
	management := clusterapi.Management{Platforms: map[string]clusterapi.OpenPlatform{"metal3": metal3.Open}}
	os.Exit(command.Program{Version: version, Commit: commit, Management: management}.Main())
}
