// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"path/filepath"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// note records the answer of the last run. If the same parent runs the plugin again before the
// expirationTimestamp, the API server probably answered 401. A plugin has no other way to learn
// that.
//
// The note is best effort, on a file system that need not survive a reboot. Without it, a rejected
// certificate is served until it is due.
type note struct {
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

// noteFile is the file of the note for one certificate directory. It is as well protected as the
// files there.
type noteFile struct {
	dir  cache.Dir
	name string
}

func newNoteFile(runtimeDir, certDir string) noteFile {
	sum := sha256.Sum256([]byte(filepath.Clean(certDir)))
	return noteFile{cache.At(runtimeDir), hex.EncodeToString(sum[:8]) + ".json"}
}

// usable reports whether the directory is an absolute path. It may not be if the configuration is
// invalid.
func (f noteFile) usable() bool { return filepath.IsAbs(f.dir.Path()) }

// read returns the note, the zero note if there is none or it cannot be read.
func (f noteFile) read() note {
	var n note
	if !f.usable() || f.dir.Check() != nil {
		return note{}
	}
	data, _, err := f.dir.Read(f.name)
	if err != nil || json.Unmarshal(data, &n) != nil {
		return note{}
	}
	return n
}

// write replaces the note. It ignores errors.
func (f noteFile) write(n note) {
	data, err := json.Marshal(n)
	if err == nil && f.usable() && f.dir.Create() == nil {
		_ = f.dir.Write(f.name, data)
	}
}
