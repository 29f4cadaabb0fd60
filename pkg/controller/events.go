// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/lru"
)

const (
	// sayAgain is how soon the same Event is recorded again. client-go remembers one for twelve minutes at most.
	sayAgain = 15 * time.Minute
	// maxSaid bounds how many Events are remembered.
	maxSaid = 4096
)

// sparing is what Sparing returns.
type sparing struct {
	recorder events.EventRecorder
	said     *lru.Cache
}

// Sparing returns a recorder that drops an Event if there was one like it within 15 minutes: of the same version of an object and of what it is related
// to, with the same type, reason and action. client-go makes a series of two such Events, for which it needs the right to change Events, and keeps the
// message of the first.
func Sparing(recorder events.EventRecorder) events.EventRecorder {
	return &sparing{recorder, lru.New(maxSaid)}
}

// Eventf records an Event, or drops it.
func (s *sparing) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	like, now := [...]string{version(regarding), version(related), kind, reason, action}, time.Now()
	if last, ok := s.said.Get(like); ok && now.Sub(last.(time.Time)) < sayAgain {
		return
	}
	s.said.Add(like, now)
	s.recorder.Eventf(regarding, related, kind, reason, action, note, args...)
}

// version tells versions of objects apart.
func version(object runtime.Object) string {
	if object == nil {
		return ""
	}
	o, err := meta.Accessor(object)
	if err != nil {
		return ""
	}
	return o.GetNamespace() + "/" + o.GetName() + "/" + string(o.GetUID()) + "/" + o.GetResourceVersion()
}
