// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-tpm/tpm2"
)

// commandError says which command failed. Err wraps the TPM's answer, a tpm2.TPMRC, if it gave one.
type commandError struct {
	// Command is the name in the TPM 2.0 Library, part 3: "TPM2_Quote".
	Command string
	Err     error
}

func (e *commandError) Error() string { return e.Command + ": " + e.Err.Error() }
func (e *commandError) Unwrap() error { return e.Err }

// execute sends one command.
func execute[R any, C tpm2.Command[R, *R]](t *TPM, name string, command C) (*R, error) {
	start := t.begin(name)
	rsp, err := command.Execute(t.conn)
	return rsp, t.done(name, start, err)
}

// begin stores the current command, for a Run that returns before the command ends.
func (t *TPM) begin(name string) time.Time {
	t.underWay.Store(&name)
	return time.Now()
}

// done ends every command of this package, so that each error names its command.
func (t *TPM) done(name string, start time.Time, err error) error {
	if err != nil {
		err = &commandError{name, err}
	}
	if t.observe != nil {
		t.observe(name, time.Since(start), err)
	}
	return err
}

// conn is a transport.TPM. It sends one command at a time, repeats it if the TPM asks for that, and
// tracks what commands have loaded. go-tpm's own transports are not used: they sleep through
// warnings without a context.
type conn struct {
	// ctx ends every command but those that clean up. A conn lives as long as one call of Run.
	ctx context.Context
	rw  io.ReadWriteCloser
	// managed is set if the kernel's resource manager is between this process and the TPM. Then
	// handles of others are not visible.
	managed bool
	// freed is set once handles that others left were flushed.
	freed bool
	// held are the handles of objects and sessions that this process loaded.
	held []uint32
	// reset is set once the TPM returned a new handle that equals one in held. Then the TPM was
	// reset, and has lost the objects and sessions.
	reset bool
}

// open opens the first device that it can.
func open(ctx context.Context, devices []string) (*conn, error) {
	var failed OpenError
	for _, path := range devices {
		rw, err := openDevice(ctx, path)
		if err == nil {
			return &conn{ctx: ctx, rw: rw, managed: strings.HasPrefix(filepath.Base(path), "tpmrm")}, nil
		}
		failed.Tried = append(failed.Tried, err)
	}
	return nil, &failed
}

func openDevice(ctx context.Context, path string) (io.ReadWriteCloser, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case info.Mode()&fs.ModeSocket != 0:
		return dial(ctx, path, queueWait)
	case info.Mode()&fs.ModeCharDevice == 0:
		return nil, &fs.PathError{Op: "open", Path: path, Err: errors.New("neither a character device nor a socket")}
	}
	// os.OpenFile would make the device non-blocking. Then the kernel answers a read before the
	// response with no bytes at all.
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

const (
	// queueWait is how long dial waits for a place in the full queue of a software TPM. It is
	// below the 30 s that a run waits for a certificate by default, so that the run can report it.
	queueWait = 20 * time.Second
	// refusedWait is how long a software TPM may take to start again.
	refusedWait = 2 * time.Second
	// maxDialPause is the longest pause between two tries. The queue has no order, so pauses
	// are random.
	maxDialPause = 50 * time.Millisecond
)

// dial connects to a software TPM. A software TPM serves one client at a time, and lets few others
// wait: swtpm one or two. All others get EAGAIN from the kernel at once, and dial tries again for
// maxWait. While the TPM starts again, clients get ECONNREFUSED.
func dial(ctx context.Context, path string, maxWait time.Duration) (net.Conn, error) {
	start := time.Now()
	var last error // names the cause: a Dialer that ctx ends says only "i/o timeout"
	for {
		rw, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if err == nil {
			return rw, nil
		}
		limit := maxWait
		switch {
		case errors.Is(err, syscall.EAGAIN):
		case errors.Is(err, syscall.ECONNREFUSED):
			limit = min(refusedWait, maxWait)
		case last != nil:
			return nil, fmt.Errorf("%w: %w", last, err)
		default:
			return nil, err
		}
		if waited := time.Since(start); waited >= limit {
			return nil, fmt.Errorf("%w, for %v", err, waited.Round(time.Millisecond))
		}
		last = err
		pause := time.Millisecond + rand.N(maxDialPause) //nolint:gosec // G404: jitter
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", err, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// close flushes the handles that are still held, and closes the device.
func (c *conn) close() {
	for _, handle := range slices.Clone(c.held) {
		// A handle that is left matters only once the TPM is full, and free() finds it
		// then.
		_, _ = tpm2.FlushContext{FlushHandle: tpm2.TPMHandle(handle)}.Execute(c)
	}
	_ = c.rw.Close()
}

const (
	// maxRetries bounds how often one command is repeated. With pauses that double from
	// firstPause, this takes 5 s.
	maxRetries = 9
	firstPause = 10 * time.Millisecond
	// headerSize is the size of the header of a command or a response: tag, length, code.
	headerSize = 10
	// maxResponse is larger than any response in bytes (go-tpm, tpmutil).
	maxResponse = 4096
)

// Send sends a command and returns its response, after as many tries as the TPM asks for.
func (c *conn) Send(command []byte) ([]byte, error) {
	code := tpm2.TPMCC(binary.BigEndian.Uint32(command[6:]))
	ctx := c.ctx
	if code == tpm2.TPMCCFlushContext || code == tpm2.TPMCCNVUndefineSpace {
		ctx = context.WithoutCancel(ctx)
	}
	for retry := 0; ; retry++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		response, err := c.exchange(command)
		if err != nil {
			return nil, err
		}
		rc := tpm2.TPMRC(binary.BigEndian.Uint32(response[6:]))
		switch {
		case rc == tpm2.TPMRCSuccess:
			c.track(code, command, response)
			return response, nil
		case isFull(rc) && !c.managed && !c.freed:
			if err := c.free(); err != nil {
				return nil, fmt.Errorf("%w, and to make room: %w", rc, err)
			}
		case (isBusy(rc) || code == tpm2.TPMCCFlushContext && rc.IsWarning()) && retry < maxRetries:
			// TPM2_FlushContext is repeated after every warning. A handle that stays loaded takes
			// room from other processes, and free runs only when the TPM is full.
			select {
			case <-ctx.Done():
			case <-time.After(firstPause << retry):
			}
		default:
			return response, nil
		}
	}
}

// isBusy reports whether the TPM asks for the same command again, later (TPM 2.0 Library, part 2,
// "TPM_RC"). TPM_RC_LOCKOUT is a warning too, but lasts for hours, and a retry may prolong it.
func isBusy(rc tpm2.TPMRC) bool {
	return slices.Contains([]tpm2.TPMRC{tpm2.TPMRCRetry, tpm2.TPMRCYielded, tpm2.TPMRCTesting, tpm2.TPMRCNVRate, tpm2.TPMRCNVUnavailable}, rc)
}

// isFull reports whether the TPM has no room for another object or session.
func isFull(rc tpm2.TPMRC) bool {
	return slices.Contains([]tpm2.TPMRC{tpm2.TPMRCObjectMemory, tpm2.TPMRCSessionMemory, tpm2.TPMRCMemory, tpm2.TPMRCSessionHandles,
		tpm2.TPMRCObjectHandles}, rc)
}

// exchange writes a command and reads the response. The kernel wants each in one piece. A socket
// may split them.
func (c *conn) exchange(command []byte) ([]byte, error) {
	if _, err := c.rw.Write(command); err != nil {
		return nil, err
	}
	response := make([]byte, maxResponse)
	n, err := io.ReadAtLeast(c.rw, response, headerSize)
	if err != nil {
		return nil, err
	}
	size := int64(binary.BigEndian.Uint32(response[2:]))
	if size < headerSize || size > maxResponse {
		return nil, fmt.Errorf("a response of %d bytes", size)
	}
	if int64(n) < size {
		if _, err := io.ReadFull(c.rw, response[n:size]); err != nil {
			return nil, err
		}
	}
	return response[:size], nil
}

// track updates the list of held handles after a command.
func (c *conn) track(code tpm2.TPMCC, command, response []byte) {
	switch code {
	case tpm2.TPMCCCreatePrimary, tpm2.TPMCCStartAuthSession:
		if len(response) >= headerSize+4 {
			handle := binary.BigEndian.Uint32(response[headerSize:])
			c.reset = c.reset || slices.Contains(c.held, handle)
			c.held = append(c.held, handle)
		}
	case tpm2.TPMCCFlushContext:
		flushed := binary.BigEndian.Uint32(command[headerSize:])
		c.held = slices.DeleteFunc(c.held, func(h uint32) bool { return h == flushed })
	}
}

// free flushes, once, the transient objects and loaded sessions that this process does not hold. A
// killed process left them: this process holds the lock, and no resource manager separates other
// processes.
func (c *conn) free() error {
	c.freed = true
	for _, first := range []tpm2.TPMHandle{firstTransient, firstLoadedSession} {
		rsp, err := tpm2.GetCapability{Capability: tpm2.TPMCapHandles, Property: uint32(first), PropertyCount: maxHandles}.Execute(c)
		if err != nil {
			return &commandError{"TPM2_GetCapability", err}
		}
		list, err := rsp.CapabilityData.Data.Handles()
		if err != nil {
			return &commandError{"TPM2_GetCapability", err}
		}
		for _, handle := range list.Handle {
			if slices.Contains(c.held, uint32(handle)) {
				continue
			}
			if _, err := (tpm2.FlushContext{FlushHandle: handle}).Execute(c); err != nil {
				return &commandError{"TPM2_FlushContext", err}
			}
		}
	}
	return nil
}

// The first handles of each range (TPM 2.0 Library, part 2, "TPM_HC"; TCG Registry of Reserved TPM
// 2.0 Handles).
const (
	firstTransient     tpm2.TPMHandle = 0x80000000
	firstLoadedSession tpm2.TPMHandle = 0x02000000
	firstPersistentEK  tpm2.TPMHandle = 0x81010000
	lastPersistentEK   tpm2.TPMHandle = 0x8101ffff
	firstCertificate   tpm2.TPMHandle = 0x01c00002
	firstChain         tpm2.TPMHandle = 0x01c00100
	lastChain          tpm2.TPMHandle = 0x01c001ff

	// maxHandles is how many handles are requested at a time: as many as fit into a response.
	maxHandles = 254
)
