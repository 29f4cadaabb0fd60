// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"crypto/x509"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

func ofNode(name string) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.Subject.CommonName = "system:node:" + name }
}

// looked is what look should find.
type looked struct {
	prints bool
	lack   string        // part of why nothing can be printed
	reason reason.Reason // of the lack, as a Failure
	final  bool
	aside  bool
	due    string // part of why another is wanted
	remark string // part of what a person should know
	// testNode is the name to ask a certificate for.
	node string
}

func TestLook(t *testing.T) {
	t.Parallel()
	ca, otherCA := plugintest.NewCA(t), plugintest.NewCA(t)
	const rotten = "-----BEGIN PRIVATE KEY-----\nhunter2hunter2\n-----END PRIVATE KEY-----\n"
	cluster := func(server string, ca []byte) ExecInfo {
		return ExecInfo{APIVersion: execV1, Cluster: &clientauthentication.Cluster{Server: server, CertificateAuthorityData: ca}}
	}
	from := func(pair *cache.Pair, server string, ca []byte) *cache.Pair {
		pair.Origin = &cache.Origin{Server: server, CertificateAuthorityData: ca}
		return pair
	}
	noted := func(a *Authenticator, n note) { a.note.write(n) }

	for name, c := range map[string]struct {
		prepare func(t *testing.T, a *Authenticator)
		want    looked
	}{
		"nothing there": {
			func(*testing.T, *Authenticator) {},
			looked{lack: "no such file", node: "a"},
		},
		"an empty directory": {
			func(t *testing.T, a *Authenticator) { plugintest.Put(t, a.dir, "other", nil, 0o600) },
			looked{lack: "no such file", node: "a"},
		},
		"a good certificate": {
			func(t *testing.T, a *Authenticator) { plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil)) },
			looked{prints: true, node: "a"},
		},
		"one that is about to end": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, func(c *x509.Certificate) { c.NotAfter = plugintest.Noon.Add(time.Second) }))
			},
			looked{prints: true, due: "nearly over", node: "a"},
		},
		"one that has ended": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, func(c *x509.Certificate) { c.NotAfter = plugintest.Noon }))
			},
			looked{lack: "expired", reason: reason.ClockWrong, node: "a"},
		},
		"one of tomorrow": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, func(c *x509.Certificate) { c.NotBefore = plugintest.Noon.Add(11 * time.Minute) }))
			},
			looked{prints: true, remark: "not valid before", node: "a"},
		},
		"one for servers": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }))
			},
			looked{lack: "client authentication", reason: reason.CertificateUnusable, node: "a"},
		},
		"an administrator's": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, func(c *x509.Certificate) { c.Subject.Organization = []string{"system:masters"} }))
			},
			looked{lack: "organization", reason: reason.CertificateUnusable, node: "a"},
		},
		"due": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, func(c *x509.Certificate) {
					c.NotBefore, c.NotAfter = plugintest.Noon.Add(-91*time.Minute), plugintest.Noon.Add(9*time.Minute)
				}))
			},
			looked{prints: true, due: "nearly over", node: "a"},
		},
		"due, but the provider does not renew": {
			func(t *testing.T, a *Authenticator) {
				a.provider = plugintest.Provider{}
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, func(c *x509.Certificate) {
					c.NotBefore, c.NotAfter = plugintest.Noon.Add(-91*time.Minute), plugintest.Noon.Add(9*time.Minute)
				}))
			},
			looked{prints: true, node: "a"},
		},
		"not due yet": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, func(c *x509.Certificate) {
					c.NotBefore, c.NotAfter = plugintest.Noon.Add(-69*time.Minute), plugintest.Noon.Add(31*time.Minute)
				}))
			},
			looked{prints: true, node: "a"},
		},
		"another node's": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, ofNode("b")))
			},
			looked{lack: `for node "b"`, node: "a"},
		},
		"another node's, served to this very kubelet before, but a name was given": {
			func(t *testing.T, a *Authenticator) {
				pair := plugintest.NewPair(t, ofNode("b"))
				plugintest.InstallPair(t, a.dir, pair)
				a.parent = asker
				noted(a, note{Parent: asker, Certificate: pair.Fingerprint()})
			},
			looked{lack: `for node "b"`, node: "a"},
		},
		"no name to be had": {
			func(t *testing.T, a *Authenticator) {
				a.nodeName = "Not_A_Name"
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
			},
			looked{prints: true, remark: "DNS-1123", node: "a"},
		},
		"of the cluster asked for": {
			func(t *testing.T, a *Authenticator) {
				a.exec = cluster("https://new-address", ca)
				plugintest.InstallPair(t, a.dir, from(plugintest.NewPair(t, nil), "https://old-address", ca))
			},
			looked{prints: true, node: "a"},
		},
		"of another cluster": {
			func(t *testing.T, a *Authenticator) {
				a.exec = cluster("https://x", otherCA)
				plugintest.InstallPair(t, a.dir, from(plugintest.NewPair(t, nil), "https://x", ca))
			},
			looked{prints: true, due: "another CA", node: "a"},
		},
		"of a cluster, none asked for": {
			func(t *testing.T, a *Authenticator) {
				a.exec = ExecInfo{APIVersion: execV1}
				plugintest.InstallPair(t, a.dir, from(plugintest.NewPair(t, nil), "https://x", ca))
			},
			looked{prints: true, node: "a"},
		},
		"of no known cluster": {
			func(t *testing.T, a *Authenticator) {
				a.exec = cluster("https://x", ca)
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
			},
			looked{prints: true, node: "a"},
		},
		"others can read it": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
				if err := os.Chmod(a.dir.File(cache.CurrentFile), 0o640); err != nil {
					t.Fatal(err)
				}
			},
			looked{prints: true, due: "others could read", node: "a"},
		},
		"others can read it, and the provider does not renew": {
			func(t *testing.T, a *Authenticator) {
				a.provider = plugintest.Provider{}
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
				if err := os.Chmod(a.dir.File(cache.CurrentFile), 0o604); err != nil {
					t.Fatal(err)
				}
			},
			looked{prints: true, due: "others could read", node: "a"},
		},
		"others can write it": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
				if err := os.Chmod(a.dir.File(cache.CurrentFile), 0o660); err != nil {
					t.Fatal(err)
				}
			},
			looked{lack: "others may write", aside: true, node: "a"},
		},
		"a link to it": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
				if err := errors.Join(os.Rename(a.dir.File(cache.CurrentFile), a.dir.File("x")), os.Symlink("x", a.dir.File(cache.CurrentFile))); err != nil {
					t.Fatal(err)
				}
			},
			looked{lack: "link", aside: true, node: "a"},
		},
		"damaged": {
			func(t *testing.T, a *Authenticator) {
				plugintest.Put(t, a.dir, cache.CurrentFile, []byte(rotten), 0o600)
			},
			looked{lack: "certificate", aside: true, node: "a"},
		},
		"cut short": {
			func(t *testing.T, a *Authenticator) {
				pair := plugintest.NewPair(t, nil)
				plugintest.Put(t, a.dir, cache.CurrentFile, append(bytes.Clone(pair.Chain), pair.Key[:len(pair.Key)/2]...), 0o600)
			},
			looked{lack: "private key", aside: true, node: "a"},
		},
		"empty": {
			func(t *testing.T, a *Authenticator) { plugintest.Put(t, a.dir, cache.CurrentFile, nil, 0o600) },
			looked{lack: "certificate", aside: true, node: "a"},
		},
		"rejected": {
			func(t *testing.T, a *Authenticator) {
				pair := plugintest.NewPair(t, nil)
				plugintest.InstallPair(t, a.dir, pair)
				noted(a, note{Certificate: pair.Fingerprint(), Rejected: true})
			},
			looked{prints: true, due: "rejects", node: "a"},
		},
		"the one before was rejected": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
				noted(a, note{Certificate: plugintest.NewPair(t, nil).Fingerprint(), Rejected: true})
			},
			looked{prints: true, node: "a"},
		},
		"a note that makes no sense": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
				noted(a, note{})
				if err := os.WriteFile(a.note.path(), []byte(`{"rejected":true`), 0o600); err != nil {
					t.Fatal(err)
				}
			},
			looked{prints: true, node: "a"},
		},
		"a directory that others can write": {
			func(t *testing.T, a *Authenticator) {
				plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
				if err := os.Chmod(a.dir.Path(), 0o770); err != nil {
					t.Fatal(err)
				}
			},
			looked{lack: "others may write into it", reason: reason.DirectoryRefused, final: true, node: "a"},
		},
		"a file in the directory's place": {
			func(t *testing.T, a *Authenticator) {
				if err := os.WriteFile(a.dir.Path(), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			},
			looked{lack: "not a directory", reason: reason.DirectoryRefused, final: true, node: "a"},
		},
		"a directory below a file": {
			func(t *testing.T, a *Authenticator) {
				if err := os.WriteFile(a.dir.Path(), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				a.dir = cache.At(a.dir.File("certs"))
			},
			looked{lack: "not a directory", reason: reason.DirectoryRefused, final: true, node: "a"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := testAuthenticator(t)
			c.prepare(t, a)
			run := filepath.Dir(a.note.path())
			before := plugintest.Snapshot(t, filepath.Dir(a.dir.Path())) + plugintest.Snapshot(t, run)
			s := a.loadStatus()
			if after := plugintest.Snapshot(t, filepath.Dir(a.dir.Path())) + plugintest.Snapshot(t, run); after != before {
				t.Errorf("looking changed something:\n%s\nnow\n%s", before, after)
			}
			if (s.pair != nil) != c.want.prints || s.permanent != c.want.final || s.damaged != c.want.aside || s.nodeName != c.want.node {
				t.Errorf("pair %v, final %v, aside %v, node %q: want %+v", s.pair != nil, s.permanent, s.damaged, s.nodeName, c.want)
			}
			if (s.due == "") != (c.want.due == "") || !strings.Contains(s.due, c.want.due) {
				t.Errorf("due %q, want %q", s.due, c.want.due)
			}
			if s.rejected != (c.want.due == "rejects") {
				t.Errorf("rejected %v", s.rejected)
			}
			if s.foreign != (c.want.due == "another CA") {
				t.Errorf("foreign %v", s.foreign)
			}
			if (s.remark == nil) != (c.want.remark == "") || s.remark != nil && !strings.Contains(s.remark.Error(), c.want.remark) {
				t.Errorf("remark %v, want %q", s.remark, c.want.remark)
			}
			if (s.problem != nil) == c.want.prints {
				t.Fatalf("lack %v, although it can be printed: %v", s.problem, c.want.prints)
			}
			if s.problem == nil {
				return
			}
			if !strings.Contains(s.problem.Error(), c.want.lack) || plugintest.NotOneLine(s.problem.Error()) != "" || strings.Contains(s.problem.Error(), "hunter2") {
				t.Errorf("lack %q, want %q", s.problem, c.want.lack)
			}
			if errors.Is(s.problem, fs.ErrNotExist) != (c.want.lack == "no such file") {
				t.Errorf("lack is that there is none: %v", s.problem)
			}
			if got := reason.AsFailure(s.problem).Reason; c.want.reason != "" && got != c.want.reason {
				t.Errorf("reason %s, want %s", got, c.want.reason)
			}
		})
	}
}

// A host's name can be wrong for a moment at boot, and change under a living kubelet: it takes no
// certificate away.
func TestHostOfAnotherName(t *testing.T) {
	if _, err := os.Stat(nodeaccess.KubeadmFlagsFile); err == nil {
		t.Skip("this machine is a node: its name is not derived")
	}
	a := testAuthenticator(t)
	a.nodeName = ""
	plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, ofNode("renamed-since.example.com")))
	s := a.loadStatus()
	if s.pair == nil || s.due != "" || s.nodeName != "renamed-since.example.com" || s.remark == nil || !strings.Contains(s.remark.Error(), "renamed-since.example.com") {
		t.Errorf("pair %v, due %q, node %q, remark %v", s.pair != nil, s.due, s.nodeName, s.remark)
	}
	// Once it has ended, the host's name is the node's.
	a.now = func() time.Time { return plugintest.Noon.Add(24 * time.Hour) }
	host, err := os.Hostname()
	if s := a.loadStatus(); err != nil || s.pair != nil || s.nodeName != strings.ToLower(host) {
		t.Errorf("after its end: pair %v, node %q, %v", s.pair != nil, s.nodeName, err)
	}
}

// Under a configuration that is wrong nothing in it is judged.
func TestWrongConfigurationTakesNoCertificateAway(t *testing.T) {
	a := testAuthenticator(t)
	a.invalid, a.nodeName = errors.New("wrong"), ""
	plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, nil))
	if s := a.loadStatus(); s.pair == nil {
		t.Errorf("nothing to print: %v", s.problem)
	}
}

// A name that was given is not forgotten because something else in the configuration is wrong:
// another node's certificate is not printed.
func TestWrongConfigurationWithAName(t *testing.T) {
	a := testAuthenticator(t)
	a.invalid = errors.New("wrong")
	plugintest.InstallPair(t, a.dir, plugintest.NewPair(t, ofNode("b")))
	if s := a.loadStatus(); s.pair != nil {
		t.Error("another node's certificate would be printed")
	}
}

// What another cluster called this machine is not its name in this one.
func TestForeignCertificateNamesNoNode(t *testing.T) {
	if _, err := os.Stat(nodeaccess.KubeadmFlagsFile); err == nil {
		t.Skip("this machine is a node: its name is not derived")
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	a := testAuthenticator(t)
	a.nodeName = ""
	a.exec = ExecInfo{APIVersion: execV1, Cluster: &clientauthentication.Cluster{Server: "https://new", CertificateAuthorityData: plugintest.NewCA(t)}}
	pair := plugintest.NewPair(t, ofNode("old-1"))
	pair.Origin = &cache.Origin{Server: "https://old", CertificateAuthorityData: plugintest.NewCA(t)}
	plugintest.InstallPair(t, a.dir, pair)
	if s := a.loadStatus(); s.pair == nil || !s.foreign || s.nodeName != strings.ToLower(host) {
		t.Errorf("pair %v, foreign %v, node %q", s.pair != nil, s.foreign, s.nodeName)
	}
}
