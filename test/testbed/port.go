// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"crypto/rand"
	"errors"
	"fmt"
	"math/big"
	"net"
	"strconv"
)

// The ports are below the range that Linux uses for outgoing connections and for port 0. So Linux
// does not assign a free port before it is used.
const (
	firstPort = 20000
	portCount = 12000
)

// Port is a reserved port on 127.0.0.1. TakePort returns it to no other caller, in no process,
// until it is freed or garbage collected. So the user of the port may listen late, or stop and
// start again.
type Port struct {
	addr  string
	claim net.Listener
}

// TakePort reserves a port on which no process listens.
func TakePort() (*Port, error) {
	var failure error
	for range 50 {
		n, err := rand.Int(rand.Reader, big.NewInt(portCount))
		if err != nil {
			return nil, fmt.Errorf("choose a port: %w", err)
		}
		p, err := takePort(firstPort + n.Int64())
		if err == nil {
			return p, nil
		}
		failure = err
	}
	return nil, errors.Join(errors.New("no free port on loopback"), failure)
}

func takePort(number int64) (*Port, error) {
	port := strconv.FormatInt(number, 10)
	// A socket without a file belongs to the network namespace, as the port
	// does, and is gone with this process, however it ends.
	claim, err := net.Listen("unix", "@testbed-port-"+port)
	if err != nil {
		return nil, err
	}
	p := &Port{addr: net.JoinHostPort("127.0.0.1", port), claim: claim}
	listener, err := net.Listen("tcp", p.addr)
	if err == nil {
		err = listener.Close()
	}
	if err != nil {
		p.Free()
		return nil, err
	}
	return p, nil
}

// Addr returns the port's host:port.
func (p *Port) Addr() string { return p.addr }

// Free lets others have the port. A second call does nothing.
func (p *Port) Free() { _ = p.claim.Close() } // nothing was accepted: there is nothing to lose
