// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/go-logr/logr"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// maxConfigSize bounds the configuration file, in bytes: a ConfigMap has at most 1 MiB.
const maxConfigSize = 1 << 20

// Reload reads the configuration file again while the controller runs, and puts its unattestedNodes
// in force. The other fields need a restart. While the file is invalid or missing, the last valid
// list stays in force.
type Reload struct {
	*lastgood.File[Config]
	settings *Settings
	// read are the names that were read last. They come into force if they are read twice: a file
	// may be read while it is written.
	read []string
	// others has the other fields as they were read last. It is nil until then.
	others *Config
	log    logr.Logger
}

// Reload returns the Reload of these settings, which were read from path. Call its Refresh from one
// goroutine.
func (s *Settings) Reload(path string, log logr.Logger) *Reload {
	return &Reload{settings: s, log: log, File: &lastgood.File[Config]{
		Name: "configuration file", Path: path, MaxSize: maxConfigSize,
		Rejudge: true, // a file that it names may be missing for a moment
		Parse: func(data []byte) (Config, error) {
			if len(data) > maxConfigSize {
				return Config{}, fmt.Errorf("longer than %d bytes", maxConfigSize)
			}
			c, err := Parse(data)
			if err == nil {
				_, err = New(c)
			}
			return c, err
		},
	}}
}

// Refresh reads the file.
func (r *Reload) Refresh(now time.Time) {
	c, err := r.Get(now)
	if err != nil {
		return // Problem has it
	}
	before, names := r.settings.rules.UnattestedNodes(), c.UnattestedNodes
	twice := slices.Equal(names, r.read)
	if r.read = names; twice && !slices.Equal(before, names) && r.settings.rules.SetUnattestedNodes(names) == nil {
		r.log.Info("unattestedNodes has changed", "added", text.Names(without(names, before)), "removed", text.Names(without(before, names)))
	}
	c.UnattestedNodes = nil
	if r.others != nil && !reflect.DeepEqual(c, *r.others) {
		r.log.Info("the configuration file has changed; all fields but unattestedNodes need a restart", "file", r.Path)
	}
	r.others = &c
}

// without returns the names that are not in other.
func without(names, other []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(other, name) })
}
