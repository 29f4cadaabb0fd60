// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/ec2"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/ec2role"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/gce"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// providers returns the attestation providers in this binary, the strongest first: "auto" never
// replaces a choice by one further down.
func providers() []provider.Factory {
	return []provider.Factory{
		tpm.Factory(),
		ec2.Factory(),
		ec2role.Factory(),
		gce.Factory(),
		azure.Factory(),
		insecure.Factory(),
	}
}

// flagValues returns the values that shell completion offers for a provider's own flag.
func flagValues(flag string) []string {
	switch flag {
	case "ek-template":
		return tpm.EKTemplates()
	case "system-uuid-from":
		return tpm.SystemUUIDFields()
	}
	return nil
}
