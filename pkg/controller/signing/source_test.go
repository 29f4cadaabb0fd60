// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"crypto/rand"
	"crypto/x509"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// directory holds a CA's two files.
type directory struct {
	t    testing.TB
	path string
}

func newDirectory(t testing.TB) directory { return directory{t, t.TempDir()} }

func (d directory) files() *Files { return NewFiles(d.certificate(), d.key()) }

func (d directory) certificate() string { return filepath.Join(d.path, "tls.crt") }
func (d directory) key() string         { return filepath.Join(d.path, "tls.key") }

func (d directory) write(path string, data []byte) {
	d.t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		d.t.Fatal(err)
	}
}

func (d directory) put(a *authority) {
	d.t.Helper()
	d.write(d.certificate(), a.certPEM())
	d.write(d.key(), a.keyPEM())
}

// serves fails the test unless the source returns that CA, with this problem.
func serves(t *testing.T, f *Files, want *authority, problem string) {
	t.Helper()
	ca, err := f.CA(t.Context(), now())
	if err != nil {
		t.Fatal(err)
	}
	if ca.Fingerprint() != fingerprint(want.certificate.Raw) {
		t.Fatalf("it serves %s, not %s", ca.chain[0].Subject, want.certificate.Subject)
	}
	if err := f.Problem(); (err == nil) != (problem == "") || err != nil && !strings.Contains(err.Error(), problem) {
		t.Fatalf("its problem is %v, not %q", err, problem)
	}
}

func TestFilesRotate(t *testing.T) {
	t.Parallel()
	before, after := newAuthority(t, "before", "p256", nil, nil), newAuthority(t, "after", "rsa2048", nil, nil)
	for name, steps := range map[string][]func(d directory){
		"certificate first": {
			func(d directory) { d.write(d.certificate(), after.certPEM()) },
			func(d directory) { d.write(d.key(), after.keyPEM()) },
		},
		"key first": {
			func(d directory) { d.write(d.key(), after.keyPEM()) },
			func(d directory) { d.write(d.certificate(), after.certPEM()) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDirectory(t)
			d.put(before)
			files := d.files()
			serves(t, files, before, "")
			steps[0](d)
			serves(t, files, before, "the key is not the certificate's")
			serves(t, files, before, "the key is not the certificate's")
			steps[1](d)
			serves(t, files, after, "")
			d.put(before) // and back
			serves(t, files, before, "")
		})
	}
}

// A CA may be renewed with the same key. Then only one file changes.
func TestFilesTakeANewCertificateForTheSameKey(t *testing.T) {
	t.Parallel()
	before := newAuthority(t, "same", "p256", nil, nil)
	after := newAuthority(t, "same", "p256", nil, func(c *x509.Certificate) { c.NotAfter = c.NotAfter.Add(time.Hour) })
	d := newDirectory(t)
	d.put(before)
	files := d.files()
	serves(t, files, before, "")
	d.write(d.certificate(), after.certPEM())
	serves(t, files, after, "")
}

// A change is seen even if it is in the same second, has the same length, and the file's time was
// set back.
func TestFilesMissNoChange(t *testing.T) {
	t.Parallel()
	before := newAuthority(t, "one", "p256", nil, nil)
	var after *authority
	for after == nil || len(after.certPEM()) != len(before.certPEM()) {
		after = newAuthority(t, "two", "p256", nil, nil)
	}
	d := newDirectory(t)
	d.put(before)
	files := d.files()
	serves(t, files, before, "")
	info, err := os.Stat(d.certificate())
	if err != nil {
		t.Fatal(err)
	}
	d.write(d.certificate(), after.certPEM())
	if err := os.Chtimes(d.certificate(), info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
	serves(t, files, after, "")
}

// The kubelet updates the volume of a Secret by replacing a link.
func TestFilesBehindALink(t *testing.T) {
	t.Parallel()
	before, after := newAuthority(t, "before", "p256", nil, nil), newAuthority(t, "after", "p384", nil, nil)
	d := newDirectory(t)
	link := filepath.Join(d.path, "..data")
	for i, a := range []*authority{before, after} {
		version := directory{t, filepath.Join(d.path, []string{"v1", "v2"}[i])}
		if err := os.Mkdir(version.path, 0o700); err != nil {
			t.Fatal(err)
		}
		version.put(a)
	}
	swap := func(to string) {
		if err := errors.Join(os.Symlink(to, link+"_tmp"), os.Rename(link+"_tmp", link)); err != nil {
			t.Fatal(err)
		}
	}
	swap("v1")
	files := NewFiles(filepath.Join(link, "tls.crt"), filepath.Join(link, "tls.key"))
	serves(t, files, before, "")
	swap("v2")
	serves(t, files, after, "")
}

func TestFilesKeepWhatIsGood(t *testing.T) {
	t.Parallel()
	good := newAuthority(t, "good", "p256", nil, nil)
	for name, c := range map[string]struct {
		spoil func(d directory)
		says  string
	}{
		"certificate gone":  {func(d directory) { _ = os.Remove(d.certificate()) }, "no such file"},
		"key gone":          {func(d directory) { _ = os.Remove(d.key()) }, "no such file"},
		"directory gone":    {func(d directory) { _ = os.RemoveAll(d.path) }, "no such file"},
		"certificate empty": {func(d directory) { d.write(d.certificate(), nil) }, "0 certificates"},
		"key empty":         {func(d directory) { d.write(d.key(), nil) }, "0 PEM blocks"},
		"certificate cut":   {func(d directory) { d.write(d.certificate(), good.certPEM()[:100]) }, "broken"},
		"key cut":           {func(d directory) { d.write(d.key(), good.keyPEM()[:100]) }, "broken"},
		"too long":          {func(d directory) { d.write(d.key(), make([]byte, maxPEM+1)) }, "longer"},
		"a directory": {func(d directory) {
			_ = os.Remove(d.key())
			_ = os.Mkdir(d.key(), 0o700)
		}, "is a directory"},
		"an expired one": {func(d directory) {
			d.put(newAuthority(t, "x", "p384", nil, func(c *x509.Certificate) { c.NotAfter = now().Add(-time.Hour) }))
		}, "expired"},
		"not a CA": {func(d directory) {
			d.put(newAuthority(t, "x", "p384", nil, func(c *x509.Certificate) { c.IsCA = false }))
		}, "not a CA"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDirectory(t)
			d.put(good)
			files := d.files()
			serves(t, files, good, "")
			c.spoil(d)
			serves(t, files, good, c.says)
			if err := os.RemoveAll(d.path); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(d.path, 0o700); err != nil {
				t.Fatal(err)
			}
			d.put(good)
			serves(t, files, good, "")
		})
	}
}

func TestFilesThatAppearLate(t *testing.T) {
	t.Parallel()
	good := newAuthority(t, "good", "p256", nil, nil)
	d := newDirectory(t)
	files := d.files()
	if ca, err := files.CA(t.Context(), now()); ca != nil || !errors.Is(err, fs.ErrNotExist) || !errors.Is(files.Problem(), fs.ErrNotExist) {
		t.Errorf("got %v, %v", ca, err)
	}
	d.write(d.certificate(), good.certPEM())
	if ca, err := files.CA(t.Context(), now()); ca != nil || err == nil {
		t.Errorf("got %v, %v", ca, err)
	}
	d.write(d.key(), good.keyPEM())
	serves(t, files, good, "")
}

// A CA that is not valid yet is used as soon as it is valid, without another change of the files.
func TestFilesTakeOverInTime(t *testing.T) {
	t.Parallel()
	before := newAuthority(t, "before", "p256", nil, func(c *x509.Certificate) { c.NotAfter = now().Add(2 * time.Hour) })
	after := newAuthority(t, "after", "p384", nil, func(c *x509.Certificate) { c.NotBefore = now().Add(time.Hour) })
	d := newDirectory(t)
	d.put(before)
	files := d.files()
	serves(t, files, before, "")
	d.put(after)
	serves(t, files, before, "not valid before")
	if ca, err := files.CA(t.Context(), now().Add(time.Hour)); err != nil || ca.Fingerprint() != fingerprint(after.certificate.Raw) || files.Problem() != nil {
		t.Errorf("got %v, %v", ca, err)
	}
}

func TestFilesLetNoCASignPastItsEnd(t *testing.T) {
	t.Parallel()
	good := newAuthority(t, "good", "p256", nil, nil)
	d := newDirectory(t)
	d.put(good)
	files := d.files()
	serves(t, files, good, "")
	late := good.certificate.NotAfter
	ca, err := files.CA(t.Context(), late)
	if ca != nil || err == nil || !strings.Contains(err.Error(), "expired") || files.Problem() == nil {
		t.Errorf("got %v, %v", ca, err)
	}
	d.write(d.key(), newAuthority(t, "x", "p384", nil, nil).keyPEM())
	ca, err = files.CA(t.Context(), late)
	if ca != nil || err == nil || !strings.Contains(err.Error(), "expired") || !strings.Contains(err.Error(), "not the certificate's") {
		t.Errorf("got %v, %v", ca, err)
	}
}

func TestZeroFilesRefuse(t *testing.T) {
	t.Parallel()
	files := &Files{}
	if ca, err := files.CA(t.Context(), now()); ca != nil || err == nil || files.Problem() == nil {
		t.Errorf("got %v, %v", ca, err)
	}
}

// Under load, and with files that are not written atomically, each certificate comes from either
// CA. After the rotation it comes from the new one.
func TestFilesRotateUnderLoad(t *testing.T) {
	t.Parallel()
	pool := []*authority{newAuthority(t, "one", "p256", nil, nil), newAuthority(t, "two", "p384", nil, nil)}
	d := newDirectory(t)
	d.put(pool[0])
	files := d.files()
	serves(t, files, pool[0], "")
	var stop atomic.Bool
	var issued [2]atomic.Int64
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for !stop.Load() {
				ca, err := files.CA(t.Context(), now())
				if err != nil {
					t.Error(err)
					return
				}
				chain, err := Issue(ca, grant(), DefaultLimits(), now(), rand.Reader)
				if err != nil {
					t.Error(err)
					return
				}
				leaf := leafOf(t, chain)
				for i, a := range pool {
					if leaf.CheckSignatureFrom(a.certificate) == nil && leaf.Issuer.String() == a.certificate.Subject.String() {
						issued[i].Add(1)
					}
				}
			}
		})
	}
	for i := range 100 {
		d.put(pool[(i+1)%2])
		time.Sleep(time.Millisecond)
	}
	stop.Store(true)
	workers.Wait()
	d.put(pool[1])
	serves(t, files, pool[1], "")
	if issued[0].Load() == 0 || issued[1].Load() == 0 {
		t.Errorf("%d and %d certificates", issued[0].Load(), issued[1].Load())
	}
}

func TestFromSecret(t *testing.T) {
	t.Parallel()
	good := newAuthority(t, "good", "rsa2048", nil, nil)
	data := map[string][]byte{"tls.crt": good.certPEM(), "tls.key": good.keyPEM(), "tls-combined.pem": []byte("x")}
	ca, err := FromSecret(data, now())
	if err != nil || ca.Fingerprint() != fingerprint(good.certificate.Raw) {
		t.Fatalf("got %v, %v", ca, err)
	}
	for name, c := range map[string]struct {
		change func(map[string][]byte)
		says   string
	}{
		"empty": {func(m map[string][]byte) { clear(m) }, "no tls.crt"},
		// a CA from outside, to Cluster API
		"no key":        {func(m map[string][]byte) { delete(m, "tls.key") }, "no tls.key"},
		"an empty key":  {func(m map[string][]byte) { m["tls.key"] = nil }, "no tls.key"},
		"another's key": {func(m map[string][]byte) { m["tls.key"] = keyPEM(makeKeys()["p256"]) }, "none of the 1 certificates"},
	} {
		other := maps.Clone(data)
		c.change(other)
		var problem *CAError
		if ca, err := FromSecret(other, now()); ca != nil || !errors.As(err, &problem) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, %v", name, ca, err)
		}
	}
	if ca, err := FromSecret(nil, now()); ca != nil || err == nil {
		t.Errorf("nil: got %v", ca)
	}
}

// The files are read for each certificate, so a read must cost less than the signature.
func BenchmarkFiles(b *testing.B) {
	d := newDirectory(b)
	d.put(newAuthority(b, "good", "p256", nil, nil))
	files := d.files()
	for b.Loop() {
		if _, err := files.CA(b.Context(), now()); err != nil {
			b.Fatal(err)
		}
	}
}
