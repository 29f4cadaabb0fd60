// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"errors"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// A firewall that drops packets is a service that is not there. A full backlog has the same effect:
// the kernel drops further packets. Several calls run at once, because two timers would race.
func TestPacketsAreDropped(t *testing.T) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(name.(*syscall.SockaddrInet4).Port))
	for {
		c, err := net.DialTimeout("tcp", address, 200*time.Millisecond)
		if err != nil {
			break // the backlog is full
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	results := make(chan error)
	const calls = 20
	for range calls {
		go func() {
			_, err := Client{Address: address}.Call(t.Context(), http.MethodGet, "/", nil, nil)
			results <- err
		}()
	}
	for range calls {
		err := <-results
		if failed, ok := errors.AsType[*provider.Error](err); !ok || failed.Class != provider.NoDevice {
			t.Errorf("got %v (%+v), want class NoDevice", err, failed)
		}
	}
}
