// SPDX-License-Identifier: Apache-2.0

// Package machinelist writes inventories for tests.
package machinelist

import (
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
)

// Of returns an inventory with these machines.
func Of(machines ...machineentry.Machine) string {
	var out strings.Builder
	out.WriteString("apiVersion: " + machineentry.APIVersion + "\nkind: " + machineentry.Kind + "\nmachines:")
	if len(machines) == 0 {
		return out.String() + " []\n"
	}
	out.WriteString("\n")
	for _, m := range machines {
		out.WriteString(m.String())
	}
	return out.String()
}
