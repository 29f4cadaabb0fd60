// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

// fillers is how many records are made at a time.
const fillers = 8

// fillRecords makes records of machines that do not exist, numbered from one to another, each as
// the first machine's is, who has enrolled.
func (s *site) fillRecords(ctx context.Context, records client.Client, from, to int) error {
	found := &v1alpha1.NodeAttestationList{}
	if err := records.List(ctx, found, client.InNamespace(controllerprocess.Namespace), client.MatchingFields{v1alpha1.FieldNodeName: s.machines[0].Name}); err != nil {
		return err
	}
	if len(found.Items) != 1 || len(found.Items[0].Status.Certificates) == 0 {
		return fmt.Errorf("%s has %d records, or no certificate", s.machines[0].Name, len(found.Items))
	}
	real := &found.Items[0]
	var (
		next atomic.Int64
		wait sync.WaitGroup
		mu   sync.Mutex
		errs error
	)
	next.Store(int64(from))
	for range fillers {
		wait.Go(func() {
			for i := int(next.Add(1)) - 1; i < to; i = int(next.Add(1)) - 1 {
				if err := records.Create(ctx, absentRecord(real, i)); err != nil {
					mu.Lock()
					errs = errors.Join(errs, err)
					mu.Unlock()
					return
				}
			}
		})
	}
	wait.Wait()
	return errs
}

// absentRecord is the record of the machine in listed with that number.
func absentRecord(like *v1alpha1.NodeAttestation, i int) *v1alpha1.NodeAttestation {
	r := like.DeepCopy()
	r.ObjectMeta = metav1.ObjectMeta{Namespace: like.Namespace, Name: absentName(i)}
	r.Spec.Machine.Name, r.Spec.NodeName, r.Spec.ProviderID = absentName(i), absentName(i), absentProviderID(i)
	r.Spec.EK.Fingerprint, r.Spec.AKName = absentEK(i), "000b"+absentEK(i)
	uid := types.UID(fmt.Sprintf("%08x-0000-4000-8000-000000000000", i))
	r.Status.FirstRequestUID = uid
	one := r.Status.Certificates[0]
	r.Status.Certificates = nil
	for n := range 2 { // it has renewed once
		one.SHA256, one.RequestUID = fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "certificate %d of %d", n, i))), uid
		r.Status.Certificates = append(r.Status.Certificates, one)
	}
	return r
}
