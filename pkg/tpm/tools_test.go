// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// tools runs tpm2-tools, somebody else's reading of the same specifications, in a directory of its
// own.
type tools struct {
	t   *testing.T
	dir string
	tpm *swtpm.TPM
}

func (x tools) run(name string, arguments ...string) {
	x.t.Helper()
	cmd := exec.Command(name, arguments...)
	cmd.Dir = x.dir
	cmd.Env = append(os.Environ(), "TPM2TOOLS_TCTI=swtpm:path="+x.tpm.Socket())
	if out, err := cmd.CombinedOutput(); err != nil {
		x.t.Fatalf("%s: %v: %s", cmd, err, out)
	}
}

func (x tools) write(name string, data []byte) {
	x.t.Helper()
	if err := os.WriteFile(filepath.Join(x.dir, name), data, 0o600); err != nil {
		x.t.Fatal(err)
	}
}

func (x tools) read(name string) []byte {
	x.t.Helper()
	data, err := os.ReadFile(filepath.Join(x.dir, name))
	if err != nil {
		x.t.Fatal(err)
	}
	return data
}

func newTools(t *testing.T, o swtpm.Options) tools {
	return tools{t, t.TempDir(), swtpm.Start(t, o)}
}

func TestToolsMakeTheSameEKs(t *testing.T) {
	t.Parallel()
	x := newTools(t, swtpm.Options{})
	for name, algorithm := range map[string]string{"rsa-2048": "rsa", "ecc-p256": "ecc", "ecc-p384-high": "ecc384"} {
		x.run("tpm2_createek", "-c", "ek.ctx", "-G", algorithm, "-u", "ek.pub", "-f", "tss")
		x.run("tpm2_flushcontext", "-t")
		ours := with(t, x.tpm.Socket(), hello(name)).ek.Public
		if theirs := x.read("ek.pub"); !bytes.Equal(theirs[2:], ours) { // a TPM2B_PUBLIC
			t.Errorf("%s: tpm2_createek %s makes %x, not %x", name, algorithm, theirs, ours)
		}
	}
}

func TestToolsCredentialIsActivated(t *testing.T) {
	for _, name := range []string{"rsa-2048", "ecc-p256", "ecc-p384-high"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := newTools(t, swtpm.Options{Certified: []string{name}})
			k := with(t, x.tpm.Socket(), hello(""))
			akName, err := template.Name(k.ak)
			if err != nil {
				t.Fatal(err)
			}
			x.write("secret", secret)
			x.write("ek.pub", tpm2.Marshal(tpm2.TPM2BData{Buffer: k.ek.Public}))
			x.run("tpm2_makecredential", "-u", "ek.pub", "-s", "secret", "-n", hex.EncodeToString(akName), "-o", "blob")
			// its file header: magic, version
			blob, ok := bytes.CutPrefix(x.read("blob"), []byte{0xba, 0xdc, 0xc0, 0xde, 0, 0, 0, 1})
			if !ok {
				t.Fatalf("%x", blob)
			}
			c := challenge(t, k)
			size := 2 + int(blob[0])<<8 + int(blob[1])
			c.CredentialBlob, c.EncryptedSecret = blob[:size], blob[size:]
			checkQuote(t, k, c, with(t, x.tpm.Socket(), prove(c)))
		})
	}
}

func TestToolsAcceptTheQuote(t *testing.T) {
	t.Parallel()
	x := newTools(t, swtpm.Options{})
	if err := x.tpm.Extend(7, []byte("x")); err != nil {
		t.Fatal(err)
	}
	k := with(t, x.tpm.Socket(), hello(""))
	c := challenge(t, k)
	slices.Sort(c.PCRs)
	q := with(t, x.tpm.Socket(), prove(c))
	key, err := template.CheckAK(k.ak)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	x.write("ak.pem", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	x.write("quote", q.Attest)
	x.write("signature", q.Signature)
	x.run("tpm2_pcrread", "-F", "serialized", "-o", "pcrs", "sha256:all")
	x.run("tpm2_checkquote", "-u", "ak.pem", "-m", "quote", "-s", "signature", "-f", "pcrs", "-g", "sha256", "-q", hex.EncodeToString(mac(secret)))
	x.run("tpm2_pcrread", "-F", "values", "-o", "values", "sha256:all")
	if !bytes.Equal(x.read("values"), slices.Concat(q.PCRs...)) {
		t.Error("tpm2_pcrread reads other values")
	}
}
