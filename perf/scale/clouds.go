// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/elliptic"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/nitrotpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/ec2"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/gce"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

// cloud imitates a platform that vouches for its machines. The controller asks nobody about them:
// the keys are in files.
type cloud struct {
	// configure sets the controller's policy.
	configure func(*config.Config)
	// machine returns machine i, which has this name.
	machine func(i int, name string) (*fleet.Machine, error)
}

// newCrowd makes machines of the cloud.
func (c *cloud) newCrowd(prefix string, count int, cluster fleet.Cluster) (*crowd, error) {
	machines, err := fleet.Make(count, func(i int) (*fleet.Machine, error) { return c.machine(i, fmt.Sprintf("%s-%04d", prefix, i)) })
	return &crowd{machines: machines, cluster: cluster}, err
}

// signed is a provider whose statements are made in this process.
type signed struct {
	provider.Provider
	version attestation.Version
	sign    func(attestation.Binding) ([]byte, error)
}

// Evidence returns a statement for this request.
func (s signed) Evidence(_ context.Context, r provider.Request) ([]byte, error) {
	statement, err := s.sign(attestation.Binding{
		Version: s.version, SignerName: r.SignerName, Name: r.Name, PKCS10: r.PKCS10, Usages: r.Usages, ExpirationSeconds: r.ExpirationSeconds,
	})
	if err != nil {
		return nil, err
	}
	return attestation.Identity{Version: s.version, Statement: statement}.Marshal()
}

// newGCE returns Google Compute Engine. The file with its keys is in the directory.
func newGCE(dir string) (*cloud, error) {
	platform, file := google.New("scale"), filepath.Join(dir, "google-keys.json")
	return &cloud{
		configure: func(c *config.Config) { c.GCE = &config.GCE{KeysFile: file} },
		machine: func(i int, name string) (*fleet.Machine, error) {
			vm := google.VM{Project: "some-project", ProjectNumber: 123456789012, Zone: "europe-west1-b", Name: name, ID: fmt.Sprint(1_000_000_000_000_000_000 + i)}
			return &fleet.Machine{
				Name: name, ID: "gce://" + vm.Project + "/" + vm.Zone + "/" + vm.Name,
				Provider: signed{gce.Provider{}, attestation.VersionGCE, func(b attestation.Binding) ([]byte, error) {
					key := platform.Key()
					return key.Sign(key.Header(), vm.Claims(b.Audience(), true, time.Now())), nil
				}},
			}, nil
		},
	}, os.WriteFile(file, platform.KeySet(), 0o600)
}

// newEC2 returns EC2 with NitroTPM. The file with its root is in the directory. All instances have
// one CA, and each has a certificate of its own.
func newEC2(dir string) (*cloud, error) {
	const region = "eu-west-1"
	platform, err := nitrotpm.New("i-00000000000000000", region, time.Now())
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "ec2-roots.pem")
	return &cloud{
		configure: func(c *config.Config) { c.EC2 = &config.EC2{RootsFile: file} },
		machine: func(i int, name string) (*fleet.Machine, error) {
			instance := *platform
			instance.Instance, instance.Chain = fmt.Sprintf("i-%017x", i), slices.Clone(platform.Chain)
			last := len(instance.Chain) - 1
			template := *instance.Chain[last].Certificate
			template.Subject.CommonName = instance.ModuleID() + "." + region + ".aws"
			if err := instance.Issue(last, &template, elliptic.P384()); err != nil {
				return nil, err
			}
			return &fleet.Machine{
				Name: name, ID: "aws:///" + region + "a/" + instance.Instance,
				Provider: signed{ec2.Provider{}, attestation.VersionEC2, func(b attestation.Binding) ([]byte, error) {
					nonce := b.Nonce()
					return instance.Document(nonce[:], time.Now())
				}},
			}, nil
		},
	}, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: platform.Root().Raw}), 0o600)
}
