// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

// The names of faults.
const (
	apiServerKilled  = "API server killed"
	etcdKilled       = "etcd killed"
	leaderKilled     = "leader killed, and away until the other one leads"
	etcdCompacted    = "etcd compacted and defragmented"
	etcdRestored     = "etcd restored from a backup, controllers restarted"
	caRemoved        = "CA Secret removed"
	inventoryRemoved = "inventory removed"
	crdRemoved       = "CRD removed, with all records"
	rbacRemoved      = "RBAC removed"
	policiesRemoved  = "admission policies removed"
)

// ours is the prefix of the names of the objects in packaging/kubernetes.
const ours = "node-attestation-"

var (
	crds      = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	rbac      = schema.GroupVersion{Group: "rbac.authorization.k8s.io", Version: "v1"}
	admission = schema.GroupVersion{Group: "admissionregistration.k8s.io", Version: "v1"}
	core      = schema.GroupVersion{Version: "v1"}
	crdName   = "nodeattestations." + v1alpha1.GroupVersion.Group
	namespace = controllerprocess.Namespace
)

// outage is the time of a fault.
type outage struct {
	name string
	// from is when the fault began, and repaired when nothing was missing any more. recovered is
	// when each machine that was renewing at that time had its certificate, and the backlog of
	// later ones was gone.
	from, repaired, recovered time.Time
	// heldUp is the number of machines that were renewing at the repair.
	heldUp int
}

// backlog is how much of a run's rate is at it when there is no backlog.
const backlog = 2 * time.Second

// isBacklogGone reports whether no more machines are at it than begin within a short time. A short
// run always has a backlog on a busy machine, and does not wait for its end.
func (c *campaign) isBacklogGone() bool {
	return !c.size.bounds || c.atIt(time.Now()) <= int(backlog*time.Duration(c.size.rate)/time.Minute)
}

// try makes a fault, and waits until each machine that it delayed has its certificate.
func (c *campaign) try(name string, fault func() error) {
	c.t.Helper()
	c.log.say("%s", name)
	o := &outage{name: name, from: time.Now()}
	if err := fault(); err != nil {
		c.giveUp(fmt.Sprintf("%s: %v\n%s", name, err, c.Logs()))
	}
	o.repaired = time.Now()
	o.heldUp = c.atIt(o.repaired)
	c.log.say("repaired after %s, %d machines are at it", round(o.repaired.Sub(o.from)), o.heldUp)
	c.await("all have a certificate that "+name+" held up", func() bool { return c.atIt(o.repaired) == 0 && (c.also == nil || c.also()) })
	c.log.say("all of these had a certificate %s after that", round(time.Since(o.repaired)))
	c.await("the backlog of "+name+" is gone", c.isBacklogGone)
	c.also = nil
	o.recovered = time.Now()
	c.log.outages = append(c.log.outages, o)
	c.log.say("recovered %s after that", round(o.recovered.Sub(o.repaired)))
}

func (c *campaign) hold() error {
	select {
	case <-time.After(c.size.hold):
		return nil
	case <-c.ctx.Done():
		return c.ctx.Err()
	}
}

// faults are all that can be tried.
func (c *campaign) faults(backup string, backedUp time.Time) map[string]func() error {
	return map[string]func() error{
		apiServerKilled: func() error {
			return runSteps(c.APIServer().Stop, c.hold, func() error { return c.APIServer().Start(c.ctx) })
		},
		etcdKilled: func() error {
			return runSteps(c.StopEtcd, c.hold, func() error { return c.StartEtcd(c.ctx) })
		},
		leaderKilled: c.killLeader,
		etcdCompacted: func() error {
			revision, err := c.CompactEtcd(c.ctx)
			c.log.say("compacted to revision %s", revision)
			return err
		},
		etcdRestored: func() error { return c.restore(backup, backedUp) },
		caRemoved:    func() error { return c.removed(core.WithResource("secrets"), namespace, controllerprocess.CASecret) },
		inventoryRemoved: func() error {
			return c.removed(core.WithResource("configmaps"), namespace, controllerprocess.Inventory)
		},
		crdRemoved: c.removeCRD,
		rbacRemoved: func() error {
			return c.allRemoved(ours, kind{rbac.WithResource("clusterrolebindings"), ""}, kind{rbac.WithResource("clusterroles"), ""},
				kind{rbac.WithResource("rolebindings"), namespace}, kind{rbac.WithResource("roles"), namespace},
				kind{rbac.WithResource("rolebindings"), metav1.NamespaceSystem}, kind{rbac.WithResource("roles"), metav1.NamespaceSystem})
		},
		policiesRemoved: func() error {
			held := c.inForce()
			err := c.allRemoved(ours, kind{admission.WithResource("validatingadmissionpolicybindings"), ""}, kind{admission.WithResource("validatingadmissionpolicies"), ""})
			if held != metav1.ConditionTrue {
				err = errors.Join(err, fmt.Errorf("before, the policies were in force: %s", held))
			}
			c.await("the controller says that the policies are in force again", func() bool { return c.inForce() == metav1.ConditionTrue })
			return err
		},
	}
}

// inForce returns the status of the controller's condition about the policies.
func (c *campaign) inForce() metav1.ConditionStatus {
	space, err := c.Client().CoreV1().Namespaces().Get(c.ctx, namespace, metav1.GetOptions{})
	if err != nil {
		return metav1.ConditionUnknown
	}
	for _, condition := range space.Status.Conditions {
		if condition.Type == "NodeAttestationPoliciesInForce" {
			return metav1.ConditionStatus(condition.Status)
		}
	}
	return metav1.ConditionUnknown
}

func runSteps(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// kind is a resource in a namespace.
type kind struct {
	schema.GroupVersionResource
	namespace string
}

func (c *campaign) objects(k kind) (dynamic.ResourceInterface, error) {
	api, err := dynamic.NewForConfig(c.AdminConfig())
	if err != nil {
		return nil, err
	}
	if k.namespace == "" {
		return api.Resource(k.GroupVersionResource), nil
	}
	return api.Resource(k.GroupVersionResource).Namespace(k.namespace), nil
}

// removed deletes one object, and puts it back.
func (c *campaign) removed(resource schema.GroupVersionResource, in, name string) error {
	return c.allRemoved(name, kind{resource, in})
}

// allRemoved deletes the objects of some kinds whose names have a prefix, and puts them back.
func (c *campaign) allRemoved(prefix string, kinds ...kind) error {
	type one struct {
		kind
		object *unstructured.Unstructured
	}
	var all []one
	for _, k := range kinds {
		api, err := c.objects(k)
		if err != nil {
			return err
		}
		list, err := api.List(c.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range list.Items {
			if !strings.HasPrefix(list.Items[i].GetName(), prefix) {
				continue
			}
			object := list.Items[i].DeepCopy()
			if err := api.Delete(c.ctx, object.GetName(), metav1.DeleteOptions{}); err != nil {
				return err
			}
			object.SetResourceVersion("")
			object.SetUID("")
			all = append(all, one{k, object})
		}
	}
	if len(all) == 0 {
		return fmt.Errorf("nothing is called %s...", prefix)
	}
	c.log.say("%d objects were removed", len(all))
	if err := c.hold(); err != nil {
		return err
	}
	for _, o := range all {
		api, err := c.objects(o.kind)
		if err != nil {
			return err
		}
		if _, err := api.Create(c.ctx, o.object, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// killLeader kills the leader, whose machine is away until the other one leads.
func (c *campaign) killLeader() error {
	leads := c.leader()
	if leads == nil {
		return errors.New("nobody leads")
	}
	if err := leads.kill(); err != nil {
		return err
	}
	c.await("the other replica leads", func() bool { now := c.leader(); return now != nil && now != leads })
	return leads.start(c.ctx)
}

// removeCRD removes the CRD, and so all records. The machines' renewals make them again.
func (c *campaign) removeCRD() error {
	api, err := c.objects(kind{crds, ""})
	if err != nil {
		return err
	}
	crd, err := api.Get(c.ctx, crdName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if err := api.Delete(c.ctx, crdName, metav1.DeleteOptions{}); err != nil {
		return err
	}
	c.await("the CRD is gone", func() bool {
		_, err := api.Get(c.ctx, crdName, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	if err := c.hold(); err != nil {
		return err
	}
	crd.SetResourceVersion("")
	crd.SetUID("")
	delete(crd.Object, "status")
	if _, err := api.Create(c.ctx, crd, metav1.CreateOptions{}); err != nil {
		return err
	}
	return nil
}

// restore follows docs/operations.md, "etcd restored". Those who have renewed since the backup
// renew first: the records do not know their certificates.
func (c *campaign) restore(backup string, backedUp time.Time) error {
	// The controllers decide as soon as the API server is back, before Restore returns.
	c.oracle.expectRestore()
	if err := c.Restore(c.ctx, backup); err != nil {
		return err
	}
	c.oracle.restart()
	for _, r := range c.replicas { // step 1
		if err := r.stop(); err != nil {
			c.log.say("replica %s: %s", r.name, firstLine(err)) // it had lost its Lease
		}
	}
	// Steps 2 and 3.
	patch := []byte(`{"data":null}`)
	if _, err := c.Client().CoreV1().Secrets(namespace).Patch(c.ctx, keySecret, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return err
	}
	if err := c.setInventory(); err != nil {
		return err
	}
	for _, r := range c.replicas {
		if err := r.start(c.ctx); err != nil {
			return err
		}
	}
	c.mu.Lock()
	for _, m := range c.members {
		if m.renewed.Load() > backedUp.UnixNano() {
			c.first = append(c.first, m)
		}
	}
	concerned := c.first
	c.mu.Unlock()
	if len(concerned) == 0 {
		return errors.New("nobody has renewed since the backup")
	}
	c.log.say("%d machines have renewed since the backup", len(concerned))
	c.wait.Go(func() { c.deleteStale(c.ctx) }) // step 4
	began := time.Now().UnixNano()
	c.also = func() bool {
		return !slices.ContainsFunc(concerned, func(m *machine) bool { return m.renewed.Load() < began }) && c.log.refusals(string(verifier.ReasonUnknownCredential)) > 0
	}
	return nil
}

// deleteStale deletes the records of the nodes that are denied, again and again.
func (c *campaign) deleteStale(ctx context.Context) {
	api, err := c.objects(kind{v1alpha1.Resource, namespace})
	if err != nil {
		c.t.Error(err)
		return
	}
	done := map[string]bool{}
	for ctx.Err() == nil {
		events, err := c.Client().CoreV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,reason=" + string(verifier.ReasonUnknownCredential),
		})
		if err == nil {
			for _, event := range events.Items {
				if done[event.InvolvedObject.Name] {
					continue
				}
				selected := metav1.ListOptions{FieldSelector: v1alpha1.FieldNodeName + "=" + event.InvolvedObject.Name}
				if err := api.DeleteCollection(ctx, metav1.DeleteOptions{}, selected); err == nil {
					done[event.InvolvedObject.Name] = true
					c.log.deleted.Add(1)
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(c.size.look): // a person is slower
		}
	}
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
