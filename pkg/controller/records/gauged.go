// SPDX-License-Identifier: Apache-2.0

package records

import (
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// Gauged returns the cached records for metrics, and false until the cache is filled. The cache may
// be minutes old.
func (s *Store) Gauged() ([]telemetry.Record, bool) {
	if s.informer == nil || !s.informer.HasSynced() {
		return nil, false
	}
	items := s.informer.GetStore().List()
	gauged := make([]telemetry.Record, len(items))
	for i, item := range items {
		gauged[i] = gaugedOf(item.(*v1alpha1.NodeAttestation))
	}
	return gauged, true
}

// gaugedOf returns a record for metrics. NotAfter is that of the newest certificate: older releases
// do not write status.expires.
func gaugedOf(record *v1alpha1.NodeAttestation) telemetry.Record {
	gauged := telemetry.Record{NodeName: record.Spec.NodeName}
	if attested := record.Status.LastAttested; attested != nil {
		gauged.LastAttested = attested.Time
	}
	if newest := newestCertificate(record); newest != nil {
		gauged.NotAfter = newest.NotAfter.Time
	}
	return gauged
}
