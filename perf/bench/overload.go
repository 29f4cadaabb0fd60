// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// overloadDomain has a name for each client: client-go keeps one connection for each name, and each
// node has its own.
const overloadDomain = "overload.invalid"

const (
	// oneNodeFor is how long a node is watched whose certificate is due.
	oneNodeFor = 55 * time.Second
	// clientsStart is the time within which the clients begin. All at once, their TLS handshakes
	// would be what is measured.
	clientsStart = 40 * time.Second
	// steadyFrom and overloadFor bound the part that counts.
	steadyFrom, overloadFor = 50 * time.Second, 130 * time.Second
	progressEvery           = 10 * time.Second
)

// overload has nodes ask an API server that sheds load. First one whose certificate is due, then a
// fleet that has none. It runs the plugin's code without its processes, since 5,000 do not fit into
// one machine. So a worker may use the connection of the one before (connectionIdle).
func (b *bench) overload(ctx context.Context) error {
	statuses := []int{http.StatusTooManyRequests, http.StatusServiceUnavailable}
	if b.shedStatus != 0 {
		return b.overloadFleet(ctx, b.shedStatus)
	}
	var single []func() (row, error)
	for _, left := range []time.Duration{30 * time.Minute, time.Minute} {
		for _, status := range statuses {
			single = append(single, func() (row, error) { return oneDueNode(ctx, status, left) })
		}
	}
	rows, errs := make([]row, len(single)), make([]error, len(single))
	var wait sync.WaitGroup
	for i, measure := range single {
		wait.Go(func() { rows[i], errs[i] = measure() })
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("one node: %w", err)
	}
	b.table.add(rows...)
	for _, status := range statuses {
		if err := b.overloadFleet(ctx, status); err != nil {
			return fmt.Errorf("%d: %w", status, err)
		}
	}
	return nil
}

// renewing is the insecure provider, but for that it renews, as the one for TPMs does.
type renewing struct{ insecure.Provider }

func (renewing) Renews() bool { return true }

// onTmpfs makes a folder that costs no disk. Else 5,000 nodes would share one.
func onTmpfs() (string, error) {
	const tmpfs = "/dev/shm"
	if _, err := os.Stat(tmpfs); err != nil {
		return os.MkdirTemp("", "overload-")
	}
	return os.MkdirTemp(tmpfs, "overload-")
}

// simulatedNode is the plugin of one node.
type simulatedNode struct {
	*authenticator.Authenticator
	certs cache.Dir
	wait  sync.WaitGroup // for the worker that Run has started
}

// newNode makes a node with a token for that server.
func (s *sheddingServer) newNode(ctx context.Context, dir, name string) (*simulatedNode, error) {
	bootstrap := filepath.Join(dir, "bootstrap.kubeconfig")
	kubeconfig, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "x",
		"contexts": []any{map[string]any{"name": "x", "context": map[string]string{"cluster": "x", "user": "x"}}},
		"users":    []any{map[string]any{"name": "x", "user": map[string]string{"token": "overload"}}},
		"clusters": []any{map[string]any{"name": "x", "cluster": map[string]any{
			"server": s.url, "certificate-authority-data": s.ca, "tls-server-name": name + "." + overloadDomain,
		}}},
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(bootstrap, kubeconfig, 0o600)); err != nil {
		return nil, err
	}
	n := &simulatedNode{certs: cache.At(filepath.Join(dir, "certs"))}
	config := authenticator.DefaultConfig()
	config.Provider, config.NodeName, config.BootstrapKubeconfig = insecure.Name, name, bootstrap
	config.CertDir, config.RuntimeDir = n.certs.Path(), filepath.Join(dir, "run")
	n.Authenticator, err = authenticator.New(authenticator.Options{
		Config: config, UserAgent: "bench/overload",
		Providers: []provider.Factory{{Name: insecure.Name, New: func(provider.Settings) (provider.Provider, error) { return renewing{}, nil }}},
		// A run kills a worker that outlives it, and here that is this very process. The
		// context of work has the real one.
		WorkerDeadline: 24 * time.Hour,
		StartWorker: func() (process.ID, error) {
			n.wait.Go(func() { n.work(ctx) })
			return process.Of(os.Getpid())
		},
	})
	return n, err
}

// work is a worker's process. At its end no worker is named any more, as if the process had ended.
func (n *simulatedNode) work(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, authenticator.DefaultWorkerDeadline)
	defer cancel()
	_ = n.Work(ctx) // it is recorded
	if lock, err := n.certs.WaitLock(context.WithoutCancel(ctx)); err == nil {
		_ = lock.NameWorker(process.ID{})
		lock.Unlock()
	}
}

// oneDueNode counts what one node sends whose certificate is due and has so much time left, while
// the server sheds each request. As with client-go, the next run follows as soon as the credential
// has expired: the less time the certificate has left, the sooner.
func oneDueNode(ctx context.Context, status int, left time.Duration) (row, error) {
	server, err := newSheddingServer(status, 0)
	if err != nil {
		return row{}, err
	}
	defer server.close()
	dir, err := onTmpfs()
	if err != nil {
		return row{}, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	ctx, cancel := context.WithTimeout(ctx, oneNodeFor)
	defer cancel()
	node, err := server.newNode(ctx, dir, "due")
	if err != nil {
		return row{}, err
	}
	ca, err := testbed.NewCA("overload-client")
	if err != nil {
		return row{}, err
	}
	ends := time.Now().Add(left)
	pair, err := ca.IssueClient("system:node:due", []string{"system:nodes"}, ends.Add(-24*time.Hour), ends)
	if err != nil {
		return row{}, err
	}
	if err := install(node.certs.Path(), pair, cache.Origin{Server: server.url, CertificateAuthorityData: server.ca}); err != nil {
		return row{}, err
	}
	runs := 0
	for ctx.Err() == nil {
		answer, err := node.Run(ctx)
		if err != nil {
			return row{}, err
		}
		runs++
		var credential clientauthentication.ExecCredential
		if err := json.Unmarshal(answer.Credential, &credential); err != nil || credential.Status == nil {
			return row{}, fmt.Errorf("no credential: %w", err)
		}
		pause(ctx, time.Until(credential.Status.ExpirationTimestamp.Time))
	}
	node.wait.Wait()
	var sum second
	for _, second := range server.arrived(0, oneNodeFor) {
		sum.add(second)
	}
	return row{
		what:    fmt.Sprintf("overload, all %d: one node, renewal due, %s left, in %s", status, left, oneNodeFor),
		figure:  fmt.Sprintf("%d POSTs of %d requests", sum.answered[callPost]+sum.shed[callPost], sum.all()),
		against: fmt.Sprintf("runs, %d", runs),
	}, nil
}

func (s *second) add(other second) {
	for c := range calls {
		s.answered[c] += other.answered[c]
		s.shed[c] += other.shed[c]
	}
}

// overloadFleet has nodes without a certificate ask, all for as long as the measurement takes.
func (b *bench) overloadFleet(ctx context.Context, status int) (err error) {
	if err := allowFiles(3*uint64(b.clients) + 1000); err != nil { //nolint:gosec // G115: it is at least 1
		return err
	}
	dir, err := onTmpfs()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	server, err := newSheddingServer(status, b.capacity)
	if err != nil {
		return err
	}
	defer server.close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	nodes := make([]*simulatedNode, b.clients)
	for i := range nodes {
		name := fmt.Sprintf("node-%05d", i)
		if nodes[i], err = server.newNode(ctx, filepath.Join(dir, name), name); err != nil {
			return err
		}
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	server.began = time.Now()
	cpuBefore := cpuTime()
	late := make(chan []time.Duration, 1)
	go func() { late <- lateness(ctx) }()
	var wait sync.WaitGroup
	for i, node := range nodes {
		wait.Go(func() { node.drive(ctx, clientsStart*time.Duration(i)/time.Duration(len(nodes))) })
	}
	filed := map[time.Duration]int{}
	for at := progressEvery; at <= overloadFor; at += progressEvery {
		pause(ctx, time.Until(server.began.Add(at)))
		filed[at] = server.filed()
		var last second
		for _, s := range server.arrived(at-progressEvery, at) {
			last.add(s)
		}
		fmt.Fprintf(os.Stderr, "%d: after %s: %d nodes have a request filed; %d requests arrived since, %d answered\n", status, at, filed[at], last.all(), last.all()-last.allShed())
	}
	runtime.ReadMemStats(&after)
	if err := ctx.Err(); err != nil {
		return err
	}
	window := server.arrived(steadyFrom, overloadFor)
	cpu := float64(cpuTime()-cpuBefore) / float64(time.Since(server.began))
	if err := onlyOverload(nodes); err != nil {
		return err
	}
	cancel()
	server.close()
	wait.Wait()
	b.table.add(overloadRows(fmt.Sprintf("overload, %d beyond %.0f/s, %d nodes: ", status, b.capacity, len(nodes)), window, b.capacity,
		fmt.Sprintf("%d after 60 s, %d after 120 s", filed[time.Minute], filed[2*time.Minute]))...)
	resident, err := peakResident()
	b.table.add(row{
		what:   fmt.Sprintf("overload, %d: memory of all nodes and the server", status),
		figure: fmt.Sprintf("%.0f MB of heap", float64(after.HeapAlloc-before.HeapAlloc)/1e6), against: resident,
	}, row{
		what:   fmt.Sprintf("overload, %d: CPU of all nodes and the server", status),
		figure: fmt.Sprintf("%.2f cores", cpu), against: fmt.Sprintf("cores, %d", runtime.NumCPU()),
	}, row{ // far below a second, or the machine was what was measured
		what:   fmt.Sprintf("overload, %d: a timer of the same process is late, p99", status),
		figure: milliseconds(quantile(<-late, 0.99)),
	})
	return err
}

// allowFiles raises the limit of open files. Without enough of them nodes wait for each other, and
// not for the server.
func allowFiles(least uint64) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	if limit.Cur >= least {
		return nil
	}
	limit.Cur, limit.Max = least, max(limit.Max, least)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("%d open files are needed (ulimit -n): %w", least, err)
	}
	return nil
}

// onlyOverload returns an error if a worker has failed for another cause than the server's load.
// Then something else was measured.
func onlyOverload(nodes []*simulatedNode) error {
	for _, node := range nodes {
		state, err := node.certs.State()
		if err != nil {
			return err
		}
		if state.Last == nil {
			continue
		}
		switch why := reason.Reason(state.Last.Reason); why {
		case reason.APIUnreachable, reason.WaitingForSigner, "APIOverloaded":
		default:
			return fmt.Errorf("a worker has ended with %s: %s", why, state.Last.Message)
		}
	}
	return nil
}

// drive starts one worker after the other, as the runs of a kubelet without a credential do. A
// kubelet asks each second or so. A run starts a worker unless the last one has left a back-off.
// The runs themselves are left out: 5,000 that look for a certificate again and again need more
// than this machine.
func (n *simulatedNode) drive(ctx context.Context, delay time.Duration) {
	for pause(ctx, delay); ctx.Err() == nil; pause(ctx, delay) {
		n.work(ctx)
		delay = 0
		if state, err := n.certs.State(); err == nil {
			delay = max(time.Until(state.NextAttempt), 0)
		}
		delay += time.Duration(rand.Float64() * float64(time.Second)) //nolint:gosec // G404: when the kubelet asks next
	}
}

// lateness returns how late a timer was, again and again until ctx ends.
func lateness(ctx context.Context) []time.Duration {
	const every = 100 * time.Millisecond
	late := []time.Duration{0}
	for ctx.Err() == nil {
		began := time.Now()
		pause(ctx, every)
		late = append(late, max(time.Since(began)-every, 0))
	}
	return late
}

// pause waits that long, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// overloadRows are the figures of one fleet.
func overloadRows(what string, window []second, capacity float64, filed string) []row {
	var sum second
	peak := 0
	for _, s := range window {
		sum.add(s)
		peak = max(peak, s.all())
	}
	perSecond := func(n int) string { return fmt.Sprintf("%.1f/s", float64(n)/float64(len(window))) }
	mean := float64(sum.all()) / float64(len(window))
	rows := []row{
		{what: what + "requests that arrive", figure: fmt.Sprintf("%s, peak second %d", perSecond(sum.all()), peak), against: fmt.Sprintf("capacity, %.0f/s", capacity), ratio: fmt.Sprintf("%.2f", mean/capacity)},
	}
	for c := range calls {
		rows = append(rows, row{what: what + c.String(), figure: perSecond(sum.answered[c]) + " answered", against: "shed, " + perSecond(sum.shed[c])})
	}
	return append(rows, row{what: what + "nodes with a request filed", figure: filed})
}

// cpuTime is what this process has used so far.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// peakResident returns the largest resident size of this process so far.
func peakResident() (string, error) {
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return "", err
	}
	_, rest, _ := strings.Cut(string(data), "VmHWM:")
	kib, _, _ := strings.Cut(rest, " kB")
	return "peak of the process, " + strings.TrimSpace(kib) + " KiB resident", nil
}
