// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"crypto/elliptic"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http"
	"testing"

	"golang.org/x/oauth2"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const (
	projectID = "example-project"
	zone      = "europe-west1-b"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	platformkittest.Run(t, func(t *testing.T) platformkittest.Imitation { return newImitation(t) })
}

// imitation is Compute Engine.
type imitation struct {
	compute *google.Compute
	server  *platformkittest.Server
}

func newImitation(t *testing.T) *imitation {
	t.Helper()
	i := &imitation{compute: &google.Compute{}}
	i.server = platformkittest.NewServer(t, i.compute)
	i.server.Throttle = func(w http.ResponseWriter, _ *http.Request) {
		google.WriteComputeError(w, http.StatusForbidden, "rateLimitExceeded")
	}
	return i
}

func (i *imitation) Server() *platformkittest.Server { return i.server }

func (i *imitation) Trust(t *testing.T, options platformkit.Options, budget *platformkit.Budget) clusterapi.EKTrust {
	t.Helper()
	roots, err := platformkit.Roots(i.server.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	tokens := oauth2.StaticTokenSource(&oauth2.Token{AccessToken: i.compute.Token()})
	trust, err := New(Config{Projects: []string{"other-project", projectID}, Endpoint: i.server.URL, Roots: roots, Tokens: tokens}, options, budget)
	if err != nil {
		t.Fatal(err)
	}
	return trust
}

func location(name string) string { return projectID + "/" + zone + "/" + name }

func (*imitation) Machine(name string) clusterapi.PlatformMachine {
	return clusterapi.PlatformMachine{
		Cluster: types.NamespacedName{Namespace: "default", Name: "c"}, Name: name, UID: types.UID("uid-" + name), ProviderID: "gce://" + location(name),
	}
}

func (i *imitation) Foreign() []clusterapi.PlatformMachine {
	var all []clusterapi.PlatformMachine
	for n, providerID := range []string{
		"aws:///eu-west-1a/i-0123456789abcdef0", "gce:///" + location("a"), "gce://" + location("A"), "gce://" + location("a/b"), "gce://" + location(""),
		"gce://" + location("a-"), "gce://" + location("1a"), "gce://foreign-project/" + zone + "/a", "gce://" + projectID + "/europe-west1/a",
		" gce://" + location("a"), "gce://" + location("a\n"), "gce://" + location("a?fields=id"), "gce://" + projectID + "/" + zone + "/../a", "GCE://" + location("a"),
	} {
		m := i.Machine(fmt.Sprintf("foreign%d", n))
		m.ProviderID = providerID
		all = append(all, m)
	}
	return all
}

func (i *imitation) Launch(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	i.compute.Delete(location(name))
	return i.Change(name, chip)
}

func (i *imitation) Change(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	instance, exists := i.compute.Get(location(name))
	if !exists {
		instance = google.ComputeInstance{Project: projectID, Zone: zone, Name: name}
	}
	instance.Silent, instance.VTPM = chip.Silent, new(!chip.None)
	if chip.None {
		instance.RSA2048, instance.ECCP256 = "", ""
		i.compute.Put(instance)
		return nil, true
	}
	rsaKey, eccKey := platformkittest.RSAKey(chip.Number), platformkittest.ECCKey(elliptic.P256(), chip.Number)
	instance.RSA2048, instance.ECCP256, instance.SigningKey = encode(rsaKey), encode(eccKey), encode(platformkittest.RSAKey(-chip.Number))
	if chip.Broken {
		instance.ECCP256 = "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
	}
	i.compute.Put(instance)
	return platformkittest.Fingerprints(rsaKey, eccKey), true
}

func encode(key any) string {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		panic(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

func (i *imitation) Terminate(name string) { i.compute.Delete(location(name)) }

// Double is false: the table asks for two instances, which are got one by one. TestListedTwice has
// more.
func (*imitation) Double(string) bool { return false }

func (*imitation) Twins() bool { return true }
