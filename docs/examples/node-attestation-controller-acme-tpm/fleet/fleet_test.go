// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"crypto/elliptic"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/platform"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const token = "controller"

func TestConformance(t *testing.T) {
	platformkittest.Run(t, func(t *testing.T) platformkittest.Imitation {
		i := &imitation{fleet: &platform.Fleet{Token: token}}
		i.server = platformkittest.NewServer(t, i.fleet)
		return i
	})
}

// imitation is Acme.
type imitation struct {
	fleet  *platform.Fleet
	server *platformkittest.Server
}

func (i *imitation) Server() *platformkittest.Server { return i.server }

func (i *imitation) Trust(t *testing.T, options platformkit.Options, budget *platformkit.Budget) clusterapi.EKTrust {
	t.Helper()
	return platformkit.New(i.adapter(t, budget), options)
}

func (i *imitation) adapter(t *testing.T, budget *platformkit.Budget) *fleet {
	t.Helper()
	endpoint, err := platformkit.ParseEndpoint(i.server.URL)
	if err != nil {
		t.Fatal(err)
	}
	roots, err := platformkit.Roots(i.server.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return &fleet{url: endpoint, tokenFile: file, client: platformkit.NewClient(roots, budget)}
}

func (*imitation) Machine(name string) clusterapi.PlatformMachine {
	return clusterapi.PlatformMachine{
		Cluster: types.NamespacedName{Namespace: "default", Name: "c"}, Name: name, UID: types.UID("uid-" + name),
		ProviderID: identity.ProviderID(name),
	}
}

func (i *imitation) Foreign() []clusterapi.PlatformMachine {
	var all []clusterapi.PlatformMachine
	for n, id := range []string{"aws:///a/i-1", "acme:/a", "acme://a/b", "acme://", "acme://a,b", "acme://A", " acme://a", "acme://a\n"} {
		m := i.Machine(fmt.Sprintf("foreign%d", n))
		m.ProviderID = id
		all = append(all, m)
	}
	return all
}

func (i *imitation) Launch(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	if chip.None {
		return nil, i.fleet.Launch(name, "", nil...) == nil
	}
	key := platformkittest.ECCKey(elliptic.P256(), chip.Number)
	if err := i.fleet.Launch(name, "", key); err != nil {
		panic(err)
	}
	i.fleet.Change(name, func(instance *platform.Instance) bool {
		instance.Silent = chip.Silent
		if chip.Broken {
			instance.EndorsementKeys = append(instance.EndorsementKeys, "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
		}
		return true
	})
	return platformkittest.Fingerprints(key), true
}

func (i *imitation) Change(name string, chip platformkittest.TPM) (eks []tpm.Fingerprint, possible bool) {
	var serial string
	i.fleet.Change(name, func(instance *platform.Instance) bool { serial = instance.Serial; return true })
	eks, possible = i.Launch(name, chip)
	i.fleet.Change(name, func(instance *platform.Instance) bool { instance.Serial = serial; return true })
	return eks, possible
}

func (i *imitation) Terminate(name string) {
	i.fleet.Change(name, func(*platform.Instance) bool { return false })
}

func (i *imitation) Double(name string) bool {
	i.fleet.Change(name, func(instance *platform.Instance) bool { instance.Twice = true; return true })
	return true
}

func (*imitation) Twins() bool { return true }

// An instance that takes the ID of another one between two calls does not get its keys into the
// answer.
func TestReplacedMeanwhile(t *testing.T) {
	i := &imitation{fleet: &platform.Fleet{Token: token}}
	i.server = platformkittest.NewServer(t, i.fleet)
	f := i.adapter(t, platformkit.NewBudget(10, 10))
	i.Launch("a", platformkittest.TPM{Number: 1})
	found, err := f.Find(t.Context(), types.NamespacedName{}, []string{"a"})
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	if eks, err := f.EndorsementKeys(t.Context(), found[0]); err != nil || len(eks) != 1 {
		t.Error(eks, err)
	}
	i.Launch("a", platformkittest.TPM{Number: 2})
	if eks, err := f.EndorsementKeys(t.Context(), found[0]); err == nil {
		t.Errorf("got %v", eks)
	}
}

// It says which variable is wrong, and shows no secret.
func TestOpen(t *testing.T) {
	server := platformkittest.NewServer(t, &platform.Fleet{})
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	good := map[string]string{"ACME_URL": server.URL, "ACME_CA_FILE": server.CAFile, "ACME_TOKEN_FILE": file}
	for name, wrong := range map[string]string{"ACME_URL": "http://acme.example", "ACME_CA_FILE": file, "ACME_TOKEN_FILE": "/nonexistent"} {
		for variable, value := range good {
			t.Setenv(variable, value)
		}
		if _, err := Open(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		t.Setenv(name, wrong)
		if _, err := Open(t.Context(), nil); err == nil || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
