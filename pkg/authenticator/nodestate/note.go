// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"path/filepath"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// Note records the answer of the last run. If the same parent runs the plugin again before the
// expirationTimestamp, the API server probably answered 401. A plugin has no other way to learn
// that.
//
// The note is best effort, on a file system that need not survive a reboot. Without it, a rejected
// certificate is served until it is due.
type Note struct {
	Parent process.ID `json:"parent"`
	// Certificate is the SHA-256 of the printed certificate.
	Certificate string `json:"certificate"`
	// Until is the expirationTimestamp, in seconds since 1970.
	Until int64 `json:"until"`
	// Reviewed is the time when the API server was last asked about the certificate, in seconds
	// since 1970.
	Reviewed int64 `json:"reviewed,omitempty"`
	// Rejected says that the API server answered the certificate with 401.
	Rejected bool `json:"rejected,omitempty"`
}

// NoteFile is the file of the note for one certificate directory. It is as well protected as the
// files there.
type NoteFile struct {
	dir  cache.Dir
	name string
}

// NewNoteFile returns the file of the note in the runtime directory.
func NewNoteFile(runtimeDir, certDir string) NoteFile {
	sum := sha256.Sum256([]byte(filepath.Clean(certDir)))
	return NoteFile{cache.At(runtimeDir), hex.EncodeToString(sum[:8]) + ".json"}
}

// Usable reports whether the directory is an absolute path. It may not be if the configuration is
// invalid.
func (f NoteFile) Usable() bool { return filepath.IsAbs(f.dir.Path()) }

// Read returns the note, the zero note if there is none or it cannot be read.
func (f NoteFile) Read() Note {
	var n Note
	if !f.Usable() || f.dir.Check() != nil {
		return Note{}
	}
	data, _, err := f.dir.Read(f.name)
	if err != nil || json.Unmarshal(data, &n) != nil {
		return Note{}
	}
	return n
}

// Write replaces the note. It ignores errors.
func (f NoteFile) Write(n Note) {
	data, err := json.Marshal(n)
	if err == nil && f.Usable() && f.dir.Create() == nil {
		_ = f.dir.Write(f.name, data)
	}
}

// Path returns the path of the file.
func (f NoteFile) Path() string { return f.dir.File(f.name) }
