// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/lru"
)

const (
	// DedupInterval is the time until the same Event may be recorded again. client-go remembers an
	// Event for at most twelve minutes.
	DedupInterval = 14 * time.Minute
	// maxRemembered bounds the number of remembered Events.
	maxRemembered = 1024
)

// dedupRecorder drops repeated Events. NewDedupRecorder says which.
type dedupRecorder struct {
	recorder     events.EventRecorder
	lastRecorded *lru.Cache
}

// NewDedupRecorder returns a recorder that drops an Event if it recorded the same one within
// DedupInterval. Two Events are the same if type, reason, action, and the versions of both objects
// are the same. The messages may differ: a waiting request has its first message in the Event and
// the latest in the log. client-go would make a series of two such Events, which needs the right to
// change Events.
func NewDedupRecorder(recorder events.EventRecorder) events.EventRecorder {
	return &dedupRecorder{recorder, lru.New(maxRemembered)}
}

// Eventf records an Event, or drops it. Parts of the note may come from a peer, so it becomes a
// Message.
func (r *dedupRecorder) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	about, known := versionOf(regarding)
	to, knownToo := versionOf(related)
	if key, now := [...]string{about, to, kind, reason, action}, time.Now(); known && (knownToo || related == nil) {
		if last, ok := r.lastRecorded.Get(key); ok && now.Sub(last.(time.Time)) < DedupInterval {
			return
		}
		r.lastRecorded.Add(key, now)
	}
	r.recorder.Eventf(regarding, related, kind, reason, action, "%s", Message(fmt.Sprintf(note, args...)))
}

// versionOf identifies a version of an object. It returns false if object is not an API object.
func versionOf(object runtime.Object) (string, bool) {
	o, err := meta.Accessor(object)
	if err != nil {
		return "", false
	}
	return o.GetNamespace() + "/" + o.GetName() + "/" + string(o.GetUID()) + "/" + o.GetResourceVersion(), true
}
