// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/nitrotpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	azureprovider "github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/ec2"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/ec2role"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/gce"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// bed is a cluster whose nodes are machines of clouds.
type bed struct {
	*testbed.ControlPlane
	controller *controllerprocess.Controller
	records    client.Client
	inventory  controllerprocess.Machines
	instances  []*instance

	// dir has the files that the controller reads.
	dir      string
	services metadataServices
	network  *internet
	// configure sets the policy for each cloud.
	configure []func(c *config.Config)
}

var shared *bed

func setUp(ctx context.Context, cp *testbed.ControlPlane, dir string) (err error) {
	b := &bed{ControlPlane: cp, dir: dir, services: metadataServices{}}
	var env []string
	for _, step := range []func() error{
		func() (err error) { b.network, err = newInternet(); return err },
		b.addEC2, b.addEC2Role, b.addGCE, b.addAzure,
		func() error { return b.services.listen(ctx) },
		func() (err error) { env, err = b.network.env(dir); return err },
		// The nodes' right to file requests, without the bindings that approve them.
		func() error { return b.BindGroup(ctx, "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup) },
		func() error { return controllerprocess.Install(ctx, cp, module) },
		func() error { return controllerprocess.InstallRevocation(ctx, cp, module) },
		func() (err error) { b.records, err = controllerprocess.RecordClient(ctx, cp); return err },
		func() (err error) {
			b.controller, err = controllerprocess.New(controllerprocess.Options{
				ControlPlane: cp, Dir: dir, Binary: built.Controller, Args: []string{"--revocation"}, Env: env,
				Configure: func(c *config.Config) {
					c.LeaderElection.Enabled = false
					for _, configure := range b.configure {
						configure(c)
					}
				},
			})
			return err
		},
		func() error { return b.controller.Start(ctx) },
		func() error { return b.controller.Ready(ctx) },
	} {
		if err := step(); err != nil {
			return errors.Join(err, cp.Stop())
		}
	}
	shared = b
	return nil
}

const awsAccount = "123456789012"

// addEC2 adds an instance of EC2 with a NitroTPM. The controller asks nobody about it.
func (b *bed) addEC2() error {
	const id, region = "i-0123456789abcdef0", "eu-west-1"
	maker, err := nitrotpm.New(id, region, time.Now())
	if err != nil {
		return err
	}
	// Its documents are of a hypervisor that is not AWS's.
	forger, err := nitrotpm.New(id, region, time.Now())
	if err != nil {
		return err
	}
	nitro := func(t *testing.T, maker *nitrotpm.Maker) string {
		t.Helper()
		device, err := nitrotpm.Open(swtpm.Start(t, swtpm.Options{}), maker)
		harness.Must(t, err)
		t.Cleanup(device.Close)
		return device.Socket()
	}
	roots, err := b.file("ec2-roots.pem", maker.Root())
	if err != nil {
		return err
	}
	b.configure = append(b.configure, func(c *config.Config) { c.EC2 = &config.EC2{RootsFile: roots} })
	b.instances = append(b.instances, &instance{
		provider: "ec2", nodeName: "ec2-worker", providerID: "aws:///eu-west-1a/" + id, givenProviderID: true,
		is: attestation.Instance{Platform: "ec2", ID: id}, copied: cloud.ReasonRequest,
		device: func(t *testing.T) string { return nitro(t, maker) },
		foreign: func(t *testing.T) provider.Provider {
			p, err := ec2.Factory().New(provider.Settings{TPMDevice: nitro(t, forger), RuntimeDir: t.TempDir()})
			harness.Must(t, err)
			return p
		}, foreignReason: cloud.ReasonSignature,
	})
	return nil
}

// addEC2Role adds an instance of EC2 without a TPM.
func (b *bed) addEC2Role() error {
	everything := aws.Unserved()
	vm := &aws.Instance{AWS: everything, Partition: "aws", Account: awsAccount, Region: "eu-west-1", Zone: "eu-west-1b", ID: "i-0fedcba9876543210"}
	foreign := *vm
	foreign.Account = "999999999999"
	b.services["/latest/"] = vm
	b.configure = append(b.configure, func(c *config.Config) {
		c.EC2Role = &config.EC2Role{Regions: []string{vm.Region}, Accounts: []string{vm.Account}}
	})
	b.instances = append(b.instances, &instance{
		provider: "ec2-role", nodeName: "ec2-role-worker", providerID: "aws:///" + vm.Zone + "/" + vm.ID,
		is: attestation.Instance{Platform: "ec2", ID: vm.ID, Account: vm.Account}, copied: cloud.ReasonSignature,
		foreign: func(t *testing.T) provider.Provider { return ec2role.Provider{Metadata: served(t, &foreign)} }, foreignReason: cloud.ReasonInstance,
		faults: faultsOf(everything.SetFault, aws.Slow, aws.Redirecting, aws.InternalError, aws.Throttled, aws.TooLong), mend: func() { everything.SetFault(aws.None) },
		asksEachTime: true,
	})
	return b.network.host("sts."+vm.Region+".amazonaws.com", everything.STS())
}

// addGCE adds an instance of Google Compute Engine. Its creator wrote metadata by which it would be
// another machine.
func (b *bed) addGCE() error {
	everything := google.New("cloud")
	vm := google.VM{
		Project: "some-project", ProjectNumber: 123456789012, Zone: "europe-west1-b", Name: "gce-worker", ID: "2875949485074006138",
		Attributes: map[string]string{"provider-id": "gce://other/zone/name", "cluster-name": "other"},
	}
	foreign := vm
	foreign.Project, foreign.ID = "other-project", "1234567890123456789"
	keys := everything.Keys()
	b.services["/computeMetadata/"] = everything.Metadata(vm)
	b.configure = append(b.configure, func(c *config.Config) { c.GCE = &config.GCE{Projects: []string{vm.Project}} })
	b.instances = append(b.instances, &instance{
		provider: "gce", nodeName: vm.Name, providerID: "gce://" + vm.Project + "/" + vm.Zone + "/" + vm.Name,
		is: attestation.Instance{Platform: "gce", ID: vm.ID, Account: vm.Project}, copied: cloud.ReasonRequest,
		foreign: func(t *testing.T) provider.Provider {
			return gce.Provider{Metadata: served(t, everything.Metadata(foreign))}
		}, foreignReason: cloud.ReasonInstance,
		faults: faultsOf(keys.Set, google.Down, google.Slow, google.Lying, google.Redirecting, google.Failing), mend: func() { keys.Set(0) },
	})
	keys.Set(google.Down) // also before the first request
	return b.network.host("www.googleapis.com", keys)
}

// addAzure adds a VM of Azure.
func (b *bed) addAzure() error {
	const subscription = "8d10da13-8125-4ba9-a717-bf7490507b3d"
	root := azure.NewRoot("imitated root")
	intermediate := root.Intermediate("imitated intermediate")
	signer := intermediate.Signer(nil, "metadata.azure.com")
	path := "/subscriptions/" + subscription + "/resourceGroups/group/providers/Microsoft.Compute/virtualMachines/azure-worker"
	vm := azure.VM{ID: "13f56399-bd52-4150-9748-7190aae1ff21", Subscription: subscription, ResourceID: path}
	foreign := vm
	foreign.ID, foreign.Subscription = "23f56399-bd52-4150-9748-7190aae1ff22", "9d10da13-8125-4ba9-a717-bf7490507b3d"
	identity := azure.Identity{Tenant: "1a10da13-8125-4ba9-a717-bf7490507b3d", Client: "2a10da13-8125-4ba9-a717-bf7490507b3d", Assertion: "a.b.c", Token: "token"}
	management := azure.Management(identity, vm)
	roots, err := b.file("azure-roots.pem", root.Certificate)
	if err != nil {
		return err
	}
	intermediates, err := b.file("azure-intermediates.pem", intermediate.Certificate)
	if err != nil {
		return err
	}
	token := filepath.Join(b.dir, "azure-token")
	if err := os.WriteFile(token, []byte(identity.Assertion), 0o600); err != nil {
		return err
	}
	b.services["/metadata/"] = azure.Metadata(vm, signer)
	b.configure = append(b.configure, func(c *config.Config) {
		c.Azure = &config.Azure{
			RootsFile: roots, IntermediatesFile: intermediates, Subscriptions: []string{subscription},
			Lookup: &config.AzureLookup{TenantID: identity.Tenant, ClientID: identity.Client, TokenFile: token},
		}
	})
	b.instances = append(b.instances, &instance{
		provider: "azure", nodeName: "azure-worker", providerID: "azure://" + path,
		is: attestation.Instance{Platform: "azure", ID: vm.ID, Account: subscription}, copied: cloud.ReasonRequest,
		foreign: func(t *testing.T) provider.Provider {
			return azureprovider.Provider{Metadata: served(t, azure.Metadata(foreign, signer))}
		}, foreignReason: cloud.ReasonInstance,
		faults: faultsOf(management.Set, azure.Down, azure.Slow, azure.Redirecting, azure.Forbidding, azure.Flooding), mend: func() { management.Set(0) },
	})
	return errors.Join(b.network.host("login.microsoftonline.com", azure.Login(identity)), b.network.host("management.azure.com", management))
}

// file writes a certificate into a file for the controller.
func (b *bed) file(name string, certificate *x509.Certificate) (string, error) {
	path := filepath.Join(b.dir, name)
	return path, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw}), 0o600)
}

// served returns a client of a metadata service at an address of its own.
func served(t *testing.T, service http.Handler) metadata.Client {
	t.Helper()
	server := httptest.NewServer(service)
	t.Cleanup(server.Close)
	return metadata.Client{Address: server.Listener.Addr().String()}
}

// faultsOf returns functions that set one of these faults each.
func faultsOf[F any](set func(F), faults ...F) (all []func()) {
	for _, fault := range faults {
		all = append(all, func() { set(fault) })
	}
	return all
}

// admit adds machines to the inventory.
func (b *bed) admit(t *testing.T, documents []byte) {
	t.Helper()
	harness.Must(t, b.inventory.Add(t.Context(), b.ControlPlane, documents))
}
