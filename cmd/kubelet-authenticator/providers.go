// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// providers are the ones that this binary carries.
func providers() []provider.Factory {
	return []provider.Factory{
		tpm.Factory(),
		insecure.Factory(),
	}
}

// flagValues are the values that a shell completes for a provider's own flag.
func flagValues(flag string) []string {
	if flag == "ek-template" {
		return tpm.EKTemplates()
	}
	return nil
}
