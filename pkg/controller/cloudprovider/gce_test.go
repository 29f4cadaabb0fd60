// SPDX-License-Identifier: Apache-2.0

package cloudprovider

import (
	"crypto/x509"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/googlekeys"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/lookup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/gce"
)

const (
	gceSigner     = "cluster.x-k8s.io/kube-apiserver-client-kubelet-gce"
	gceProviderID = "gce://some-project/europe-west1-b/worker-0"
	someCluster   = "some-cluster"
)

// newGoogle costs a second for its keys.
var newGoogle = sync.OnceValue(func() *google.Google { return google.New("cloudprovider") })

// filedNow is a request that the node of the VM has just filed, with a token by this Google.
func filedNow(t *testing.T, g *google.Google, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	now := time.Now().Truncate(time.Second)
	vm := google.VM{Project: "some-project", ProjectNumber: 1, Zone: "europe-west1-b", Name: "worker-0", ID: "7"}
	binding := attestation.Binding{Version: attestation.VersionGCE, ClusterUID: someCluster, SignerName: gceSigner, Name: name, PKCS10: []byte("x"), Usages: []string{"client auth"}}
	token := g.Key().Sign(g.Key().Header(), vm.Claims(binding.Audience(), true, now))
	data, err := attestation.Identity{Version: attestation.VersionGCE, ClusterUID: someCluster, Statement: token}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	request, err := attestation.Request{PKCS10: []byte("x"), Provider: gce.Name, Data: data}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(now)},
		Spec:       certificatesv1.CertificateSigningRequestSpec{SignerName: gceSigner, Request: request, Usages: []certificatesv1.KeyUsage{"client auth"}},
	}
}

func newGCE(t *testing.T, keys GoogleKeys) Provider {
	t.Helper()
	v, err := gce.New(gce.Config{ClusterUID: someCluster})
	if err != nil {
		t.Fatal(err)
	}
	return Provider{Cloud: gce.Name, Judge: GCE(v, keys), Machines: machineList{machines: []verifier.Machine{machineOf("worker", gceProviderID)}}, Rules: rules(t, gce.Name)}
}

// Whatever is wrong with the service of the keys, nothing false is accepted. Once the controller
// has the keys, nothing true is lost.
func TestGCEKeys(t *testing.T) {
	g := newGoogle()
	service := g.Keys()
	server := httptest.NewTLSServer(service)
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	client, err := googlekeys.New(googlekeys.Config{URL: server.URL, RootCAs: roots})
	if err != nil {
		t.Fatal(err)
	}
	verify := func(p Provider, name string) verifier.Evidence {
		return p.Verify(t.Context(), evidence.Question{Request: filedNow(t, g, name), Now: time.Now()})
	}
	accepted := func(what string, e verifier.Evidence) {
		t.Helper()
		if e.Err != nil || e.Machine != "worker" || e.Instance.ID != "7" {
			t.Errorf("%s: %+v", what, e)
		}
	}
	for fault, name := range map[google.Fault]string{google.Down: "down", google.Slow: "slow", google.Lying: "lying", google.Redirecting: "redirecting", google.Failing: "failing"} {
		keys := NewGoogleKeys(client, nil).(*fetchedKeys)
		p := newGCE(t, keys)
		service.Set(fault)
		if e := verify(p, "node-csr-a"); e.Err == nil || evidence.IsVerdict(e.Err) || e.EK != "" || fault == google.Slow && !errors.Is(e.Err, lookup.ErrPending) {
			t.Errorf("%s at the start: %+v", name, e)
		}

		service.Set(0)
		keys = NewGoogleKeys(client, nil).(*fetchedKeys)
		p = newGCE(t, keys)
		accepted(name, verify(p, "node-csr-a"))
		service.Set(fault)
		keys.minAge = 0
		keys.Expire()
		accepted(name+" later", verify(p, "node-csr-b"))
		service.Set(0)
	}

	// A token by a new key waits once, and makes the keys be fetched. That of the old key still
	// passes.
	keys := NewGoogleKeys(client, nil).(*fetchedKeys)
	p := newGCE(t, keys)
	before := filedNow(t, g, "node-csr-before")
	accepted("before the rotation", verify(p, "node-csr-a"))
	g.Rotate()
	g.Rotate()
	for range 3 {
		if _, unknown := errors.AsType[*gce.UnknownKeyError](verify(p, "node-csr-b").Err); !unknown {
			t.Error("it is not an unknown key, or a node makes the controller fetch at once")
		}
	}
	keys.minAge = 0
	_ = verify(p, "node-csr-b")
	accepted("after the rotation", verify(p, "node-csr-b"))
	accepted("under way during the rotation", p.Verify(t.Context(), evidence.Question{Request: before, Now: time.Now()}))

	copied := filedNow(t, g, "node-csr-c")
	copied.Name = "node-csr-d"
	if e := p.Verify(t.Context(), evidence.Question{Request: copied}); reasonOf(e.Err) != cloud.ReasonRequest {
		t.Errorf("copied from another request: %+v", e)
	}
}

func TestGCEKeysFile(t *testing.T) {
	g := newGoogle()
	path := filepath.Join(t.TempDir(), "keys.json")
	p := newGCE(t, NewGoogleKeysFile(path))
	verify := func() verifier.Evidence {
		return p.Verify(t.Context(), evidence.Question{Request: filedNow(t, g, "node-csr-a"), Now: time.Now()})
	}
	if e := verify(); e.Err == nil || evidence.IsVerdict(e.Err) || !strings.Contains(e.Err.Error(), "keys of Google") {
		t.Errorf("%+v", e)
	}
	if err := os.WriteFile(path, g.KeySet(), 0o600); err != nil {
		t.Fatal(err)
	}
	p = newGCE(t, NewGoogleKeysFile(path))
	if e := verify(); e.Err != nil {
		t.Errorf("%+v", e)
	}
}
