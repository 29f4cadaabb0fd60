// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"crypto/x509"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// manager is a node with client-go's certificate manager, the kubelet's own rotation. It is a model
// of client-go's source (util/certificate/certificate_manager.go), which exports none of this.
// jitteryDuration says when a certificate is due. rotateCerts waits 15 minutes for one. run repeats
// it after 2, 4, 8 and 16 s, and then every 32 s.
type manager struct {
	*world
	index    int
	leaf     *x509.Certificate
	failures int
	number   int
	waits    bool
}

const (
	managerWaits = 15 * time.Minute
	managerPolls = 32 * time.Second
)

func newManagers(w *world, count int) {
	for i := range count {
		w.nodes = append(w.nodes, &manager{world: w, index: i})
	}
}

func (m *manager) join(age time.Duration) bool {
	m.leaf = m.issue(-age)
	return m.sleeps()
}

// sleeps waits for the renewal point, and reports whether it is still to come.
func (m *manager) sleeps() bool {
	total := m.leaf.NotAfter.Sub(m.leaf.NotBefore)
	due := m.leaf.NotBefore.Add(wait.Jitter(total, 0.2) - time.Duration(float64(total)*0.3))
	if !due.After(m.clock()) {
		return false
	}
	m.at(due.Sub(start), event{node: m.index, kind: runs})
	return true
}

func (m *manager) wake(e event) {
	if e.kind == deadline {
		if m.waits && e.number == m.number {
			m.fails()
		}
		return
	}
	if !m.send(asks, 1) {
		m.fails()
		return
	}
	m.send(others, 2) // it lists, and watches
	m.number++
	m.waits = true
	m.file(m.index, m.number)
	m.at(m.now+managerWaits, event{m.index, deadline, m.number})
}

func (m *manager) fails() {
	m.waits = false
	m.failures++
	pause := managerPolls
	if m.failures < 5 {
		pause = wait.Jitter(time.Second<<m.failures, 0.1)
	}
	m.at(m.now+pause, event{node: m.index, kind: runs})
}

func (m *manager) decided(number int) {
	if number != m.number || !m.waits {
		return
	}
	before := m.leaf
	m.leaf = m.issue(m.now)
	m.renewed(before)
	m.waits, m.failures = false, 0
	m.sleeps()
}
