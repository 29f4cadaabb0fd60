// SPDX-License-Identifier: Apache-2.0

package vsphere

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vmware/govmomi/vim25/types"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/platforms/vsphere/internal/imitation"
)

func TestMain(m *testing.M) { unittest.Main(m) }

// launch adds the virtual machine of a name, with the virtual TPM of a number.
func (f *fixture) launch(name string, number int) {
	f.Launch(name, platformkittest.TPM{Number: number})
}

// find asks for the instances at the BIOS UUIDs of these names.
func find(t *testing.T, v *VCenter, names ...string) (map[string]platformkit.Instance, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var uuids []string
	for _, name := range names {
		uuids = append(uuids, biosUUID(name))
	}
	slices.Sort(uuids)
	instances, err := v.Find(ctx, kubetypes.NamespacedName{}, uuids)
	found := map[string]platformkit.Instance{}
	for _, name := range names {
		for _, i := range instances {
			if i.Location == biosUUID(name) {
				found[name] = i
			}
		}
	}
	return found, err
}

// finds fails unless exactly these names have an instance.
func finds(t *testing.T, v *VCenter, asked []string, want ...string) map[string]platformkit.Instance {
	t.Helper()
	found, err := find(t, v, asked...)
	if got := slices.Sorted(maps.Keys(found)); err != nil || !slices.Equal(got, want) {
		t.Fatalf("found %v, %v, want %v", got, err, want)
	}
	return found
}

// called fails unless these calls were made since the last time.
func (f *fixture) called(t *testing.T, want map[string]int) {
	t.Helper()
	if got := f.vcenter.Calls(); !maps.Equal(got, want) {
		t.Errorf("calls: %v, want %v", got, want)
	}
}

func budget() *platformkit.Budget { return platformkit.NewBudget(1000, 1000) }

// A UUID is looked up once. Known machines are asked about in one call, absent UUIDs each time.
func TestCalls(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	v := f.open(t, budget())
	f.launch("a", 1)
	f.launch("b", 2)
	asked := []string{"a", "absent", "b"}
	instances := finds(t, v, asked, "a", "b")
	f.called(t, map[string]int{"RetrieveServiceContent": 1, "Login": 1, "FindAllByUuid": 3, "RetrievePropertiesEx": 1})
	finds(t, v, asked, "a", "b")
	f.called(t, map[string]int{"FindAllByUuid": 1, "RetrievePropertiesEx": 1})
	if _, err := v.EndorsementKeys(t.Context(), instances["a"]); err != nil {
		t.Error(err)
	}
	f.called(t, map[string]int{"RetrievePropertiesEx": 1})
	if a, b := instances["a"], instances["b"]; a.ID == b.ID || a.Version == b.Version || a.ID == "" || a.Version == "" {
		t.Errorf("%+v, %+v", a, b)
	}
}

// vCenter ends sessions that are idle, and all when it starts again.
func TestSessionEnds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	v := f.open(t, budget())
	f.launch("a", 1)
	for _, asked := range [][]string{{"a"}, {"a"}, {"absent"}} { // by both methods
		finds(t, v, append(asked, "absent"), slices.DeleteFunc(asked, func(n string) bool { return n == "absent" })...)
		f.vcenter.Calls()
		f.vcenter.EndSessions()
	}
	instance := finds(t, v, []string{"a"}, "a")["a"]
	if n := f.vcenter.Calls()["Login"]; n != 1 {
		t.Errorf("%d logins after a session ended", n)
	}
	f.vcenter.EndSessions()
	if eks, err := v.EndorsementKeys(t.Context(), instance); err != nil || len(eks) != 2 {
		t.Errorf("%v, %v", eks, err)
	}
}

// A refused password is not tried again at once, as vCenter would lock the user. Another one is.
func TestRefusedPassword(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.launch("a", 1)
	const wrong = "wrong password"
	write(t, f.passwordFile, wrong+"\n")
	v := f.open(t, budget())
	for i, says := range []string{"InvalidLogin", "is not locked"} {
		found, err := find(t, v, "a")
		if err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), wrong) || len(found) > 0 {
			t.Errorf("attempt %d: %v, %v", i, found, err)
		}
	}
	if n := f.vcenter.Calls()["Login"]; n != 1 {
		t.Errorf("%d logins with a wrong password", n)
	}
	write(t, f.passwordFile, password+"\n")
	finds(t, v, []string{"a"}, "a")
	write(t, f.passwordFile, wrong) // not needed while the session lasts
	finds(t, v, []string{"a"}, "a")
}

func TestLogout(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	v := f.open(t, budget())
	v.Logout(t.Context())
	f.called(t, map[string]int{})
	finds(t, v, []string{"absent"})
	f.vcenter.Calls()
	v.Logout(t.Context())
	f.called(t, map[string]int{"Logout": 1})
	finds(t, v, []string{"absent"})
}

// A machine that the user cannot read is not absent.
func TestHiddenMachine(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	v := f.open(t, budget())
	f.launch("a", 1)
	f.launch("b", 2)
	f.launch("c", 3)
	instances := finds(t, v, []string{"a", "b", "c"}, "a", "b", "c")
	for _, name := range []string{"a", "b"} {
		m, _ := machineOf(name, platformkittest.TPM{Number: 1})
		m.Hidden = true
		f.vcenter.Change(m.UUID, m)
	}
	f.vcenter.Calls()
	found, err := find(t, v, "a", "b", "c")
	if err == nil || !strings.Contains(err.Error(), "cannot read config.uuid of 2 virtual machines") || !strings.Contains(err.Error(), "NoPermission") ||
		!slices.Equal(slices.Collect(maps.Keys(found)), []string{"c"}) {
		t.Errorf("%v, %v", found, err)
	}
	f.called(t, map[string]int{"RetrievePropertiesEx": 1}) // nor is it looked up again
	if eks, err := v.EndorsementKeys(t.Context(), instances["a"]); err == nil {
		t.Errorf("it has the keys %v", eks)
	}
	// It may be a second one with that UUID.
	f.vcenter.Add(imitation.Machine{UUID: biosUUID("d"), Hidden: true})
	f.vcenter.Add(imitation.Machine{UUID: biosUUID("d")})
	if found, err := find(t, v, "d"); err == nil || len(found) > 0 {
		t.Errorf("%v, %v", found, err)
	}
}

// A template has no TPM that runs, and can become a virtual machine.
func TestTemplate(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	v := f.open(t, budget())
	m, _ := machineOf("a", platformkittest.TPM{Number: 1})
	template := m
	template.Template = true
	f.vcenter.Add(template)
	finds(t, v, []string{"a"})
	f.vcenter.Change(m.UUID, m)
	finds(t, v, []string{"a"}, "a")
	f.vcenter.Change(m.UUID, template)
	f.vcenter.Add(m)
	finds(t, v, []string{"a"}) // the UUID is known as the template's, until that is gone
	f.vcenter.Remove(m.UUID)
	f.vcenter.Add(m)
	f.vcenter.Add(template)
	finds(t, v, []string{"a"}, "a")
}

// The machine behind a reference can get another BIOS UUID. Then it is no longer this machine.
func TestChangedUUID(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	v := f.open(t, budget())
	f.launch("a", 1)
	before := finds(t, v, []string{"a"}, "a")["a"]
	m, _ := machineOf("b", platformkittest.TPM{Number: 1})
	f.vcenter.Change(biosUUID("a"), m)
	finds(t, v, []string{"a"})
	finds(t, v, []string{"a", "b"}, "b")
	if eks, err := v.EndorsementKeys(t.Context(), before); err == nil || !strings.Contains(err.Error(), "another virtual machine") {
		t.Errorf("%v, %v", eks, err)
	}
	f.vcenter.Remove(biosUUID("b"))
	if eks, err := v.EndorsementKeys(t.Context(), before); err == nil || !strings.Contains(err.Error(), "is gone") {
		t.Errorf("%v, %v", eks, err)
	}
	if eks, err := v.EndorsementKeys(t.Context(), platformkit.Instance{}); err == nil {
		t.Errorf("%v", eks)
	}
}

// vCenter changes the version with the configuration. The keys are then read again at once.
func TestReplacedTPM(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	trust := f.Trust(t, platformkit.Options{}, budget())
	f.launch("a", 1)
	for number := 1; number <= 2; number++ {
		_, want := certificates(number)
		f.Change("a", platformkittest.TPM{Number: number})
		answers, err := trust.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{f.Machine("a")})
		if got := answers[f.Machine("a")].EKs; err != nil || !slices.Equal(got, want) {
			t.Errorf("TPM %d: %v, %v, want %v", number, got, err, want)
		}
	}
}

// few lets a number of calls through.
type few struct {
	next http.RoundTripper
	left atomic.Int32
}

func (f *few) RoundTrip(r *http.Request) (*http.Response, error) {
	if f.left.Add(-1) < 0 {
		_ = r.Body.Close()
		return nil, platformkit.ErrPaused
	}
	return f.next.RoundTrip(r)
}

// UUIDs without a machine use up the calls. Known machines have their answers nevertheless. A
// machine that replaces another is found next, and a new machine soon.
func TestJunkDoesNotStarve(t *testing.T) {
	t.Parallel()
	const junk, calls = 40, 10
	f := newFixture(t)
	v := f.open(t, budget())
	limit := &few{next: v.session.transport}
	limit.left.Store(100)
	v.session.transport = limit
	asked := []string{"known", "replaced", "new"}
	f.launch("known", 1)
	f.launch("replaced", 2)
	finds(t, v, asked[:2], "known", "replaced")
	f.launch("replaced", 3) // another instance with the same BIOS UUID
	f.launch("new", 4)
	for n := range junk {
		asked = append(asked, fmt.Sprintf("junk%d", n))
	}
	for poll := range 200 {
		limit.left.Store(calls)
		found, err := find(t, v, asked...)
		if err == nil || !strings.Contains(err.Error(), "were not looked up") || !strings.Contains(err.Error(), platformkit.ErrPaused.Error()) {
			t.Fatalf("poll %d: all lookups fit into %d calls: %v", poll, calls, err)
		}
		if _, known := found["known"]; !known {
			t.Fatalf("poll %d: the known machine has no answer: %v", poll, err)
		}
		if _, replaced := found["replaced"]; !replaced && poll > 0 {
			t.Fatalf("poll %d: the replaced machine has no answer: %v", poll, err)
		}
		if _, ok := found["new"]; ok {
			t.Logf("the new machine was found by poll %d", poll)
			return
		}
	}
	t.Error("the new machine was never found")
}

// References of machines that no Cluster asks about are dropped.
func TestForgetsReferences(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	v := f.open(t, budget())
	f.launch("a", 1)
	f.launch("b", 2)
	finds(t, v, []string{"a", "b"}, "a", "b")
	v.mu.Lock()
	for _, r := range v.refs {
		r.used = r.used.Add(-refExpiry)
	}
	v.mu.Unlock()
	finds(t, v, []string{"a"}, "a")
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.refs) != 1 {
		t.Errorf("%d references", len(v.refs))
	}
}

func TestCertificates(t *testing.T) {
	t.Parallel()
	ders, eks := certificates(1)
	text := base64.StdEncoding.EncodeToString(ders[0])
	own := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "vTPM"}, BasicConstraintsValid: true}
	selfSigned, err := x509.CreateCertificate(rand.Reader, own, own, authority().Public(), authority())
	if err != nil {
		t.Fatal(err)
	}
	ownEK, err := clusterapi.EKFingerprint(authority().Public())
	if err != nil {
		t.Fatal(err)
	}
	edwards, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, encoded := range map[string][]byte{"DER": ders[0], "base64": []byte(text), "lines": []byte("\n  " + text[:64] + "\r\n" + text[64:] + "\n")} {
		got, err := endorsementKeys([]types.BaseVirtualDevice{&types.VirtualTPM{EndorsementKeyCertificate: [][]byte{encoded, ders[0]}}})
		if err != nil || len(got) != 1 || got[0] != eks[0] {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	got, err := endorsementKeys([]types.BaseVirtualDevice{&types.VirtualTPM{EndorsementKeyCertificate: [][]byte{selfSigned}}})
	if err != nil || len(got) != 1 || got[0] != ownEK {
		t.Errorf("self-signed: %v, %v", got, err)
	}
	for name, encoded := range map[string][]byte{
		"empty": nil, "text": []byte("no certificate"), "cut": ders[0][:100], "cut base64": []byte(text[:101]), "more": append(slices.Clone(ders[0]), 0),
		"another kind of key": certify(edwards), "PEM": []byte("-----BEGIN CERTIFICATE-----\n" + text + "\n-----END CERTIFICATE-----\n"),
	} {
		got, err := endorsementKeys([]types.BaseVirtualDevice{&types.VirtualTPM{EndorsementKeyCertificate: [][]byte{ders[1], encoded}}})
		if err == nil {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A virtual TPM without a certificate is an error. A machine without a virtual TPM has no keys.
func TestTPMWithoutCertificate(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	v := f.open(t, budget())
	f.vcenter.Add(imitation.Machine{UUID: biosUUID("bare"), Bare: true})
	f.vcenter.Add(imitation.Machine{UUID: biosUUID("none")})
	instances := finds(t, v, []string{"bare", "none"}, "bare", "none")
	if eks, err := v.EndorsementKeys(t.Context(), instances["bare"]); err == nil || !strings.Contains(err.Error(), "no endorsement key certificate") {
		t.Errorf("%v, %v", eks, err)
	}
	if eks, err := v.EndorsementKeys(t.Context(), instances["none"]); err != nil || len(eks) > 0 {
		t.Errorf("%v, %v", eks, err)
	}
}

func TestConfiguration(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const secret = "secret"
	notPEM := filepath.Join(t.TempDir(), "file")
	write(t, notPEM, secret+"\n"+secret)
	good := map[string]string{
		"VSPHERE_SERVER": "vcenter.example.com", "VSPHERE_CA_FILE": f.server.CAFile, "VSPHERE_USER_FILE": f.userFile, "VSPHERE_PASSWORD_FILE": f.passwordFile,
	}
	open := func(change map[string]string) error {
		_, err := fromEnvironment(func(name string) string {
			if value, ok := change[name]; ok {
				return value
			}
			return good[name]
		})
		return err
	}
	for _, change := range []map[string]string{nil, {"VSPHERE_CA_FILE": ""}, {"VSPHERE_SERVER": "192.0.2.1:8443"}, {"VSPHERE_SERVER": "[2001:db8::1]"}} {
		if err := open(change); err != nil {
			t.Errorf("%v: %v", change, err)
		}
	}
	for _, wrong := range []struct{ name, value string }{
		{"VSPHERE_SERVER", ""}, {"VSPHERE_SERVER", "https://vcenter.example.com"}, {"VSPHERE_SERVER", "user:" + secret + "@vcenter.example.com"},
		{"VSPHERE_SERVER", "vcenter.example.com/sdk"}, {"VSPHERE_SERVER", "vcenter.example.com?a"}, {"VSPHERE_SERVER", "a b"},
		{"VSPHERE_CA_FILE", "/nonexistent"}, {"VSPHERE_CA_FILE", notPEM},
		{"VSPHERE_USER_FILE", ""}, {"VSPHERE_USER_FILE", "/nonexistent"},
		{"VSPHERE_PASSWORD_FILE", ""}, {"VSPHERE_PASSWORD_FILE", "/nonexistent"}, {"VSPHERE_PASSWORD_FILE", notPEM}, {"VSPHERE_PASSWORD_FILE", "/dev/null"},
	} {
		err := open(map[string]string{wrong.name: wrong.value})
		if err == nil || !strings.Contains(err.Error(), wrong.name) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s=%s: %v", wrong.name, wrong.value, err)
		}
	}
	if calls := f.server.Calls(); calls > 0 {
		t.Errorf("%d calls", calls)
	}
}

// An answer without an end does not fill the memory.
func TestLongAnswer(t *testing.T) {
	t.Parallel()
	endless := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for chunk := make([]byte, 1<<20); ; {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}))
	t.Cleanup(endless.Close)
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: strict{transport}}
	response, err := client.Get(endless.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	var tooLong *http.MaxBytesError
	if n, err := io.Copy(io.Discard, response.Body); !errors.As(err, &tooLong) || n != maxAnswer {
		t.Errorf("%d bytes, %v", n, err)
	}
}
