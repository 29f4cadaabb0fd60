// SPDX-License-Identifier: Apache-2.0

package config

import (
	"reflect"
	"slices"
	"time"

	"github.com/go-logr/logr"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// maxConfigSize bounds the configuration file, in bytes: a ConfigMap has at most 1 MiB.
const maxConfigSize = 1 << 20

// Reloader reads the configuration file again while the controller runs, and puts its
// unattestedNodes in force. The other fields need a restart. While the file is invalid or missing,
// the last valid list stays in force.
type Reloader struct {
	*lastgood.File[Config]
	settings *Settings
	// candidate are the names of the last read. A second read must confirm them, because the file
	// may be read while it is being written.
	candidate []string
	// restartFields has the other fields of the last read. It is nil until then.
	restartFields *Config
	log           logr.Logger
}

// NewReloader returns the Reloader of these settings, which were read from path. Call its Refresh
// from one goroutine.
func (s *Settings) NewReloader(path string, log logr.Logger) *Reloader {
	return &Reloader{settings: s, log: log, File: &lastgood.File[Config]{
		Name: "configuration file", Path: path, MaxSize: maxConfigSize,
		Reparse: true, // a file that it names may be missing for a moment
		Parse: func(data []byte) (Config, error) {
			c, err := Parse(data)
			if err == nil {
				_, err = New(c)
			}
			return c, err
		},
	}}
}

// Refresh reads the file, and puts unattestedNodes in force once two reads agree.
func (r *Reloader) Refresh(now time.Time) {
	c, err := r.Get(now)
	if err != nil {
		return // Problem has it
	}
	before, names := r.settings.rules.UnattestedNodes(), c.UnattestedNodes
	confirmed := slices.Equal(names, r.candidate)
	r.candidate = names
	if confirmed && !slices.Equal(before, names) && r.settings.rules.SetUnattestedNodes(names) == nil {
		r.log.Info("unattestedNodes has changed", "added", text.Names(without(names, before)), "removed", text.Names(without(before, names)))
	}
	c.UnattestedNodes = nil
	if r.restartFields != nil && !reflect.DeepEqual(c, *r.restartFields) {
		r.log.Info("the configuration file has changed; all fields but unattestedNodes need a restart", "file", r.Path)
	}
	r.restartFields = &c
}

// without returns the names that are not in other.
func without(names, other []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(other, name) })
}

// UnattestedFile returns the unattestedNodes of a configuration file, for a program that needs no
// other field. It reads the file again after maxAge. It does not check other fields: they name
// files that may be on another machine.
func UnattestedFile(path string, maxAge time.Duration) *lastgood.File[[]string] {
	return &lastgood.File[[]string]{
		Name: "configuration file", Path: path, MaxSize: maxConfigSize, MaxAge: maxAge,
		Parse: func(data []byte) ([]string, error) {
			c, err := Parse(data)
			if err == nil {
				err = (&verifier.Rules{}).SetUnattestedNodes(c.UnattestedNodes)
			}
			return c.UnattestedNodes, err
		},
	}
}
