// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// hunter is a secret that must not be in any error.
const hunter = "hunter2hunter2"

// kubeconfig returns a kubeconfig with those lines in its cluster and its user.
func kubeconfig(cluster, user string) string {
	indent := func(lines string) string {
		return "    " + strings.ReplaceAll(strings.TrimSpace(lines), "\n", "\n    ") + "\n"
	}
	return "apiVersion: v1\nkind: Config\ncurrent-context: x\ncontexts:\n- name: x\n  context: {cluster: x, user: x}\n" +
		"clusters:\n- name: x\n  cluster:\n" + indent(cluster) +
		"users:\n- name: x\n  user:\n" + indent(user)
}

func base64Of(data []byte) string { return base64.StdEncoding.EncodeToString(data) }

// onServer is a cluster's description in a kubeconfig.
func onServer(server string, ca []byte) string {
	return fmt.Sprintf("server: %s\ncertificate-authority-data: %s", server, base64Of(ca))
}

func writeFile(t testing.TB, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
	return path
}

// newCertificate returns a self-signed certificate and its key, both in PEM.
func newCertificate(t testing.TB) (leaf *x509.Certificate, certificate, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:a"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	if leaf, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return leaf, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

func newCA(t testing.TB) []byte {
	t.Helper()
	_, ca, _ := newCertificate(t)
	return ca
}

// wantError returns the Error in err if it is of that problem and its text fits on one line.
func wantError(t testing.TB, err error, problem Problem) *Error {
	t.Helper()
	var failure *Error
	if !errors.As(err, &failure) {
		t.Fatalf("got %v, want an Error", err)
	}
	if failure.Problem != problem || strings.ContainsAny(failure.Error()+failure.Hint, "\n\r") || len(failure.Error()) > 1500 {
		t.Errorf("problem %d, want %d: %.2000q", failure.Problem, problem, err)
	}
	return failure
}

func TestReadBootstrapRefuses(t *testing.T) {
	good := onServer("https://10.0.0.1:6443", newCA(t))
	token := "token: " + hunter
	_, key, certificate := newCertificate(t)
	for name, c := range map[string]struct{ content, says string }{
		"empty":                        {"", ""},
		"garbage":                      {token + "\n\t- [", "cannot be read"},
		"a token and nothing else":     {hunter, "cannot be read"},
		"half a file":                  {kubeconfig(good, "token: \""+hunter), "cannot be read"},
		"token of a wrong type":        {kubeconfig(good, "token: ["+hunter+"]"), "cannot be read"},
		"key not base64":               {kubeconfig(good, "client-key-data: '"+hunter+"!'"), "cannot be read"},
		"another kind":                 {strings.Replace(kubeconfig(good, token), "kind: Config", "kind: Secret", 1), "cannot be read"},
		"a user with exec":             {kubeconfig(good, "exec: {apiVersion: client.authentication.k8s.io/v1, command: kubelet-authenticator, interactiveMode: Never}"), "exec"},
		"exec beside a token":          {kubeconfig(good, token+"\nexec: {apiVersion: client.authentication.k8s.io/v1, command: kubelet-authenticator, interactiveMode: Never}"), "exec"},
		"auth-provider beside a token": {kubeconfig(good, token+"\nauth-provider: {name: gcp}"), ""},
		"auth-provider":                {kubeconfig(good, "auth-provider: {name: gcp, config: {access-token: "+hunter+"}}"), ""},
		"insecure":                     {kubeconfig("server: https://10.0.0.1:6443\ninsecure-skip-tls-verify: true", token), "insecure-skip-tls-verify"},
		"insecure, and http":           {kubeconfig("server: http://10.0.0.1:8080\ninsecure-skip-tls-verify: true", token), "insecure-skip-tls-verify"},
		"http":                         {kubeconfig("server: http://10.0.0.1:8080", token), "https"},
		"http with a CA":               {kubeconfig(onServer("http://10.0.0.1:8080", newCA(t)), token), "https"},
		"http in capitals":             {kubeconfig("server: HTTP://10.0.0.1:8080", token), "https"},
		"no scheme":                    {kubeconfig("server: 10.0.0.1:6443", token), "https"},
		"no server":                    {kubeconfig("certificate-authority-data: "+base64Of(newCA(t)), token), ""},
		"a proxy that is no URL":       {kubeconfig(good+"\nproxy-url: 'http://user:hunter2@[::1'", token), "proxy-url"},
		"no credential":                {kubeconfig(good, "as-uid: x"), ""},
		"no credential at all":         {kubeconfig(good, "{}"), "neither"},
		"a password":                   {kubeconfig(good, "username: x\npassword: "+hunter), "neither"},
		"empty token":                  {kubeconfig(good, "token: ''"), "neither"},
		"token file missing":           {kubeconfig(good, "tokenFile: none"), "none"},
		"certificate without key":      {kubeconfig(good, "client-certificate-data: "+base64Of(certificate)), ""},
		"certificate file missing":     {kubeconfig(good, "client-certificate: none\nclient-key-data: "+base64Of(key)), "none"},
		"CA file missing":              {kubeconfig("server: https://10.0.0.1:6443\ncertificate-authority: none", token), "none"},
		"no current context":           {strings.Replace(kubeconfig(good, token), "current-context: x", "current-context: ''", 1), ""},
		"current context not there":    {strings.Replace(kubeconfig(good, token), "current-context: x", "current-context: y", 1), ""},
		"context without a cluster":    {strings.Replace(kubeconfig(good, token), "cluster: x,", "cluster: y,", 1), ""},
		"context without a user":       {strings.Replace(kubeconfig(good, token), "user: x}", "user: y}", 1), ""},
	} {
		t.Run(name, func(t *testing.T) {
			path := writeFile(t, t.TempDir(), "b.conf", c.content)
			got, err := readKubeconfig("bootstrap kubeconfig", path)
			failure := wantError(t, err, Misconfigured)
			if got.Config != nil {
				t.Errorf("something came with the error: %+v", got)
			}
			if !strings.Contains(failure.Error(), path) || !strings.Contains(failure.Error(), c.says) || failure.Hint == "" {
				t.Errorf("it does not name the file or say %q, or has no hint: %v", c.says, failure)
			}
			if strings.Contains(failure.Error()+failure.Hint, "hunter2") {
				t.Errorf("it shows a secret: %v", failure)
			}
			if errors.Is(err, fs.ErrNotExist) {
				t.Error("it passes for a file that is not there, and the next one would be tried")
			}
		})
	}
	t.Run("a directory", func(t *testing.T) {
		_, err := readKubeconfig("bootstrap kubeconfig", t.TempDir())
		_ = wantError(t, err, Misconfigured)
	})
	t.Run("no file", func(t *testing.T) {
		if _, err := readKubeconfig("bootstrap kubeconfig", filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
}

func TestReadBootstrapAccepts(t *testing.T) {
	ca := newCA(t)
	_, certificate, key := newCertificate(t)
	server := "https://10.0.0.1:6443"
	for name, c := range map[string]struct {
		cluster, user string
		check         func(a Access) bool
	}{
		"a token":           {onServer(server, ca), "token: " + hunter, func(a Access) bool { return a.Config.BearerToken == hunter }},
		"a token in a file": {onServer(server, ca), "tokenFile: token", func(a Access) bool { return a.Config.BearerToken == hunter || a.Config.BearerTokenFile != "" }},
		"a certificate": {onServer(server, ca), fmt.Sprintf("client-certificate-data: %s\nclient-key-data: %s", base64Of(certificate), base64Of(key)), func(a Access) bool {
			return bytes.Equal(a.Config.CertData, certificate) && bytes.Equal(a.Config.KeyData, key)
		}},
		"certificate files": {onServer(server, ca), "client-certificate: tls.crt\nclient-key: tls.key", func(a Access) bool {
			return bytes.Equal(a.Config.CertData, certificate) && bytes.Equal(a.Config.KeyData, key)
		}},
		"CA in a file": {"server: " + server + "\ncertificate-authority: ca.crt", "token: " + hunter, func(a Access) bool { return bytes.Equal(a.Config.CAData, ca) }},
		"name of the server": {onServer(server, ca) + "\ntls-server-name: kubernetes", "token: x", func(a Access) bool {
			return a.Config.ServerName == "kubernetes" && a.Cluster.TLSServerName == "kubernetes"
		}},
		"a proxy": {onServer(server, ca) + "\nproxy-url: http://proxy:3128", "token: x", func(a Access) bool { return a.Config.Proxy != nil }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeFile(t, dir, "token", hunter)
			writeFile(t, dir, "ca.crt", string(ca))
			writeFile(t, dir, "tls.crt", string(certificate))
			writeFile(t, dir, "tls.key", string(key))
			got, err := readKubeconfig("bootstrap kubeconfig", writeFile(t, dir, "b.conf", kubeconfig(c.cluster, c.user)))
			if err != nil {
				t.Fatal(err)
			}
			if !c.check(got) {
				t.Errorf("got %+v", got)
			}
			if got.Config.Host != server || got.Cluster.Server != server || !bytes.Equal(got.Cluster.CertificateAuthorityData, ca) || got.Config.Insecure {
				t.Errorf("cluster %+v, config %+v", got.Cluster, got.Config)
			}
			if got.Own || strings.Contains(got.Credential, hunter) || got.Credential == "" {
				t.Errorf("credential %q, own %v", got.Credential, got.Own)
			}
		})
	}
}

// A bootstrap kubeconfig, and each file that it names, is refused if another user may write it.
func TestReadBootstrapRefusesFilesOfOthers(t *testing.T) {
	ca := newCA(t)
	_, certificate, key := newCertificate(t)
	for _, name := range []string{"b.conf", "token", "ca.crt", "tls.crt", "tls.key"} {
		for how, spoil := range map[string]func(path string) error{
			"others may write it": func(path string) error { return os.Chmod(path, 0o666) },
			"not a regular file":  func(path string) error { return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)) },
		} {
			t.Run(name+", "+how, func(t *testing.T) {
				dir := t.TempDir()
				user := "client-certificate: tls.crt\nclient-key: tls.key"
				if name == "token" {
					user = "tokenFile: token"
				}
				path := writeFile(t, dir, "b.conf", kubeconfig("server: https://10.0.0.1:6443\ncertificate-authority: ca.crt", user))
				for file, content := range map[string]string{"token": hunter, "ca.crt": string(ca), "tls.crt": string(certificate), "tls.key": string(key)} {
					writeFile(t, dir, file, content)
				}
				if _, err := readKubeconfig("bootstrap kubeconfig", path); err != nil {
					t.Fatal(err)
				}
				if err := spoil(filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
				_, err := readKubeconfig("bootstrap kubeconfig", path)
				if failure := wantError(t, err, Misconfigured); !strings.Contains(failure.Error(), filepath.Join(dir, name)+": ") || !strings.Contains(failure.Error(), how) {
					t.Error(failure)
				}
			})
		}
	}
}

// A credential is sent only to the kubelet's cluster. A bootstrap kubeconfig of another cluster is
// skipped: after a join to this cluster, the copy for the former cluster is still there.
func TestForeignBootstrapIsPassedOver(t *testing.T) {
	here, there := newCA(t), newCA(t)
	dir := cache.At(t.TempDir())
	kubeadms := writeFile(t, t.TempDir(), "bootstrap-kubelet.conf", kubeconfig(onServer("https://here:6443", here), "token: here"))
	writeFile(t, dir.Path(), cache.BootstrapFile, kubeconfig(onServer("https://there:6443", there), "token: there"))
	n := Node{Dir: dir, KubeletBootstrap: kubeadms, Asked: &cache.Origin{Server: "https://here:6443", CertificateAuthorityData: here}}
	if a, err := n.BootstrapAccess(); err != nil || a.Config.BearerToken != "here" || a.Source != kubeadms {
		t.Errorf("%+v, %v", a.Source, err)
	}
	n.KubeletBootstrap = filepath.Join(t.TempDir(), "none")
	_, err := n.BootstrapAccess()
	_ = wantError(t, err, ForeignBootstrap)
	n.Asked = nil
	if a, err := n.BootstrapAccess(); err != nil || a.Config.BearerToken != "there" {
		t.Errorf("%+v, %v", a.Source, err)
	}
}

// The node's certificate requests the next one, unless one of these conditions prevents it.
func TestWhyBootstrap(t *testing.T) {
	here, there := cache.Origin{Server: "https://here"}, cache.Origin{Server: "https://there"}
	for want, c := range map[string]struct {
		pair     *cache.Pair
		rejected bool
		renews   bool
	}{
		"":                {&cache.Pair{Origin: &here}, false, true},
		"no usable":       {nil, false, true},
		"does not renew":  {&cache.Pair{Origin: &here}, false, false},
		"another cluster": {&cache.Pair{Origin: &there}, false, true},
		"rejects":         {&cache.Pair{Origin: &here}, true, true},
	} {
		n := Node{Asked: &here, AskedBy: "kubelet.conf", Provider: "fake", Renews: c.renews}
		if got := n.WhyBootstrap(c.pair, c.rejected); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("%q: %q", want, got)
		}
	}
}
