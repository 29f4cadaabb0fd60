// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

func encode(t testing.TB, config *clientcmdapi.Config) []byte {
	t.Helper()
	data, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// client-go can read the rendered kubeconfig. Its exec user is never interactive, and gets the
// cluster's information.
func TestRenderKubeconfig(t *testing.T) {
	cluster := newCluster(t, "https://10.0.0.1:6443")
	cluster.TLSServerName, cluster.ProxyURL = "kubernetes", "http://proxy:3128"
	exec := Exec{Command: program, Args: []string{"--provider-id-scheme=metal", "--node-name=a b"}}
	data, err := RenderKubeconfig(cluster, exec)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := RenderKubeconfig(cluster, exec); err != nil || string(again) != string(data) {
		t.Errorf("the second time it is another: %v", err)
	}
	loader, err := clientcmd.NewClientConfigFromBytes(data)
	if err != nil {
		t.Fatal(err)
	}
	config, err := loader.ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	if config.Host != cluster.Server || config.ServerName != "kubernetes" || string(config.CAData) != string(cluster.CertificateAuthorityData) || config.Proxy == nil || config.Insecure {
		t.Errorf("cluster: %+v", config)
	}
	plugin := config.ExecProvider
	if plugin == nil || plugin.Command != program || !reflect.DeepEqual(plugin.Args, exec.Args) || !plugin.ProvideClusterInfo || plugin.InstallHint == "" ||
		plugin.APIVersion != "client.authentication.k8s.io/v1" || plugin.InteractiveMode != clientcmdapi.NeverExecInteractiveMode {
		t.Errorf("exec: %+v", plugin)
	}
	for name, c := range map[string]struct {
		cluster cache.Origin
		exec    Exec
	}{
		"plain HTTP":         {cache.Origin{Server: "http://10.0.0.1"}, exec},
		"no server":          {cache.Origin{}, exec},
		"a proxy that is no": {cache.Origin{Server: cluster.Server, ProxyURL: "http://a b:1"}, exec},
		"a relative command": {cluster, Exec{Command: "kubelet-authenticator"}},
	} {
		if _, err := RenderKubeconfig(c.cluster, c.exec); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestIsOurs(t *testing.T) {
	for command, want := range map[string]bool{
		program: true, "kubelet-authenticator": true, "/opt/bin/kubelet-authenticator-acme": true, "/opt/wrapper": true,
		"/usr/bin/kubelet": false, "/usr/bin/kubelet-authenticatory": false, "": false, "/kubelet-authenticator/aws": false,
	} {
		if got := isOurs(command, "/opt/wrapper"); got != want {
			t.Errorf("%q: %v", command, got)
		}
	}
	if isOurs("", "") {
		t.Error("nothing is ours")
	}
}

func TestWriteKubeconfig(t *testing.T) {
	cluster := newCluster(t, "https://10.0.0.1:6443")
	content, err := RenderKubeconfig(cluster, Exec{Command: program})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		before           []byte
		written, refused bool
	}{
		"none":                {nil, true, false},
		"the same":            {content, false, false},
		"ours, another":       {kubeconfig(t, cluster, execUser("/opt/kubelet-authenticator")), true, false},
		"a token's":           {kubeconfig(t, cluster, token("t")), false, true},
		"another plugin's":    {kubeconfig(t, cluster, execUser("/usr/bin/aws")), false, true},
		"not a kubeconfig":    {[]byte("precious"), false, true},
		"ours, and something": {[]byte(strings.Replace(string(content), "users:\n", "users:\n- name: more\n  user: {}\n", 1)), false, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			if c.before != nil {
				m.put(m.Kubeconfig, c.before)
			}
			before := m.tree()
			written, err := WriteKubeconfig(m.Kubeconfig, content, program)
			var foreign *ForeignError
			if written != c.written || errors.As(err, &foreign) != c.refused || !c.refused && err != nil {
				t.Fatal(written, err)
			}
			if !c.written && m.tree() != before {
				t.Error("it was touched")
			}
			if c.refused {
				return
			}
			info, err := os.Lstat(m.Kubeconfig)
			if err != nil || info.Mode() != 0o600 || m.read(m.Kubeconfig) != string(content) {
				t.Errorf("%v %v", info, err)
			}
			// and the manifests
			if entries, err := os.ReadDir(filepath.Dir(m.Kubeconfig)); err != nil || len(entries) != 2 {
				t.Errorf("left behind: %v %v", entries, err)
			}
		})
	}
}

// client-go prefers any other credential to the exec stanza. Such a file is not ours: it is neither
// used nor overwritten.
func TestACredentialBesideThePlugin(t *testing.T) {
	cluster := newCluster(t, "https://10.0.0.1:6443")
	cert, key := certificate(t)
	for name, beside := range map[string]func(*clientcmdapi.AuthInfo){
		"client-certificate":      func(u *clientcmdapi.AuthInfo) { u.ClientCertificate = RotatedFile },
		"client-certificate-data": func(u *clientcmdapi.AuthInfo) { u.ClientCertificateData = cert },
		"client-key":              func(u *clientcmdapi.AuthInfo) { u.ClientKey = RotatedFile },
		"client-key-data":         func(u *clientcmdapi.AuthInfo) { u.ClientKeyData = key },
		"token":                   func(u *clientcmdapi.AuthInfo) { u.Token = "t" },
		"tokenFile":               func(u *clientcmdapi.AuthInfo) { u.TokenFile = "/t" },
		"username":                func(u *clientcmdapi.AuthInfo) { u.Username = "u" },
		"password":                func(u *clientcmdapi.AuthInfo) { u.Password = "p" },
		"auth-provider":           func(u *clientcmdapi.AuthInfo) { u.AuthProvider = &clientcmdapi.AuthProviderConfig{Name: "oidc"} },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			user := execUser(program)
			beside(user)
			m.put(m.Kubeconfig, kubeconfig(t, cluster, user))
			m.put(m.Bootstrap, kubeconfig(t, cluster, token("one")))
			m.put(m.EnvFile, Environment(m.Kubeconfig))
			before := m.read(m.Kubeconfig)
			if k := ReadKubeconfig(m.Kubeconfig, program); k.Kind != bypassed {
				t.Errorf("%s", k.Kind)
			}
			if p := m.prepare(); p.Enabled || !p.Foreign || len(m.said) != 1 || !strings.Contains(m.said[0], "beside it") {
				t.Errorf("%+v %q", p, m.said)
			}
			if _, err := os.Lstat(m.EnvFile); err == nil {
				t.Error("the environment file is still there")
			}
			var foreign *ForeignError
			if _, err := WriteKubeconfig(m.Kubeconfig, []byte("x"), program); !errors.As(err, &foreign) || m.read(m.Kubeconfig) != before {
				t.Error(err)
			}
		})
	}
}

// No kind's text quotes the file.
func TestReadKubeconfigSaysNoSecret(t *testing.T) {
	m := newMachine(t)
	const secret = "abcdef.0123456789abcdef"
	m.put(m.Kubeconfig, []byte("apiVersion: v1\nkind: Config\nusers:\n- name: a\n  user:\n    token: ["+secret+"\n"))
	k := ReadKubeconfig(m.Kubeconfig, "")
	if k.Kind != Unreadable || strings.Contains(k.Problem.Error(), secret) {
		t.Errorf("%s %v", k.Kind, k.Problem)
	}
	if text := (&ForeignError{k}).Error(); strings.Contains(text, secret) || strings.Contains(text, "\n") {
		t.Error(text)
	}
}

func TestParseFlags(t *testing.T) {
	on, off := true, false
	for line, want := range map[string]Flags{
		"kubelet": {},
		"kubelet --bootstrap-kubeconfig=/b --kubeconfig=/k --config=/c": {BootstrapKubeconfig: "/b", Kubeconfig: "/k", Config: "/c"},
		"kubelet --kubeconfig /k --rotate-certificates=false":           {Kubeconfig: "/k", RotateCertificates: &off},
		"kubelet --kubeconfig=/1 --kubeconfig=/2 --rotate-certificates": {Kubeconfig: "/2", RotateCertificates: &on},
		"kubelet --rotate-certificates false --hostname_override=n":     {RotateCertificates: &on, HostnameOverride: "n"},
		"kubelet --cert-dir=/d -- --kubeconfig=/k":                      {CertDir: "/d"},
		"kubelet --bootstrap-kubeconfig= --kubeconfig":                  {},
		"--kubeconfig=/name-of-the-program":                             {},
	} {
		if got := ParseFlags(strings.Fields(line)); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v", line, got)
		}
	}
	if got := ParseFlags(nil); got != (Flags{}) {
		t.Errorf("%+v", got)
	}
}
