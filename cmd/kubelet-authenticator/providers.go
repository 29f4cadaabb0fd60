// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// providers returns the attestation providers in this binary.
func providers() []provider.Factory {
	return []provider.Factory{
		tpm.Factory(),
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
