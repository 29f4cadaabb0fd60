// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// slowList is an API server that takes a while to list, and has one record more each time.
type slowList struct {
	client.Reader
	takes time.Duration
	lists int
}

func (s *slowList) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	s.lists++
	time.Sleep(s.takes)
	list.(*v1alpha1.NodeAttestationList).Items = make([]v1alpha1.NodeAttestation, s.lists)
	return nil
}

// Readings are shared, do the longer the longer they took, and hold nobody up who has one.
func TestReadingsOfAllRecords(t *testing.T) {
	for name, c := range map[string]struct{ takes, does time.Duration }{
		"fast": {10 * time.Millisecond, lookAgain}, "slow": {300 * time.Millisecond, readingShare * 300 * time.Millisecond}, "very slow": {time.Minute, lookAtLeast},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := &slowList{takes: c.takes}
				s := &records{reader: api}
				began := time.Now()
				read := func(now time.Time) int {
					items, told, err := s.recent(t.Context(), now)
					if err != nil || len(items) != len(told) {
						t.Errorf("%v, %d records, %d told", err, len(items), len(told))
					}
					return len(items)
				}
				if got := read(began); got != 1 {
					t.Errorf("the first reading is number %d", got)
				}
				for _, now := range []time.Time{began, began.Add(-time.Millisecond), began.Add(c.does - 1)} {
					if got := read(now); got != 1 {
						t.Errorf("after %v it is number %d", now.Sub(began), got)
					}
				}
				second := make(chan int)
				go func() { second <- read(began.Add(c.does)) }()
				synctest.Wait() // it reads
				before := time.Now()
				if got := read(began.Add(c.does)); got != 1 || time.Now() != before {
					t.Errorf("meanwhile another has number %d, after %v", got, time.Since(before))
				}
				if got := <-second; got != 2 {
					t.Errorf("the second reading is number %d", got)
				}
				if got := read(began.Add(-time.Hour)); got != 3 {
					t.Errorf("with a clock that was put back it is number %d", got)
				}
			})
		})
	}
}
