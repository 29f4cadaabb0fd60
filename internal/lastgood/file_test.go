// SPDX-License-Identifier: Apache-2.0

package lastgood

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

const maxContent = 100

// content is what the tests' files hold: valid if it begins with "good".
type content struct{ text string }

func parse(data []byte) (*content, error) {
	if !strings.HasPrefix(string(data), "good") {
		return nil, fmt.Errorf("invalid: %q", data)
	}
	return &content{string(data)}, nil
}

func newFile(t *testing.T, maxAge time.Duration) *File[*content] {
	path := filepath.Join(t.TempDir(), "file")
	return &File[*content]{Name: "things", Path: path, MaxSize: maxContent, MaxAge: maxAge, Parse: parse}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// has fails the test unless the file's value is this one, with a problem that contains a text.
func has(t *testing.T, f *File[*content], at time.Time, want, problem string) *content {
	t.Helper()
	got, err := f.Get(at)
	if err != nil {
		t.Fatal(err)
	}
	if got.text != want {
		t.Fatalf("it is %q, not %q", got.text, want)
	}
	if err := f.Problem(); (err == nil) != (problem == "") || err != nil && !strings.Contains(err.Error(), problem) {
		t.Fatalf("its problem is %v, not %q", err, problem)
	}
	return got
}

func TestFileIsReadAgain(t *testing.T) {
	t.Parallel()
	f := newFile(t, 0)
	if got, err := f.Get(now()); got != nil || !errors.Is(err, fs.ErrNotExist) || !strings.HasPrefix(err.Error(), "things: ") || !errors.Is(f.Problem(), fs.ErrNotExist) {
		t.Fatalf("got %v, %v", got, err)
	}
	write(t, f.Path, "bad")
	if got, err := f.Get(now()); got != nil || err == nil || !strings.Contains(err.Error(), "invalid") {
		t.Fatalf("got %v, %v", got, err)
	}
	write(t, f.Path, "good 1")
	first := has(t, f, now(), "good 1", "")
	if has(t, f, now(), "good 1", "") != first {
		t.Error("it was parsed again without a change")
	}
	for _, invalid := range []struct{ text, problem string }{{"", "invalid"}, {"bad", "bad"}, {"good" + strings.Repeat("#", maxContent), "longer than 100 bytes"}} {
		write(t, f.Path, invalid.text)
		for range 2 {
			if has(t, f, now(), "good 1", invalid.problem) != first {
				t.Error("another value")
			}
		}
	}
	write(t, f.Path, "good 2")
	second := has(t, f, now(), "good 2", "")
	if err := os.Rename(f.Path, f.Path+".old"); err != nil {
		t.Fatal(err)
	}
	has(t, f, now(), "good 2", "no such file")
	if err := os.Rename(f.Path+".old", f.Path); err != nil {
		t.Fatal(err)
	}
	if has(t, f, now(), "good 2", "") != second {
		t.Error("it was parsed again, though it came back unchanged")
	}
}

func TestFileIsReadOnceInMaxAge(t *testing.T) {
	t.Parallel()
	f := newFile(t, time.Second)
	write(t, f.Path, "good 1")
	has(t, f, now(), "good 1", "")
	write(t, f.Path, "good 2")
	has(t, f, now().Add(time.Second-1), "good 1", "")
	has(t, f, now().Add(time.Second), "good 2", "")
	write(t, f.Path, "good 3")
	has(t, f, now().Add(-5*time.Second), "good 2", "") // a decision that began before the last read
	has(t, f, now().Add(time.Second), "good 2", "")
	has(t, f, now().Add(-time.Hour), "good 3", "") // the clock was put back
}

func TestFileUnderLoad(t *testing.T) {
	t.Parallel()
	f := newFile(t, 0)
	write(t, f.Path, "good 1")
	has(t, f, now(), "good 1", "")
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if got, err := f.Get(now()); err != nil || got.text != "good 1" && got.text != "good 2" {
					t.Errorf("got %v, %v", got, err)
					return
				}
			}
		})
	}
	for i := range 200 { // not atomic: the file is empty for a moment
		write(t, f.Path, []string{"good 1", "good 2"}[i%2])
	}
	close(done)
	readers.Wait()
	has(t, f, now(), "good 2", "")
}
