// SPDX-License-Identifier: Apache-2.0

// node-attestation-controller-ec2 is node-attestation-controller for Cluster API on Amazon EC2: it
// gets the endorsement keys of NitroTPMs from EC2. Flags and configuration are the released
// program's, with clusterAPI.platform: ec2 (docs/platforms/ec2.md).
package main

import (
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/platforms/ec2"
)

var version, commit = "devel", "unknown"

func main() {
	platforms := map[string]clusterapi.OpenPlatform{"ec2": ec2.Open}
	os.Exit(command.Program{Version: version, Commit: commit, Management: clusterapi.Management{Platforms: platforms}}.Main())
}
