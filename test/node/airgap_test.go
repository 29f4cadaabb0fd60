// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"net"
	"syscall"
	"testing"
)

// The tests of this package run where nothing leads out of the machine. So what they show needs
// nothing from elsewhere: plugin, controller and kubelet fetch nothing while they run.
func TestNoWayOut(t *testing.T) {
	t.Parallel()
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range interfaces {
		if i.Flags&(net.FlagLoopback|net.FlagUp) == net.FlagUp {
			t.Errorf("%s leads out", i.Name)
		}
	}
	for _, address := range []string{"192.0.2.1:443", "[2001:db8::1]:443"} { // of documentation
		connection, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err == nil {
			_ = connection.Close()
		}
		if !errors.Is(err, syscall.ENETUNREACH) {
			t.Errorf("%s: %v", address, err)
		}
	}
}
