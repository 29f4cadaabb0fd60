// SPDX-License-Identifier: Apache-2.0

// Package bounded reads content that may be of any length.
package bounded

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// TooLongError says that there is more content than the caller takes. Max is in bytes.
type TooLongError struct{ Max int64 }

func (e *TooLongError) Error() string { return fmt.Sprintf("longer than %d bytes", e.Max) }

// ReadFile returns the content of a file of at most limit bytes. Errors name the path.
func ReadFile(path string, limit int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it was only read
	data, err := ReadAll(file, limit)
	if tooLong, ok := errors.AsType[*TooLongError](err); ok {
		err = &fs.PathError{Op: "read", Path: path, Err: tooLong}
	}
	return data, err
}

// ReadAll returns the rest of the content, which may have at most limit bytes. It reads at most one
// byte more.
func ReadAll(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	switch {
	case err != nil:
		return nil, err
	case int64(len(data)) > limit:
		return nil, &TooLongError{limit}
	}
	return data, nil
}
