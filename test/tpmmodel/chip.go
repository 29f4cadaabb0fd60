// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
)

// Chip is a model behind a socket, with EK certificates, as swtpm.TPM is one in a process of its
// own.
type Chip struct {
	swtpm.Chip

	socket *Socket
}

// NewChip makes a chip with a seed of its own. Options.Setup is not for it: there are no files.
func NewChip(o swtpm.Options) (*Chip, error) {
	var err error
	if o.CA == nil {
		if o.CA, err = swtpm.NewCA(); err != nil {
			return nil, err
		}
	}
	model := New(RandomSeed())
	c := &Chip{Chip: swtpm.Chip{CA: o.CA, TPM: model}}
	if err := c.Manufacture(o); err != nil {
		return nil, err
	}
	c.socket, err = Serve(model)
	return c, err
}

// Socket is the path of the Unix socket that takes TPM commands.
func (c *Chip) Socket() string { return c.socket.Path() }

// Stop ends it.
func (c *Chip) Stop() { _ = c.socket.Close() }
