// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-tpm/tpm2"
)

// CommandError says which command failed. Err wraps the TPM's answer, a tpm2.TPMRC, if it gave one.
type CommandError struct {
	// Command is the name in the TPM 2.0 Library, part 3: "TPM2_Quote".
	Command string
	Err     error
}

func (e *CommandError) Error() string { return e.Command + ": " + e.Err.Error() }
func (e *CommandError) Unwrap() error { return e.Err }

// execute sends one command.
func execute[R any, C tpm2.Command[R, *R]](t *TPM, name string, command C) (*R, error) {
	start := t.begin(name)
	rsp, err := command.Execute(t.conn)
	return rsp, t.done(name, start, err)
}

// begin notes which command is under way, for a Run that does not wait for its end.
func (t *TPM) begin(name string) time.Time {
	t.underWay.Store(&name)
	return time.Now()
}

// done ends every command of this package, so that every error names its command.
func (t *TPM) done(name string, start time.Time, err error) error {
	if err != nil {
		err = &CommandError{name, err}
	}
	if t.observe != nil {
		t.observe(name, time.Since(start), err)
	}
	return err
}

// conn is a transport.TPM that sends a command at a time, does with each what any of them may need, and knows what they have
// loaded. go-tpm's own transports are not used: they sleep through warnings without asking a context.
type conn struct {
	// ctx ends every command but TPM2_FlushContext. A conn lives as long as one call of Run.
	ctx context.Context
	rw  io.ReadWriteCloser
	// managed is set where the kernel's resource manager is between us and the TPM: nobody else's handles are visible then.
	managed bool
	// freed is set once handles left by others were flushed.
	freed bool
	// held are the handles of the objects and sessions that were loaded here.
	held []uint32
}

// open opens the first of the devices that it can.
func open(ctx context.Context, devices []string) (*conn, error) {
	var absent AbsentError
	for _, path := range devices {
		rw, err := openDevice(ctx, path)
		if err == nil {
			return &conn{ctx: ctx, rw: rw, managed: strings.HasPrefix(filepath.Base(path), "tpmrm")}, nil
		}
		absent.Tried = append(absent.Tried, err)
	}
	return nil, &absent
}

func openDevice(ctx context.Context, path string) (io.ReadWriteCloser, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case info.Mode()&fs.ModeSocket != 0:
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	case info.Mode()&fs.ModeCharDevice == 0:
		return nil, &fs.PathError{Op: "open", Path: path, Err: errors.New("neither a character device nor a socket")}
	}
	// Not os.OpenFile: it would make the device non-blocking, and the kernel then answers a read before there is a response with
	// no bytes at all.
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// close flushes whatever is still held and closes the device.
func (c *conn) close() {
	for _, handle := range slices.Clone(c.held) {
		// A handle that stays behind costs nobody anything before the TPM is full, and free() finds it then.
		_, _ = tpm2.FlushContext{FlushHandle: tpm2.TPMHandle(handle)}.Execute(c)
	}
	_ = c.rw.Close()
}

const (
	// maxRetries bounds how often one command is repeated: with the pauses doubling from firstPause, for 5 s.
	maxRetries = 9
	firstPause = 10 * time.Millisecond
	// headerSize is that of a command and of a response: tag, length, code.
	headerSize = 10
	// maxResponse is larger than any response in bytes (go-tpm, tpmutil).
	maxResponse = 4096
)

// Send sends a command and returns its response, after as many tries as the TPM asks for.
func (c *conn) Send(command []byte) ([]byte, error) {
	code := tpm2.TPMCC(binary.BigEndian.Uint32(command[6:]))
	ctx := c.ctx
	if code == tpm2.TPMCCFlushContext {
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
		case isBusy(rc) && retry < maxRetries:
			select {
			case <-ctx.Done():
			case <-time.After(firstPause << retry):
			}
		default:
			return response, nil
		}
	}
}

// isBusy reports whether the TPM asks for the same command again, later (TPM 2.0 Library, part 2, "TPM_RC"). TPM_RC_LOCKOUT is a
// warning too, but lasts for hours, and trying may prolong it.
func isBusy(rc tpm2.TPMRC) bool {
	return slices.Contains([]tpm2.TPMRC{tpm2.TPMRCRetry, tpm2.TPMRCYielded, tpm2.TPMRCTesting, tpm2.TPMRCNVRate, tpm2.TPMRCNVUnavailable}, rc)
}

// isFull reports whether the TPM has no room for another object or session.
func isFull(rc tpm2.TPMRC) bool {
	return slices.Contains([]tpm2.TPMRC{tpm2.TPMRCObjectMemory, tpm2.TPMRCSessionMemory, tpm2.TPMRCMemory, tpm2.TPMRCSessionHandles,
		tpm2.TPMRCObjectHandles}, rc)
}

// exchange writes a command and reads the response. The kernel wants each in one piece; a socket may split them.
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

// track keeps the list of held handles by what has passed.
func (c *conn) track(code tpm2.TPMCC, command, response []byte) {
	switch code {
	case tpm2.TPMCCCreatePrimary, tpm2.TPMCCStartAuthSession:
		if len(response) >= headerSize+4 {
			c.held = append(c.held, binary.BigEndian.Uint32(response[headerSize:]))
		}
	case tpm2.TPMCCFlushContext:
		flushed := binary.BigEndian.Uint32(command[headerSize:])
		c.held = slices.DeleteFunc(c.held, func(h uint32) bool { return h == flushed })
	}
}

// free flushes, once, the transient objects and loaded sessions that are not ours: a process that was killed left them, since we
// hold the lock and there is no resource manager that would keep those of others apart.
func (c *conn) free() error {
	c.freed = true
	for _, first := range []tpm2.TPMHandle{firstTransient, firstLoadedSession} {
		rsp, err := tpm2.GetCapability{Capability: tpm2.TPMCapHandles, Property: uint32(first), PropertyCount: maxHandles}.Execute(c)
		if err != nil {
			return &CommandError{"TPM2_GetCapability", err}
		}
		list, err := rsp.CapabilityData.Data.Handles()
		if err != nil {
			return &CommandError{"TPM2_GetCapability", err}
		}
		for _, handle := range list.Handle {
			if slices.Contains(c.held, uint32(handle)) {
				continue
			}
			if _, err := (tpm2.FlushContext{FlushHandle: handle}).Execute(c); err != nil {
				return &CommandError{"TPM2_FlushContext", err}
			}
		}
	}
	return nil
}

// Where ranges of handles begin (TPM 2.0 Library, part 2, "TPM_HC"; TCG Registry of Reserved TPM 2.0 Handles).
const (
	firstTransient     tpm2.TPMHandle = 0x80000000
	firstLoadedSession tpm2.TPMHandle = 0x02000000
	firstPersistentEK  tpm2.TPMHandle = 0x81010000
	lastPersistentEK   tpm2.TPMHandle = 0x8101ffff
	firstCertificate   tpm2.TPMHandle = 0x01c00002
	firstChain         tpm2.TPMHandle = 0x01c00100
	lastChain          tpm2.TPMHandle = 0x01c001ff

	// maxHandles is how many handles are asked for at a time: as many as fit into a response.
	maxHandles = 254
)
