// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const (
	// crowdSize is the number of nodes of a large cluster.
	crowdSize = 1000
	// crowdLost is how many of their records will be lost: those with the label willBeLost.
	crowdLost  = 100
	willBeLost = "lost"
	// crowdWorkers is the number of requests at a time.
	crowdWorkers = 16
)

// crowd is nodes with records and certificates, which did not attest. An authorizer cannot tell
// them from nodes that did.
type crowd struct {
	fleet   *strictFleet
	records client.Client
	// like is the record of a node that attested.
	like  *v1alpha1.NodeAttestation
	nodes []*http.Client
}

// newCrowd returns a crowd without nodes, whose records will be as that of v.
func (f *strictFleet) newCrowd(t *testing.T, v *victim) *crowd {
	t.Helper()
	records, err := controllerprocess.RecordClient(t.Context(), f.ControlPlane)
	harness.Must(t, err)
	found := &v1alpha1.NodeAttestationList{}
	harness.Must(t, records.List(t.Context(), found, client.InNamespace(controllerprocess.Namespace), client.MatchingFields{v1alpha1.FieldNodeName: v.Name}))
	if len(found.Items) != 1 {
		t.Fatalf("%s has %d records", v.Name, len(found.Items))
	}
	return &crowd{fleet: f, records: records, like: &found.Items[0]}
}

func crowdName(i int) string { return fmt.Sprintf("crowd-%04d", i) }

// grow adds nodes until there are size.
func (c *crowd) grow(t *testing.T, size int) {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(c.fleet.ServerCA())
	from := len(c.nodes)
	c.nodes = append(c.nodes, make([]*http.Client, size-from)...)
	inParallel(t, from, size, func(i int) error {
		pair, err := c.fleet.ClientCA().IssueClient("system:node:"+crowdName(i), []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
		if err != nil {
			return err
		}
		certificate, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
		if err != nil {
			return err
		}
		c.nodes[i] = &http.Client{Transport: &http.Transport{
			TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{certificate}, RootCAs: roots, MinVersion: tls.VersionTLS13}, DisableKeepAlives: true,
		}}
		_, leaf, err := csr.ParseCertificates(pair.CertPEM)
		if err != nil {
			return err
		}
		return c.records.Create(t.Context(), c.record(i, leaf))
	})
}

// record returns the record of a node with one certificate.
func (c *crowd) record(i int, leaf *x509.Certificate) *v1alpha1.NodeAttestation {
	r, sum, ek := c.like.DeepCopy(), sha256.Sum256(leaf.Raw), sha256.Sum256([]byte(crowdName(i)))
	r.ObjectMeta = metav1.ObjectMeta{Namespace: r.Namespace, Name: crowdName(i)}
	if i < crowdLost {
		r.Labels = map[string]string{willBeLost: "true"}
	}
	r.Spec.NodeName, r.Spec.Machine.Name, r.Spec.ProviderID = crowdName(i), crowdName(i), ""
	r.Spec.EK.Fingerprint, r.Spec.AKName = hex.EncodeToString(ek[:]), "000b"+hex.EncodeToString(ek[:])
	r.Status.Certificates = r.Status.Certificates[:1]
	r.Status.Certificates[0].SHA256, r.Status.Certificates[0].NotAfter = hex.EncodeToString(sum[:]), metav1.NewTime(leaf.NotAfter)
	return r
}

// works fails the test if one of the nodes may not read.
func (c *crowd) works(t *testing.T, when string) {
	t.Helper()
	var denied atomic.Int64
	inParallel(t, 0, len(c.nodes), func(i int) error {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.fleet.servers[0].URL()+"/api/v1/services?limit=1", nil)
		if err != nil {
			return err
		}
		answer, err := c.nodes[i].Do(request)
		if err != nil {
			return err
		}
		defer func() { _ = answer.Body.Close() }()
		switch answer.StatusCode {
		case http.StatusOK:
		case http.StatusForbidden:
			denied.Add(1)
		default:
			return fmt.Errorf("%s, %s reads: %s", when, crowdName(i), answer.Status)
		}
		return nil
	})
	if n := denied.Load(); n > 0 {
		t.Errorf("%s, %d of %d nodes are denied", when, n, len(c.nodes))
	}
}

// inParallel calls do with the numbers from one to another, and fails the test with its errors.
func inParallel(t *testing.T, from, to int, do func(i int) error) {
	t.Helper()
	var next atomic.Int64
	next.Store(int64(from))
	var wait sync.WaitGroup
	for range crowdWorkers {
		wait.Go(func() {
			for i := int(next.Add(1)) - 1; i < to; i = int(next.Add(1)) - 1 {
				if err := do(i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wait.Wait()
}
