// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"cmp"
	"sync"
	"time"

	"k8s.io/utils/lru"
)

// Once says whether to report a text about a subject, such as an object or a file. Its zero value
// has reported nothing. It is safe for concurrent use.
type Once struct {
	// Max is the number of subjects that it remembers. It forgets the one that was asked about
	// least recently. Default: 20,000.
	Max int

	mu       sync.Mutex
	reported *lru.Cache
}

const maxReported = 20_000

type report struct {
	text string
	at   time.Time
}

// MarkReported returns true if the caller should report a text about a subject now, and remembers
// it as reported. That is so if the last text about the subject is another one, is unknown, or is
// at least again old. If again is 0, the same text is not repeated. The subject may be "" if there
// is only one. A caller that could not report calls Forget.
func (o *Once) MarkReported(subject, text string, now time.Time, again time.Duration) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.reported == nil {
		o.reported = lru.New(cmp.Or(o.Max, maxReported))
	}
	if found, ok := o.reported.Get(subject); ok {
		last := found.(report)
		age := now.Sub(last.at).Abs() // the clock may have been set back
		if last.text == text && (again == 0 || age < again) {
			return false
		}
	}
	o.reported.Add(subject, report{text, now})
	return true
}

// Forget forgets what was reported about a subject.
func (o *Once) Forget(subject string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.reported != nil {
		o.reported.Remove(subject)
	}
}
