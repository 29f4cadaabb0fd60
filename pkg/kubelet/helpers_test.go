// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

const program = "/usr/bin/kubelet-authenticator"

// certificate returns a self-signed certificate and its key in PEM: a node's, and as good as any
// for a CA to tell clusters apart by.
func certificate(t testing.TB) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "system:node:a", Organization: []string{"system:nodes"}},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

func newCluster(t testing.TB, server string) cache.Origin {
	t.Helper()
	ca, _ := certificate(t)
	return cache.Origin{Server: server, CertificateAuthorityData: ca}
}

// kubeconfig returns one with a user of its own choice.
func kubeconfig(t testing.TB, cluster cache.Origin, user *clientcmdapi.AuthInfo) []byte {
	t.Helper()
	data, err := write("kubernetes", "user", cluster, user)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func token(value string) *clientcmdapi.AuthInfo { return &clientcmdapi.AuthInfo{Token: value} }

func execUser(command string) *clientcmdapi.AuthInfo {
	return &clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
		APIVersion: "client.authentication.k8s.io/v1", Command: command, InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
	}}
}

// machine is one with a configuration file and nothing else.
type machine struct {
	t    testing.TB
	root string
	Setup
	said []string
}

func newMachine(t testing.TB) *machine {
	t.Helper()
	root := t.TempDir()
	m := &machine{t: t, root: root, Setup: Setup{
		Config: filepath.Join(root, "config.yaml"), Kubeconfig: filepath.Join(root, "etc/kubelet.conf"), Bootstrap: filepath.Join(root, "etc/bootstrap-kubelet.conf"),
		EnvFile: filepath.Join(root, "run/kubelet.env"), Manifests: filepath.Join(root, "etc/manifests"), Certs: cache.At(filepath.Join(root, "certs")),
		KubeletConfig: filepath.Join(root, "kubelet.yaml"), Exec: Exec{Command: program},
	}}
	m.must(os.Chmod(root, 0o755)) // whatever the umask
	m.put(m.Config, nil)
	m.put(m.KubeletConfig, nil)
	m.must(os.MkdirAll(m.Manifests, 0o755))
	return m
}

func (m *machine) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) put(path string, data []byte) {
	m.t.Helper()
	m.must(errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o600)))
}

func (m *machine) read(path string) string {
	m.t.Helper()
	data, err := os.ReadFile(path)
	m.must(err)
	return string(data)
}

// locked calls what needs the certificate directory's lock.
func (m *machine) locked(do func(*cache.Lock) error) {
	m.t.Helper()
	lock, err := m.Certs.TryLock()
	m.must(err)
	defer lock.Unlock()
	m.must(do(lock))
}

// enrolled gives the node a certificate of a cluster.
func (m *machine) enrolled(from cache.Origin) {
	m.t.Helper()
	cert, key := certificate(m.t)
	pair, err := cache.ParsePair(append(bytes.Clone(cert), key...))
	m.must(err)
	pair.Origin = &from
	m.locked(func(l *cache.Lock) error { return l.Install(pair) })
}

func (m *machine) prepare() Preparation {
	m.t.Helper()
	m.said = nil
	p, err := Prepare(m.Setup, func(line string) { m.said = append(m.said, line) })
	m.must(err)
	for _, line := range m.said {
		if line == "" || strings.Contains(line, "\n") {
			m.t.Errorf("not a line: %q", line)
		}
	}
	return p
}

// tree describes all that is below the root: names, modes, times, owners, content.
func (m *machine) tree() string {
	m.t.Helper()
	var out strings.Builder
	m.must(filepath.WalkDir(m.root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		_, _ = fmt.Fprint(&out, strings.TrimPrefix(path, m.root), " ", info.Mode(), " ", info.ModTime())
		if info.Mode().IsRegular() {
			_, _ = fmt.Fprintf(&out, " %q", m.read(path))
		}
		_, _ = fmt.Fprintln(&out)
		return nil
	}))
	return out.String()
}

func sameAccess(a, b cache.Origin) bool {
	return a.Server == b.Server && a.TLSServerName == b.TLSServerName && a.ProxyURL == b.ProxyURL &&
		bytes.Equal(a.CertificateAuthorityData, b.CertificateAuthorityData)
}
