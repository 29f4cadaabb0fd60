// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// recordGCInterval is the time between two checks of the records of a cluster.
	recordGCInterval = 5 * time.Minute
	// instanceGracePeriod is how long an instance must be missing from its MachinePool's list
	// before its record is deleted. Lists have been empty by mistake.
	instanceGracePeriod = time.Hour
)

// reasonNodeRef is the reason of the Event on a Machine whose nodeRef is not the Node in its
// record.
const reasonNodeRef = "NodeRefMismatch"

// recordGC checks the records of one cluster. It reports a Machine whose nodeRef is another Node
// than the one in its record. Cluster API sets a nodeRef by the unverified provider IDs of Nodes.
// No decision depends on that.
//
// It deletes the records of instances that have left their MachinePool. The garbage collector
// deletes those of Machines.
type recordGC struct {
	cached  client.Reader
	live    client.Client
	cluster types.NamespacedName
	uid     string
	events  events.EventRecorder
	log     logr.Logger
	now     func() time.Time

	// missingSince is when an instance was first missing, by the record's UID. nodeRefs are the
	// nodeRefs that were reported.
	missingSince map[types.UID]time.Time
	nodeRefs     telemetry.Once
}

// Start checks the records until ctx ends.
func (u *recordGC) Start(ctx context.Context) error {
	ticker := time.NewTicker(recordGCInterval)
	defer ticker.Stop()
	for {
		if err := u.run(ctx); err != nil && ctx.Err() == nil {
			u.log.Error(nil, "cannot check the records", "cause", err.Error())
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (u *recordGC) run(ctx context.Context) error {
	records := &v1alpha1.NodeAttestationList{}
	if err := u.live.List(ctx, records, client.InNamespace(u.cluster.Namespace), client.MatchingFields{v1alpha1.FieldCluster: u.uid}); err != nil {
		return fmt.Errorf("records: %w", err)
	}
	source := newMachineSource(machineSourceConfig{Reader: u.cached, Cluster: u.cluster})
	machines, err := source.listMachines(ctx)
	if err != nil {
		return err
	}
	pools, err := source.listPools(ctx)
	if err != nil {
		return err
	}
	byUID := map[types.UID]*v1alpha1.NodeAttestation{}
	for i := range records.Items {
		if owners := records.Items[i].OwnerReferences; len(owners) == 1 && owners[0].Kind == "Machine" {
			byUID[owners[0].UID] = &records.Items[i]
		}
	}
	u.reportNodeRefs(machines, byUID)
	return u.deleteOrphans(ctx, records.Items, pools)
}

// reportNodeRefs reports Machines whose nodeRef is not the one in their record, each once.
func (u *recordGC) reportNodeRefs(machines []clusterv1.Machine, records map[types.UID]*v1alpha1.NodeAttestation) {
	for i := range machines {
		m := &machines[i]
		record, ref := records[m.UID], m.Status.NodeRef.Name
		if record == nil || ref == "" || ref == record.Spec.NodeName {
			u.nodeRefs.Forget(string(m.UID))
			continue
		}
		if u.nodeRefs.MarkReported(string(m.UID), ref, u.now(), 0) {
			u.events.Eventf(m.DeepCopy(), nil, corev1.EventTypeWarning, reasonNodeRef, "Compare",
				"status.nodeRef is %.253q, and the machine that attested is the node %s: a Node may have claimed a provider ID that is not its own", ref, record.Spec.NodeName)
		}
	}
}

// deleteOrphans deletes the records of instances that have been missing for long, from pools that
// have other instances.
func (u *recordGC) deleteOrphans(ctx context.Context, records []v1alpha1.NodeAttestation, pools []clusterv1.MachinePool) error {
	instances, populated := map[string]bool{}, map[types.UID]bool{}
	for i := range pools {
		for _, instance := range instancesOf(&pools[i]) {
			instances[instance.machine.Ref.Name] = true
			populated[pools[i].UID] = true
		}
	}
	missingSince := map[types.UID]time.Time{}
	for i := range records {
		record := &records[i]
		owners := record.OwnerReferences
		if len(owners) != 1 || owners[0].Kind != "MachinePool" || !populated[owners[0].UID] || instances[record.Spec.Machine.Name] {
			continue
		}
		since, known := u.missingSince[record.UID]
		if !known {
			since = u.now()
		}
		missingSince[record.UID] = since
		if u.now().Sub(since) < instanceGracePeriod {
			continue
		}
		err := u.live.Delete(ctx, record, client.Preconditions{UID: &record.UID, ResourceVersion: &record.ResourceVersion})
		if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			return fmt.Errorf("record %s of an instance that is gone: %w", record.Name, err)
		}
		u.log.Info("the record of an instance that is gone was deleted", "record", record.Name, "machine", record.Spec.Machine.Name, "node", record.Spec.NodeName)
	}
	u.missingSince = missingSince
	return nil
}
