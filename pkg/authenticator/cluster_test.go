// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// hunter is a secret that must not be in any error.
const hunter = "hunter2hunter2"

// kubeconfig returns one with those lines in its cluster and its user.
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

func TestReadBootstrapRefuses(t *testing.T) {
	good := onServer("https://10.0.0.1:6443", newCA(t))
	token := "token: " + hunter
	_, key, certificate := newCertificate(t, leafOf(1, noon, 1))
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
			got, err := readBootstrap(path)
			failure := wantFailure(t, err, Configuration)
			if got.config != nil {
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
		_, err := readBootstrap(t.TempDir())
		_ = wantFailure(t, err, Configuration)
	})
	t.Run("no file", func(t *testing.T) {
		if _, err := readBootstrap(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
}

func TestReadBootstrapAccepts(t *testing.T) {
	ca := newCA(t)
	_, certificate, key := newCertificate(t, leafOf(1, noon, 1))
	server := "https://10.0.0.1:6443"
	for name, c := range map[string]struct {
		cluster, user string
		check         func(a access) bool
	}{
		"a token":           {onServer(server, ca), "token: " + hunter, func(a access) bool { return a.config.BearerToken == hunter }},
		"a token in a file": {onServer(server, ca), "tokenFile: token", func(a access) bool { return a.config.BearerToken == hunter || a.config.BearerTokenFile != "" }},
		"a certificate": {onServer(server, ca), fmt.Sprintf("client-certificate-data: %s\nclient-key-data: %s", base64Of(certificate), base64Of(key)), func(a access) bool {
			return bytes.Equal(a.config.CertData, certificate) && bytes.Equal(a.config.KeyData, key)
		}},
		"certificate files": {onServer(server, ca), "client-certificate: tls.crt\nclient-key: tls.key", func(a access) bool {
			return bytes.Equal(a.config.CertData, certificate) && bytes.Equal(a.config.KeyData, key)
		}},
		"CA in a file": {"server: " + server + "\ncertificate-authority: ca.crt", "token: " + hunter, func(a access) bool { return bytes.Equal(a.config.CAData, ca) }},
		"name of the server": {onServer(server, ca) + "\ntls-server-name: kubernetes", "token: x", func(a access) bool {
			return a.config.ServerName == "kubernetes" && a.cluster.TLSServerName == "kubernetes"
		}},
		"a proxy": {onServer(server, ca) + "\nproxy-url: http://proxy:3128", "token: x", func(a access) bool { return a.config.Proxy != nil }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeFile(t, dir, "token", hunter)
			writeFile(t, dir, "ca.crt", string(ca))
			writeFile(t, dir, "tls.crt", string(certificate))
			writeFile(t, dir, "tls.key", string(key))
			got, err := readBootstrap(writeFile(t, dir, "b.conf", kubeconfig(c.cluster, c.user)))
			if err != nil {
				t.Fatal(err)
			}
			if !c.check(got) {
				t.Errorf("got %+v", got)
			}
			if got.config.Host != server || got.cluster.Server != server || !bytes.Equal(got.cluster.CertificateAuthorityData, ca) || got.config.Insecure {
				t.Errorf("cluster %+v, config %+v", got.cluster, got.config)
			}
			if got.own || strings.Contains(got.credential, hunter) || got.credential == "" {
				t.Errorf("credential %q, own %v", got.credential, got.own)
			}
		})
	}
}

// What the kubelet asks for never decides where the bootstrap credential goes, or which CA is trusted with it.
func TestBootstrapCredentialStaysWithItsCluster(t *testing.T) {
	ca, other := newCA(t), newCA(t)
	const server = "https://10.0.0.1:6443"
	for name, c := range map[string]struct {
		asked *clientauthentication.Cluster
		used  bool
	}{
		"no cluster asked":           {nil, true},
		"the same":                   {&clientauthentication.Cluster{Server: server, CertificateAuthorityData: ca}, true},
		"the same at another server": {&clientauthentication.Cluster{Server: "https://evil.example.com", TLSServerName: "evil", CertificateAuthorityData: ca}, true},
		"the same, CA being rotated": {&clientauthentication.Cluster{Server: server, CertificateAuthorityData: bytes.Join([][]byte{other, ca}, nil)}, true},
		"another CA":                 {&clientauthentication.Cluster{Server: server, CertificateAuthorityData: other}, false},
		"another server, no CA":      {&clientauthentication.Cluster{Server: "https://evil.example.com"}, false},
		"insecure":                   {&clientauthentication.Cluster{Server: "https://evil.example.com", InsecureSkipTLSVerify: true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := testOptions(t)
			o.bootstrapKubeconfig = writeFile(t, t.TempDir(), "b.conf", kubeconfig(onServer(server, ca), "token: "+hunter))
			o.exec = ExecInfo{APIVersion: execV1, Cluster: c.asked}
			got, err := o.bootstrapAccess()
			if !c.used {
				failure := wantFailure(t, err, NoBootstrap)
				if got.config != nil || failure.Hint == "" || !strings.Contains(failure.Error(), c.asked.Server) || !strings.Contains(failure.Error(), server) {
					t.Errorf("got %+v, %v", got.config, failure)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.config.Host != server || !bytes.Equal(got.config.CAData, ca) || got.config.ServerName != "" || got.config.Insecure || got.config.BearerToken != hunter {
				t.Errorf("the credential would go to %+v", got.config)
			}
			if got.config.UserAgent != o.UserAgent {
				t.Errorf("User-Agent %q", got.config.UserAgent)
			}
			if c.asked != nil && got.cluster.Server != c.asked.Server {
				t.Errorf("the certificate would be noted as one of %s", got.cluster.Server)
			}
		})
	}
}

func TestBootstrapIsSearchedForInOrder(t *testing.T) {
	if _, err := os.Stat(kubelet.BootstrapFile); err == nil {
		t.Skip("this machine has a bootstrap kubeconfig of kubeadm's own")
	}
	conf := kubeconfig(onServer("https://10.0.0.1:6443", newCA(t)), "token: ")
	t.Run("none", func(t *testing.T) {
		o := testOptions(t)
		o.bootstrapKubeconfig = ""
		_, err := o.bootstrapAccess()
		failure := wantFailure(t, err, NoBootstrap)
		for _, path := range []string{o.dir.File(cache.BootstrapFile), kubelet.BootstrapFile} {
			if !strings.Contains(failure.Error(), path) {
				t.Errorf("it does not say that it looked at %s: %v", path, failure)
			}
		}
	})
	t.Run("in the certificate directory", func(t *testing.T) {
		o := testOptions(t)
		o.bootstrapKubeconfig = ""
		put(t, o.dir, cache.BootstrapFile, []byte(strings.TrimSpace(conf)+" abc\n"), 0o600)
		got, err := o.bootstrapAccess()
		if err != nil || got.config.BearerToken != "abc" || !strings.Contains(got.credential, o.dir.File(cache.BootstrapFile)) {
			t.Errorf("got %+v, %v", got, err)
		}
	})
	t.Run("a broken one is not passed over", func(t *testing.T) {
		o := testOptions(t)
		o.bootstrapKubeconfig = ""
		put(t, o.dir, cache.BootstrapFile, []byte("{"), 0o600)
		_, err := o.bootstrapAccess()
		_ = wantFailure(t, err, Configuration)
	})
	t.Run("named, and only that one counts", func(t *testing.T) {
		o := testOptions(t)
		put(t, o.dir, cache.BootstrapFile, []byte(strings.TrimSpace(conf)+" abc\n"), 0o600)
		_, err := o.bootstrapAccess()
		if failure := wantFailure(t, err, NoBootstrap); !strings.Contains(failure.Error(), o.bootstrapKubeconfig) {
			t.Errorf("it does not say where it looked: %v", failure)
		}
	})
}

// The node's own certificate goes where the kubelet asks; where it does not say, to the cluster it knows of.
func TestOwnCertificateGoesToTheClusterAskedFor(t *testing.T) {
	ca := newCA(t)
	pair := newPair(t, nil)
	asked := &clientauthentication.Cluster{Server: "https://asked:6443", TLSServerName: "kubernetes", CertificateAuthorityData: ca}
	origin := &cache.Origin{Server: "https://origin:6443", CertificateAuthorityData: ca}
	for name, c := range map[string]struct {
		asked     *clientauthentication.Cluster
		bootstrap bool
		origin    *cache.Origin
		want      string
	}{
		"asked for":                  {asked, true, origin, "https://asked:6443"},
		"the bootstrap kubeconfig's": {nil, true, nil, "https://bootstrap:6443"},
		"its origin":                 {nil, true, origin, "https://origin:6443"},
		"nowhere":                    {nil, false, nil, ""},
		"asked for without TLS":      {&clientauthentication.Cluster{Server: "http://asked:8080"}, true, origin, ""},
		"asked for insecurely":       {&clientauthentication.Cluster{Server: "https://asked:6443", InsecureSkipTLSVerify: true}, true, origin, ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := testOptions(t)
			o.exec.Cluster = c.asked
			if c.bootstrap {
				o.bootstrapKubeconfig = writeFile(t, t.TempDir(), "b.conf", kubeconfig(onServer("https://bootstrap:6443", ca)+"\nproxy-url: http://proxy:3128", "token: "+hunter))
			}
			own := *pair
			own.Origin = c.origin
			got, err := o.ownAccess(&own)
			if c.want == "" {
				if failure := wantFailure(t, err, Configuration); failure.Hint == "" || got.config != nil {
					t.Errorf("got %+v, %v", got.config, failure)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.config.Host != c.want || got.cluster.Server != c.want || !bytes.Equal(got.config.CAData, ca) || !got.own {
				t.Errorf("got %+v for %+v", got.config, got.cluster)
			}
			if !bytes.Equal(got.config.CertData, pair.Chain) || !bytes.Equal(got.config.KeyData, pair.Key) || got.config.BearerToken != "" || got.config.BearerTokenFile != "" {
				t.Errorf("another credential goes along: %+v", got.config)
			}
			if (got.config.Proxy != nil) != (c.want == "https://bootstrap:6443") {
				t.Error("the proxy is lost, or another cluster's is used")
			}
		})
	}
}
