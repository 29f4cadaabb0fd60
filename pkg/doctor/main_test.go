// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
)

// A check that hangs is left behind: the process ends soon.
func TestMain(m *testing.M) {
	unittest.Main(m, goleak.IgnoreAnyFunction("github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor.guarded"))
}
