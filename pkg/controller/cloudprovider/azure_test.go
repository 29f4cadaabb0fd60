// SPDX-License-Identifier: Apache-2.0

package cloudprovider

import (
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	imitation "github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/azurevm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/azure"
)

const (
	aSubscription = "11111111-1111-1111-1111-111111111111"
	aTenant       = "22222222-2222-2222-2222-222222222222"
	firstVMID     = "33333333-3333-3333-3333-333333333333"
	secondVMID    = "44444444-4444-4444-4444-444444444444"
	aResource     = "/subscriptions/" + aSubscription + "/resourceGroups/group/providers/Microsoft.Compute/virtualMachines/worker-0"
	otherResource = "/subscriptions/" + aTenant + "/resourceGroups/group/providers/Microsoft.Compute/virtualMachines/worker-0"
)

// Azure's documents name a vmId, and Azure Resource Manager says which machine has it.
func TestAzureLookup(t *testing.T) {
	root := imitation.NewRoot("Root")
	ca := root.Intermediate("Issuing CA 01")
	signer := ca.Signer(nil, "metadata.azure.com")
	v, err := azure.New(azure.Config{ClusterUID: someCluster, Roots: []*x509.Certificate{root.Certificate}, Intermediates: []*x509.Certificate{ca.Certificate}})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now().UTC().Truncate(time.Second)
	filedBy := func(vmID string) verifier.Filed {
		t.Helper()
		filed := verifier.Filed{Name: "node-csr-a", UID: "u", SignerName: "example.com/azure", Created: now}
		binding := attestation.Binding{Version: attestation.VersionAzure, SignerName: filed.SignerName, Name: filed.Name, PKCS10: []byte("x")}
		vm := imitation.VM{ID: vmID, Subscription: aSubscription}
		data, err := attestation.Identity{Version: attestation.VersionAzure, Statement: signer.Sign(vm.Content(binding.Alphanumeric(), now)).DER()}.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if filed.Request, err = (attestation.Request{PKCS10: []byte("x"), Provider: azure.Name, Data: data}).Marshal(); err != nil {
			t.Fatal(err)
		}
		return filed
	}

	identity := imitation.Identity{Tenant: aTenant, Client: aTenant, Assertion: "an.assertion.x", Token: "a-token"}
	login, management := imitation.Login(identity), imitation.Management(identity, imitation.VM{ID: firstVMID, Subscription: aSubscription, ResourceID: aResource})
	pool, calls := x509.NewCertPool(), &atomic.Int64{}
	serve := func(service http.Handler, count bool) string {
		server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if count {
				calls.Add(1)
			}
			service.ServeHTTP(w, r)
		}))
		t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
		pool.AddCert(server.Certificate())
		return server.URL
	}
	tokenFile := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(tokenFile, []byte(identity.Assertion), 0o600); err != nil {
		t.Fatal(err)
	}
	client, err := azurevm.New(azurevm.Config{TenantID: aTenant, ClientID: aTenant, TokenFile: tokenFile, LoginURL: serve(login, false), ManagementURL: serve(management, true), RootCAs: pool})
	if err != nil {
		t.Fatal(err)
	}

	const id = "azure://" + aResource
	judge := Azure(v, NewVMIDs(client, nil))
	for what, c := range map[string]struct {
		vmID, claims string
		has          bool
	}{
		"its own":                 {firstVMID, id, true},
		"another VM's":            {secondVMID, id, false},
		"no claim":                {firstVMID, "", false},
		"of another subscription": {firstVMID, "azure://" + otherResource, false},
		"no such VM":              {firstVMID, id + "0", false},
		"of another cloud":        {firstVMID, "gce://p/z/n", false},
	} {
		verified, err := judge(t.Context(), filedBy(c.vmID), c.claims)
		if err != nil || verified.Instance.ID != c.vmID || verified.HasProviderID(id) != c.has || verified.HasProviderID(c.claims) != c.has {
			t.Errorf("%s: %+v, %v", what, verified, err)
		}
	}
	if calls.Load() != 2 { // of the VM, and of the one that does not exist
		t.Errorf("%d calls", calls.Load())
	}
	forged := filedBy(firstVMID)
	forged.Name = "node-csr-b"
	if _, err := judge(t.Context(), forged, "azure://"+aResource+"1"); !evidence.IsVerdict(err) || calls.Load() != 2 {
		t.Errorf("copied evidence makes the controller look up: %v, %d calls", err, calls.Load())
	}
	if verified, err := Azure(v, nil)(t.Context(), filedBy(firstVMID), id); err != nil || verified.HasProviderID(id) {
		t.Errorf("without a look-up: %+v, %v", verified, err)
	}

	for name, fault := range map[string]imitation.Fault{"down": imitation.Down, "slow": imitation.Slow, "lying": imitation.Lying, "redirecting": imitation.Redirecting, "forbidding": imitation.Forbidding} {
		for _, service := range []*imitation.Service{login, management} {
			judge := Azure(v, NewVMIDs(client, nil))
			service.Set(fault)
			if verified, err := judge(t.Context(), filedBy(firstVMID), id); err != nil || verified.HasProviderID(id) {
				t.Errorf("%s: %+v, %v", name, verified, err)
			}
			service.Set(0)
		}
	}
}
