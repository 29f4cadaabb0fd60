// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// stalledBeyond are two limits. A request is stalled if it took longer than the other node's
// request of the same moment by more than the limit. A busy machine delays both.
var stalledBeyond = []time.Duration{50 * time.Millisecond, 250 * time.Millisecond}

const (
	// trafficEvery is how far apart requests are.
	trafficEvery = 100 * time.Millisecond
	// requestLimit is for one request: longer than anything that the plugin waits for.
	requestLimit = time.Minute
)

// traffic is a node's requests through client-go, whose credential is the plugin's, as a kubelet
// sends them.
type traffic struct {
	name   string
	client kubernetes.Interface

	mu   sync.Mutex
	took []time.Duration // by when the request was due
	errs []error
}

// stall kills the controller and sends requests as two nodes: one's certificate is due, the other's
// is not.
func (b *bench) stall(ctx context.Context) error {
	return b.withCluster(ctx, "stall", 2, func(c *cluster) error {
		due, steady := c.machines[0], c.machines[1]
		now := time.Now()
		for m, begins := range map[*machine]time.Time{
			// of 24: due for hours, and half an hour to go
			due:    now.Add(-23*time.Hour - 30*time.Minute),
			steady: now.Add(-time.Minute),
		} {
			pair, err := c.ClientCA().IssueClient("system:node:"+m.name, []string{"system:nodes"}, begins, begins.Add(24*time.Hour))
			if err != nil {
				return err
			}
			if err := install(m.certs.Path(), pair, c.origin()); err != nil {
				return err
			}
		}
		if err := c.controller.Kill(); err != nil {
			return err
		}
		before, err := due.certs.Current()
		if err != nil {
			return err
		}
		disturbed, undisturbed, err := b.sendBoth(ctx, c, due, steady)
		if err != nil {
			return err
		}
		// Else something else was measured.
		pending, err := due.certs.Pending()
		if err != nil || pending == nil || pending.Last().UID == "" {
			return errors.Join(errors.New("the renewal that was due is not under way"), err)
		}
		if after, err := due.certs.Current(); err != nil || after.Fingerprint() != before.Fingerprint() {
			return errors.Join(errors.New("the certificate was replaced, with no signer there"), err)
		}
		if pending, err := steady.certs.Pending(); err != nil || pending != nil {
			return errors.Join(errors.New("the node with nothing due has asked for a certificate"), err)
		}
		b.table.add(stallRows(disturbed, undisturbed)...)
		return nil
	})
}

// sendBoth sends the requests of both nodes at the same time.
func (b *bench) sendBoth(ctx context.Context, c *cluster, due, steady *machine) (disturbed, undisturbed *traffic, err error) {
	if disturbed, err = newTraffic(c, due, b.plugin); err != nil {
		return nil, nil, err
	}
	if undisturbed, err = newTraffic(c, steady, b.plugin); err != nil {
		return nil, nil, err
	}
	var wait sync.WaitGroup
	for _, t := range []*traffic{disturbed, undisturbed} {
		wait.Go(func() { t.send(ctx, b.traffic) })
	}
	wait.Wait()
	return disturbed, undisturbed, errors.Join(append(disturbed.errs, undisturbed.errs...)...)
}

func newTraffic(c *cluster, m *machine, plugin string) (*traffic, error) {
	command, err := filepath.Abs(plugin)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: c.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: c.ServerCA()}, QPS: -1,
		ExecProvider: &clientcmdapi.ExecConfig{
			APIVersion: "client.authentication.k8s.io/v1", Command: command, Args: m.flags,
			InteractiveMode: clientcmdapi.NeverExecInteractiveMode, ProvideClusterInfo: true,
		},
	})
	return &traffic{name: m.name, client: client}, err
}

// send sends a request each trafficEvery, whether those before have been answered or not, and waits
// for all.
func (t *traffic) send(ctx context.Context, during time.Duration) {
	var wait sync.WaitGroup
	began := time.Now()
	t.took = make([]time.Duration, during/trafficEvery)
	for i := range t.took {
		at := began.Add(time.Duration(i) * trafficEvery)
		select {
		case <-ctx.Done():
			t.failed(ctx.Err())
			wait.Wait()
			return
		case <-time.After(time.Until(at)):
		}
		wait.Go(func() {
			if err := t.request(ctx); err != nil {
				t.failed(fmt.Errorf("%s: request %d: %w", t.name, i, err))
			}
			t.mu.Lock()
			defer t.mu.Unlock()
			t.took[i] = time.Since(at)
		})
	}
	wait.Wait()
}

func (t *traffic) failed(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.errs = append(t.errs, err)
}

// request asks the API server whom it takes the node for.
func (t *traffic) request(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	review, err := t.client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if who := review.Status.UserInfo.Username; who != "system:node:"+t.name {
		return fmt.Errorf("the API server takes it for %s", who)
	}
	return nil
}

// stalls counts the requests that took longer than the other node's request of the same moment by
// more than a limit. It also returns the number of groups of consecutive stalled requests, and the
// sum of the delays.
func (t *traffic) stalls(other *traffic, beyond time.Duration) (requests, groups int, sum time.Duration) {
	before := false
	for i, took := range t.took {
		stalled := took > other.took[i]+beyond
		if stalled {
			requests++
			sum += took - other.took[i]
		}
		if stalled && !before {
			groups++
		}
		before = stalled
	}
	return requests, groups, sum
}

func stallRows(disturbed, undisturbed *traffic) []row {
	const what, against = "renewal due, signer dead: ", "nothing due, "
	count := func(requests, groups, of int) string {
		return fmt.Sprintf("%d of %d, in %d groups", requests, of, groups)
	}
	var rows []row
	for _, beyond := range stalledBeyond {
		requests, groups, sum := disturbed.stalls(undisturbed, beyond)
		otherRequests, otherGroups, otherSum := undisturbed.stalls(disturbed, beyond)
		rows = append(rows, row{
			what:    what + "requests more than " + beyond.String() + " later than the other node's",
			figure:  count(requests, groups, len(disturbed.took)),
			against: against + count(otherRequests, otherGroups, len(undisturbed.took)),
		}, row{
			what: what + "by how much in all", figure: milliseconds(sum), against: against + milliseconds(otherSum),
		})
	}
	for _, q := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p90", 0.9}, {"p95", 0.95}, {"p99", 0.99}} {
		one, other := quantile(disturbed.took, q.q), quantile(undisturbed.took, q.q)
		rows = append(rows, row{
			what: what + q.name + " of a request", figure: milliseconds(one), against: against + milliseconds(other), ratio: fmt.Sprintf("%.2f", over(one, other)),
		})
	}
	one, other := slices.Max(disturbed.took), slices.Max(undisturbed.took)
	return append(rows, row{
		what: what + "longest request", figure: milliseconds(one), against: against + milliseconds(other), ratio: fmt.Sprintf("%.2f", over(one, other)),
	})
}
