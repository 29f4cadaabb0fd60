// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
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

func now() time.Time { return time.Date(2026, 11, 3, 12, 0, 0, 0, time.UTC) }

func put(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// holds fails the test unless the file's inventory has this machine alone, with a problem that says so much.
func holds(t *testing.T, f *File, at time.Time, digit rune, problem string) *Inventory {
	t.Helper()
	inventory, err := f.Inventory(at)
	if err != nil {
		t.Fatal(err)
	}
	if len(inventory.ByEK(print(digit))) != 1 || len(inventory.All()) != 1 {
		t.Fatalf("it holds %+v", inventory.All())
	}
	if err := f.Problem(); (err == nil) != (problem == "") || err != nil && !strings.Contains(err.Error(), problem) {
		t.Fatalf("its problem is %v, not %q", err, problem)
	}
	return inventory
}

func TestFileIsReadAgain(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "inventory.yaml")
	file := NewFile(path, 0)
	if inventory, err := file.Inventory(now()); inventory != nil || !errors.Is(err, fs.ErrNotExist) || !errors.Is(file.Problem(), fs.ErrNotExist) {
		t.Fatalf("got %v, %v", inventory, err)
	}
	put(t, path, "")
	if inventory, err := file.Inventory(now()); inventory != nil || err == nil || !strings.Contains(err.Error(), "empty") {
		t.Fatalf("got %v, %v", inventory, err)
	}
	put(t, path, head+machine('1', ""))
	first := holds(t, file, now(), '1', "")
	if holds(t, file, now(), '1', "") != first {
		t.Error("it was parsed again without a change")
	}
	for _, c := range []struct{ content, says string }{
		{head + machine('2', "") + machine('2', ""), "is also machine"},
		{"", "empty"},
		{head + machine('2', "")[:30], ""},
		{strings.Repeat("#", MaxSize+1), "longer"},
	} {
		put(t, path, c.content)
		if _, err := Parse([]byte(c.content)); err == nil {
			t.Fatalf("%q is good", c.content)
		}
		problem := c.says
		if problem == "" {
			problem = "inventory"
		}
		holds(t, file, now(), '1', problem)
		holds(t, file, now(), '1', problem)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	holds(t, file, now(), '1', "no such file")
	put(t, path, head+machine('1', "")+"# a remark\n")
	holds(t, file, now(), '1', "")
	put(t, path, head+machine('2', ""))
	second := holds(t, file, now(), '2', "")
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	holds(t, file, now(), '2', "no such file")
	if err := os.Rename(path+".old", path); err != nil {
		t.Fatal(err)
	}
	if holds(t, file, now(), '2', "") != second {
		t.Error("it was parsed again, though it came back as it was")
	}
	put(t, path, strings.TrimSpace(head)+" []\n")
	if inventory, err := file.Inventory(now()); err != nil || len(inventory.All()) > 0 || file.Problem() != nil {
		t.Errorf("an empty list does not empty it: %v, %v", inventory.All(), err)
	}
}

func TestFileIsReadOnceInAnInterval(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "inventory.yaml")
	file := NewFile(path, time.Second)
	put(t, path, head+machine('1', ""))
	holds(t, file, now(), '1', "")
	put(t, path, head+machine('2', ""))
	holds(t, file, now().Add(time.Second-1), '1', "")
	holds(t, file, now().Add(time.Second), '2', "")
	put(t, path, head+machine('3', ""))
	holds(t, file, now().Add(-5*time.Second), '2', "") // a decision that began before it was read
	holds(t, file, now().Add(time.Second), '2', "")
	holds(t, file, now().Add(-time.Hour), '3', "") // the clock was put back
}

func TestLatest(t *testing.T) {
	t.Parallel()
	var l Latest
	if inventory, err := l.Inventory(); inventory != nil || err == nil || l.Problem() != nil {
		t.Errorf("zero: got %v, %v", inventory, err)
	}
	l.Fail(fs.ErrPermission)
	if inventory, err := l.Inventory(); inventory != nil || !errors.Is(err, fs.ErrPermission) {
		t.Errorf("got %v, %v", inventory, err)
	}
	if err := l.Offer([]byte("x")); err == nil || l.Problem() == nil {
		t.Errorf("got %v", err)
	}
	if err := l.Offer([]byte(head + machine('1', ""))); err != nil || l.Problem() != nil {
		t.Errorf("got %v, %v", err, l.Problem())
	}
	for range 2 {
		if err := l.Offer([]byte("x")); err == nil || l.Problem() == nil {
			t.Errorf("got %v", err)
		}
	}
	if inventory, err := l.Inventory(); err != nil || len(inventory.ByEK(print('1'))) != 1 {
		t.Errorf("got %v, %v", inventory, err)
	}
	l.Fail(fs.ErrNotExist)
	if !errors.Is(l.Problem(), fs.ErrNotExist) {
		t.Errorf("got %v", l.Problem())
	}
	if err := l.Offer([]byte("x")); err == nil || errors.Is(l.Problem(), fs.ErrNotExist) {
		t.Errorf("got %v, %v", err, l.Problem())
	}
}

// Nobody who needs the last good one waits while new content is parsed.
func TestLatestIsThereWhileContentIsParsed(t *testing.T) {
	t.Parallel()
	var l Latest
	if err := l.Offer([]byte(head + machine('1', ""))); err != nil {
		t.Fatal(err)
	}
	const machines, least = 20_000, 5 // more than while the content is hashed
	many := bytes.NewBufferString(head)
	for i := range machines {
		fmt.Fprintf(many, "- nodeName: node-%d\n  eks:\n  - fingerprint: %064x\n", i, i)
	}
	done := make(chan error, 1)
	go func() { done <- l.Offer(many.Bytes()) }()
	offered := func() bool {
		if l.offers.TryLock() {
			l.offers.Unlock()
			return false
		}
		return true
	}
	for had := 0; ; time.Sleep(time.Millisecond) {
		before := offered()
		if _, err := l.Inventory(); err != nil || l.Problem() != nil {
			t.Fatalf("got %v, %v", err, l.Problem())
		}
		if before && offered() {
			had++
		}
		select {
		case err := <-done:
			if err != nil || had < least {
				t.Errorf("%v; the last good one was had %d times meanwhile", err, had)
			}
			if inventory, err := l.Inventory(); err != nil || len(inventory.All()) != machines {
				t.Errorf("got %d machines, %v", len(inventory.All()), err)
			}
			return
		default:
		}
	}
}

func TestFileUnderLoad(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "inventory.yaml")
	put(t, path, head+machine('1', ""))
	file := NewFile(path, 0)
	holds(t, file, now(), '1', "")
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
				inventory, err := file.Inventory(now())
				if err != nil || len(inventory.ByEK(print('1')))+len(inventory.ByEK(print('2'))) != 1 {
					t.Errorf("got %v, %v", inventory.All(), err)
					return
				}
			}
		})
	}
	for i := range 200 { // without any care: it is empty for a moment
		put(t, path, head+machine('1'+rune(i%2), ""))
	}
	close(done)
	readers.Wait()
	holds(t, file, now(), '2', "")
}
