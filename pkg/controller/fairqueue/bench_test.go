// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"fmt"
	"runtime"
	"testing"
)

// fill queues requests, each with a claim of its own.
func fill(q *Queue, count int, flow func(i int) Flow) {
	for i := range count {
		q.add(fmt.Sprintf("node-csr-%043d", i), flow(i))
	}
}

// junkOf returns flows with the lengths of real ones: the EK is a fingerprint in hexadecimal
// digits.
func junkOf(requesters int) func(i int) Flow {
	return func(i int) Flow {
		return Flow{
			Class: Tokens, Requester: fmt.Sprintf("system:bootstrap:%06d", i%requesters),
			Claim: Claim{EK: fmt.Sprintf("sha256:%064d", i), Node: fmt.Sprintf("worker-%06d", i)},
		}
	}
}

// BenchmarkQueue adds, gets and finishes one request while as many are queued.
func BenchmarkQueue(b *testing.B) {
	for _, c := range []struct {
		name               string
		queued, requesters int
	}{
		{"1 queued", 1, 1}, {"100000 of one requester", 100_000, 1}, {"100000 requesters", 100_000, 100_000},
	} {
		b.Run(c.name, func(b *testing.B) {
			q := newTestQueue(free)
			fill(q, c.queued, junkOf(c.requesters))
			b.ReportAllocs()
			for b.Loop() {
				request, _ := q.Get()
				q.Done(request)
				q.Add(request)
			}
		})
	}
}

// BenchmarkLimited is BenchmarkQueue where requesters wait for tokens: one of two Gets parks one.
func BenchmarkLimited(b *testing.B) {
	rates := free
	rates.Requester = Rate{Every: 1, Burst: 1}
	q := newTestQueue(rates)
	fill(q, 100_000, junkOf(50_000))
	b.ReportAllocs()
	for b.Loop() {
		request, _ := q.Get()
		q.Done(request)
		q.Add(request)
	}
}

func BenchmarkReclassify(b *testing.B) {
	q := newTestQueue(free)
	fill(q, 100_000, junkOf(1))
	for b.Loop() {
		q.Reclassify()
	}
}

// BenchmarkBytesPerRequest reports what each queued and each waiting request takes, with its
// strings.
func BenchmarkBytesPerRequest(b *testing.B) {
	const count = 100_000
	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	for _, requesters := range []int{1, count} {
		b.Run(fmt.Sprintf("of %d requesters", requesters), func(b *testing.B) {
			for b.Loop() {
				before := heap()
				q := newTestQueue(free)
				fill(q, count, junkOf(requesters))
				b.ReportMetric((heap()-before)/count, "B/queued")
				for q.Len() > 0 {
					request, _ := q.Get()
					q.Done(request)
				}
				b.ReportMetric((heap()-before)/count, "B/observed")
				runtime.KeepAlive(q)
			}
		})
	}
	b.Run("retries", func(b *testing.B) {
		for b.Loop() {
			before := heap()
			r := NewRetries[struct{}]()
			for i := range count {
				r.Remember(Waiting{Name: fmt.Sprintf("node-csr-%043d", i), UID: "00000000-0000-0000-0000-000000000000", Claim: junkOf(1)(i).Claim}, noon)
			}
			b.ReportMetric((heap()-before)/count, "B/waiting")
			runtime.KeepAlive(r)
		}
	})
}
