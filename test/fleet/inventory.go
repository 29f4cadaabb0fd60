// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"context"
	"fmt"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Inventory is what an operator makes of the machines' own words: a document for each, in order.
func Inventory(ctx context.Context, machines ...*Machine) ([]byte, error) {
	documents := make([][]byte, len(machines))
	err := Each(len(machines), func(i int) (err error) {
		if documents[i], err = machines[i].document(ctx); err != nil {
			return fmt.Errorf("%s: %w", machines[i].Name, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	const separator = "---\n"
	return append([]byte(separator), bytes.Join(documents, []byte(separator))...), nil
}

// document is the machine's entry in an inventory: as identify prints it, or with the provider ID
// that a cloud vouches for.
func (m *Machine) document(ctx context.Context) ([]byte, error) {
	inspector, ok := m.Provider.(provider.Inspector)
	if !ok {
		return yaml.Marshal(map[string]any{"nodeName": m.Name, "providerID": m.ProviderID()})
	}
	device, err := inspector.Identify(ctx)
	if err != nil {
		return nil, err
	}
	return yaml.Marshal(map[string]any{"nodeName": m.Name, "providerID": m.ProviderID(), "provider": m.Provider.Name(), "device": device})
}
