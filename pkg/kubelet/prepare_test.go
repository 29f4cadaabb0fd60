// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// On a machine that is not ours, the environment file is removed and no other file changes.
func TestPrepareLeavesTheMachineAlone(t *testing.T) {
	cluster := newCluster(t, "https://10.0.0.1:6443")
	cert, key := certificate(t)
	certUser := &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	for name, c := range map[string]struct {
		arrange func(*machine)
		says    string
	}{
		"no configuration file":              {func(m *machine) { m.must(os.Remove(m.Config)) }, "no configuration file"},
		"an image's first boot":              {func(m *machine) { m.must(os.Remove(m.Bootstrap)) }, "neither a bootstrap kubeconfig nor a certificate"},
		"static one is named, but not there": {func(m *machine) { m.must(os.Remove(m.Bootstrap)); m.Static = filepath.Join(m.root, "none") }, "neither"},
		"static one, before kubeadm": {func(m *machine) {
			m.must(errors.Join(os.Remove(m.Bootstrap), os.Remove(m.KubeletConfig)))
			m.Static = filepath.Join(m.root, "static.conf")
			m.put(m.Static, kubeconfig(t, cluster, token("static")))
		}, "kubelet.yaml yet"},
		"static one, after kubeadm reset": {func(m *machine) {
			m.must(errors.Join(os.Remove(m.Bootstrap), os.Remove(m.KubeletConfig)))
			m.Static = filepath.Join(m.root, "static.conf")
			m.put(m.Static, kubeconfig(t, cluster, token("static")))
			m.enrolled(cluster)
		}, "that names a cluster"},
		"kubelet.conf of ours, and nothing to join with": {func(m *machine) {
			m.must(os.Remove(m.Bootstrap))
			m.put(m.Kubeconfig, kubeconfig(t, cluster, execUser(program)))
		}, "neither"},
		"a certificate, but no kubelet.conf": {func(m *machine) { m.must(os.Remove(m.Bootstrap)); m.enrolled(cluster) }, "that names a cluster"},
		"kubeadm init's":                     {func(m *machine) { m.put(m.Kubeconfig, kubeconfig(t, cluster, certUser)) }, "client certificate"},
		"the kubelet's own": {func(m *machine) {
			data, err := write("default-cluster", "default-auth", cluster, &clientcmdapi.AuthInfo{ClientCertificate: RotatedFile, ClientKey: RotatedFile})
			m.must(err)
			m.put(m.Kubeconfig, data)
		}, "bootstrap of its own"},
		"another exec plugin": {func(m *machine) { m.put(m.Kubeconfig, kubeconfig(t, cluster, execUser("/usr/bin/aws"))) }, "another exec plugin"},
		"a token":             {func(m *machine) { m.put(m.Kubeconfig, kubeconfig(t, cluster, token("t"))) }, "neither an exec plugin"},
		"what cannot be read, on a machine that nothing joins": {func(m *machine) { m.must(os.Remove(m.Bootstrap)); m.put(m.Kubeconfig, []byte("{")) },
			"cannot be read as a kubeconfig"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.put(m.Bootstrap, kubeconfig(t, cluster, token("abcdef.0123456789abcdef")))
			m.must(os.Mkdir(filepath.Dir(m.EnvFile), 0o700))
			c.arrange(m)
			before := m.tree()
			m.put(m.EnvFile, Environment(m.Kubeconfig))
			for range 2 {
				if p := m.prepare(); p.Enabled || p.First || len(p.Problems) > 0 {
					t.Errorf("%+v", p)
				}
				if len(m.said) != 1 || !strings.Contains(m.said[0], c.says) {
					t.Errorf("said %q, not %q", m.said, c.says)
				}
			}
			if _, err := os.Lstat(m.EnvFile); err == nil {
				t.Error("the environment file is still there")
			}
			m.must(os.Chtimes(filepath.Dir(m.EnvFile), time.Time{}, modTime(t, before, "/run")))
			if after := m.tree(); after != before {
				t.Errorf("it changed\n%s\nto\n%s", before, after)
			}
		})
	}
}

// modTime finds the time of a directory in a tree.
func modTime(t *testing.T, tree, name string) time.Time {
	t.Helper()
	for line := range strings.Lines(tree) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), name+" "); ok {
			_, text, _ := strings.Cut(rest, " ")
			at, err := time.Parse("2006-01-02 15:04:05.999999999 -0700 MST", text)
			if err != nil {
				t.Fatal(err)
			}
			return at
		}
	}
	t.Fatalf("%s is not in %s", name, tree)
	return time.Time{}
}

// enabling has the machines on which the kubelet starts with this program, and their files
// afterwards.
type enabling struct {
	arrange func(*machine)
	first   bool
	// cluster is the one in kubelet.conf, copied the token in bootstrap.kubeconfig, empty if
	// there is no such file.
	cluster  cache.Origin
	copied   string
	problems int
	says     []string
}

func enablings(t *testing.T) map[string]enabling {
	here, there := newCluster(t, "https://10.0.0.1:6443"), newCluster(t, "https://10.0.0.2:6443")
	moved := here
	moved.Server = "https://api.example.com:6443"
	bootstrap := func(m *machine, cluster cache.Origin, value string) {
		m.put(m.Bootstrap, kubeconfig(t, cluster, token(value)))
	}
	ours := func(m *machine, cluster cache.Origin) {
		data, err := RenderKubeconfig(cluster, m.Exec)
		m.must(err)
		m.put(m.Kubeconfig, data)
	}
	joined := func(m *machine) { // as it is before the first certificate
		bootstrap(m, here, "one")
		m.prepare()
	}
	return map[string]enabling{
		"kubeadm joins a worker": {func(m *machine) { bootstrap(m, here, "one") }, true, here, "one", 0, []string{"copied", "wrote", "wrote"}},
		"a control plane": {func(m *machine) {
			bootstrap(m, here, "one")
			m.put(filepath.Join(m.Manifests, ServerManifest), nil)
		}, false, here, "one", 0, []string{"copied", "wrote", "wrote"}},
		"again, before there is a certificate": {joined, true, here, "one", 0, nil},
		"kubeadm has deleted its file":         {func(m *machine) { joined(m); m.must(os.Remove(m.Bootstrap)) }, true, here, "one", 0, nil},
		"the environment file is gone with the boot": {func(m *machine) { joined(m); m.enrolled(here); m.must(os.RemoveAll(filepath.Dir(m.EnvFile))) },
			false, here, "one", 0, []string{"wrote"}},
		"another environment": {func(m *machine) { joined(m); m.put(m.EnvFile, []byte("A=b\n")) }, true, here, "one", 0, []string{"wrote"}},
		"a certificate that has been set aside": {func(m *machine) {
			joined(m)
			m.enrolled(here)
			_, err := m.Certs.SetAside(cache.CurrentFile, time.Now())
			m.must(err)
		}, false, here, "one", 0, nil},
		"a certificate that was deleted": {func(m *machine) {
			joined(m)
			m.locked(func(l *cache.Lock) error { return l.SetState(&cache.State{Issued: time.Now()}) })
		}, false, here, "one", 0, nil},
		"the bootstrap credential has served": {func(m *machine) {
			joined(m)
			m.enrolled(here)
			spent := Fingerprint([]byte(m.read(m.Certs.File(cache.BootstrapFile))))
			m.locked(func(l *cache.Lock) error {
				return errors.Join(l.SetState(&cache.State{SpentBootstrap: spent}), l.RemoveBootstrap())
			})
		}, false, here, "", 0, nil},
		"a newer token": {func(m *machine) { joined(m); bootstrap(m, here, "two") }, true, here, "two", 0, []string{"copied"}},
		"joined to another cluster, after kubeadm reset": {func(m *machine) {
			joined(m)
			m.enrolled(here)
			m.must(os.Remove(m.Kubeconfig))
			bootstrap(m, there, "two")
		}, true, there, "two", 0, []string{"copied", "wrote"}},
		"joined to another cluster, without": {func(m *machine) { joined(m); m.enrolled(here); bootstrap(m, there, "two") }, true, there, "two", 0, []string{"copied", "wrote"}},
		"joined again, the API server has moved": {func(m *machine) { joined(m); m.enrolled(here); bootstrap(m, moved, "two") },
			false, here, "two", 0, []string{"copied"}},
		"an operator has given it another server": {func(m *machine) { joined(m); m.must(os.Remove(m.Kubeconfig)); ours(m, moved) }, true, moved, "one", 0, nil},
		"an operator's own kubelet.conf with us": {func(m *machine) {
			user := execUser(m.root + "/kubelet-authenticator-acme")
			m.put(user.Exec.Command, nil)
			user.Exec.Args = []string{"--provider=acme"}
			m.put(m.Kubeconfig, kubeconfig(t, here, user))
			bootstrap(m, here, "one")
		}, true, here, "one", 0, []string{"copied", "wrote"}},
		"one with more in it is not written over": {func(m *machine) {
			ours(m, here)
			m.put(m.Kubeconfig, append([]byte(m.read(m.Kubeconfig)), "- context:\n    cluster: kubernetes\n    user: node\n  name: more\n"...))
			data := strings.Replace(m.read(m.Kubeconfig), "- context:\n    cluster: kubernetes\n    user: node\n  name: more\n", "", 1)
			m.put(m.Kubeconfig, []byte(strings.Replace(data, "contexts:\n", "contexts:\n- context:\n    cluster: kubernetes\n    user: node\n  name: more\n", 1)))
			bootstrap(m, there, "two")
		}, true, here, "two", 1, []string{"copied", "wrote"}},
		"kubeadm joins through an exec plugin": {func(m *machine) { m.put(m.Bootstrap, kubeconfig(t, here, execUser(program))); m.enrolled(here) },
			false, here, "", 0, []string{"token or a client certificate", "wrote", "wrote"}},
		"a bootstrap kubeconfig that cannot be read": {func(m *machine) { joined(m); m.put(m.Bootstrap, []byte("{")) }, true, here, "one", 1, nil},
		"without TLS": {func(m *machine) {
			joined(m)
			m.put(m.Bootstrap, kubeconfig(t, cache.Origin{Server: "http://10.0.0.2:8080"}, token("two")))
		}, true, here, "one", 1, nil},
		"an operator's own bootstrap.kubeconfig": {func(m *machine) {
			m.must(m.Certs.Create())
			m.put(m.Certs.File(cache.BootstrapFile), kubeconfig(t, here, token("static")))
			bootstrap(m, here, "one")
		}, true, here, "static", 0, []string{"is not changed", "wrote", "wrote"}},
		"a static credential by name": {func(m *machine) {
			m.Static = filepath.Join(m.root, "static.conf")
			m.put(m.Static, kubeconfig(t, here, token("static")))
		}, true, here, "", 0, []string{"wrote", "wrote"}},
		"a static credential by name, and kubeadm's": {func(m *machine) {
			m.Static = filepath.Join(m.root, "static.conf")
			m.put(m.Static, kubeconfig(t, here, token("static")))
			bootstrap(m, there, "one")
		}, true, there, "", 0, []string{"wrote", "wrote"}},
		"a static credential by name, and kubeadm's, before the kubelet's configuration": {func(m *machine) {
			m.must(os.Remove(m.KubeletConfig))
			m.Static = filepath.Join(m.root, "static.conf")
			m.put(m.Static, kubeconfig(t, here, token("static")))
			bootstrap(m, here, "one")
		}, true, here, "", 0, []string{"wrote", "wrote"}},
		"the copy alone": {func(m *machine) { joined(m); m.must(errors.Join(os.Remove(m.Bootstrap), os.Remove(m.Kubeconfig))) },
			true, here, "one", 0, []string{"wrote"}},
		"a copy that others can read": {func(m *machine) { joined(m); m.must(os.Chmod(m.Certs.File(cache.BootstrapFile), 0o644)) },
			true, here, "one", 0, []string{"copied"}},
		"the CA in a file of its own": {func(m *machine) {
			m.put(m.root+"/etc/ca.crt", here.CertificateAuthorityData)
			config := clientcmdapi.NewConfig()
			config.Clusters["k"] = &clientcmdapi.Cluster{Server: here.Server, CertificateAuthority: "ca.crt"}
			config.AuthInfos["u"] = token("one")
			config.Contexts["c"] = &clientcmdapi.Context{Cluster: "k", AuthInfo: "u"}
			config.CurrentContext = "c"
			m.put(m.Bootstrap, encode(t, config))
		}, true, here, "one", 0, []string{"copied", "wrote", "wrote"}},
	}
}

func TestPrepare(t *testing.T) {
	old := syscall.Umask(0) // the modes are ours, whatever the unit says
	defer syscall.Umask(old)
	for name, c := range enablings(t) {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			c.arrange(m)
			p := m.prepare()
			if !p.Enabled || p.First != c.first || len(p.Problems) != c.problems {
				t.Errorf("%+v", p)
			}
			if len(m.said) != len(c.says) {
				t.Errorf("said %q", m.said)
			}
			for i := range min(len(m.said), len(c.says)) {
				if !strings.Contains(m.said[i], c.says[i]) {
					t.Errorf("said %q, not %q", m.said[i], c.says[i])
				}
			}
			m.check(c, p)

			before := m.tree()
			again := m.prepare()
			if after := m.tree(); after != before {
				t.Errorf("the second one changed\n%s\nto\n%s", before, after)
			}
			if again.First != p.First {
				t.Errorf("the second one: first is %v", again.First)
			}
			for _, line := range m.said {
				if strings.HasPrefix(line, "wrote ") || strings.HasPrefix(line, "copied ") {
					t.Errorf("the second one %s", line)
				}
			}
		})
	}
}

// check checks the files after Prepare.
func (m *machine) check(c enabling, p Preparation) {
	m.t.Helper()
	if got, want := m.read(m.EnvFile), "KUBELET_KUBECONFIG_ARGS=--kubeconfig="+m.Kubeconfig+" --rotate-certificates=false\n"; got != want {
		m.t.Errorf("environment: %q", got)
	}
	k := ReadKubeconfig(m.Kubeconfig, "")
	if k.Kind != Ours || !sameAccess(k.Cluster, c.cluster) || !sameAccess(p.Cluster, c.cluster) {
		m.t.Errorf("kubelet.conf: %s, cluster %q, reported %q, want %q", k.Kind, k.Cluster.Server, p.Cluster.Server, c.cluster.Server)
	}
	copied := ReadKubeconfig(m.Certs.File(cache.BootstrapFile), "")
	if c.copied == "" {
		if copied.Kind != Missing {
			m.t.Errorf("there is a copy: %+v", copied)
		}
	} else if copied.Kind != OtherUser || copied.user.Token != c.copied {
		m.t.Errorf("copy: %s %v", copied.Kind, copied.Problem)
	}
	for _, path := range []string{m.EnvFile, m.Kubeconfig, m.Certs.File(cache.BootstrapFile)} {
		if info, err := os.Lstat(path); err == nil && info.Mode() != 0o600 {
			m.t.Errorf("%s: mode %s", path, info.Mode())
		}
	}
	if info, err := os.Lstat(m.Certs.Path()); err == nil && info.Mode().Perm() != 0o700 {
		m.t.Errorf("certificate directory: mode %s", info.Mode())
	}
}

// If the program was behind a link, an upgrade leaves a kubelet.conf that names a missing file.
func TestPrepareAfterAnUpgrade(t *testing.T) {
	cluster := newCluster(t, "https://10.0.0.1:6443")
	more := "users:\n- name: more\n  user: {}\n"
	for name, c := range map[string]struct {
		command func(*machine) string
		more    bool
		mended  bool
	}{
		"gone": {func(m *machine) string { return m.root + "/1.0/kubelet-authenticator" }, false, true},
		"still there": {func(m *machine) string {
			m.put(m.root+"/1.0/kubelet-authenticator", nil)
			return m.root + "/1.0/kubelet-authenticator"
		}, false, false},
		"found by PATH":               {func(*machine) string { return "kubelet-authenticator" }, false, false},
		"this one, although gone":     {func(*machine) string { return program }, false, false},
		"gone, and the file has more": {func(m *machine) string { return m.root + "/1.0/kubelet-authenticator" }, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.enrolled(cluster)
			user := execUser(c.command(m))
			user.Exec.Args, user.Exec.Env = []string{"--provider=acme"}, []clientcmdapi.ExecEnvVar{{Name: "A", Value: "b"}}
			data := string(kubeconfig(t, cluster, user))
			if c.more {
				data = strings.Replace(data, "users:\n", more, 1)
			}
			m.put(m.Kubeconfig, []byte(data))
			want := data
			if c.mended {
				want = strings.Replace(data, user.Exec.Command, program, 1)
			}
			for _, lines := range []int{2, 0} {
				if !c.mended && lines > 0 {
					lines--
				}
				if p := m.prepare(); !p.Enabled || len(p.Problems) > 0 || len(m.said) != lines {
					t.Errorf("%+v %q", p, m.said)
				}
				if got := m.read(m.Kubeconfig); got != want {
					t.Errorf("%s\nnot\n%s", got, want)
				}
			}
		})
	}
}

// If Prepare is killed after any write, the next run has the same result.
func TestPrepareIsKilled(t *testing.T) {
	type killed struct{}
	for name, c := range enablings(t) {
		for after := range c.says {
			t.Run(fmt.Sprint(name, " ", after), func(t *testing.T) {
				m := newMachine(t)
				c.arrange(m)
				func() {
					defer func() {
						if got := recover(); got != (killed{}) {
							t.Fatal(got)
						}
					}()
					lines := 0
					_, err := Prepare(m.Setup, func(string) {
						if lines++; lines > after {
							panic(killed{})
						}
					})
					t.Fatal("it was not killed", err)
				}()
				p := m.prepare()
				if !p.Enabled || p.First != c.first {
					t.Errorf("%+v", p)
				}
				m.check(c, p)
			})
		}
	}
}

// A node that has joined is not stopped because the folder of kubelet.conf is open. But a machine
// joins no cluster that another user may name.
func TestPrepareWithAnOpenFolder(t *testing.T) {
	cluster := newCluster(t, "https://10.0.0.1:6443")
	for _, joined := range []bool{true, false} {
		m := newMachine(t)
		m.put(m.Kubeconfig, kubeconfig(t, cluster, execUser(program)))
		m.put(m.Certs.File(cache.BootstrapFile), kubeconfig(t, cluster, token("one")))
		if joined {
			m.enrolled(cluster)
		}
		m.must(os.Chmod(filepath.Dir(m.Kubeconfig), 0o777))
		p, err := Prepare(m.Setup, func(string) {})
		if joined && (err != nil || !p.Enabled || len(p.Problems) == 0 || !strings.Contains(errors.Join(p.Problems...).Error(), "others may write into it")) {
			t.Errorf("joined: %+v, %v", p, err)
		}
		if unprepared := new(UnpreparedError); !joined && (!errors.As(err, &unprepared) || p.Enabled) {
			t.Errorf("not joined: %+v, %v", p, err)
		}
	}
}

// Without its environment file the kubelet would request a certificate itself with the existing
// bootstrap kubeconfig. Then it must not start.
func TestKubeletMustNotStart(t *testing.T) {
	for name, arrange := range map[string]func(*machine){
		"a file in place of its directory": func(m *machine) { m.put(filepath.Dir(m.EnvFile), nil) },
		"others may write there": func(m *machine) {
			m.must(errors.Join(os.Mkdir(filepath.Dir(m.EnvFile), 0o777), os.Chmod(filepath.Dir(m.EnvFile), 0o777)))
		},
		"a bootstrap kubeconfig without TLS": func(m *machine) {
			m.put(m.Bootstrap, kubeconfig(t, cache.Origin{Server: "http://10.0.0.2:8080"}, token("two")))
		},
		"one that cannot be read":  func(m *machine) { m.put(m.Bootstrap, []byte("{")) },
		"a directory in its place": func(m *machine) { m.must(os.MkdirAll(m.EnvFile+"/x", 0o755)) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.put(m.Bootstrap, kubeconfig(t, newCluster(t, "https://10.0.0.1:6443"), token("one")))
			arrange(m)
			var unprepared *UnpreparedError
			if _, err := Prepare(m.Setup, func(string) {}); !errors.As(err, &unprepared) {
				t.Error(err)
			}
		})
	}
}

// A file that cannot be read may be ours. Without the environment file, a kubelet with a bootstrap
// kubeconfig would join without attestation. A kubelet that has joined would not start.
func TestUnreadableKubeletConf(t *testing.T) {
	cluster := newCluster(t, "https://10.0.0.1:6443")
	ours := kubeconfig(t, cluster, execUser(program))
	joined := map[string]func(*machine){
		"joining": func(m *machine) { m.put(m.Bootstrap, kubeconfig(t, cluster, token("one"))) },
		"copied":  func(m *machine) { m.put(m.Certs.File(cache.BootstrapFile), kubeconfig(t, cluster, token("one"))) },
		"joined":  func(m *machine) { m.enrolled(cluster) },
		"static": func(m *machine) {
			m.Static = filepath.Join(m.root, "static.conf")
			m.put(m.Static, kubeconfig(t, cluster, token("static")))
		},
	}
	for name, c := range map[string]struct {
		arrange func(*machine)
		says    string
	}{
		"garbage":     {func(m *machine) { m.put(m.Kubeconfig, []byte("{")) }, "cannot be read as a kubeconfig"},
		"torn":        {func(m *machine) { m.put(m.Kubeconfig, ours[:len(ours)/2]) }, "kubelet.conf"},
		"empty":       {func(m *machine) { m.put(m.Kubeconfig, nil) }, "no current-context"},
		"a directory": {func(m *machine) { m.must(os.MkdirAll(m.Kubeconfig, 0o755)) }, "not a regular file"},
		"a link to one of ours": {func(m *machine) {
			m.put(m.root+"/elsewhere", ours)
			m.must(os.Symlink(m.root+"/elsewhere", m.Kubeconfig))
		}, "symbolic link"},
		"a link to nothing":                 {func(m *machine) { m.must(os.Symlink(m.root+"/nothing", m.Kubeconfig)) }, "symbolic link"},
		"one of ours that others may write": {func(m *machine) { m.put(m.Kubeconfig, ours); m.must(os.Chmod(m.Kubeconfig, 0o664)) }, "others may write it"},
		"one of ours that is another user's": {func(m *machine) {
			if os.Geteuid() != 0 {
				t.Skip("only root can give a file away")
			}
			m.put(m.Kubeconfig, ours)
			m.must(os.Chown(m.Kubeconfig, 65534, 65534))
		}, "another user"},
	} {
		for how, join := range joined {
			t.Run(name+", "+how, func(t *testing.T) {
				m := newMachine(t)
				join(m)
				m.put(m.EnvFile, Environment(m.Kubeconfig))
				c.arrange(m)
				before := m.tree()
				var unprepared *UnpreparedError
				if _, err := Prepare(m.Setup, func(string) {}); !errors.As(err, &unprepared) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("%v, not %q", err, c.says)
				}
				if after := m.tree(); after != before {
					t.Errorf("it changed\n%s\nto\n%s", before, after)
				}
			})
		}
	}
}

// Two concurrent runs do not remove each other's half-written files.
func TestPrepareBesideAnother(t *testing.T) {
	cluster := newCluster(t, "https://10.0.0.1:6443")
	for range 50 {
		m := newMachine(t)
		m.put(m.Bootstrap, kubeconfig(t, cluster, token("one")))
		m.must(m.Certs.Create())
		failed := make(chan error)
		for range 4 {
			go func() {
				p, err := Prepare(m.Setup, func(string) {})
				failed <- errors.Join(append(p.Problems, err)...)
			}()
		}
		for range 4 {
			if err := <-failed; err != nil {
				t.Error(err)
			}
		}
		m.check(enabling{cluster: cluster, copied: "one"}, Preparation{Cluster: cluster})
	}
}

func TestCheckSetup(t *testing.T) {
	if err := newMachine(t).Check(); err != nil {
		t.Error(err)
	}
	named := newMachine(t)
	if named.Static = "/etc/static credential.conf"; named.Check() != nil {
		t.Error(named.Check())
	}
	for says, change := range map[string]func(*Setup, string){
		"kubeletKubeconfig":          func(s *Setup, path string) { s.Kubeconfig = path },
		"kubeletBootstrapKubeconfig": func(s *Setup, path string) { s.Bootstrap = path },
		"bootstrapKubeconfig":        func(s *Setup, path string) { s.Static = path },
		"certDir":                    func(s *Setup, path string) { s.Certs = cache.At(path) },
		"--config":                   func(s *Setup, path string) { s.Config = path },
		"--env-file":                 func(s *Setup, path string) { s.EnvFile = path },
		"--manifests":                func(s *Setup, path string) { s.Manifests = path },
		"--kubelet-config":           func(s *Setup, path string) { s.KubeletConfig = path },
	} {
		paths := []string{"etc/kubelet.conf", "./x"}
		if strings.HasPrefix(says, "kubelet") {
			paths = append(paths, "", "/etc/a b", "/etc/a --rotate-certificates=true", `/etc/"a"`, "/etc/a'", "/etc/$A", "/etc/a\nB=c", "/etc/a\n", `/etc/a\`, "/")
		}
		for _, path := range paths {
			m := newMachine(t)
			change(&m.Setup, path)
			if err := m.Check(); err == nil || !strings.HasPrefix(err.Error(), says+" ") {
				t.Errorf("%s %q: %v", says, path, err)
			}
		}
	}
}

// A link in place of a file to write is replaced or refused, and never followed.
func TestPrepareFollowsNoLink(t *testing.T) {
	m := newMachine(t)
	m.put(m.Bootstrap, kubeconfig(t, newCluster(t, "https://10.0.0.1:6443"), token("secret")))
	victim := filepath.Join(m.root, "victim")
	m.put(victim, []byte("precious"))
	m.must(errors.Join(m.Certs.Create(), os.Mkdir(filepath.Dir(m.EnvFile), 0o700),
		os.Symlink(victim, m.EnvFile), os.Symlink(victim, m.Certs.File(cache.BootstrapFile))))
	p := m.prepare()
	if len(p.Problems) != 1 || !strings.Contains(p.Problems[0].Error(), "symbolic link") {
		t.Errorf("%+v", p)
	}
	if got := m.read(victim); got != "precious" {
		t.Errorf("it wrote through a link: %q", got)
	}
	if info, err := os.Lstat(m.EnvFile); err != nil || !info.Mode().IsRegular() {
		t.Errorf("environment file: %v %v", info, err)
	}
	m.must(errors.Join(os.Remove(m.EnvFile), os.Symlink(victim, m.EnvFile), os.Remove(m.Config)))
	m.prepare()
	if _, err := os.Lstat(m.EnvFile); err == nil || m.read(victim) != "precious" {
		t.Errorf("the link is to go, and nothing else: %v", err)
	}
}
