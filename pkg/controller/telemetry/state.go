// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"cmp"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// State provides the values for a scrape. Each function must be safe for concurrent use.
type State struct {
	// Waiting returns the number of waiting requests, by reason.
	Waiting func() map[string]int
	// Records returns the records, and false while they are not known, as on a standby replica.
	Records func() ([]Record, bool)
}

// ReasonNoEvidence is the reason of a waiting request that a kubelet made by itself, without the
// plugin. The rules do not match it, so it waits until another approver decides.
const ReasonNoEvidence = "NoEvidence"

// Record has the fields of a record that are gauged.
type Record struct {
	NodeName string
	// NotAfter is the end of the newest certificate, zero if there is none. LastAttested is the
	// time of the machine's last attestation.
	NotAfter, LastAttested time.Time
}

// maxRecordSeries bounds the series of single records in a scrape, over all clusters. If there are
// more records, only those whose certificates end first have a series.
const maxRecordSeries = 20_000

var (
	waitingDesc = prometheus.NewDesc("node_attestation_waiting_requests",
		"Requests that wait, by the reason of the last decision. NoEvidence: requests that kubelets make by themselves, older than a minute.", []string{"cluster", "reason"}, nil)
	recordsDesc = prometheus.NewDesc("node_attestation_records",
		"Records of machines. Absent on a standby replica.", []string{"cluster"}, nil)
	recordEndDesc = prometheus.NewDesc("node_attestation_record_certificate_not_after_timestamp_seconds",
		"End of the newest certificate in a node's record.", []string{"cluster", "node"}, nil)
	recordAttestedDesc = prometheus.NewDesc("node_attestation_record_last_attested_timestamp_seconds",
		"When the node's machine was last attested.", []string{"cluster", "node"}, nil)
)

// stateCollector reads the state of all clusters at each scrape. So nothing has to count records
// when they are created and deleted, and the series of a deleted record ends.
type stateCollector struct {
	mu     sync.Mutex
	states map[string]State
}

func (c *stateCollector) observe(cluster string, state State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.states[cluster] = state
}

func (c *stateCollector) forget(cluster string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.states, cluster)
}

// Describe implements prometheus.Collector.
func (*stateCollector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{waitingDesc, recordsDesc, recordEndDesc, recordAttestedDesc} {
		descriptions <- d
	}
}

// clusterRecord is a record with its cluster.
type clusterRecord struct {
	cluster string
	Record
}

// Collect implements prometheus.Collector.
func (c *stateCollector) Collect(samples chan<- prometheus.Metric) {
	c.mu.Lock()
	states := maps.Clone(c.states)
	c.mu.Unlock()
	gauge := func(description *prometheus.Desc, value float64, labels ...string) {
		samples <- prometheus.MustNewConstMetric(description, prometheus.GaugeValue, value, labels...)
	}
	// Two records may have the same node name: the one with the later certificate counts.
	latest := map[[2]string]Record{}
	for cluster, state := range states {
		for reason, n := range state.Waiting() {
			gauge(waitingDesc, float64(n), cluster, label(reason))
		}
		records, known := state.Records()
		if !known {
			continue
		}
		gauge(recordsDesc, float64(len(records)), cluster)
		for _, r := range records {
			key := [2]string{cluster, label(r.NodeName)}
			if before, there := latest[key]; !r.NotAfter.IsZero() && (!there || before.NotAfter.Before(r.NotAfter)) {
				latest[key] = r
			}
		}
	}
	for _, r := range soonest(latest, maxRecordSeries) {
		gauge(recordEndDesc, timestamp(r.NotAfter), r.cluster, label(r.NodeName))
		gauge(recordAttestedDesc, timestamp(r.LastAttested), r.cluster, label(r.NodeName))
	}
}

// soonest returns the records whose certificates end first.
func soonest(records map[[2]string]Record, limit int) []clusterRecord {
	all := make([]clusterRecord, 0, len(records))
	for key, r := range records {
		all = append(all, clusterRecord{key[0], r})
	}
	if len(all) > limit {
		slices.SortFunc(all, func(a, b clusterRecord) int {
			return cmp.Or(a.NotAfter.Compare(b.NotAfter), cmp.Compare(a.NodeName, b.NodeName))
		})
		all = all[:limit]
	}
	return all
}

// RegisterBuildInfo registers a gauge with the program's version. Call it once in a process.
func RegisterBuildInfo(version, commit string) error {
	return metrics.Registry.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "node_attestation_controller_build_info", Help: "The controller that serves these metrics. The value is always 1.",
		ConstLabels: prometheus.Labels{"version": version, "commit": commit, "goversion": runtime.Version()},
	}, func() float64 { return 1 }))
}
