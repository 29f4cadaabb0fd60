// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"os"
	"strings"
	"testing"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// hunter is a secret that must not be in any error.
const hunter = "hunter2hunter2"

// What the kubelet asks for never decides where the bootstrap credential goes, or which CA is
// trusted with it.
func TestBootstrapCredentialStaysWithItsCluster(t *testing.T) {
	ca, other := plugintest.NewCA(t), plugintest.NewCA(t)
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
			a := testAuthenticator(t)
			a.node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "b.conf", plugintest.Kubeconfig(plugintest.OnServer(server, ca), "token: "+hunter))
			a.ask(ExecInfo{APIVersion: execV1, Cluster: c.asked})
			got, err := a.node.Access.BootstrapAccess()
			if !c.used {
				failure := plugintest.WantFailure(t, reason.AsFailure(err), reason.NoBootstrap)
				if got.Config != nil || failure.Hint == "" || !strings.Contains(failure.Error(), c.asked.Server) || !strings.Contains(failure.Error(), server) {
					t.Errorf("got %+v, %v", got.Config, failure)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.Config.Host != server || !bytes.Equal(got.Config.CAData, ca) || got.Config.ServerName != "" || got.Config.Insecure || got.Config.BearerToken != hunter {
				t.Errorf("the credential would go to %+v", got.Config)
			}
			if got.Config.UserAgent != a.node.Access.UserAgent {
				t.Errorf("User-Agent %q", got.Config.UserAgent)
			}
			if c.asked != nil && got.Cluster.Server != c.asked.Server {
				t.Errorf("the certificate would be noted as one of %s", got.Cluster.Server)
			}
		})
	}
}

func TestBootstrapIsSearchedForInOrder(t *testing.T) {
	if _, err := os.Stat(kubelet.BootstrapFile); err == nil {
		t.Skip("this machine has a bootstrap kubeconfig of kubeadm's own")
	}
	conf := plugintest.Kubeconfig(plugintest.OnServer("https://10.0.0.1:6443", plugintest.NewCA(t)), "token: ")
	t.Run("none", func(t *testing.T) {
		a := testAuthenticator(t)
		a.node.Access.Bootstrap = ""
		_, err := a.node.Access.BootstrapAccess()
		failure := plugintest.WantFailure(t, reason.AsFailure(err), reason.NoBootstrap)
		for _, path := range []string{a.node.Dir().File(cache.BootstrapFile), kubelet.BootstrapFile} {
			if !strings.Contains(failure.Error(), path) {
				t.Errorf("it does not say that it looked at %s: %v", path, failure)
			}
		}
	})
	t.Run("in the certificate directory", func(t *testing.T) {
		a := testAuthenticator(t)
		a.node.Access.Bootstrap = ""
		plugintest.Put(t, a.node.Dir(), cache.BootstrapFile, []byte(strings.TrimSpace(conf)+" abc\n"), 0o600)
		got, err := a.node.Access.BootstrapAccess()
		if err != nil || got.Config.BearerToken != "abc" || !strings.Contains(got.Credential, a.node.Dir().File(cache.BootstrapFile)) {
			t.Errorf("got %+v, %v", got, err)
		}
	})
	t.Run("a broken one is not passed over", func(t *testing.T) {
		a := testAuthenticator(t)
		a.node.Access.Bootstrap = ""
		plugintest.Put(t, a.node.Dir(), cache.BootstrapFile, []byte("{"), 0o600)
		_, err := a.node.Access.BootstrapAccess()
		_ = plugintest.WantFailure(t, reason.AsFailure(err), reason.Configuration)
	})
	t.Run("named, and only that one counts", func(t *testing.T) {
		a := testAuthenticator(t)
		plugintest.Put(t, a.node.Dir(), cache.BootstrapFile, []byte(strings.TrimSpace(conf)+" abc\n"), 0o600)
		_, err := a.node.Access.BootstrapAccess()
		if failure := plugintest.WantFailure(t, reason.AsFailure(err), reason.NoBootstrap); !strings.Contains(failure.Error(), a.node.Access.Bootstrap) {
			t.Errorf("it does not say where it looked: %v", failure)
		}
	})
}

// The node's own certificate goes where the kubelet asks; where it does not say, to the cluster it
// knows of.
func TestOwnCertificateGoesToTheClusterAskedFor(t *testing.T) {
	ca := plugintest.NewCA(t)
	pair := plugintest.NewPair(t, nil)
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
			a := testAuthenticator(t)
			a.ask(ExecInfo{Cluster: c.asked})
			if c.bootstrap {
				a.node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "b.conf", plugintest.Kubeconfig(plugintest.OnServer("https://bootstrap:6443", ca)+"\nproxy-url: http://proxy:3128", "token: "+hunter))
			}
			own := *pair
			own.Origin = c.origin
			got, err := a.node.Access.OwnAccess(&own)
			if c.want == "" {
				if failure := plugintest.WantFailure(t, reason.AsFailure(err), reason.Configuration); failure.Hint == "" || got.Config != nil {
					t.Errorf("got %+v, %v", got.Config, failure)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.Config.Host != c.want || got.Cluster.Server != c.want || !bytes.Equal(got.Config.CAData, ca) || !got.Own {
				t.Errorf("got %+v for %+v", got.Config, got.Cluster)
			}
			if !bytes.Equal(got.Config.CertData, pair.Chain) || !bytes.Equal(got.Config.KeyData, pair.Key) || got.Config.BearerToken != "" || got.Config.BearerTokenFile != "" {
				t.Errorf("another credential goes along: %+v", got.Config)
			}
			if (got.Config.Proxy != nil) != (c.want == "https://bootstrap:6443") {
				t.Error("the proxy is lost, or another cluster's is used")
			}
		})
	}
}
