// SPDX-License-Identifier: Apache-2.0

package bounded

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "file")
	if _, err := ReadFile(path, 10); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	for _, size := range []int{0, 9, 10, 11, 100_000} {
		content := bytes.Repeat([]byte("a"), size)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		data, err := ReadFile(path, 10)
		switch {
		case size <= 10 && (err != nil || !bytes.Equal(data, content)):
			t.Errorf("%d bytes: %q, %v", size, data, err)
		case size > 10 && (data != nil || err == nil || err.Error() != "read "+path+": longer than 10 bytes"):
			t.Errorf("%d bytes: %d of them, %v", size, len(data), err)
		}
	}
}

// No content, however long, is read further than a byte beyond the limit.
func TestReadAllStops(t *testing.T) {
	t.Parallel()
	content := strings.NewReader(strings.Repeat("a", 1_000_000))
	_, err := ReadAll(content, 1000)
	if tooLong, ok := errors.AsType[*TooLongError](err); !ok || tooLong.Max != 1000 {
		t.Errorf("no *TooLongError: %v", err)
	}
	if left := content.Len(); left != 1_000_000-1001 {
		t.Errorf("%d bytes are left", left)
	}
	failed := errors.New("failed")
	if _, err := ReadAll(io.MultiReader(strings.NewReader("a"), readerFunc(func([]byte) (int, error) { return 0, failed })), 10); !errors.Is(err, failed) {
		t.Errorf("a read fails: %v", err)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
