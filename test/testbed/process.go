// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	defaultGrace = 5 * time.Second
	logTailBytes = 4096
)

// Command says what StartProcess starts.
type Command struct {
	Path string
	Args []string
	// Env is added to this process's environment, and wins over it.
	Env []string
	// Dir is the working directory; empty means this process's.
	Dir string
	// LogFile takes stdout and stderr, appended to what it already has.
	LogFile string
}

// Process is a child that ends when this process does, however this process
// ends: the kernel kills it, so no handler has to run. Its own children are in
// its process group; Stop and Kill reach them, a death of this process does not.
type Process struct {
	name     string
	logFile  string
	cmd      *exec.Cmd
	done     chan struct{}
	exit     error       // of Wait; set before done is closed
	stopping atomic.Bool // we ended it, so its end is no error
}

// StartProcess starts a command.
func StartProcess(c Command) (*Process, error) {
	name := filepath.Base(c.Path)
	log, err := os.OpenFile(c.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the log of %s: %w", name, err)
	}
	cmd := exec.Command(c.Path, c.Args...) //nolint:gosec // starting what the caller names is the purpose
	cmd.Dir = c.Dir
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid:   true,
		Pdeathsig: syscall.SIGKILL,
	}
	p := &Process{name: name, logFile: c.LogFile, cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go p.run(log, started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// run starts the child and waits for it on the same thread. Pdeathsig watches the thread that
// forked, and the Go runtime could otherwise end that thread at any time.
func (p *Process) run(log *os.File, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	_ = log.Close() // the child has its own descriptor
	started <- err
	if err != nil {
		return
	}
	p.exit = p.cmd.Wait()
	close(p.done)
}

// PID returns the process ID, which is also that of its process group.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended and been reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err returns nil while the process runs, after it exited with 0, and after Stop or Kill. Otherwise
// it returns how the process ended, with the end of its log.
func (p *Process) Err() error {
	select {
	case <-p.done:
	default:
		return nil
	}
	if p.exit == nil || p.stopping.Load() {
		return nil
	}
	return fmt.Errorf("%s ended: %w\n%s", p.name, p.exit, p.LogTail())
}

// Signal sends a signal to the process alone, not to its group.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("signal %s: %w", p.name, err)
	}
	return nil
}

// Stop sends SIGTERM to the group, after the grace period SIGKILL, and waits. If the process had
// already failed, it returns that error.
func (p *Process) Stop(grace time.Duration) error {
	if p.ended() {
		return p.Err()
	}
	p.stopping.Store(true)
	if err := p.signalGroup(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(grace):
		return p.Kill()
	}
}

// Kill sends SIGKILL to the group and waits. If the process had already failed, it returns that
// error.
func (p *Process) Kill() error {
	if p.ended() {
		return p.Err()
	}
	p.stopping.Store(true)
	if err := p.signalGroup(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

func (p *Process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *Process) signalGroup(sig syscall.Signal) error {
	// ESRCH: the process has just ended, as intended.
	if err := syscall.Kill(-p.PID(), sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("send %s to %s: %w", sig, p.name, err)
	}
	return nil
}

// LogTail returns the end of the log, for an error message.
func (p *Process) LogTail() string {
	tail, err := readTail(p.logFile, logTailBytes)
	if err != nil {
		return fmt.Sprintf("(no log of %s: %v)", p.name, err)
	}
	return fmt.Sprintf("--- end of %s ---\n%s", filepath.Base(p.logFile), tail)
}

func readTail(path string, limit int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // only read
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	start := max(0, size-limit)
	tail := make([]byte, size-start)
	n, err := file.ReadAt(tail, start)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	tail = tail[:n]
	if start > 0 { // the first line is probably not whole
		if _, rest, ok := bytes.Cut(tail, []byte("\n")); ok {
			tail = rest
		}
	}
	return tail, nil
}
