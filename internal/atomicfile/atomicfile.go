// SPDX-License-Identifier: Apache-2.0

// Package atomicfile replaces files, so that a crash leaves the old or the new content.
package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Temporary is the end of the name of a file that is being written. The rest of the name is the
// file's own, so that the next write removes what a crash has left. Only one process at a time may
// replace a file.
const Temporary = ".tmp"

// File is the new content of a file.
type File struct {
	Path    string
	Content []byte
}

// Replace writes the files. No file is replaced unless all could be written. After a crash, each
// one has either its old or its new content.
func Replace(mode fs.FileMode, files ...File) (err error) {
	defer func() {
		for _, f := range files {
			if removed := os.Remove(f.Path + Temporary); !errors.Is(removed, fs.ErrNotExist) {
				err = errors.Join(err, removed)
			}
		}
	}()
	for _, f := range files {
		if err := writeSynced(f.Path+Temporary, f.Content, mode); err != nil {
			return err
		}
	}
	var folders []string
	for _, f := range files {
		if err := os.Rename(f.Path+Temporary, f.Path); err != nil {
			return err
		}
		folders = append(folders, filepath.Dir(f.Path))
	}
	for _, folder := range slices.Compact(slices.Sorted(slices.Values(folders))) {
		if err := syncFolder(folder); err != nil {
			return err
		}
	}
	return nil
}

func writeSynced(path string, content []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if err = f.Chmod(mode); err == nil { // a crash may have left a file of another mode
		_, err = f.Write(content)
	}
	return errors.Join(err, f.Sync(), f.Close())
}

// syncFolder makes the new names in a folder durable.
func syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
