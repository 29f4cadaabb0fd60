// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math/big"
	"net"
	"strconv"
	"time"
)

const pollInterval = 25 * time.Millisecond

// poll calls check until it returns nil or the context ends; then the last
// reason why not is part of the error.
func poll(ctx context.Context, what string, check func(context.Context) error) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w (last: %w)", what, ctx.Err(), err)
		case <-tick.C:
		}
	}
}

// pollWhile is poll that also gives up as soon as the process ends.
func pollWhile(ctx context.Context, p *Process, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-p.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	err := poll(ctx, what, check)
	if err == nil {
		return nil
	}
	if p.ended() {
		if failure := p.Err(); failure != nil {
			return fmt.Errorf("wait for %s: %w", what, failure)
		}
		return fmt.Errorf("wait for %s: %s has exited\n%s", what, p.name, p.LogTail())
	}
	return fmt.Errorf("%w\n%s", err, p.LogTail())
}

// Below the range from which Linux takes ports for outgoing connections and for
// port 0, so that a port found free is not given away before it is used.
const (
	firstPort = 20000
	portCount = 12000
)

// freeLoopbackAddr returns an address on 127.0.0.1 that nobody listens on.
func freeLoopbackAddr() (string, error) {
	var failure error
	for range 50 {
		n, err := rand.Int(rand.Reader, big.NewInt(portCount))
		if err != nil {
			return "", fmt.Errorf("choose a port: %w", err)
		}
		addr := net.JoinHostPort("127.0.0.1", strconv.FormatInt(firstPort+n.Int64(), 10))
		listener, err := net.Listen("tcp", addr)
		if err != nil {
			failure = err
			continue
		}
		if err := listener.Close(); err != nil {
			return "", fmt.Errorf("release %s: %w", addr, err)
		}
		return addr, nil
	}
	return "", errors.Join(errors.New("no free port on loopback"), failure)
}

// freeLoopbackPort is freeLoopbackAddr for who needs the port by itself, too.
func freeLoopbackPort() (addr, port string, err error) {
	if addr, err = freeLoopbackAddr(); err != nil {
		return "", "", err
	}
	if _, port, err = net.SplitHostPort(addr); err != nil {
		return "", "", fmt.Errorf("split %s: %w", addr, err)
	}
	return addr, port, nil
}
