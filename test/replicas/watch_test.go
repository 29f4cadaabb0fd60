// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/witness"
)

// observer follows all requests from its creation on.
type observer struct{ *witness.Witness }

func observe(t *testing.T) *observer {
	t.Helper()
	w, err := witness.Observe(t.Context(), shared.ControlPlane)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return &observer{w}
}

// eachSignedOnce calls witness.SignedOnce, and returns the certificates by node name.
func (o *observer) eachSignedOnce(t *testing.T) map[string][][]byte {
	t.Helper()
	issued, err := o.SignedOnce(t.Context())
	if err != nil {
		t.Error(err)
	}
	return issued
}

// hellosAreSettled calls witness.HellosAreSettled.
func (o *observer) hellosAreSettled(t *testing.T) {
	t.Helper()
	closed, waiting, err := o.HellosAreSettled(t.Context())
	if err != nil {
		t.Error(err)
	}
	t.Logf("%d hellos are closed, %d wait for the end of their challenge", closed, waiting)
}
