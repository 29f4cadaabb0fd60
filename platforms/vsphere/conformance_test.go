// SPDX-License-Identifier: Apache-2.0

package vsphere

import (
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/platforms/vsphere/internal/imitation"
)

const user, password = "attestation@vsphere.local", "correct horse"

func TestConformance(t *testing.T) {
	platformkittest.Run(t, func(t *testing.T) platformkittest.Imitation { return newFixture(t) })
}

// fixture is a vCenter, and implements platformkittest.Imitation.
type fixture struct {
	vcenter                *imitation.VCenter
	server                 *platformkittest.Server
	userFile, passwordFile string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	dir := t.TempDir()
	f := &fixture{vcenter: imitation.New(user, password), userFile: filepath.Join(dir, "user"), passwordFile: filepath.Join(dir, "password")}
	f.server = platformkittest.NewServer(t, f.vcenter)
	f.server.Expire = imitation.NotAuthenticated
	write(t, f.userFile, user+"\n")
	write(t, f.passwordFile, password)
	return f
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// open returns an adapter with its own session.
func (f *fixture) open(t *testing.T, budget *platformkit.Budget) *VCenter {
	t.Helper()
	roots, err := platformkit.Roots(f.server.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	v, err := New(Config{
		Server: strings.TrimPrefix(f.server.URL, "https://"), Roots: roots, UserFile: f.userFile, PasswordFile: f.passwordFile, Budget: budget,
	})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (f *fixture) Server() *platformkittest.Server { return f.server }

func (f *fixture) Trust(t *testing.T, options platformkit.Options, budget *platformkit.Budget) clusterapi.EKTrust {
	t.Helper()
	return platformkit.New(f.open(t, budget), options)
}

// biosUUID returns the BIOS UUID of a name, always the same.
func biosUUID(name string) string {
	sum := sha256.Sum256([]byte(name))
	h := hex.EncodeToString(sum[:16])
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

func (*fixture) Machine(name string) clusterapi.PlatformMachine {
	return clusterapi.PlatformMachine{
		Cluster: types.NamespacedName{Namespace: "default", Name: "c"}, Name: name, UID: types.UID("uid-" + name),
		ProviderID: "vsphere://" + biosUUID(name),
	}
}

func (f *fixture) Foreign() []clusterapi.PlatformMachine {
	uuid := biosUUID("a")
	var all []clusterapi.PlatformMachine
	for n, id := range []string{
		"aws:///a/i-1", "vsphere:/" + uuid, "vsphere://" + strings.ToUpper(uuid), "vsphere://" + uuid + "/", "vsphere://{" + uuid + "}",
		"vsphere://" + strings.ReplaceAll(uuid, "-", ""), "vsphere://" + uuid + "\n", " vsphere://" + uuid, "vsphere://",
		"vsphere://" + uuid[:35], "vsphere://" + uuid[:35] + "g", "VSPHERE://" + uuid, "vsphere://vm-1",
	} {
		m := f.Machine(fmt.Sprintf("foreign%d", n))
		m.ProviderID = id
		all = append(all, m)
	}
	return all
}

// authority signs the certificates of all endorsement keys.
var authority = sync.OnceValue(func() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	return key
})

// certify returns a certificate as vCenter issues it.
func certify(key any) []byte {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "vTPM"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageKeyEncipherment,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, &x509.Certificate{Subject: pkix.Name{CommonName: "CA"}}, key, authority())
	if err != nil {
		panic(err)
	}
	return der
}

// certificates returns those of the virtual TPM of a number, always with the same keys: RSA 2048
// and P-256. Nobody has the private keys.
func certificates(number int) (ders [][]byte, eks []tpm.Fingerprint) {
	sum := sha256.Sum256(fmt.Append(nil, number))
	modulus := new(big.Int).SetBytes([]byte(strings.Repeat(string(sum[:]), 8)))
	modulus.SetBit(modulus.SetBit(modulus, 2047, 1), 0, 1)
	scalar, err := ecdh.P256().NewPrivateKey(sum[:])
	if err != nil {
		panic(err)
	}
	point, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), scalar.PublicKey().Bytes())
	if err != nil {
		panic(err)
	}
	for _, key := range []any{&rsa.PublicKey{N: modulus, E: 65537}, point} {
		ek, err := clusterapi.EKFingerprint(key)
		if err != nil {
			panic(err)
		}
		ders, eks = append(ders, certify(key)), append(eks, ek)
	}
	return ders, eks
}

// machineOf returns the virtual machine of that name, and its endorsement keys.
func machineOf(name string, chip platformkittest.TPM) (imitation.Machine, []tpm.Fingerprint) {
	m := imitation.Machine{UUID: biosUUID(name), Stalled: chip.Silent}
	if chip.None {
		return m, nil
	}
	var eks []tpm.Fingerprint
	m.Certificates, eks = certificates(chip.Number)
	if chip.Broken {
		m.Certificates = append(m.Certificates, []byte("no certificate"))
	}
	return m, eks
}

func (f *fixture) Launch(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	m, eks := machineOf(name, chip)
	f.vcenter.Remove(m.UUID)
	f.vcenter.Add(m)
	return eks, true
}

func (f *fixture) Change(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	m, eks := machineOf(name, chip)
	f.vcenter.Change(m.UUID, m)
	return eks, true
}

func (f *fixture) Terminate(name string) { f.vcenter.Remove(biosUUID(name)) }

// Double adds a second virtual machine with the same BIOS UUID.
func (f *fixture) Double(name string) bool {
	m, _ := machineOf(name, platformkittest.TPM{Number: 99})
	f.vcenter.Add(m)
	return true
}

func (*fixture) Twins() bool { return true }
