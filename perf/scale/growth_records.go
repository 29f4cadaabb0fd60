// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

// growthRecords has machines enrol beside more and more records.
func growthRecords(ctx context.Context, b *bench) error {
	c := newCurve("records", "enrolment, median", "slowest", "controller CPU", "API server CPU", "one judgement", "list by node name", "list of all", "bytes of all")
	err := b.withSite(ctx, siteOptions{machines: 2}, func(s *site) error {
		records, err := controllerprocess.RecordClient(ctx, s.cp)
		if err != nil {
			return err
		}
		if _, err := s.enrol(ctx, 0); err != nil {
			return err
		}
		made := 0
		for _, count := range []int{100, 1_000, 5_000} {
			count = b.sized(count)
			s.note("%d records", count)
			if err := s.fillRecords(ctx, records, made, count); err != nil {
				return err
			}
			made = count
			expense, err := s.expenseOf(ctx, 20)
			if err != nil {
				return err
			}
			one, _, err := listing(ctx, records, client.MatchingFields{v1alpha1.FieldNodeName: absentName(count / 2)})
			if err != nil {
				return err
			}
			all, size, err := listing(ctx, records, nil)
			if err != nil {
				return err
			}
			c.add(count, quantile(expense.took, .5), slowest(expense.took), expense.controller, expense.apiServer, expense.judging, one, all, size)
		}
		return nil
	})
	if err != nil {
		return err
	}
	c.finish()
	return nil
}

// listing returns the median of how long it takes to list records, and how many bytes they have.
func listing(ctx context.Context, records client.Client, fields client.MatchingFields) (time.Duration, int, error) {
	var took []time.Duration
	size := 0
	for range 21 {
		list := &v1alpha1.NodeAttestationList{}
		options := []client.ListOption{client.InNamespace(controllerprocess.Namespace)}
		if fields != nil {
			options = append(options, fields)
		}
		began := time.Now()
		if err := records.List(ctx, list, options...); err != nil {
			return 0, 0, err
		}
		took = append(took, time.Since(began))
		content, err := json.Marshal(list)
		if err != nil {
			return 0, 0, err
		}
		size = len(content)
	}
	return quantile(took, .5), size, nil
}
