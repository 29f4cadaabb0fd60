// SPDX-License-Identifier: Apache-2.0

// node-attestation-controller-vsphere is node-attestation-controller for Cluster API on vSphere:
// vCenter says which endorsement keys the virtual TPMs have. Flags and configuration are the
// released program's, with clusterAPI.platform: vsphere (docs/platforms/vsphere.md).
package main

import (
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/platforms/vsphere"
)

var version, commit = "devel", "unknown"

func main() {
	os.Exit(command.Program{
		Version: version, Commit: commit,
		Management: clusterapi.Management{Platforms: map[string]clusterapi.OpenPlatform{"vsphere": vsphere.Open}},
	}.Main())
}
