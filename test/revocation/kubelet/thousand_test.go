// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const (
	// thousandVariable switches TestThousand on, by the value "full".
	thousandVariable = "KUBELET_AUTHENTICATOR_TEST_ROTATE"

	simulatedNodes = 1000
	// simulatedCheck is the checkInterval of the simulated nodes.
	simulatedCheck = 30 * time.Second
	thousandSpread = 2 * time.Minute
	// thousandLimit is when the rotation revokes certificates of nodes that have not renewed. It
	// also bounds the test.
	thousandLimit = 10 * time.Minute

	// A kubelet renews its Lease at this interval. After a failure it tries again after firstRetry,
	// and then up to lastRetry.
	leaseInterval         = 10 * time.Second
	firstRetry, lastRetry = 200 * time.Millisecond, 7 * time.Second
	// leaseDuration is that of a kubelet's Lease. The controllers may take a node for lost that
	// renews later.
	leaseDuration = 40 * time.Second
)

// requestRate counts requests, second by second.
type requestRate struct {
	mu      sync.Mutex
	seconds map[int64]int
}

type counted struct {
	*requestRate
	next http.RoundTripper
}

func (c counted) RoundTrip(request *http.Request) (*http.Response, error) {
	c.mu.Lock()
	c.seconds[time.Now().Unix()]++
	c.mu.Unlock()
	return c.next.RoundTrip(request)
}

func (r *requestRate) wrap(next http.RoundTripper) http.RoundTripper { return counted{r, next} }

// peak returns the most requests in one second since a point in time.
func (r *requestRate) peak(since time.Time) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	most := 0
	for second, count := range r.seconds {
		if second >= since.Unix() {
			most = max(most, count)
		}
	}
	return most
}

// simulated is a node without a kubelet. It renews its Lease and its certificate, as a kubelet and
// the plugin do.
type simulated struct {
	*fleet.Machine
	cluster fleet.Cluster
	current atomic.Pointer[connection]

	// Each is written by one goroutine, and read after that has ended.
	renewals []time.Time // of the Lease
	failures int         // to renew the Lease
	problems []error     // of the checks for announcements
}

// connection is a client that uses one certificate of a node.
type connection struct {
	harness.Credential
	kubernetes.Interface
	leaf *x509.Certificate
}

// renew gets a certificate by evidence, and uses it from then on.
func (s *simulated) renew(ctx context.Context) error {
	if _, err := s.Attest(ctx, s.cluster); err != nil {
		return err
	}
	_, leaf, err := csr.ParseCertificates(s.Certificate)
	if err != nil {
		return err
	}
	credential := harness.Credential{Node: s.Name, Config: s.Credential(s.cluster)}
	api, err := kubernetes.NewForConfig(credential.Config)
	if err == nil {
		s.current.Store(&connection{credential, api, leaf})
	}
	return err
}

// join gets the first certificate, and creates Node and Lease with it.
func (s *simulated) join(ctx context.Context) error {
	if err := s.renew(ctx); err != nil {
		return err
	}
	api, now, seconds := s.current.Load(), metav1.NowMicro(), int32(leaseDuration/time.Second)
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.Name}}
	object.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Simulated", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
	}}
	if _, err := api.CoreV1().Nodes().Create(ctx, object, metav1.CreateOptions{}); err != nil {
		return err
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: s.Name}}
	lease.Spec = coordinationv1.LeaseSpec{HolderIdentity: &s.Name, LeaseDurationSeconds: &seconds, RenewTime: &now}
	_, err := api.CoordinationV1().Leases(lease.Namespace).Create(ctx, lease, metav1.CreateOptions{})
	return err
}

// pause waits, and reports whether ctx goes on.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// upTo returns a random part of d, so that the nodes do not act at once.
func upTo(d time.Duration) time.Duration {
	return time.Duration(rand.Int64N(int64(d)))
}

// renewLease renews the Lease until ctx ends.
func (s *simulated) renewLease(ctx context.Context) {
	retry := firstRetry
	for wait := upTo(leaseInterval); pause(ctx, wait); {
		api := s.current.Load()
		switch err := api.Write(ctx, api); {
		case err == nil:
			s.renewals = append(s.renewals, time.Now())
			wait, retry = leaseInterval, firstRetry
		case ctx.Err() == nil:
			s.failures++
			wait, retry = retry, min(2*retry, lastRetry)
		}
	}
}

// followAnnouncements checks for announced renewals until ctx ends, and renews the certificate for
// each. As the plugin does, it takes up to a quarter from the interval.
func (s *simulated) followAnnouncements(ctx context.Context) {
	var done []string // names of renewals
	for wait := upTo(simulatedCheck); pause(ctx, wait); wait = simulatedCheck - upTo(simulatedCheck/4) {
		name, err := s.renewIfAnnounced(ctx, done)
		switch {
		case err == nil && name != "":
			done = append(done, name)
		case err != nil && ctx.Err() == nil:
			s.problems = append(s.problems, err)
		}
	}
}

// renewIfAnnounced returns the name of the renewal for which the node has a new certificate now.
// Unlike the plugin it reports the new certificate at once, so that the old one is revoked while
// the node is busiest.
func (s *simulated) renewIfAnnounced(ctx context.Context, done []string) (name string, err error) {
	api := s.current.Load()
	object, err := api.CoreV1().ConfigMaps(attestation.AnnouncementNamespace).Get(ctx, attestation.AnnouncementName, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	announced, err := attestation.ParseAnnouncement([]byte(object.Data[attestation.AnnouncementKey]))
	if err != nil {
		return "", err
	}
	name, at, due := announced.Due(s.Name, api.leaf.NotBefore, done)
	if !due || !pause(ctx, time.Until(at)) {
		return "", nil
	}
	if err := s.renew(ctx); err != nil {
		return "", err
	}
	api = s.current.Load()
	sum := sha256.Sum256(api.leaf.Raw)
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, attestation.AnnotationCertificate, hex.EncodeToString(sum[:]))
	_, err = api.CoreV1().Nodes().Patch(ctx, s.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return name, err
}

// longestGap returns the longest time between two renewals of the Lease.
func (s *simulated) longestGap(until time.Time) time.Duration {
	if len(s.renewals) == 0 {
		return thousandLimit
	}
	longest := until.Sub(s.renewals[len(s.renewals)-1])
	for i, at := range s.renewals[1:] {
		longest = max(longest, at.Sub(s.renewals[i]))
	}
	return longest
}

// newSimulated returns nodes that may join. Every other one uses the second API server.
func newSimulated(ctx context.Context, t *testing.T, rate *requestRate) []*simulated {
	t.Helper()
	maker, err := swtpm.NewCA()
	harness.Must(t, err)
	dir := t.TempDir()
	machines, err := fleet.Make(simulatedNodes, func(i int) (*fleet.Machine, error) {
		own := filepath.Join(dir, fmt.Sprint(i))
		if err := os.Mkdir(own, 0o700); err != nil {
			return nil, err
		}
		return fleet.NewModel(fmt.Sprintf("simulated-%04d", i), own, maker)
	})
	harness.Must(t, err)
	t.Cleanup(func() { fleet.Stop(machines...) })
	documents, err := fleet.Inventory(ctx, machines...)
	harness.Must(t, err)
	shared.admit(t, documents)
	token, err := shared.CreateBootstrapToken(ctx, thousandLimit)
	harness.Must(t, err)
	cluster := fleet.Cluster{CA: shared.ServerCA(), Token: token, Issuer: shared.ClientCA().Certificate(), Wrap: rate.wrap}
	all := make([]*simulated, len(machines))
	for i, m := range machines {
		all[i] = &simulated{Machine: m, cluster: cluster}
		all[i].cluster.URL = apiServers()[i%2]
	}
	return all
}

func apiServers() []string { return []string{shared.ServerURL(), shared.second.URL()} }

// rotated are the certificates of one node before a rotation and after it.
type rotated struct{ before, after harness.Credential }

// check returns an error unless the node is Ready, and each API server refuses the old certificate
// and takes the new one.
func (r rotated) check(ctx context.Context) error {
	switch notReady, err := harness.NotReady(ctx, shared.Client(), r.after.Node); {
	case err != nil:
		return err
	case notReady != "":
		return fmt.Errorf("%s is not ready: %s", r.after.Node, notReady)
	}
	for _, url := range apiServers() {
		if err := write(ctx, r.before.At(url)); !harness.IsRefused(err, attestation.MessageRevoked) {
			return fmt.Errorf("%s: %s does not refuse the old certificate: %s", r.before.Node, url, fmt.Sprint(err))
		}
		if err := write(ctx, r.after.At(url)); err != nil {
			return fmt.Errorf("%s: %s refuses the new certificate: %w", r.after.Node, url, err)
		}
	}
	return nil
}

func write(ctx context.Context, c harness.Credential) error {
	api, err := kubernetes.NewForConfig(c.Config)
	if err != nil {
		return err
	}
	return c.Write(ctx, api)
}

// completed waits until a rotation is complete, and returns its status.
func completed(ctx context.Context, t *testing.T, r *v1alpha1.NodeRevocation) v1alpha1.NodeRevocationStatus {
	t.Helper()
	for !meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionComplete) {
		if !pause(ctx, 250*time.Millisecond) {
			t.Fatalf("the rotation is not complete: %+v", r.Status)
		}
		harness.Must(t, shared.client.Get(ctx, client.ObjectKeyFromObject(r), r))
	}
	return r.Status
}

// A thousand simulated nodes and a real kubelet are rotated by one NodeRevocation, while each
// renews its Lease. None is taken for lost. In the end each old certificate is refused, and each
// new one works.
func TestThousand(t *testing.T) {
	if os.Getenv(thousandVariable) != "full" {
		t.Skipf("make rotate-1000 runs it (%s=full)", thousandVariable)
	}
	ctx, cancel := context.WithTimeout(t.Context(), thousandLimit)
	defer cancel()
	kubelet, rate := newNode(t, "real"), &requestRate{seconds: map[int64]int{}}
	all := newSimulated(ctx, t, rate)

	running, stop := context.WithCancel(ctx)
	var wait sync.WaitGroup
	defer func() { stop(); wait.Wait() }()
	began := time.Now()
	harness.Must(t, fleet.Each(len(all), func(i int) error {
		s := all[i]
		if err := s.join(ctx); err != nil {
			return err
		}
		wait.Go(func() { s.renewLease(running) })
		wait.Go(func() { s.followAnnouncements(running) })
		return nil
	}))
	t.Logf("%d simulated nodes joined in %s", len(all), round(time.Since(began)))

	certificates := make([]rotated, len(all)+1) // the last is the kubelet's
	for i, s := range all {
		certificates[i].before = s.current.Load().Credential
	}
	certificates[len(all)].before = kubelet.Credential(t)
	pulse := harness.WatchNode(t, shared.Client(), kubelet.Name)
	began = time.Now()
	pause(ctx, 3*leaseInterval) // what the nodes ask for without a rotation is measured
	t.Logf("before the rotation: %d requests of the simulated nodes in the busiest second", rate.peak(began))

	began = time.Now()
	status := completed(ctx, t, rotate(t, int32(thousandSpread/time.Second), func(s *v1alpha1.NodeRevocationSpec) {
		limit := int32(thousandLimit / time.Second)
		s.All, s.LimitSeconds = true, &limit
	}))
	t.Logf("the rotation took %s with a spread of %s: %d nodes, %d renewed, %d certificates revoked; %d requests of the simulated nodes in the busiest second",
		round(time.Since(began)), thousandSpread, status.Nodes, status.Renewed, status.Revoked, rate.peak(began))
	if want := len(certificates); int(status.Nodes) != want || int(status.Renewed) != want || int(status.Revoked) != want {
		t.Errorf("not each of %d nodes was rotated", want)
	}
	pause(ctx, 2*leaseInterval) // each Lease is renewed with the new certificate
	ended := time.Now()
	for i, s := range all {
		certificates[i].after = s.current.Load().Credential
	}
	certificates[len(all)].after = kubelet.Credential(t)
	harness.Must(t, fleet.Each(len(certificates), func(i int) error { return certificates[i].check(ctx) }))
	stop()
	wait.Wait()
	pulse.Stop()

	pulse.Steady(t, leaseDuration, ended)
	var gaps []time.Duration
	failures := 0
	for _, s := range all {
		gaps, failures = append(gaps, s.longestGap(ended)), failures+s.failures
		if err := errors.Join(s.problems...); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
	slices.Sort(gaps)
	longest := gaps[len(gaps)-1]
	t.Logf("Lease gaps of the simulated nodes: %s at most, 99 %% %s, median %s; %d renewals of a Lease failed",
		round(longest), round(gaps[len(gaps)*99/100]), round(gaps[len(gaps)/2]), failures)
	if longest > leaseDuration {
		t.Errorf("a Lease was not renewed for %s", longest)
	}
}
