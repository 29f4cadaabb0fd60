// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
)

func TestMain(m *testing.M) { unittest.Main(m) }
