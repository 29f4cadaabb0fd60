// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Whose calls are counted: the service accounts of the controller, and of kube-controller-manager's
// approver and signer.
const (
	ourUser     = "system:serviceaccount:" + controllerprocess.Namespace + ":" + controllerprocess.Account
	managerUser = "system:serviceaccount:kube-system:certificate-controller"
)

// callPolicy makes the audit log record every call of these two.
const callPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: ["` + ourUser + `", "` + managerUser + `"]
- level: None
`

// call is a kind of request to the API server, such as "update
// certificatesigningrequests/approval".
type call string

// calls count them.
type calls map[call]int

// countCalls counts what a user has asked for since a mark and has been answered. It leaves out
// watches, which go on, and renewals of a Lease, which happen at all times. Neither belongs to a
// request.
func countCalls(events []testbed.AuditEvent, user string) calls {
	counted := calls{}
	for _, e := range events {
		if e.User != user || e.Stage != testbed.StageResponseComplete || e.Verb == "watch" || e.Resource == "leases" {
			continue
		}
		resource := e.Resource
		if e.Subresource != "" {
			resource += "/" + e.Subresource
		}
		counted[call(e.Verb+" "+resource)]++
	}
	return counted
}

func (c calls) total() (sum int) {
	for _, n := range c {
		sum += n
	}
	return sum
}

// reads are those that change nothing.
func (c calls) reads() (sum int) {
	for kind, n := range c {
		if verb, _, _ := strings.Cut(string(kind), " "); verb == "get" || verb == "list" {
			sum += n
		}
	}
	return sum
}

// kinds are all that are in some of the counts, those that occur most first.
func kinds(counts ...calls) []call {
	sum := calls{}
	for _, c := range counts {
		for kind, n := range c {
			sum[kind] += n
		}
	}
	var all []call
	for kind := range sum {
		all = append(all, kind)
	}
	slices.SortFunc(all, func(a, b call) int { return cmp.Or(cmp.Compare(sum[b], sum[a]), cmp.Compare(a, b)) })
	return all
}

const (
	// calm is for how long nobody asks for anything when work is done, and calmTimeout when that
	// must be so.
	calm        = 1500 * time.Millisecond
	calmTimeout = 30 * time.Second
)

// settled waits until a user's calls since a mark have come to their end: events are written later,
// and hellos are closed after the certificate. What is asked for all the time is left out.
func settled(ctx context.Context, cp *testbed.ControlPlane, mark testbed.AuditMark, user string, background ...call) (calls, error) {
	ctx, cancel := context.WithTimeout(ctx, calmTimeout)
	defer cancel()
	last, since := -1, time.Now()
	for {
		events, err := cp.AuditSince(mark)
		if err != nil {
			return nil, err
		}
		counted := countCalls(events, user)
		for _, kind := range background {
			delete(counted, kind)
		}
		if n := counted.total(); n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) >= calm {
			return counted, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait until %s has no more to do: %w", user, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}
