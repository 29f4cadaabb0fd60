// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

const (
	// fieldPodNode selects the pods that are bound to a node.
	fieldPodNode = "spec.nodeName"
	// looksWithoutPods is the number of polls in a row that must find no bound pod. With the pauses
	// after firstPoll, they take more than two seconds.
	looksWithoutPods = 4
)

// eviction takes away what the Node authorizer lets a node read: the Secrets, ConfigMaps and
// volumes of the pods that are bound to it. `kubectl drain` is not enough: it leaves the pods of
// DaemonSets, so the node could still read their Secrets.
type eviction struct {
	name string
	// node is nil where there is none.
	node *metav1.PartialObjectMetadata
	pods []corev1.Pod
}

// boundPods returns the pods that are bound to a node.
func (a *access) boundPods(ctx context.Context, node string) (all []corev1.Pod, err error) {
	err = readEach(ctx, a.nodes, func(p *corev1.Pod) { all = append(all, *p) }, client.MatchingFields{fieldPodNode: node})
	return all, err
}

func (a *access) readEviction(ctx context.Context, name string) (e *eviction, err error) {
	e = &eviction{name: name}
	if e.node, err = a.readNode(ctx, name); err != nil {
		return nil, err
	}
	e.pods, err = a.boundPods(ctx, name)
	return e, err
}

func (e *eviction) describe(out *planText) {
	namespaces := map[string]bool{}
	for _, p := range e.pods {
		namespaces[p.Namespace] = true
	}
	if len(e.pods) > 0 {
		out.item("once that is in force, its pods (%d) are force-deleted (grace period 0), whatever a PodDisruptionBudget says; namespaces: %s",
			len(e.pods), text.Names(slices.Sorted(maps.Keys(namespaces))))
		out.item("their containers go on running on the machine: a pod of a StatefulSet may run twice")
	} else {
		out.item("no pod is bound to node %s", e.name)
	}
	if e.node != nil {
		out.item("the Node %s is cordoned and then deleted; with Cluster API its Machine stays, and a MachineHealthCheck may replace it", e.name)
	} else {
		out.item("there is no Node %s", e.name)
	}
	out.item("then its certificates can no longer read Secrets, ConfigMaps and volumes; change everything that its pods could read")
}

// stage deletes the pods and the Node. The suspension must be in force: otherwise the machine could
// register its Node again.
func (e *eviction) stage(i *invocation, a *access) stage {
	cordoned, deleted, empty := e.node == nil, map[types.UID]bool{}, 0
	var last []string
	return stage{wait: &wait{
		look: func(ctx context.Context) (bool, string, error) {
			if !cordoned { // keep schedulers from binding more pods meanwhile
				if err := a.cordon(ctx, e.name); err != nil {
					return false, "", err
				}
				cordoned = true
			}
			pods, err := a.boundPods(ctx, e.name)
			if err != nil {
				return false, "", err
			}
			last = nil
			for k := range pods {
				last = append(last, pods[k].Namespace+"/"+pods[k].Name)
				if err := a.deletePod(ctx, &pods[k]); err != nil {
					return false, "", err
				}
				deleted[pods[k].UID] = true
			}
			gone, err := e.deleteNode(ctx, a)
			if err != nil {
				return false, "", err
			}
			// A scheduler that has not seen the change yet may bind one more pod.
			if empty++; len(pods) > 0 || !gone {
				empty = 0
			}
			return empty >= looksWithoutPods, text.Count(len(deleted), "pod") + " deleted", nil
		},
		finish: func(time.Duration) error {
			return i.printf("node %s evicted: %s deleted, and no Node of that name", e.name, text.Count(len(deleted), "pod"))
		},
		ended: func() string {
			return fmt.Sprintf("the machine is suspended; pods may still be bound to node %s: %s", e.name, text.Names(last))
		},
		hint: "a pod with finalizers stays until they are removed; run the command again",
	}}
}

func (a *access) cordon(ctx context.Context, name string) error {
	patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`))
	return client.IgnoreNotFound(reached(a.nodes.Patch(ctx, newNode(name), patch)))
}

// deletePod deletes exactly this pod, since a newer pod of the same name may run elsewhere.
func (a *access) deletePod(ctx context.Context, pod *corev1.Pod) error {
	uid := pod.UID
	err := a.nodes.Delete(ctx, pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &uid})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return reached(err)
}

// deleteNode deletes the Node that the plan has shown, and reports whether it is gone.
func (e *eviction) deleteNode(ctx context.Context, a *access) (gone bool, err error) {
	node, err := a.readNode(ctx, e.name)
	switch {
	case err != nil || node == nil:
		return node == nil, err
	case e.node == nil || node.UID != e.node.UID:
		return false, stop{cli.Fail(codeUnexpected, "see which machine the Node belongs to: kubectl attest describe "+e.name,
			fmt.Errorf("the Node %s was replaced meanwhile: the new Node is not deleted", e.name))}
	}
	uid := node.UID
	return false, client.IgnoreNotFound(reached(a.nodes.Delete(ctx, node, client.Preconditions{UID: &uid})))
}
