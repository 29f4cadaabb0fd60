// SPDX-License-Identifier: Apache-2.0

package state_test

import (
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/statetest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

func TestOf(t *testing.T) {
	for _, c := range statetest.Cases() {
		request := &certificatesv1.CertificateSigningRequest{Status: c.Status}
		got, cause := state.Explain(request)
		if got != c.State || state.Of(request) != c.State {
			t.Errorf("%s: %s, want %s", c.Title, got, c.State)
		}
		explained := c.State == state.Denied || c.State == state.Failed || c.State == state.Closed
		if (cause != nil) != explained {
			t.Errorf("%s: %s because of %+v", c.Title, got, cause)
		}
		if kind := map[state.State]certificatesv1.RequestConditionType{state.Denied: certificatesv1.CertificateDenied, state.Failed: certificatesv1.CertificateFailed}[got]; kind != "" && cause.Type != kind {
			t.Errorf("%s: %s because of %s", c.Title, got, cause.Type)
		}
		if want := c.State != state.Pending && c.State != state.Approved; got.Finished() != want {
			t.Errorf("%s: finished: %t", c.Title, got.Finished())
		}
	}
}

func TestZeroIsFinished(t *testing.T) {
	var s state.State
	if !s.Finished() || s.String() != "invalid" {
		t.Errorf("%s, finished: %t", s, s.Finished())
	}
}
