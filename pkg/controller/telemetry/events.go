// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
)

// DedupInterval is the time until the same Event may be recorded again. client-go remembers an
// Event for at most twelve minutes.
const DedupInterval = 14 * time.Minute

// maxRecorded bounds the memory of each recorder. Each version of an object has Events of its own.
const maxRecorded = 1024

// dedupRecorder drops repeated Events. NewDedupRecorder says which.
type dedupRecorder struct {
	recorder events.EventRecorder
	recorded Once
}

// NewDedupRecorder returns a recorder that drops an Event if it recorded the same one within
// DedupInterval. Two Events are the same if type, reason, action, and the versions of both objects
// are the same. The messages may differ: a waiting request has its first message in the Event and
// the latest in the log. client-go would make a series of two such Events, which needs the right to
// change Events.
func NewDedupRecorder(recorder events.EventRecorder) events.EventRecorder {
	return &dedupRecorder{recorder: recorder, recorded: Once{Max: maxRecorded}}
}

// Eventf records an Event, or drops it. Parts of the note may come from a peer, so it becomes a
// Message.
func (r *dedupRecorder) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	about, known := versionOf(regarding)
	to, knownToo := versionOf(related)
	identified := known && (knownToo || related == nil)
	if identified && !r.recorded.MarkReported(strings.Join([]string{about, to, kind, reason, action}, "\x00"), "", time.Now(), DedupInterval) {
		return
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
