// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

var (
	_ workqueue.TypedInterface[reconcile.Request] = (*Queue)(nil)
	_                                             = controller.Options{NewQueue: (*Queue)(nil).NewQueue}
)

// slow are rates of which tests can see each token.
var slow = Rates{Requester: Rate{time.Second, 1}, Cluster: Rate{100 * time.Millisecond, 10}}

func newTestQueue(rates Rates) *Queue {
	return New(rates, isListed, isAttested)
}

// add queues a request as an event handler does.
func (q *Queue) add(name string, flow Flow) {
	q.Observe(name, flow)
	q.Add(requestOf(name))
}

// worker gets requests and processes them in no time, until the shutdown.
func worker(q workqueue.TypedInterface[reconcile.Request], process func(name string)) {
	for {
		request, shutdown := q.Get()
		if shutdown {
			return
		}
		process(request.Name)
		q.Done(request)
	}
}

// A request that is added while it is in process comes again, and one that is added twice comes
// once.
func TestQueueHasEachRequestOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newTestQueue(free)
		for range 3 {
			q.add("a", token("a"))
		}
		if q.Len() != 1 {
			t.Errorf("%d are queued", q.Len())
		}
		a, _ := q.Get()
		q.Add(a)
		q.Add(a)
		q.add("b", token("b"))
		b, _ := q.Get()
		if b.Name != "b" || q.Len() != 0 {
			t.Errorf("%s is served while a is in process, %d are queued", b.Name, q.Len())
		}
		q.Done(b)
		q.Done(a)
		if q.Len() != 1 {
			t.Errorf("%d are queued", q.Len())
		}
		again, _ := q.Get()
		if q.Done(again); again != a || q.Len() != 0 {
			t.Errorf("%v is served, %d are queued", again, q.Len())
		}
	})
}

// Many producers and consumers: each request is served after it was added last, and by one at a
// time.
func TestQueueUnderConcurrency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newTestQueue(Rates{Requester: Rate{time.Millisecond, 10}, Cluster: Rate{time.Millisecond / 2, 20}})
		var mu sync.Mutex
		added, seen, busy := map[string]int{}, map[string]int{}, map[string]bool{}
		var consumers, producers sync.WaitGroup
		for range 16 {
			consumers.Go(func() {
				worker(q, func(name string) {
					mu.Lock()
					if busy[name] {
						t.Errorf("%s is processed twice at a time", name)
					}
					busy[name], seen[name] = true, added[name]
					mu.Unlock()
					time.Sleep(time.Millisecond)
					mu.Lock()
					busy[name] = false
					mu.Unlock()
				})
			})
		}
		for p := range 8 {
			producers.Go(func() {
				random := rand.New(rand.NewPCG(4, uint64(p)))
				for range 500 {
					name := fmt.Sprint(random.IntN(100))
					mu.Lock()
					added[name]++
					mu.Unlock()
					switch random.IntN(10) {
					case 0:
						q.Forget(name)
					case 1:
						q.Charge(token("a").Requester, time.Millisecond)
					case 2:
						q.Reclassify()
					}
					q.add(name, token(fmt.Sprint("listed-", name)))
					time.Sleep(time.Duration(random.IntN(int(time.Millisecond))))
				}
			})
		}
		producers.Wait()
		time.Sleep(time.Minute)
		mu.Lock()
		for name := range added {
			if seen[name] != added[name] {
				t.Errorf("%s was served last after %d of %d additions", name, seen[name], added[name])
			}
		}
		mu.Unlock()
		q.ShutDown()
		consumers.Wait()
	})
}

// Workers wait for tokens, and no longer.
func TestGetWaitsForTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rates := Rates{Requester: Rate{100 * time.Millisecond, 3}, Cluster: Rate{30 * time.Millisecond, 4}}
		q, began := newTestQueue(rates), time.Now()
		var mu sync.Mutex
		served := map[string][]time.Duration{}
		var workers sync.WaitGroup
		for range 4 {
			workers.Go(func() {
				worker(q, func(name string) {
					mu.Lock()
					defer mu.Unlock()
					requester, _, _ := strings.Cut(name, "-")
					served[requester] = append(served[requester], time.Since(began)/time.Millisecond)
				})
			})
		}
		synctest.Wait()
		for i := range 6 {
			q.add(fmt.Sprint("a-", i), node("a"))
		}
		synctest.Wait()
		q.Add(requestOf("unknown"))
		time.Sleep(250 * time.Millisecond)
		q.add("b-0", node("b"))
		time.Sleep(time.Second)
		q.ShutDown()
		workers.Wait()
		for requester, want := range map[string][]time.Duration{
			"a": {0, 0, 0, 100, 200, 300}, "b": {250}, "unknown": {0},
		} {
			if got := served[requester]; !slices.Equal(got, want) {
				t.Errorf("%s: served after %d ms, not %d", requester, got, want)
			}
		}
	})
}

// A Get that waits for one requester's token is woken when another request becomes eligible before.
func TestGetIsWokenBeforeItsTimer(t *testing.T) {
	for name, wake := range map[string]func(q *Queue){
		"another requester":   func(q *Queue) { q.add("x", node("x")) },
		"an unknown one":      func(q *Queue) { q.Add(requestOf("x")) },
		"a flow changes":      func(q *Queue) { q.Observe("b", Flow{Unlimited: true}) },
		"a flow is forgotten": func(q *Queue) { q.Forget("b") },
		"one in process is added": func(q *Queue) {
			q.Forget("a")
			q.Add(requestOf("a"))
			q.Done(requestOf("a"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := newTestQueue(slow)
				q.add("a", node("a"))
				q.Get()
				q.add("b", node("a"))
				got := make(chan string)
				go func() {
					request, _ := q.Get()
					got <- request.Name
				}()
				time.Sleep(500 * time.Millisecond)
				before := time.Now()
				wake(q)
				if name := <-got; time.Since(before) != 0 {
					t.Errorf("%s is served after %v", name, time.Since(before))
				}
				q.ShutDown()
			})
		})
	}
}

// What a denial costs is paid while another Get waits already.
func TestChargeMovesTheTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, began := newTestQueue(slow), time.Now()
		q.add("a", node("a"))
		q.Get()
		q.add("b", node("a"))
		go func() {
			time.Sleep(500 * time.Millisecond)
			q.Charge(node("a").Requester, time.Hour) // a burst's worth, at most
		}()
		q.Get()
		if took := time.Since(began); took != 2*time.Second {
			t.Errorf("it took %v", took)
		}
		// Eligible when a Get was woken, and not any more when it looks.
		q.add("c", node("c"))
		q.Charge(node("c").Requester, time.Hour)
		before := time.Now()
		q.Get()
		if took := time.Since(before); took != time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// The timer is set for one requester's token when another one's comes first.
func TestTimerIsSetForAnEarlierToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, began := newTestQueue(slow), time.Now()
		for range 5 {
			q.Charge(node("a").Requester, time.Hour)
		}
		q.add("a", node("a"))
		q.Charge(node("b").Requester, time.Hour)
		q.add("b", node("b"))
		for _, want := range []struct {
			name string
			took time.Duration
		}{{"b", time.Second}, {"a", 5 * time.Second}} {
			request, _ := q.Get()
			if took := time.Since(began); request.Name != want.name || took != want.took {
				t.Errorf("%s is served after %v, not %s after %v", request.Name, took, want.name, want.took)
			}
		}
	})
}

func TestShutDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newTestQueue(slow)
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() { worker(q, func(string) {}) })
		}
		q.add("a", node("a"))
		q.add("b", node("a"))
		synctest.Wait() // one was served, one waits for its token
		q.ShutDown()
		waiting.Wait()
		if !q.ShuttingDown() || q.Len() != 1 {
			t.Errorf("shutting down: %v, with %d queued", q.ShuttingDown(), q.Len())
		}
		q.Add(requestOf("too late"))
		if request, shutdown := q.Get(); !shutdown {
			t.Errorf("%v is served", request)
		}
		q.ShutDown()
		q.Charge("a", time.Second)
	})
}

// While workers are slow, the limits always allow one more. A shutdown must not wait for all of
// them.
func TestShutDownDropsWhatIsQueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newTestQueue(slow)
		q.add("a", node("a"))
		q.add("b", node("b"))
		q.Add(requestOf("unknown"))
		q.ShutDown()
		if request, shutdown := q.Get(); !shutdown || q.Len() != 3 {
			t.Errorf("%v is served, with %d queued", request, q.Len())
		}
	})
}

func TestShutDownWithDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newTestQueue(free)
		for i := range 3 {
			q.add(fmt.Sprint(i), token("a"))
		}
		began := time.Now()
		var workers sync.WaitGroup
		for range 2 {
			workers.Go(func() { worker(q, func(string) { time.Sleep(time.Second) }) })
		}
		synctest.Wait()
		q.ShutDownWithDrain()
		if took := time.Since(began); took != time.Second || q.Len() != 1 {
			t.Errorf("it took %v, with %d queued", took, q.Len())
		}
		workers.Wait()

		// ShutDown ends a drain that waits for a request which is never done.
		q = newTestQueue(free)
		q.add("a", token("a"))
		q.Get()
		drained := make(chan struct{})
		go func() { q.ShutDownWithDrain(); close(drained) }()
		synctest.Wait()
		select {
		case <-drained:
			t.Error("it does not wait")
		default:
		}
		q.ShutDown()
		<-drained
	})
}

// The clock of the queue is monotonic. If it was not, to put it back would delay nobody.
func TestClockOfTheQueueIsPutBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newTestQueue(Rates{Requester: Rate{time.Second, 2}, Cluster: Rate{time.Second, 2}})
		var back time.Duration
		q.now = func() time.Time { return time.Now().Round(0).Add(-back) }
		for i := range 6 {
			q.add(fmt.Sprint(i), node("a"))
		}
		began := time.Now()
		for i := range 6 {
			if q.Get(); i == 2 {
				back = 365 * 24 * time.Hour
			}
		}
		if took := time.Since(began); took < 4*time.Second || took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
		q.ShutDown()
	})
}

// The queue of a controller: delays, limits of what failed, and client-go's metrics.
func TestNewQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newTestQueue(slow)
		limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](10*time.Millisecond, time.Second)
		queue := q.NewQueue("fairqueue-test", limiter)
		began := time.Now()
		q.Observe("a", node("a"))
		queue.AddAfter(requestOf("a"), 5*time.Second)
		queue.AddRateLimited(requestOf("failed"))
		queue.AddRateLimited(requestOf("failed too"))
		for _, want := range []struct {
			name string
			took time.Duration
		}{{"failed", 10 * time.Millisecond}, {"failed too", 10 * time.Millisecond}, {"a", 5 * time.Second}} {
			request, _ := queue.Get()
			if request.Name != want.name || time.Since(began) != want.took {
				t.Errorf("%s after %v, not %s after %v", request.Name, time.Since(began), want.name, want.took)
			}
			queue.Done(request)
		}
		queue.Add(requestOf("left"))
		if got := metricsOf(t, "fairqueue-test"); got["workqueue_depth"] != 1 || got["workqueue_adds_total"] != 4 || got["workqueue_retries_total"] != 3 {
			t.Errorf("metrics: %v", got)
		}
		queue.ShutDown()
		if !q.ShuttingDown() {
			t.Error("the queue goes on")
		}
	})
}

// metricsOf returns the gauges and counters of a queue.
func metricsOf(t *testing.T, name string) map[string]float64 {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, family := range families {
		for _, m := range family.Metric {
			for _, label := range m.Label {
				if label.GetName() == "name" && label.GetValue() == name {
					values[family.GetName()] += m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
	}
	return values
}
