// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// MachineSource knows the machines of the cluster. It reads nothing that a node can write.
type MachineSource interface {
	// Machines returns all of them, in a slice of the caller's own. An error means that the machines
	// are not known now, so nothing is decided.
	Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error)
}

// SharedSource is a MachineSource that keeps its machines in memory, so that a decision need not
// copy all of them.
type SharedSource interface {
	MachineSource
	// Shared returns what Machines does. It stays the same slice until the machines change, and
	// nobody may change them.
	Shared(ctx context.Context, now time.Time) ([]verifier.Machine, error)
}

// machinesOf returns the machines of a source, for reading only.
func machinesOf(ctx context.Context, source MachineSource, now time.Time) ([]verifier.Machine, error) {
	if s, ok := source.(SharedSource); ok {
		return s.Shared(ctx, now)
	}
	return source.Machines(ctx, now)
}

// TokenSource knows which machine a bootstrap token was made for. A MachineSource may be one.
// Without it no token is known, and where the policy requires a token, first requests wait in vain.
type TokenSource interface {
	// Token returns what is known of the token with this ID, which is its public part. The zero value
	// means that nothing is known yet.
	Token(ctx context.Context, id string, now time.Time) (verifier.Token, error)
}
