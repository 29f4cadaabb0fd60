// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
)

// note is what the last run answered. A run that finds the same parent asking again before the time it was given knows
// that something made it ask: the API server answered 401. Nothing else tells a plugin why it is run.
//
// It is a best effort on a file system that need not outlive a boot: without it, a rejected certificate is served until it is
// due.
type note struct {
	Parent process.ID `json:"parent"`
	// NodeName and Certificate (its SHA-256) are what was printed.
	NodeName    string `json:"nodeName"`
	Certificate string `json:"certificate"`
	// Until is the expirationTimestamp, in seconds since 1970.
	Until int64 `json:"until"`
	// Reviewed is when the API server was last asked about the certificate, in seconds since 1970.
	Reviewed int64 `json:"reviewed,omitempty"`
	// Rejected is set once it answered 401.
	Rejected bool `json:"rejected,omitempty"`
}

// noteFile is the path of the note for one certificate directory.
type noteFile string

func newNoteFile(runtimeDir, certDir string) noteFile {
	sum := sha256.Sum256([]byte(filepath.Clean(certDir)))
	return noteFile(filepath.Join(runtimeDir, hex.EncodeToString(sum[:8])+".json"))
}

// read returns the note, the zero note where there is none that can be read.
func (f noteFile) read() note {
	var n note
	data, err := os.ReadFile(string(f))
	if err != nil || json.Unmarshal(data, &n) != nil {
		return note{}
	}
	return n
}

// write replaces the note. It may well be lost, or read half-written as no note.
func (f noteFile) write(n note) {
	data, err := json.Marshal(n)
	if err != nil {
		return
	}
	err = os.WriteFile(string(f), data, 0o600)
	if errors.Is(err, fs.ErrNotExist) && os.Mkdir(filepath.Dir(string(f)), 0o700) == nil {
		_ = os.WriteFile(string(f), data, 0o600)
	}
}
