// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/atomicfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const (
	// stateVersion is the version of the format. Another version is not read.
	stateVersion = 1
	// maxState bounds the file, in bytes. 100,000 certificates take some 20 MB, and ten full lists
	// 10 MB.
	maxState = 64 << 20
)

// state is the content of the state file. A copy of it is valid on each control plane node of the
// cluster.
type state struct {
	Version int `json:"version"`
	// UpToDateAt is when the lists were last known to be up to date.
	UpToDateAt     time.Time                      `json:"upToDateAt"`
	Slices         []v1alpha1.RevocationSliceSpec `json:"slices"`
	SuspendedNodes []string                       `json:"suspendedNodes"`
	// Certificates are those that a record named, by credential ID.
	Certificates map[string]Certificate `json:"certificates"`
}

// readState returns the lists in a state file. It returns nil lists if there is no file.
func readState(path string) (*Lists, time.Time, error) {
	data, err := bounded.ReadFile(path, maxState)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, time.Time{}, nil
	}
	if err != nil {
		return nil, time.Time{}, err
	}
	var s state
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&s); err != nil {
		return nil, time.Time{}, err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, time.Time{}, errors.New("it has more than one document")
	}
	if s.Version != stateVersion {
		return nil, time.Time{}, fmt.Errorf("its version is %d, not %d", s.Version, stateVersion)
	}
	lists := listsOf(s.Slices, s.SuspendedNodes, s.Certificates)
	return lists, s.UpToDateAt, lists.problem
}

// writeState writes the state file.
func writeState(path string, l *Lists, upToDateAt time.Time) error {
	data, err := json.Marshal(state{
		Version: stateVersion, UpToDateAt: upToDateAt.UTC(), Slices: l.specs, SuspendedNodes: slices.Sorted(maps.Keys(l.suspendedNodes)), Certificates: l.remembered,
	})
	if err != nil {
		return err
	}
	if len(data) > maxState {
		return &bounded.TooLongError{Max: maxState}
	}
	return atomicfile.Replace(0o600, atomicfile.File{Path: path, Content: append(data, '\n')})
}
