// SPDX-License-Identifier: Apache-2.0

package evidence

import (
	"context"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// MachineSource knows the machines of the cluster. It must read nothing that a node can write.
type MachineSource interface {
	// Machines returns all machines, in a slice that the caller may change. An error means that the
	// machines are not known now, so nothing is decided.
	Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error)
}

// SharedSource is a MachineSource that keeps its machines in memory, so that a decision need not
// copy all of them.
type SharedSource interface {
	MachineSource
	// Shared returns the same machines as Machines. It returns the same slice until the machines
	// change. The caller must not change it.
	Shared(ctx context.Context, now time.Time) ([]verifier.Machine, error)
}

// MachinesOf returns the machines of a source, for reading only.
func MachinesOf(ctx context.Context, source MachineSource, now time.Time) ([]verifier.Machine, error) {
	if s, ok := source.(SharedSource); ok {
		return s.Shared(ctx, now)
	}
	return source.Machines(ctx, now)
}

// TokenSource knows which machine a bootstrap token was made for. A MachineSource may implement it.
// Otherwise no token is known, and if the policy requires a token, no first request is ever
// approved.
type TokenSource interface {
	// Token returns the token with this ID, which is its public part. The zero value means that the
	// token is not known yet.
	Token(ctx context.Context, id string, now time.Time) (verifier.Token, error)
}

// IsSameSlice reports whether two slices share their memory. A SharedSource returns a new slice
// once its machines have changed.
func IsSameSlice(a, b []verifier.Machine) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}
