// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"net"
	"strconv"
	"testing"
)

// A port belongs to its owner while nobody listens on it. A port on which a process listens without
// having taken it belongs to nobody.
func TestPortsAreTakenOnce(t *testing.T) {
	p, err := TakePort()
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.ParseInt(port, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := takePort(number); err == nil {
		t.Error("it was taken again")
	}
	p.Free()
	p.Free()
	listener, err := net.Listen("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := takePort(number); err == nil {
		t.Error("it was taken while somebody listens on it")
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	if p, err = takePort(number); err != nil {
		t.Fatal(err)
	}
	p.Free()
}
