// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"bytes"
	"crypto/rand"
	"errors"
	"testing"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// credential is what a story about TPM2_ActivateCredential may spoil.
type credential struct {
	tpm          transport.TPM
	e            template.EK
	ak, ek       *tpm2.CreatePrimaryResponse
	blob, secret []byte
	// hash is the policy session's, bits its cipher's key size.
	hash tpm2.TPMIAlgHash
	bits tpm2.TPMKeyBits
	// satisfy has the session satisfy the EK's policy.
	satisfy func(tpm2.Session) error
	// activate and key are the handles of the command; again is how often more than once it is
	// sent.
	activate, key tpm2.AuthHandle
	again         int
	// salted is set if the session is salted with the EK.
	salted bool
	// spoil changes the command's bytes.
	spoil func([]byte)
}

var theSecret = []byte("0123456789abcdef0123456789abcdef")

func makeCredential(t *testing.T, ek *tpm2.CreatePrimaryResponse, name []byte, secret []byte) (blob, encrypted []byte) {
	t.Helper()
	public, err := ek.OutPublic.Contents()
	if err != nil {
		t.Fatal(err)
	}
	key, err := tpm2.ImportEncapsulationKey(public)
	if err != nil {
		t.Fatal(err)
	}
	if blob, encrypted, err = tpm2.CreateCredential(rand.Reader, key, name, secret); err != nil {
		t.Fatal(err)
	}
	return blob, encrypted
}

func newCredential(t *testing.T, tpm transport.TPM, e template.EK) *credential {
	t.Helper()
	c := &credential{tpm: tpm, e: e, hash: e.Public.NameAlg, bits: 128, salted: true}
	c.ak, c.ek = keys(t, tpm, e)
	c.blob, c.secret = makeCredential(t, c.ek, c.ak.Name.Buffer, theSecret)
	c.activate = tpm2.AuthHandle{Handle: c.ak.ObjectHandle, Name: c.ak.Name, Auth: tpm2.PasswordAuth(nil)}
	c.key = tpm2.AuthHandle{Handle: c.ek.ObjectHandle, Name: c.ek.Name}
	c.satisfy = func(s tpm2.Session) error {
		if err := c.bySecret(s); err != nil {
			return err
		}
		if or := c.e.PolicyOR(); or != nil {
			_, err := tpm2.PolicyOr{PolicySession: s.Handle(), PHashList: tpm2.TPMLDigest{Digests: or}}.Execute(c.tpm)
			return err
		}
		return nil
	}
	return c
}

func (c *credential) bySecret(s tpm2.Session) error {
	_, err := tpm2.PolicySecret{
		AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)}, PolicySession: s.Handle(), NonceTPM: s.NonceTPM(),
	}.Execute(c.tpm)
	return err
}

// spoiler changes what is sent to a TPM, if that is a TPM2_ActivateCredential.
type spoiler struct {
	transport.TPM
	spoil func([]byte)
}

func (s spoiler) Send(command []byte) ([]byte, error) {
	if s.spoil != nil && tpm2.TPMCC(command[8])<<8|tpm2.TPMCC(command[9]) == tpm2.TPMCCActivateCredential {
		s.spoil(command)
	}
	return s.TPM.Send(command)
}

// run does it, and returns the secret that came out last.
func (c *credential) run() ([]byte, error) {
	options := []tpm2.AuthOption{tpm2.AESEncryption(c.bits, tpm2.EncryptOut)}
	public, err := c.ek.OutPublic.Contents()
	if err != nil {
		return nil, err
	}
	if c.salted {
		options = append(options, tpm2.Salted(c.ek.ObjectHandle, *public))
	}
	session, _, err := tpm2.PolicySession(c.tpm, c.hash, 16, options...)
	if err != nil {
		return nil, err
	}
	if err := c.satisfy(session); err != nil {
		return nil, err
	}
	if c.key.Auth == nil {
		c.key.Auth = session
	}
	var out []byte
	for range c.again + 1 {
		rsp, err := tpm2.ActivateCredential{
			ActivateHandle: c.activate, KeyHandle: c.key, CredentialBlob: tpm2.TPM2BIDObject{Buffer: c.blob}, Secret: tpm2.TPM2BEncryptedSecret{Buffer: c.secret},
		}.Execute(spoiler{c.tpm, c.spoil})
		if err != nil {
			return out, err
		}
		out = rsp.CertInfo.Buffer
	}
	return out, nil
}

// What becomes of a credential, for this AK and this EK and for others, whole and spoilt, with the
// policy satisfied or not.
func TestModelActivatesAsSwtpm(t *testing.T) {
	p := newPair(t)
	other, err := create(startModel(t, swtpm.Options{}).Transport(), tpm2.TPMRHEndorsement, ekTemplate("ecc-p256").Public)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*testing.T, *credential){
		"good":                 func(*testing.T, *credential) {},
		"good, without a salt": func(_ *testing.T, c *credential) { c.salted = false },
		"good, AES-256":        func(_ *testing.T, c *credential) { c.bits = 256 },
		"twice in one session": func(_ *testing.T, c *credential) { c.again = 1 },
		"policy not satisfied": func(_ *testing.T, c *credential) { c.satisfy = func(tpm2.Session) error { return nil } },
		"policy satisfied twice": func(_ *testing.T, c *credential) {
			c.satisfy = func(s tpm2.Session) error { return errors.Join(c.bySecret(s), c.bySecret(s)) }
		},
		"only half of a policy":       func(_ *testing.T, c *credential) { c.satisfy = c.bySecret },
		"a session of another hash":   func(_ *testing.T, c *credential) { c.hash, c.satisfy = tpm2.TPMAlgSHA512, c.bySecret },
		"the wrong name of the EK":    func(_ *testing.T, c *credential) { c.key.Name = c.ak.Name },
		"the wrong name of the AK":    func(_ *testing.T, c *credential) { c.activate.Name = c.ek.Name },
		"the AK by another password":  func(_ *testing.T, c *credential) { c.activate.Auth = tpm2.PasswordAuth([]byte("x")) },
		"the AK for the EK, and back": func(_ *testing.T, c *credential) { c.activate, c.key = c.key, c.activate },
		"the AK as the EK":            func(_ *testing.T, c *credential) { c.key = c.activate },
		"a blob for another AK": func(t *testing.T, c *credential) {
			c.blob, c.secret = makeCredential(t, c.ek, c.ek.Name.Buffer, theSecret)
		},
		"a blob for another EK": func(t *testing.T, c *credential) {
			c.blob, c.secret = makeCredential(t, other, c.ak.Name.Buffer, theSecret)
		},
		"a blob with another secret":      func(t *testing.T, c *credential) { _, c.secret = makeCredential(t, c.ek, c.ak.Name.Buffer, theSecret) },
		"a blob whose MAC is another":     func(_ *testing.T, c *credential) { c.blob[5] ^= 1 },
		"a blob whose MAC is short":       func(_ *testing.T, c *credential) { c.blob[1]-- },
		"a blob whose content is another": func(_ *testing.T, c *credential) { c.blob[len(c.blob)-1] ^= 1 },
		"a blob cut off":                  func(_ *testing.T, c *credential) { c.blob = c.blob[:len(c.blob)-1] },
		"a blob cut off early":            func(_ *testing.T, c *credential) { c.blob = c.blob[:20] },
		"a blob of one byte":              func(_ *testing.T, c *credential) { c.blob = c.blob[:1] },
		"no blob":                         func(_ *testing.T, c *credential) { c.blob = nil },
		"a blob that is too long":         func(_ *testing.T, c *credential) { c.blob = make([]byte, 1000) },
		"a short secret": func(t *testing.T, c *credential) {
			c.blob, c.secret = makeCredential(t, c.ek, c.ak.Name.Buffer, []byte("x"))
		},
		"a secret longer than a digest": func(t *testing.T, c *credential) {
			c.blob, c.secret = makeCredential(t, c.ek, c.ak.Name.Buffer, make([]byte, 50))
		},
		"the session's HMAC is another":   func(_ *testing.T, c *credential) { c.spoil = func(b []byte) { b[10+8+4+9+4+2+16+1+2] ^= 1 } },
		"the session's nonce is another":  func(_ *testing.T, c *credential) { c.spoil = func(b []byte) { b[10+8+4+9+4+2] ^= 1 } },
		"the parameters are changed":      func(_ *testing.T, c *credential) { c.spoil = func(b []byte) { b[len(b)-1] ^= 1 } },
		"the session's handle is another": func(_ *testing.T, c *credential) { c.spoil = func(b []byte) { b[10+8+4+9+3] ^= 1 } },
		"the session's kind is another":   func(_ *testing.T, c *credential) { c.spoil = func(b []byte) { b[10+8+4+9] ^= 1 } },
		"reserved attributes":             func(_ *testing.T, c *credential) { c.spoil = func(b []byte) { b[10+8+4+9+4+2+16] |= 0x08 } },
		"attributes that are not vouched": func(_ *testing.T, c *credential) { c.spoil = func(b []byte) { b[10+8+4+9+4+2+16] ^= 0x01 } },
		"the AK that has been flushed": func(_ *testing.T, c *credential) {
			_, _ = tpm2.FlushContext{FlushHandle: c.ak.ObjectHandle}.Execute(c.tpm)
		},
	} {
		t.Run(name, func(t *testing.T) {
			kinds := []string{"ecc-p256"}
			if name == "good" || name == "only half of a policy" {
				kinds = append(kinds, "ecc-p384-high")
			}
			for _, kind := range kinds {
				codes := p.both(t, func(t *testing.T, r *recorder, _ chip) []byte {
					c := newCredential(t, r, ekTemplate(kind))
					change(t, c)
					secret, _ := c.run() // the recorder has the code
					return secret
				})
				t.Log(kind, codes)
			}
		})
	}
	// Secrets that are encrypted to no RSA key are not compared: libtpms answers TPM_RC_FAILURE
	// where the specification has TPM_RC_VALUE.
	for name, change := range map[string]func(*credential){
		"the point is cut off":       func(c *credential) { c.secret = c.secret[:len(c.secret)-1] },
		"a byte more than the point": func(c *credential) { c.secret = append(c.secret, 0) },
		"half a point":               func(c *credential) { c.secret = c.secret[:34] },
		"no point":                   func(c *credential) { c.secret = nil },
		"one byte of a point":        func(c *credential) { c.secret = []byte{0} },
		"a point that is not on it":  func(c *credential) { c.secret[len(c.secret)-1] ^= 1 },
		"a coordinate that is long":  func(c *credential) { c.secret = append([]byte{0, 200}, make([]byte, 230)...) },
		"the point at zero":          func(c *credential) { clear(c.secret[2:34]); clear(c.secret[36:]) },
		"a secret that is too long":  func(c *credential) { c.secret = make([]byte, 600) },
	} {
		t.Run(name, func(t *testing.T) {
			codes := p.both(t, func(t *testing.T, r *recorder, _ chip) []byte {
				c := newCredential(t, r, ekTemplate("ecc-p256"))
				c.secret = bytes.Clone(c.secret)
				change(c)
				_, _ = c.run() // the recorder has the code
				return nil
			})
			t.Log(codes)
		})
	}
}
