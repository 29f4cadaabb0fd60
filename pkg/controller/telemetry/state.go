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

// State is what a scrape asks a cluster's controller for. Each function may be called at any time.
type State struct {
	// Waiting returns how many requests wait, by reason.
	Waiting func() map[string]int
	// Records returns the records, and false while they are not known, as on a replica that stands
	// by.
	Records func() ([]Record, bool)
}

// Record is a record as it is gauged.
type Record struct {
	NodeName string
	// NotAfter is when the newest certificate ends, zero if there is none. LastAttested is when the
	// machine was last attested.
	NotAfter, LastAttested time.Time
}

// maxRecordSeries bounds the series of single records in a scrape, over all clusters. If there are
// more records, those whose certificates end first have a series.
const maxRecordSeries = 20_000

var (
	waitingDesc = prometheus.NewDesc("node_attestation_waiting_requests",
		"Requests that wait, by the reason of the last decision.", []string{"cluster", "reason"}, nil)
	recordsDesc = prometheus.NewDesc("node_attestation_records",
		"Records of machines. Absent on a replica that stands by.", []string{"cluster"}, nil)
	recordEndDesc = prometheus.NewDesc("node_attestation_record_certificate_not_after_timestamp_seconds",
		"End of the newest certificate in a node's record.", []string{"cluster", "node"}, nil)
	recordAttestedDesc = prometheus.NewDesc("node_attestation_record_last_attested_timestamp_seconds",
		"When the node's machine was last attested.", []string{"cluster", "node"}, nil)
)

// stateCollector asks controllers at each scrape. So nothing has to be counted where records come
// and go, and the series of a deleted record ends by itself.
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

// Describe is a prometheus.Collector's.
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

// Collect is a prometheus.Collector's.
func (c *stateCollector) Collect(samples chan<- prometheus.Metric) {
	c.mu.Lock()
	states := maps.Clone(c.states)
	c.mu.Unlock()
	gauge := func(description *prometheus.Desc, value float64, labels ...string) {
		samples <- prometheus.MustNewConstMetric(description, prometheus.GaugeValue, value, labels...)
	}
	// Two records may be of the same node: the record that has the later certificate counts.
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

// RegisterBuildInfo gauges which program this is. Call it once in a process.
func RegisterBuildInfo(version, commit string) error {
	return metrics.Registry.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "node_attestation_controller_build_info", Help: "The controller that serves these metrics. The value is always 1.",
		ConstLabels: prometheus.Labels{"version": version, "commit": commit, "goversion": runtime.Version()},
	}, func() float64 { return 1 }))
}
