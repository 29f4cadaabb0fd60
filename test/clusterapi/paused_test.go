// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

func paused(o metav1.Object) {
	annotations := o.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[clusterv1.PausedAnnotation] = ""
	o.SetAnnotations(annotations)
}

// While somebody has said that they work on it by hand, nothing is decided, and afterwards all that
// has waited.
func TestPaused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	controller := w.start(t, nil)
	for _, how := range []struct {
		name           string
		pause, unpause func(*clusterv1.Cluster)
	}{
		{"spec", func(o *clusterv1.Cluster) { o.Spec.Paused = new(true) }, func(o *clusterv1.Cluster) { o.Spec.Paused = nil }},
		{"annotation", func(o *clusterv1.Cluster) { paused(o) }, func(o *clusterv1.Cluster) { delete(o.Annotations, clusterv1.PausedAnnotation) }},
	} {
		t.Run(how.name, func(t *testing.T) {
			c := w.newCluster(t, how.name, func(c *cluster) { how.pause(c.object) })
			first := c.newMachine(t, "first-"+how.name, nil)
			a := first.begins(t)
			a.waits(t, 4*time.Second)
			c.untouched(t)
			since := time.Now()
			update(t, c.client, c.object, how.unpause)
			a.follows(t, "unpaused", since)

			// One that is served is let go of. What is filed then waits, renewals and first
			// requests alike.
			c.isLetGo(t, controller, func() { update(t, c.client, c.object, how.pause) })
			filed := c.requests(t)
			renewal, second := first.begins(t), c.newMachine(t, "second-"+how.name, nil).begins(t)
			renewal.waits(t, 3*time.Second)
			second.waits(t, 0)
			for _, r := range c.requests(t) {
				if isAnswered(&r) && !isOf(r.Name, filed) {
					t.Errorf("%s was answered while the cluster is paused", r.Name)
				}
			}
			since = time.Now()
			update(t, c.client, c.object, how.unpause)
			renewal.follows(t, "unpaused again: a renewal", since)
			second.follows(t, "unpaused again: a first certificate", since)
		})
	}
}

// A Machine can be paused by itself.
func TestPausedMachine(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	w.start(t, nil)
	c := w.newCluster(t, "workload", nil)
	m, other := c.newMachine(t, "paused", func(m *machine) { paused(m.object) }), c.newMachine(t, "other", nil)
	a := m.begins(t)
	other.attests(t)
	a.waits(t, 3*time.Second)
	since := time.Now()
	update(t, c.client, m.object, func(o *clusterv1.Machine) { delete(o.Annotations, clusterv1.PausedAnnotation) })
	a.follows(t, "the Machine is unpaused", since)
}

// Clusters that are another controller's are left to it: by the label that Cluster API's
// controllers are divided by, or by namespaces.
func TestOthersClusters(t *testing.T) {
	t.Parallel()
	for name, filter := range map[string]struct {
		file func(map[string]any)
		args []string
	}{
		"configured": {func(file map[string]any) { clusterAPI(file)["watchFilter"] = "blue" }, nil},
		"flag":       {nil, []string{"--watch-filter=blue"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, shared.management)
			controller := w.start(t, filter.file, filter.args...)
			label := func(value string) func(*clusterv1.Cluster) {
				return func(o *clusterv1.Cluster) { metav1.SetMetaDataLabel(&o.ObjectMeta, clusterv1.WatchLabel, value) }
			}
			c := w.newCluster(t, "workload", func(c *cluster) { label("red")(c.object) })
			m := c.newMachine(t, "m", nil)
			a := m.begins(t)
			a.waits(t, 3*time.Second)
			c.untouched(t)
			since := time.Now()
			update(t, c.client, c.object, label("blue"))
			a.follows(t, "the label is set", since)
			c.isLetGo(t, controller, func() { update(t, c.client, c.object, label("red")) })
			a = m.begins(t)
			a.waits(t, 3*time.Second)
			since = time.Now()
			update(t, c.client, c.object, label("blue"))
			a.follows(t, "the label is set again", since)
		})
	}
	t.Run("namespace", func(t *testing.T) {
		ours, theirs := newWorld(t, shared.management), newWorld(t, shared.management)
		ours.start(t, nil)
		c := theirs.newCluster(t, "workload", nil)
		a := c.newMachine(t, "m", nil).begins(t)
		a.waits(t, 4*time.Second)
		c.untouched(t)
		// One that serves both.
		theirs.start(t, func(file map[string]any) { clusterAPI(file)["namespaces"] = []any{ours.namespace, theirs.namespace} })
		a.ends(t)
	})
}
