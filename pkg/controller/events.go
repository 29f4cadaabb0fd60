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
	sayAgain = 14 * time.Minute
	// maxSaid bounds how many Events are remembered.
	maxSaid = 1024
)

// sparing is what Sparing returns.
type sparing struct {
	recorder events.EventRecorder
	said     *lru.Cache
}

// Sparing returns a recorder that drops an Event if there was one like it within 14 minutes: of the same version of an object and of what it is related
// to, with the same type, reason and action. client-go makes a series of two such Events, for which it needs the right to change Events, and keeps the
// message of the first. So of a request that waits the Event has the first cause of its reason, and the log the latest.
func Sparing(recorder events.EventRecorder) events.EventRecorder {
	return &sparing{recorder, lru.New(maxSaid)}
}

// Eventf records an Event, or drops it.
func (s *sparing) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	of, known := version(regarding)
	to, knownToo := version(related)
	if like, now := [...]string{of, to, kind, reason, action}, time.Now(); known && (knownToo || related == nil) {
		if last, ok := s.said.Get(like); ok && now.Sub(last.(time.Time)) < sayAgain {
			return
		}
		s.said.Add(like, now)
	}
	s.recorder.Eventf(regarding, related, kind, reason, action, note, args...)
}

// version tells versions of objects apart; it is false of what is no object.
func version(object runtime.Object) (string, bool) {
	o, err := meta.Accessor(object)
	if err != nil {
		return "", false
	}
	return o.GetNamespace() + "/" + o.GetName() + "/" + string(o.GetUID()) + "/" + o.GetResourceVersion(), true
}
