// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// nodePair returns a self-signed certificate of node "a", valid for a day around noon, after
// change.
func nodePair(t testing.TB, change func(*x509.Certificate)) *Pair {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:a"},
		NotBefore:    noon.Add(-12 * time.Hour),
		NotAfter:     noon.Add(12 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return &Pair{
		Chain:  pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:    pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
		Leaf:   leaf,
		Origin: &Origin{Server: "https://127.0.0.1:6443", CertificateAuthorityData: []byte("CA")},
	}
}

func lockedDir(t testing.TB) (Dir, *Lock) {
	t.Helper()
	d := At(filepath.Join(t.TempDir(), "certs"))
	lock, err := d.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(lock.Unlock)
	return d, lock
}

func TestInstalledPairIsReadBack(t *testing.T) {
	d, lock := lockedDir(t)
	want := nodePair(t, nil)
	if err := lock.Install(want); err != nil {
		t.Fatal(err)
	}
	got, err := d.Current()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Chain, want.Chain) || !bytes.Equal(got.Key, want.Key) || got.NodeName() != "a" || got.Exposed {
		t.Errorf("another pair came back: node %q, exposed %v", got.NodeName(), got.Exposed)
	}
	if got.Origin == nil || got.Origin.Server != want.Origin.Server || string(got.Origin.CertificateAuthorityData) != "CA" {
		t.Errorf("origin: %+v", got.Origin)
	}
	info, err := os.Stat(d.File(CurrentFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestPairOfAnyOrderAndWithoutOriginIsRead(t *testing.T) {
	p := nodePair(t, nil)
	for name, data := range map[string][]byte{
		"key first":       append(bytes.Clone(p.Key), p.Chain...),
		"without origin":  append(bytes.Clone(p.Chain), p.Key...),
		"unknown block":   append(append(bytes.Clone(p.Chain), p.Key...), "-----BEGIN X-----\nAA==\n-----END X-----\n"...),
		"empty origin":    append(append(bytes.Clone(p.Chain), p.Key...), pem.EncodeToMemory(&pem.Block{Type: blockOrigin, Bytes: []byte("{}")})...),
		"damaged origin":  append(append(bytes.Clone(p.Chain), p.Key...), pem.EncodeToMemory(&pem.Block{Type: blockOrigin, Bytes: []byte("{")})...),
		"two in chain":    append(append(bytes.Clone(p.Chain), nodePair(t, nil).Chain...), p.Key...),
		"text in between": append(append(bytes.Clone(p.Chain), "hello\n"...), p.Key...),
	} {
		got, err := ParsePair(data)
		if err != nil || got.NodeName() != "a" || got.Origin != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFilesThatCannotBeTrustedAreNotRead(t *testing.T) {
	good := nodePair(t, nil)
	content, err := good.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	put := func(t *testing.T, d Dir, data []byte) {
		t.Helper()
		if err := os.WriteFile(d.File(CurrentFile), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, prepare := range map[string]func(t *testing.T, d Dir){
		"empty":         func(t *testing.T, d Dir) { put(t, d, nil) },
		"half a file":   func(t *testing.T, d Dir) { put(t, d, content[:len(content)/3]) },
		"no key":        func(t *testing.T, d Dir) { put(t, d, good.Chain) },
		"another's key": func(t *testing.T, d Dir) { put(t, d, append(bytes.Clone(good.Chain), nodePair(t, nil).Key...)) },
		"two keys":      func(t *testing.T, d Dir) { put(t, d, append(bytes.Clone(content), good.Key...)) },
		"not a certificate": func(t *testing.T, d Dir) {
			put(t, d, append([]byte("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"), good.Key...))
		},
		"too large": func(t *testing.T, d Dir) { put(t, d, append(bytes.Clone(content), make([]byte, maxFileSize)...)) },
		"writable by others": func(t *testing.T, d Dir) {
			put(t, d, content)
			if err := os.Chmod(d.File(CurrentFile), 0o620); err != nil {
				t.Fatal(err)
			}
		},
		"a symbolic link": func(t *testing.T, d Dir) {
			elsewhere := filepath.Join(t.TempDir(), "x")
			if err := errors.Join(os.WriteFile(elsewhere, content, 0o600), os.Symlink(elsewhere, d.File(CurrentFile))); err != nil {
				t.Fatal(err)
			}
		},
		"a fifo": func(t *testing.T, d Dir) {
			if err := syscall.Mkfifo(d.File(CurrentFile), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"a directory": func(t *testing.T, d Dir) {
			if err := os.Mkdir(d.File(CurrentFile), 0o700); err != nil {
				t.Fatal(err)
			}
		},
		"another user's": func(t *testing.T, d Dir) {
			if os.Geteuid() != 0 {
				t.Skip("only root can give a file away")
			}
			put(t, d, content)
			if err := os.Chown(d.File(CurrentFile), 4711, 4711); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := lockedDir(t)
			prepare(t, d)
			_, err := d.Current()
			if !MustBeSetAside(err) {
				t.Fatalf("got %v, want an error that calls for setting it aside", err)
			}
			if strings.Contains(err.Error(), "BEGIN") || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error quotes the file: %v", err)
			}
			aside, err := d.SetAside(CurrentFile, noon)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := os.Lstat(aside); err != nil {
				t.Errorf("what was set aside is gone: %v", err)
			}
			if _, err := d.Current(); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("after setting aside: %v", err)
			}
		})
	}
}

// A key that others could read is no reason to lose the certificate at once: it is still served,
// and replaced.
func TestReadableCertificateIsExposedButServed(t *testing.T) {
	d, lock := lockedDir(t)
	if err := errors.Join(lock.Install(nodePair(t, nil)), os.Chmod(d.File(CurrentFile), 0o644)); err != nil {
		t.Fatal(err)
	}
	p, err := d.Current()
	if err != nil || !p.Exposed {
		t.Errorf("exposed %v, %v", p != nil && p.Exposed, err)
	}
}

func TestSetAsideKeepsTheLastFew(t *testing.T) {
	d, _ := lockedDir(t)
	for i := range keptAside + 3 {
		if err := os.WriteFile(d.File(StateFile), []byte{byte(i)}, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := d.SetAside(StateFile, noon.Add(time.Duration(i)*time.Millisecond)); err != nil {
			t.Fatal(err)
		}
	}
	left, err := filepath.Glob(d.File(StateFile) + asideMark + "*")
	if err != nil || len(left) != keptAside {
		t.Fatalf("%d are left, %v", len(left), err)
	}
	newest, err := os.ReadFile(left[len(left)-1])
	if err != nil || newest[0] != keptAside+2 {
		t.Errorf("the newest is not kept: %v, %v", newest, err)
	}
}

func TestDirectoryThatOthersCanWriteIsRefused(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T) string{
		"group may write": func(t *testing.T) string {
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o770); err != nil {
				t.Fatal(err)
			}
			return dir
		},
		"all may write, sticky": func(t *testing.T) string {
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o777|os.ModeSticky); err != nil {
				t.Fatal(err)
			}
			return dir
		},
		"a file": func(t *testing.T) string {
			path := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return path
		},
		"below a file": func(t *testing.T) string {
			path := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return filepath.Join(path, "certs")
		},
		"another user's": func(t *testing.T) string {
			if os.Geteuid() != 0 {
				t.Skip("only root can give a directory away")
			}
			dir := t.TempDir()
			if err := os.Chown(dir, 4711, 4711); err != nil {
				t.Fatal(err)
			}
			return dir
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := At(prepare(t))
			var foreign *ForeignDirError
			if err := d.Check(); !errors.As(err, &foreign) {
				t.Errorf("Check: %v", err)
			}
			if _, err := d.TryLock(); !errors.As(err, &foreign) {
				t.Errorf("TryLock: %v", err)
			}
			if _, err := os.Lstat(d.Path()); err != nil && name != "below a file" {
				t.Errorf("it was moved: %v", err)
			}
		})
	}
}

// An existing directory is not changed, even if it was named by mistake: a changed mode of /run
// would break the machine.
func TestCreateChangesNoMode(t *testing.T) {
	path := t.TempDir()
	if err := os.Chmod(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := At(path).Create(); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	fresh := At(filepath.Join(path, "a", "b"))
	if err := fresh.Create(); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(fresh.Path()); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestLockIsHeldByOne(t *testing.T) {
	d, lock := lockedDir(t)
	if _, err := d.TryLock(); !errors.Is(err, ErrLocked) {
		t.Fatalf("a second one got it: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := d.WaitLock(ctx); !errors.Is(err, ErrLocked) {
		t.Fatalf("a second one got it by waiting: %v", err)
	}
	id := process.ID{PID: 12, Start: 34}
	if err := lock.NameWorker(id); err != nil || d.Worker() != id {
		t.Errorf("worker %v, %v", d.Worker(), err)
	}
	if err := os.WriteFile(d.File(LockFile), []byte(id.String()+"\nanother-boot\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := d.Worker(); got != (process.ID{}) {
		t.Errorf("a worker of an earlier boot: %v", got)
	}
	lock.Unlock()
	second, err := d.TryLock()
	if err != nil {
		t.Fatalf("after the first gave it back: %v", err)
	}
	second.Unlock()
}

func TestLockInPlaceOfALink(t *testing.T) {
	d := At(t.TempDir())
	precious := filepath.Join(t.TempDir(), "precious")
	if err := errors.Join(os.WriteFile(precious, []byte("x"), 0o600), os.Chmod(d.Path(), 0o700), os.Symlink(precious, d.File(LockFile))); err != nil {
		t.Fatal(err)
	}
	lock, err := d.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	if err := lock.NameWorker(process.ID{PID: 1, Start: 2}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(precious); err != nil || string(got) != "x" {
		t.Errorf("the link's target was written: %q, %v", got, err)
	}
}

func TestRecordsAreReadBackAndDamagedOnesAreNot(t *testing.T) {
	d, lock := lockedDir(t)
	if p, err := d.Pending(); p != nil || err != nil {
		t.Fatalf("of an empty directory: %v, %v", p, err)
	}
	if s, err := d.State(); err != nil || s.Last != nil {
		t.Fatalf("of an empty directory: %v, %v", s, err)
	}
	seconds := int32(3600)
	pending := &Pending{
		Provider: "insecure", NodeName: "a", SignerName: "x.y/z", ExpirationSeconds: &seconds,
		Cluster: Origin{Server: "https://a"}, Key: []byte("k"),
		Requests: []PendingRequest{{Name: "node-csr-x", Request: []byte("r"), FiledAt: noon}},
	}
	announcement := &Announcement{
		Checked: noon, Answered: noon, Exists: true, Certificate: "c", Renewal: &Renewal{Name: "r", IssuedBefore: noon, DueAt: noon},
		Done: []Renewal{{Name: "q", IssuedBefore: noon, DueAt: noon}}, Reported: "c", NotReported: "d", ReportProblem: "p",
	}
	if err := errors.Join(lock.SetPending(pending), lock.SetState(&State{Failures: 3, NextAttempt: noon, Last: &Result{Reason: "R"}, Announcement: announcement})); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Pending(); err != nil || got.Requests[0].Name != "node-csr-x" || *got.ExpirationSeconds != 3600 {
		t.Errorf("pending: %+v, %v", got, err)
	}
	if got, err := d.State(); err != nil || got.Failures != 3 || !got.NextAttempt.Equal(noon) || got.Last.Reason != "R" || !reflect.DeepEqual(got.Announcement, announcement) {
		t.Errorf("state: %+v, %v", got, err)
	}
	for name, damage := range map[string]string{
		"empty": "", "not JSON": "{", "unknown field": `{"version":1,"x":1}`, "another version": `{"version":2}`,
		"incomplete": `{"version":1,"provider":"p"}`, "followed": `{"version":1} {}`,
	} {
		if err := os.WriteFile(d.File(PendingFile), []byte(damage), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Pending(); !MustBeSetAside(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := errors.Join(lock.SetPending(pending), os.Chmod(d.File(PendingFile), 0o640)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Pending(); !MustBeSetAside(err) {
		t.Errorf("a key that the group can read: %v", err)
	}
	if err := errors.Join(lock.ForgetPending(), lock.ForgetPending()); err != nil {
		t.Errorf("forgetting twice: %v", err)
	}
}

// The fields of two rounds are read back. Fields that are not needed are not written, since an
// older release could not read them.
func TestRecordsOfTwoRounds(t *testing.T) {
	d, lock := lockedDir(t)
	hello := PendingRequest{Name: "node-csr-a", Hello: true, UID: "uid", Request: []byte("hello"), FiledAt: noon}
	proof := PendingRequest{Name: "node-csr-b", Request: []byte("proof"), FiledAt: noon.Add(time.Second)}
	one := func(requests ...PendingRequest) *Pending {
		return &Pending{
			Version: fileVersion, Provider: "tpm", NodeName: "a", SignerName: "x.y/z", Cluster: Origin{Server: "https://a"}, Key: []byte("k"),
			AttestationVersion: "tpm/v1", Remember: "ecc-p256", Requests: requests,
		}
	}
	for _, want := range []*Pending{one(hello), one(hello, proof)} {
		if err := lock.SetPending(want); err != nil {
			t.Fatal(err)
		}
		got, err := d.Pending()
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("read %+v, wrote %+v, %v", got, want, err)
		}
		if last := got.Last(); !reflect.DeepEqual(*last, want.Requests[len(want.Requests)-1]) {
			t.Errorf("the last is %+v", last)
		}
		got.Last().UID = "later" // what is noted there is noted in the record
		if got.Requests[len(got.Requests)-1].UID != "later" {
			t.Error("Last returns a copy")
		}
	}
	state := &State{Version: fileVersion, Remembered: map[string]string{"tpm": "ecc-p256"}}
	if err := lock.SetState(state); err != nil {
		t.Fatal(err)
	}
	if got, err := d.State(); err != nil || !reflect.DeepEqual(got, state) {
		t.Errorf("read %+v, wrote %+v, %v", got, state, err)
	}
	plain := one(proof)
	plain.AttestationVersion, plain.Remember = "", ""
	if err := errors.Join(lock.SetPending(plain), lock.SetState(&State{})); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{PendingFile, StateFile} {
		data, _, err := d.Read(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, field := range []string{"attestationVersion", "remember", "hello"} {
			if strings.Contains(string(data), `"`+field) {
				t.Errorf("%s holds %s: %s", name, field, data)
			}
		}
	}
}

func TestPendingFileOfTheEarlierFormatIsRead(t *testing.T) {
	p, err := parsePending([]byte(`{"version":1,"provider":"p","nodeName":"n","signerName":"s","cluster":{"server":"https://x"},"key":"AA==",` +
		`"requests":[{"name":"c","uid":"u","request":"AA==","filed":"2026-11-20T12:00:00Z"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if p.Last().Hello || p.Last().UID != "u" || p.AttestationVersion != "" || p.Remember != "" {
		t.Errorf("read %+v", p)
	}
}

// Each request must be complete: a worker files it, or makes a proof for it.
func TestPendingFileWithHalfARequestIsDamaged(t *testing.T) {
	const hello, proof = `{"name":"a","hello":true,"request":"AA=="}`, `{"name":"b","request":"AA=="}`
	for name, c := range map[string]struct {
		requests string
		damaged  bool
	}{
		"a hello":                  {hello, false},
		"a hello and a proof":      {hello + "," + proof, false},
		"none":                     {"", true},
		"a hello without a name":   {`{"hello":true,"request":"AA=="}`, true},
		"a hello without bytes":    {`{"name":"a","hello":true},` + proof, true},
		"a proof without a name":   {hello + `,{"request":"AA=="}`, true},
		"a proof without bytes":    {hello + `,{"name":"b","request":""}`, true},
		"an empty one":             {hello + ",{}", true},
		"no request at all":        {hello + ",null", true},
		"a hello that is a string": {`{"name":"a","hello":"true","request":"AA=="}`, true},
		"a field to come":          {`{"name":"a","hello":true,"round":3,"request":"AA=="}`, true},
	} {
		p, err := parsePending([]byte(`{"version":1,"provider":"p","nodeName":"n","signerName":"s","cluster":{"server":"https://x"},"key":"AA==",` +
			`"attestationVersion":"p/v1","requests":[` + c.requests + `]}`))
		if (err != nil) != c.damaged || (p == nil) != c.damaged {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

// A file with two requests of the maximum size, in base64 twice, can be read again.
func TestLargestRecordIsReadBack(t *testing.T) {
	d, lock := lockedDir(t)
	large := bytes.Repeat([]byte("x"), 128<<10) // attestation.MaxRequestSize
	pending := &Pending{
		Provider: "tpm", NodeName: "a", SignerName: "x.y/z", Cluster: Origin{Server: "https://a", CertificateAuthorityData: large}, Key: []byte("k"),
		Requests: []PendingRequest{{Name: "a", Hello: true, Request: large}, {Name: "b", Request: large}},
	}
	if err := lock.SetPending(pending); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Pending(); err != nil || !bytes.Equal(got.Last().Request, large) {
		t.Error(err)
	}
}

func TestCleanRemovesTemporariesOnly(t *testing.T) {
	d, lock := lockedDir(t)
	if err := errors.Join(lock.Install(nodePair(t, nil)), os.WriteFile(d.File("."+CurrentFile+tempMark+"1"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	lock.Clean()
	entries, err := os.ReadDir(d.Path())
	if err != nil || len(entries) != 2 { // the lock and the certificate
		t.Errorf("left: %v, %v", entries, err)
	}
}

// Without the lock, a file that another process may be writing stays.
func TestCleanFileLeavesWhatIsUnderWay(t *testing.T) {
	d := At(t.TempDir())
	for name, age := range map[string]time.Duration{"1": 0, "2": underWay / 2, "3": underWay + time.Second, "4": -2 * underWay} {
		path := d.File(".a" + tempMark + name)
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, time.Time{}, time.Now().Add(-age))); err != nil {
			t.Fatal(err)
		}
	}
	d.CleanFile("a")
	left, err := filepath.Glob(d.File(".a*"))
	if err != nil || len(left) != 2 || !strings.HasSuffix(left[0], "1") || !strings.HasSuffix(left[1], "2") {
		t.Errorf("left: %q, %v", left, err)
	}
}

// A file that is too large to be read again is not written.
func TestOversizeIsNotWritten(t *testing.T) {
	_, lock := lockedDir(t)
	var write *WriteError
	if err := lock.SetState(&State{Last: &Result{Message: strings.Repeat("x", maxFileSize)}}); !errors.As(err, &write) {
		t.Errorf("got %v, want a WriteError", err)
	}
}

func TestFailedWriteLeavesTheOldFile(t *testing.T) {
	d, lock := lockedDir(t)
	old := nodePair(t, nil)
	if err := lock.Install(old); err != nil {
		t.Fatal(err)
	}
	// Renaming over a directory fails, after the temporary file was written.
	if err := os.Mkdir(d.File(StateFile), 0o700); err != nil {
		t.Fatal(err)
	}
	var write *WriteError
	if err := lock.SetState(&State{}); !errors.As(err, &write) {
		t.Errorf("got %v, want a WriteError", err)
	}
	if left, err := filepath.Glob(d.File(".*")); err != nil || len(left) > 0 {
		t.Errorf("temporaries are left: %v, %v", left, err)
	}
	if got, err := d.Current(); err != nil || !bytes.Equal(got.Chain, old.Chain) {
		t.Errorf("the certificate: %v", err)
	}
}

func TestCheckNodeCertificate(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*x509.Certificate)
		clock  bool
	}{
		"another node": {change: func(c *x509.Certificate) { c.Subject.CommonName = "system:node:b" }},
		"no node":      {change: func(c *x509.Certificate) { c.Subject.CommonName = "kubernetes-admin" }},
		"empty node":   {change: func(c *x509.Certificate) { c.Subject.CommonName = "system:node:" }},
		"two names": {change: func(c *x509.Certificate) {
			c.Subject.ExtraNames = []pkix.AttributeTypeAndValue{{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "system:node:b"}, {Type: asn1.ObjectIdentifier{2, 5, 4, 10}, Value: "system:nodes"}, {Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "system:node:a"}}
		}},
		"masters":          {change: func(c *x509.Certificate) { c.Subject.Organization = []string{"system:nodes", "system:masters"} }},
		"no organization":  {change: func(c *x509.Certificate) { c.Subject.Organization = nil }},
		"a unit":           {change: func(c *x509.Certificate) { c.Subject.OrganizationalUnit = []string{"x"} }},
		"server only":      {change: func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }},
		"no usage at all":  {change: func(c *x509.Certificate) { c.ExtKeyUsage = nil }},
		"a CA":             {change: func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }},
		"ends when begins": {change: func(c *x509.Certificate) { c.NotAfter = c.NotBefore }},
		"expired now":      {change: func(c *x509.Certificate) { c.NotAfter = noon }, clock: true},
		"11 minutes ahead": {change: func(c *x509.Certificate) { c.NotBefore = noon.Add(11 * time.Minute) }, clock: true},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckNodeCertificate(nodePair(t, c.change).Leaf, "a", noon)
			var unusable *UnusableError
			if !errors.As(err, &unusable) || unusable.Clock != c.clock {
				t.Errorf("got %v, want an UnusableError with Clock %v", err, c.clock)
			}
		})
	}
	for name, change := range map[string]func(*x509.Certificate){
		"as it should be":   nil,
		"10 minutes ahead":  func(c *x509.Certificate) { c.NotBefore = noon.Add(10 * time.Minute) },
		"a second is left":  func(c *x509.Certificate) { c.NotAfter = noon.Add(time.Second) },
		"client and server": func(c *x509.Certificate) { c.ExtKeyUsage = append(c.ExtKeyUsage, x509.ExtKeyUsageServerAuth) },
	} {
		if err := CheckNodeCertificate(nodePair(t, change).Leaf, "a", noon); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSameKey(t *testing.T) {
	a, b := nodePair(t, nil), nodePair(t, nil)
	key := func(p *Pair) crypto.PublicKey { return p.Leaf.PublicKey }
	if !SameKey(a.Leaf, key(a)) || SameKey(a.Leaf, key(b)) || SameKey(a.Leaf, nil) {
		t.Error("SameKey mistakes one key for another")
	}
}

func TestSameCluster(t *testing.T) {
	ca := func(s string) []byte { return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte(s)}) }
	old, both, latest := ca("old"), append(ca("old"), ca("new")...), ca("new")
	for name, c := range map[string]struct {
		a, b Origin
		same bool
	}{
		"equal":                     {Origin{Server: "https://a", CertificateAuthorityData: old}, Origin{Server: "https://a", CertificateAuthorityData: old}, true},
		"CA being rotated":          {Origin{Server: "https://a", CertificateAuthorityData: old}, Origin{Server: "https://a", CertificateAuthorityData: both}, true},
		"another address":           {Origin{Server: "https://a", CertificateAuthorityData: old}, Origin{Server: "https://b", CertificateAuthorityData: old}, true},
		"another CA":                {Origin{Server: "https://a", CertificateAuthorityData: old}, Origin{Server: "https://a", CertificateAuthorityData: latest}, false},
		"no CA, same server":        {Origin{Server: "https://a"}, Origin{Server: "https://a/"}, true},
		"no CA, another server":     {Origin{Server: "https://a"}, Origin{Server: "https://b"}, false},
		"CA on one, another server": {Origin{Server: "https://a", CertificateAuthorityData: old}, Origin{Server: "https://b"}, false},
	} {
		if c.a.SameCluster(c.b) != c.same || c.b.SameCluster(c.a) != c.same {
			t.Errorf("%s: want %v", name, c.same)
		}
	}
}

func FuzzParsePair(f *testing.F) {
	p := nodePair(f, nil)
	data, err := p.Marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add(p.Key)
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := ParsePair(data)
		if err != nil {
			return
		}
		// A parsed pair can be written and read again, byte for byte.
		again, err := p.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		q, err := ParsePair(again)
		if err != nil || !bytes.Equal(q.Chain, p.Chain) || !bytes.Equal(q.Key, p.Key) {
			t.Fatalf("not read back: %v", err)
		}
		_ = CheckNodeCertificate(p.Leaf, "a", noon)
	})
}

func FuzzParseRecords(f *testing.F) {
	f.Add([]byte(`{"version":1,"provider":"p","nodeName":"n","signerName":"s","cluster":{"server":"x"},"key":"AA==","requests":[{"name":"n","request":"AA=="}]}`))
	f.Add([]byte(`{"version":1,"last":{"worker":{"pid":1,"start":2},"phases":[{"name":"x","milliseconds":1.5}]},"failures":1,"nextAttempt":"2026-11-20T12:00:00Z"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if p, err := parsePending(data); err == nil && len(p.Requests) == 0 {
			t.Fatal("a pending file without a request was accepted")
		}
		if s, err := parseState(data); err == nil && s.Failures < 0 {
			t.Fatal("a negative count was accepted")
		}
	})
}

// A run reads the worker without the lock. It always sees a worker that names itself again.
func TestWorkerIsNamedAgain(t *testing.T) {
	d := At(t.TempDir())
	lock, err := d.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	id := process.ID{PID: 1 << 20, Start: 1 << 30}
	if err := lock.NameWorker(id); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		var err error
		for range 2000 {
			err = errors.Join(err, lock.NameWorker(id))
		}
		done <- err
	}()
	for {
		if got := d.Worker(); got != id {
			t.Fatalf("the worker is %v", got)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}
