// SPDX-License-Identifier: Apache-2.0

// kubelet-authenticator-acme is the plugin of an imaginary infrastructure provider: its own
// provider, everything else from the library.
package main

import (
	"os"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/kubelet-authenticator-acme/acme"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

func main() {
	os.Exit(command.Program{
		Name:            "kubelet-authenticator-acme",
		Version:         "v0.1.0",
		Providers:       []provider.Factory{acme.Factory()},
		DefaultProvider: identity.Provider,
	}.Main())
}
