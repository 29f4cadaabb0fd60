// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// CacheVariable names the environment variable that says where compiled programs are kept. Without
// it they are in the user's cache folder.
const CacheVariable = "KUBELET_AUTHENTICATOR_TEST_CACHE"

func cacheFolder() (string, error) {
	if dir := os.Getenv(CacheVariable); dir != "" {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return "", fmt.Errorf("%s: %w", CacheVariable, err)
		}
		return abs, nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a cache folder (set %s): %w", CacheVariable, err)
	}
	return filepath.Join(dir, "kubelet-authenticator-testbed"), nil
}

// cachedFor is how long an unused folder is kept.
const cachedFor = 7 * 24 * time.Hour

// Cached returns a folder of the cache. If there is none for the key, fill fills a new
// one. The key must have everything that decides the content. Programs that call this at the same
// time wait for each other. The folder must not be changed afterwards.
func Cached(ctx context.Context, kind string, key []byte, progress io.Writer, fill func(folder string) error) (string, error) {
	base, err := cacheFolder()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(base, 0o700); err != nil {
		return "", fmt.Errorf("make the cache: %w", err)
	}
	// One lock for each kind: who needs the control plane does not wait while another process
	// builds the kubelet.
	unlock, err := lockFile(ctx, filepath.Join(base, kind+".lock"), progress)
	if err != nil {
		return "", fmt.Errorf("lock the cache of %s: %w", kind, err)
	}
	defer unlock()
	sum := sha256.Sum256(key)
	folder := filepath.Join(base, kind+"-"+hex.EncodeToString(sum[:8]))
	now := time.Now()
	if err := os.Chtimes(folder, now, now); !errors.Is(err, os.ErrNotExist) {
		return folder, err
	}
	if err := removeUnused(filepath.Join(base, kind+"-*")); err != nil {
		return "", err
	}
	// Filled beside the target, so that a folder with the right name is always complete.
	partial := filepath.Join(base, kind+".partial")
	if err := os.RemoveAll(partial); err != nil {
		return "", fmt.Errorf("remove an interrupted %s: %w", kind, err)
	}
	if err := os.Mkdir(partial, 0o755); err != nil { //nolint:gosec // G301: it is the root of a machine's disk
		return "", fmt.Errorf("make a folder for %s: %w", kind, err)
	}
	if err := fill(partial); err != nil {
		return "", errors.Join(err, os.RemoveAll(partial))
	}
	return folder, os.Rename(partial, folder)
}

// removeUnused removes folders that were not used for cachedFor. Each change of a key leaves an
// unused folder behind.
func removeUnused(pattern string) error {
	folders, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}
	for _, folder := range folders {
		info, err := os.Stat(folder)
		if err != nil || time.Since(info.ModTime()) < cachedFor {
			continue
		}
		if err := os.RemoveAll(folder); err != nil {
			return fmt.Errorf("remove what is not used any more: %w", err)
		}
	}
	return nil
}
