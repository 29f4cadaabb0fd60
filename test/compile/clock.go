// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// ClockVariable names the file with the seconds by which a program of ProgramWithClock moves its
// clock. Without it, the clock is the machine's. No shipped program reads it.
const ClockVariable = "KUBELET_AUTHENTICATOR_TEST_CLOCK"

// ProgramWithClock builds a package as Program does, but for its clock: SetClock moves it. For this
// build alone, another time.Now replaces that of the standard library (go build -overlay), so that
// TLS goes by that clock, too. Durations and timers do not, as on a machine whose clock is set.
//
// The first build takes longer than a minute, since it compiles all packages again.
func ProgramWithClock(ctx context.Context, module, output, pkg string, flags ...string) error {
	overlay, err := clockOverlay(ctx)
	if err != nil {
		return fmt.Errorf("build %s with another clock: %w", pkg, err)
	}
	return Program(ctx, module, output, pkg, append([]string{"-overlay=" + overlay}, flags...)...)
}

// SetClock moves the clock of the programs whose ClockVariable names a file. They see it at once.
func SetClock(file string, by time.Duration) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(by/time.Second)), 0) //nolint:gosec // G115: it is read as an int64 again
	return errors.Join(err, f.Close())
}

const (
	// readClock is the line of time.Now that reads the machine's clock.
	readClock = "\tsec, nsec, mono := runtimeNow()\n"
	// clockSource is added to the package time. The scheduler calls time.Now, too, where no system
	// call is allowed: so the file is mapped. It must not use packages that import time.
	clockSource = `package time

import (
	"syscall"
	"unsafe"
)

var movedClock = mapClock()

func mapClock() *int64 {
	file, _ := syscall.Getenv("` + ClockVariable + `")
	if file == "" {
		return new(int64)
	}
	fd, err := syscall.Open(file, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		panic("time: the test's clock: " + err.Error())
	}
	content, err := syscall.Mmap(fd, 0, 8, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		panic("time: the test's clock: " + err.Error())
	}
	_ = syscall.Close(fd)
	return (*int64)(unsafe.Pointer(&content[0]))
}

// moved returns the seconds by which the test moves the clock. It is called before mapClock, too.
func moved() int64 {
	if movedClock == nil {
		return 0
	}
	return *movedClock
}
`
)

// clockOverlay returns the file for -overlay. It is the same in each run, or all would be compiled
// each time.
func clockOverlay(ctx context.Context) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return "", err
	}
	folder := filepath.Join(string(bytes.TrimSpace(root)), "src", "time")
	original := filepath.Join(folder, "time.go")
	source, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}
	if bytes.Count(source, []byte(readClock)) != 1 {
		return "", fmt.Errorf("%s: another Go release: time.Now reads the clock in another way", original)
	}
	source = bytes.Replace(source, []byte(readClock), []byte(readClock+"\tsec += moved()\n"), 1)
	base, err := cacheFolder()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(base, fmt.Sprintf("clock-%x", sha256.Sum256(append(bytes.Clone(source), clockSource...))))
	if err := os.MkdirAll(dir, 0o700); err != nil { //nolint:gosec // G703: a folder of this user's cache
		return "", err
	}
	unlock, err := lockFile(ctx, filepath.Join(dir, "lock"), os.Stderr)
	if err != nil {
		return "", err
	}
	defer unlock()
	replaced, added, overlay := filepath.Join(dir, "time.go"), filepath.Join(dir, "moved.go"), filepath.Join(dir, "overlay.json")
	list, err := json.Marshal(map[string]any{"Replace": map[string]string{original: replaced, filepath.Join(folder, "moved.go"): added}})
	if err != nil {
		return "", err
	}
	for file, content := range map[string][]byte{replaced: source, added: []byte(clockSource), overlay: list} {
		if before, err := os.ReadFile(file); err == nil && bytes.Equal(before, content) {
			continue
		}
		if err := os.WriteFile(file, content, 0o600); err != nil {
			return "", err
		}
	}
	return overlay, nil
}
