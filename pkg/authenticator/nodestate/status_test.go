// SPDX-License-Identifier: Apache-2.0

package nodestate

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

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// looked is what Load should find.
type looked struct {
	prints bool
	lack   string        // part of why nothing can be printed
	reason reason.Reason // of the lack, as a Failure
	final  bool
	aside  bool
	due    string // part of why another is wanted
	remark string // part of what a person should know
	// node is the name to ask a certificate for.
	node string
}

func TestLoad(t *testing.T) {
	t.Parallel()
	ca, otherCA := plugintest.NewCA(t), plugintest.NewCA(t)
	const rotten = "-----BEGIN PRIVATE KEY-----\nhunter2hunter2\n-----END PRIVATE KEY-----\n"
	cluster := func(server string, ca []byte) *cache.Origin {
		return &cache.Origin{Server: server, CertificateAuthorityData: ca}
	}
	from := func(pair *cache.Pair, server string, ca []byte) *cache.Pair {
		pair.Origin = &cache.Origin{Server: server, CertificateAuthorityData: ca}
		return pair
	}
	noted := func(a *Node, n Note) { a.Note.Write(n) }

	for name, c := range map[string]struct {
		prepare func(t *testing.T, a *Node)
		want    looked
	}{
		"nothing there": {
			func(*testing.T, *Node) {},
			looked{lack: "no such file", node: "a"},
		},
		"an empty directory": {
			func(t *testing.T, a *Node) { plugintest.Put(t, a.Dir(), "other", nil, 0o600) },
			looked{lack: "no such file", node: "a"},
		},
		"a good certificate": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
			},
			looked{prints: true, node: "a"},
		},
		"one that is about to end": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) { c.NotAfter = plugintest.Noon.Add(time.Second) }))
			},
			looked{prints: true, due: "nearly over", node: "a"},
		},
		"one that has ended": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) { c.NotAfter = plugintest.Noon }))
			},
			looked{lack: "expired", reason: reason.ClockWrong, node: "a"},
		},
		"one of tomorrow": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) { c.NotBefore = plugintest.Noon.Add(11 * time.Minute) }))
			},
			looked{prints: true, remark: "not valid before", node: "a"},
		},
		"one for servers": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }))
			},
			looked{lack: "client authentication", reason: reason.CertificateUnusable, node: "a"},
		},
		"an administrator's": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) { c.Subject.Organization = []string{"system:masters"} }))
			},
			looked{lack: "organization", reason: reason.CertificateUnusable, node: "a"},
		},
		"due": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) {
					c.NotBefore, c.NotAfter = plugintest.Noon.Add(-91*time.Minute), plugintest.Noon.Add(9*time.Minute)
				}))
			},
			looked{prints: true, due: "nearly over", node: "a"},
		},
		"due, but the provider does not renew": {
			func(t *testing.T, a *Node) {
				a.Access.Renews = (plugintest.Provider{}).CanRenew
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) {
					c.NotBefore, c.NotAfter = plugintest.Noon.Add(-91*time.Minute), plugintest.Noon.Add(9*time.Minute)
				}))
			},
			looked{prints: true, node: "a"},
		},
		"not due yet": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) {
					c.NotBefore, c.NotAfter = plugintest.Noon.Add(-69*time.Minute), plugintest.Noon.Add(31*time.Minute)
				}))
			},
			looked{prints: true, node: "a"},
		},
		"another node's": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, plugintest.OfNode("b")))
			},
			looked{lack: `for node "b"`, node: "a"},
		},
		"another node's, served to this very kubelet before, but a name was given": {
			func(t *testing.T, a *Node) {
				pair := plugintest.NewPair(t, plugintest.OfNode("b"))
				plugintest.InstallPair(t, a.Dir(), pair)
				noted(a, Note{Parent: plugintest.Asker, Certificate: pair.Fingerprint()})
			},
			looked{lack: `for node "b"`, node: "a"},
		},
		"no name to be had": {
			func(t *testing.T, a *Node) {
				a.Name = "Not_A_Name"
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
			},
			looked{prints: true, remark: "DNS-1123", node: "a"},
		},
		"of the cluster asked for": {
			func(t *testing.T, a *Node) {
				a.Access.Asked = cluster("https://new-address", ca)
				plugintest.InstallPair(t, a.Dir(), from(plugintest.NewPair(t, nil), "https://old-address", ca))
			},
			looked{prints: true, node: "a"},
		},
		"of another cluster": {
			func(t *testing.T, a *Node) {
				a.Access.Asked = cluster("https://x", otherCA)
				plugintest.InstallPair(t, a.Dir(), from(plugintest.NewPair(t, nil), "https://x", ca))
			},
			looked{prints: true, due: "another CA", node: "a"},
		},
		"of a cluster, none asked for": {
			func(t *testing.T, a *Node) {
				a.Access.Asked = nil
				plugintest.InstallPair(t, a.Dir(), from(plugintest.NewPair(t, nil), "https://x", ca))
			},
			looked{prints: true, node: "a"},
		},
		"of no known cluster": {
			func(t *testing.T, a *Node) {
				a.Access.Asked = cluster("https://x", ca)
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
			},
			looked{prints: true, node: "a"},
		},
		"others can read it": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
				if err := os.Chmod(a.Dir().File(cache.CurrentFile), 0o640); err != nil {
					t.Fatal(err)
				}
			},
			looked{prints: true, due: "others could read", node: "a"},
		},
		"others can read it, and the provider does not renew": {
			func(t *testing.T, a *Node) {
				a.Access.Renews = (plugintest.Provider{}).CanRenew
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
				if err := os.Chmod(a.Dir().File(cache.CurrentFile), 0o604); err != nil {
					t.Fatal(err)
				}
			},
			looked{prints: true, due: "others could read", node: "a"},
		},
		"others can write it": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
				if err := os.Chmod(a.Dir().File(cache.CurrentFile), 0o660); err != nil {
					t.Fatal(err)
				}
			},
			looked{lack: "others may write", aside: true, node: "a"},
		},
		"a link to it": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
				if err := errors.Join(os.Rename(a.Dir().File(cache.CurrentFile), a.Dir().File("x")), os.Symlink("x", a.Dir().File(cache.CurrentFile))); err != nil {
					t.Fatal(err)
				}
			},
			looked{lack: "link", aside: true, node: "a"},
		},
		"damaged": {
			func(t *testing.T, a *Node) {
				plugintest.Put(t, a.Dir(), cache.CurrentFile, []byte(rotten), 0o600)
			},
			looked{lack: "certificate", aside: true, node: "a"},
		},
		"cut short": {
			func(t *testing.T, a *Node) {
				pair := plugintest.NewPair(t, nil)
				plugintest.Put(t, a.Dir(), cache.CurrentFile, append(bytes.Clone(pair.Chain), pair.Key[:len(pair.Key)/2]...), 0o600)
			},
			looked{lack: "private key", aside: true, node: "a"},
		},
		"empty": {
			func(t *testing.T, a *Node) { plugintest.Put(t, a.Dir(), cache.CurrentFile, nil, 0o600) },
			looked{lack: "certificate", aside: true, node: "a"},
		},
		"rejected": {
			func(t *testing.T, a *Node) {
				pair := plugintest.NewPair(t, nil)
				plugintest.InstallPair(t, a.Dir(), pair)
				noted(a, Note{Certificate: pair.Fingerprint(), Rejected: true})
			},
			looked{prints: true, due: "rejects", node: "a"},
		},
		"the one before was rejected": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
				noted(a, Note{Certificate: plugintest.NewPair(t, nil).Fingerprint(), Rejected: true})
			},
			looked{prints: true, node: "a"},
		},
		"a note that makes no sense": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
				noted(a, Note{})
				if err := os.WriteFile(a.Note.Path(), []byte(`{"rejected":true`), 0o600); err != nil {
					t.Fatal(err)
				}
			},
			looked{prints: true, node: "a"},
		},
		"a directory that others can write": {
			func(t *testing.T, a *Node) {
				plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
				if err := os.Chmod(a.Dir().Path(), 0o770); err != nil {
					t.Fatal(err)
				}
			},
			looked{lack: "others may write into it", reason: reason.DirectoryRefused, final: true, node: "a"},
		},
		"a file in the directory's place": {
			func(t *testing.T, a *Node) {
				if err := os.WriteFile(a.Dir().Path(), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			},
			looked{lack: "not a directory", reason: reason.DirectoryRefused, final: true, node: "a"},
		},
		"a directory below a file": {
			func(t *testing.T, a *Node) {
				if err := os.WriteFile(a.Dir().Path(), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				a.Access.Dir = cache.At(a.Dir().File("certs"))
			},
			looked{lack: "not a directory", reason: reason.DirectoryRefused, final: true, node: "a"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := testNode(t)
			c.prepare(t, a)
			run := filepath.Dir(a.Note.Path())
			before := plugintest.Snapshot(t, filepath.Dir(a.Dir().Path())) + plugintest.Snapshot(t, run)
			s := a.Load()
			if after := plugintest.Snapshot(t, filepath.Dir(a.Dir().Path())) + plugintest.Snapshot(t, run); after != before {
				t.Errorf("looking changed something:\n%s\nnow\n%s", before, after)
			}
			if (s.Pair != nil) != c.want.prints || s.Permanent != c.want.final || s.Damaged != c.want.aside || s.NodeName != c.want.node {
				t.Errorf("pair %v, final %v, aside %v, node %q: want %+v", s.Pair != nil, s.Permanent, s.Damaged, s.NodeName, c.want)
			}
			if (s.Due == "") != (c.want.due == "") || !strings.Contains(s.Due, c.want.due) {
				t.Errorf("due %q, want %q", s.Due, c.want.due)
			}
			if s.Rejected != (c.want.due == "rejects") {
				t.Errorf("rejected %v", s.Rejected)
			}
			if s.Foreign != (c.want.due == "another CA") {
				t.Errorf("foreign %v", s.Foreign)
			}
			if (s.Remark == nil) != (c.want.remark == "") || s.Remark != nil && !strings.Contains(s.Remark.Error(), c.want.remark) {
				t.Errorf("remark %v, want %q", s.Remark, c.want.remark)
			}
			if (s.Problem != nil) == c.want.prints {
				t.Fatalf("lack %v, although it can be printed: %v", s.Problem, c.want.prints)
			}
			if s.Problem == nil {
				return
			}
			if !strings.Contains(s.Problem.Error(), c.want.lack) || plugintest.NotOneLine(s.Problem.Error()) != "" || strings.Contains(s.Problem.Error(), "hunter2") {
				t.Errorf("lack %q, want %q", s.Problem, c.want.lack)
			}
			if errors.Is(s.Problem, fs.ErrNotExist) != (c.want.lack == "no such file") {
				t.Errorf("lack is that there is none: %v", s.Problem)
			}
			if got := reason.AsFailure(s.Problem).Reason; c.want.reason != "" && got != c.want.reason {
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
	a := testNode(t)
	a.Name = ""
	plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, plugintest.OfNode("renamed-since.example.com")))
	s := a.Load()
	if s.Pair == nil || s.Due != "" || s.NodeName != "renamed-since.example.com" || s.Remark == nil || !strings.Contains(s.Remark.Error(), "renamed-since.example.com") {
		t.Errorf("pair %v, due %q, node %q, remark %v", s.Pair != nil, s.Due, s.NodeName, s.Remark)
	}
	// Once it has ended, the host's name is the node's.
	a.Now = func() time.Time { return plugintest.Noon.Add(24 * time.Hour) }
	host, err := os.Hostname()
	if s := a.Load(); err != nil || s.Pair != nil || s.NodeName != strings.ToLower(host) {
		t.Errorf("after its end: pair %v, node %q, %v", s.Pair != nil, s.NodeName, err)
	}
}

// Under a configuration that is wrong nothing in it is judged.
func TestWrongConfigurationTakesNoCertificateAway(t *testing.T) {
	a := testNode(t)
	a.Invalid, a.Name = errors.New("wrong"), ""
	plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
	if s := a.Load(); s.Pair == nil {
		t.Errorf("nothing to print: %v", s.Problem)
	}
}

// A name that was given is not forgotten because something else in the configuration is wrong:
// another node's certificate is not printed.
func TestWrongConfigurationWithAName(t *testing.T) {
	a := testNode(t)
	a.Invalid = errors.New("wrong")
	plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, plugintest.OfNode("b")))
	if s := a.Load(); s.Pair != nil {
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
	a := testNode(t)
	a.Name = ""
	a.Access.Asked = &cache.Origin{Server: "https://new", CertificateAuthorityData: plugintest.NewCA(t)}
	pair := plugintest.NewPair(t, plugintest.OfNode("old-1"))
	pair.Origin = &cache.Origin{Server: "https://old", CertificateAuthorityData: plugintest.NewCA(t)}
	plugintest.InstallPair(t, a.Dir(), pair)
	if s := a.Load(); s.Pair == nil || !s.Foreign || s.NodeName != strings.ToLower(host) {
		t.Errorf("pair %v, foreign %v, node %q", s.Pair != nil, s.Foreign, s.NodeName)
	}
}
