// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// An invalid credential is found before the first request, where it would look like a failure of
// the network. The error names the file, and quotes no secret.
func TestBootstrapCredentialIsChecked(t *testing.T) {
	const server = "https://10.0.0.1:6443"
	good := onServer(server, newCA(t))
	token := "token: " + hunter
	_, certificate, key := newCertificate(t)
	_, _, otherKey := newCertificate(t)
	pair := func(key []byte) string {
		return "client-certificate-data: " + base64Of(certificate) + "\nclient-key-data: " + base64Of(key)
	}
	for name, c := range map[string]struct{ cluster, user, says string }{
		"a token":                        {good, token, ""},
		"a blank after the token":        {good, "token: '" + hunter + " '", ""},
		"a certificate":                  {good, pair(key), ""},
		"a proxy":                        {good + "\nproxy-url: socks5://proxy:1080", token, ""},
		"a line break after the token":   {good, "token: |\n      " + hunter, "line break"},
		"a blank before the token":       {good, "token: ' " + hunter + "'", "line break"},
		"another key's certificate":      {good, pair(otherKey), "not a PEM certificate with its key"},
		"a proxy of no scheme":           {good + "\nproxy-url: proxy:3128", token, "proxy-url"},
		"a proxy of another scheme":      {good + "\nproxy-url: ftp://hunter2@proxy", token, "proxy-url"},
		"a CA that is no PEM":            {onServer(server, []byte("x")), token, "certificate-authority-data"},
		"a CA with text before its name": {onServer(server, append([]byte("the CA\n"), newCA(t)...)), token, ""},
	} {
		t.Run(name, func(t *testing.T) {
			path := writeFile(t, t.TempDir(), "b.conf", kubeconfig(c.cluster, c.user))
			_, err := Node{Dir: cache.At(t.TempDir()), Bootstrap: path}.BootstrapAccess()
			if c.says == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			failure := wantError(t, err, Misconfigured)
			if !strings.Contains(failure.Error(), path) || !strings.Contains(failure.Error(), c.says) || strings.Contains(failure.Error()+failure.Hint, "hunter2") {
				t.Error(failure)
			}
		})
	}
}

// An invalid proxy in the environment is not reported as a failure of the network, and its password
// is not shown. Go reads the environment once, so each case runs in a process of its own.
func TestProxyInTheEnvironment(t *testing.T) {
	const child = "TEST_PROXY_CHILD"
	if os.Getenv(child) != "" {
		cluster := onServer("https://10.0.0.1:6443", newCA(t)) + os.Getenv(child+"_FIELD")
		path := writeFile(t, t.TempDir(), "b.conf", kubeconfig(cluster, "token: "+hunter))
		_, err := Node{Dir: cache.At(t.TempDir()), Bootstrap: path}.BootstrapAccess()
		if err != nil {
			t.Fatalf("refused: %v", wantError(t, err, Misconfigured))
		}
		return
	}
	for name, c := range map[string]struct {
		environment []string
		field       string
		refused     bool
	}{
		"none":                           {nil, "", false},
		"a proxy":                        {[]string{"HTTPS_PROXY=http://proxy:3128"}, "", false},
		"without a scheme":               {[]string{"HTTPS_PROXY=proxy:3128"}, "", false},
		"no URL":                         {[]string{"HTTPS_PROXY=http://hunter2@[::1"}, "", true},
		"no URL, in small letters":       {[]string{"https_proxy=http://hunter2@proxy:port"}, "", true},
		"another scheme":                 {[]string{"HTTPS_PROXY=ftp://hunter2@proxy"}, "", true},
		"not for this server":            {[]string{"HTTPS_PROXY=http://[::1", "NO_PROXY=10.0.0.0/8"}, "", false},
		"the kubeconfig names one":       {[]string{"HTTPS_PROXY=http://[::1"}, "\nproxy-url: http://proxy:3128", false},
		"for servers without encryption": {[]string{"HTTP_PROXY=http://[::1"}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestProxyInTheEnvironment$")
			cmd.Env = append(append(os.Environ(), child+"=1", child+"_FIELD="+c.field, "HTTPS_PROXY=", "https_proxy=", "HTTP_PROXY=", "http_proxy=", "NO_PROXY=", "no_proxy="), c.environment...)
			out, err := cmd.CombinedOutput()
			if (err != nil) != c.refused || c.refused != strings.Contains(string(out), "refused: HTTPS_PROXY in the environment") || strings.Contains(string(out), "hunter2") {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// An unused credential is not checked: in a file for another cluster, and if only the file's
// cluster is needed.
func TestUnusedCredentialIsNotChecked(t *testing.T) {
	here, there := newCA(t), newCA(t)
	dir := cache.At(t.TempDir())
	broken := "token: |\n      " + hunter
	kubeadms := writeFile(t, t.TempDir(), "bootstrap-kubelet.conf", kubeconfig(onServer("https://here:6443", here), "token: here"))
	writeFile(t, dir.Path(), cache.BootstrapFile, kubeconfig(onServer("https://there:6443", there), broken))
	n := Node{Dir: dir, KubeletBootstrap: kubeadms, Asked: &cache.Origin{Server: "https://here:6443", CertificateAuthorityData: here}}
	if a, err := n.BootstrapAccess(); err != nil || a.Source != kubeadms {
		t.Errorf("%s, %v", a.Source, err)
	}
	n = Node{Dir: cache.At(t.TempDir()), Bootstrap: writeFile(t, t.TempDir(), "b.conf", kubeconfig(onServer("https://here:6443", here), broken))}
	if a, err := n.OwnAccess(&cache.Pair{}); err != nil || !bytes.Equal(a.Cluster.CertificateAuthorityData, here) || filepath.Base(a.Source) != "b.conf" {
		t.Errorf("%s, %v", a.Source, err)
	}
}
