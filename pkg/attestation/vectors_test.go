// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"crypto/aes"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math/big"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// hexBytes are written in hexadecimal.
type hexBytes []byte

func (h *hexBytes) UnmarshalJSON(data []byte) error {
	var text string
	if err := json.Unmarshal(data, &text); err != nil {
		return err
	}
	raw, err := hex.DecodeString(text)
	*h = raw
	return err
}

// vectors is testdata/vectors.json, which vectors.py wrote from docs/spec.md: no line of this
// package had a part in it.
type vectors struct {
	Comment   string              `json:"comment"`
	Templates map[string]hexBytes `json:"templates"`
	Exchange  struct {
		ControllerKey   hexBytes `json:"controllerKey"`
		ClusterUID      string   `json:"clusterUID"`
		SignerName      string   `json:"signerName"`
		Usages          []string `json:"usages"`
		PKCS10          hexBytes `json:"pkcs10"`
		HelloName       string   `json:"helloName"`
		HelloUID        string   `json:"helloUID"`
		HelloDocument   string   `json:"helloDocument"`
		HelloRequest    string   `json:"helloRequest"`
		EKPublicKey     hexBytes `json:"ekPublicKey"`
		EKPrivateKey    hexBytes `json:"ekPrivateKey"`
		AKName          hexBytes `json:"akName"`
		Challenge       string   `json:"challenge"`
		Secret          hexBytes `json:"secret"`
		ProofName       string   `json:"proofName"`
		MAC             hexBytes `json:"mac"`
		QualifiedSigner hexBytes `json:"qualifiedSigner"`
		PCRDigest       hexBytes `json:"pcrDigest"`
		ProofDocument   string   `json:"proofDocument"`
		ProofRequest    string   `json:"proofRequest"`
	} `json:"exchange"`
	Secrets []struct {
		Name         string       `json:"name"`
		Key          hexBytes     `json:"key"`
		HelloUID     string       `json:"helloUID"`
		Version      Version      `json:"version"`
		ClusterUID   string       `json:"clusterUID"`
		SignerName   string       `json:"signerName"`
		EKPublicKey  hexBytes     `json:"ekPublicKey"`
		AKName       hexBytes     `json:"akName"`
		HelloRequest string       `json:"helloRequest"`
		Expires      int64        `json:"expires"`
		PCRs         PCRSelection `json:"pcrs"`
		Info         hexBytes     `json:"info"`
		Secret       hexBytes     `json:"secret"`
	} `json:"secrets"`
	Transcripts []struct {
		Name              string       `json:"name"`
		Secret            hexBytes     `json:"secret"`
		Version           Version      `json:"version"`
		SignerName        string       `json:"signerName"`
		HelloName         string       `json:"helloName"`
		HelloUID          string       `json:"helloUID"`
		HelloRequest      string       `json:"helloRequest"`
		ProofName         string       `json:"proofName"`
		PKCS10            hexBytes     `json:"pkcs10"`
		Usages            []string     `json:"usages"`
		ExpirationSeconds *int32       `json:"expirationSeconds"`
		KeyID             string       `json:"kid"`
		PCRs              PCRSelection `json:"pcrs"`
		Transcript        hexBytes     `json:"transcript"`
		Digest            hexBytes     `json:"digest"`
		MAC               hexBytes     `json:"mac"`
	} `json:"transcripts"`
	Documents []struct {
		Name     string          `json:"name"`
		Kind     string          `json:"kind"`
		Fields   json.RawMessage `json:"fields"`
		Document string          `json:"document"`
	} `json:"documents"`
	RefusedDocuments []refusedDocument `json:"refusedDocuments"`
	RefusedRequests  []struct {
		Name    string `json:"name"`
		Request string `json:"request"`
	} `json:"refusedRequests"`
	Versions struct {
		Accepted []string `json:"accepted"`
		Refused  []string `json:"refused"`
		Common   []struct {
			Ours   string    `json:"ours"`
			Theirs string    `json:"theirs"`
			Tried  []Version `json:"tried"`
			Want   Version   `json:"want"`
		} `json:"common"`
	} `json:"versions"`
	Heads []struct {
		Document string  `json:"document"`
		Version  Version `json:"version"`
		Kind     string  `json:"kind"`
	} `json:"heads"`
	Announcements struct {
		Cases []struct {
			Name      string   `json:"name"`
			Entry     string   `json:"entry"`
			Node      string   `json:"node"`
			NotBefore int64    `json:"notBefore"`
			Done      []string `json:"done"`
			Renewal   string   `json:"renewal"`
			At        int64    `json:"at"`
		} `json:"cases"`
		Refused []struct {
			Name  string `json:"name"`
			Entry string `json:"entry"`
		} `json:"refused"`
	} `json:"announcements"`
	// Origins has the cases that pkg/verifier/tpm verifies.
	Origins struct {
		ObjectName string          `json:"objectName"`
		Request    hexBytes        `json:"request"`
		ExtraData  hexBytes        `json:"extraData"`
		Cases      json.RawMessage `json:"cases"`
	} `json:"origins"`
	Waiting struct {
		Accepted []struct {
			Value  string `json:"value"`
			Reason string `json:"reason"`
			Text   string `json:"text"`
		} `json:"accepted"`
		Refused []string `json:"refused"`
	} `json:"waiting"`
}

type refusedDocument struct {
	Name     string   `json:"name"`
	Kind     string   `json:"kind"`
	Field    string   `json:"field"`
	Document string   `json:"document"`
	Bytes    hexBytes `json:"bytes"`
	Then     string   `json:"then"`
	Times    int      `json:"times"`
}

// data is Document, or Bytes where it is not UTF-8, and Then so many times.
func (r refusedDocument) data() []byte {
	return append(append([]byte(r.Document), r.Bytes...), strings.Repeat(r.Then, r.Times)...)
}

var readVectors = sync.OnceValues(func() (*vectors, error) {
	data, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		return nil, err
	}
	v := &vectors{}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	return v, d.Decode(v)
})

func loadVectors(t testing.TB) *vectors {
	t.Helper()
	v, err := readVectors()
	if err != nil {
		t.Fatal(err)
	}
	if len(v.Secrets) == 0 || len(v.Transcripts) == 0 || len(v.Documents) == 0 || len(v.RefusedDocuments) == 0 ||
		len(v.RefusedRequests) == 0 || len(v.Announcements.Cases) == 0 || len(v.Announcements.Refused) == 0 || len(v.Waiting.Accepted) == 0 || len(v.Waiting.Refused) == 0 || len(v.Versions.Accepted) == 0 || len(v.Versions.Refused) == 0 || len(v.Versions.Common) == 0 || len(v.Heads) == 0 {
		t.Fatal("there are no vectors of some kind")
	}
	return v
}

// document is what the three have in common.
type document interface{ Marshal() ([]byte, error) }

func parseKind(t testing.TB, kind string, data []byte) (document, error) {
	t.Helper()
	switch kind {
	case KindHello:
		return ParseHello(data)
	case KindChallenge:
		return ParseChallenge(data)
	case KindProof:
		return ParseProof(data)
	case KindOrigin:
		return ParseOrigin(data)
	}
	t.Fatalf("no such kind: %q", kind)
	return nil, nil
}

// The file is what its generator writes: nobody has mended a vector by hand.
func TestVectorsAreGenerated(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	command := exec.Command(python, "vectors.py")
	command.Dir = "testdata"
	got, err := command.Output()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("testdata/vectors.json is not what testdata/vectors.py writes")
	}
}

func TestSecretVectors(t *testing.T) {
	for _, c := range loadVectors(t).Secrets {
		t.Run(c.Name, func(t *testing.T) {
			got, err := Secret(c.Key, c.HelloUID, SecretInfo{
				Version: c.Version, ClusterUID: c.ClusterUID, SignerName: c.SignerName, EKPublicKey: c.EKPublicKey,
				AKName: c.AKName, HelloRequest: []byte(c.HelloRequest), Expires: c.Expires, PCRs: c.PCRs,
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != SecretSize || !bytes.Equal(got, c.Secret) {
				t.Errorf("got %x, want %x", got, []byte(c.Secret))
			}
		})
	}
}

func TestTranscriptVectors(t *testing.T) {
	for _, c := range loadVectors(t).Transcripts {
		t.Run(c.Name, func(t *testing.T) {
			transcript := Transcript{
				Version: c.Version, SignerName: c.SignerName, HelloName: c.HelloName, HelloUID: c.HelloUID,
				HelloRequest: []byte(c.HelloRequest), ProofName: c.ProofName, PKCS10: c.PKCS10, Usages: c.Usages,
				ExpirationSeconds: c.ExpirationSeconds, KeyID: c.KeyID, PCRs: c.PCRs,
			}
			if digest := transcript.digest(); !bytes.Equal(digest[:], c.Digest) {
				t.Errorf("digest: got %x, want %x, of %x", digest, []byte(c.Digest), []byte(c.Transcript))
			}
			if mac := transcript.MAC(c.Secret); !bytes.Equal(mac, c.MAC) {
				t.Errorf("MAC: got %x, want %x", mac, []byte(c.MAC))
			}
		})
	}
}

// The fields of the documents as vectors.json has them: their names are those of the wire, bytes
// are hexadecimal.
type (
	helloFields struct {
		Version        Version    `json:"version"`
		Versions       Versions   `json:"versions"`
		SignerName     string     `json:"signerName"`
		EKTemplate     string     `json:"ekTemplate"`
		EKPublic       hexBytes   `json:"ekPublic"`
		EKCertificates []hexBytes `json:"ekCertificates"`
		AKPublic       hexBytes   `json:"akPublic"`
	}
	challengeFields struct {
		Version         Version      `json:"version"`
		KeyID           string       `json:"kid"`
		Expires         int64        `json:"expires"`
		CredentialBlob  hexBytes     `json:"credentialBlob"`
		EncryptedSecret hexBytes     `json:"encryptedSecret"`
		PCRs            PCRSelection `json:"pcrs"`
		EventLog        bool         `json:"eventLog"`
	}
	proofFields struct {
		Version   Version `json:"version"`
		HelloName string  `json:"helloName"`
		HelloUID  string  `json:"helloUID"`
		KeyID     string  `json:"kid"`
		Expires   int64   `json:"expires"`
		PCRBank   string  `json:"pcrBank"`
		PCRs      []struct {
			Index int      `json:"index"`
			Value hexBytes `json:"value"`
		} `json:"pcrs"`
		Quote     hexBytes `json:"quote"`
		Signature hexBytes `json:"signature"`
		EventLog  hexBytes `json:"eventLog"`
	}
)

// fromFields returns the document that the fields describe, kind included.
func fromFields(t *testing.T, kind string, raw json.RawMessage) document {
	t.Helper()
	read := func(into any) {
		d := json.NewDecoder(bytes.NewReader(raw))
		d.DisallowUnknownFields()
		if err := d.Decode(into); err != nil {
			t.Fatal(err)
		}
	}
	switch kind {
	case KindHello:
		var f helloFields
		read(&f)
		h := &Hello{Version: f.Version, Kind: kind, Versions: f.Versions, SignerName: f.SignerName, EKTemplate: f.EKTemplate, EKPublic: f.EKPublic, AKPublic: f.AKPublic}
		for _, certificate := range f.EKCertificates {
			h.EKCertificates = append(h.EKCertificates, certificate)
		}
		return h
	case KindChallenge:
		var f challengeFields
		read(&f)
		return &Challenge{Version: f.Version, Kind: kind, KeyID: f.KeyID, Expires: f.Expires, CredentialBlob: f.CredentialBlob, EncryptedSecret: f.EncryptedSecret, PCRs: f.PCRs, EventLog: f.EventLog}
	case KindProof:
		var f proofFields
		read(&f)
		p := &Proof{Version: f.Version, Kind: kind, HelloName: f.HelloName, HelloUID: f.HelloUID, KeyID: f.KeyID, Expires: f.Expires, PCRBank: f.PCRBank, Quote: f.Quote, Signature: f.Signature}
		for _, pcr := range f.PCRs {
			p.PCRs = append(p.PCRs, PCR{pcr.Index, pcr.Value})
		}
		if len(f.EventLog) > 0 {
			p.EventLog = f.EventLog
		}
		return p
	}
	t.Fatalf("no such kind: %q", kind)
	return nil
}

func TestDocumentVectors(t *testing.T) {
	for _, c := range loadVectors(t).Documents {
		t.Run(c.Kind+" "+c.Name, func(t *testing.T) {
			want := fromFields(t, c.Kind, c.Fields)
			if data, err := want.Marshal(); err != nil || string(data) != c.Document {
				t.Errorf("Marshal: %v\n%s\nwant\n%s", err, data, c.Document)
			}
			got, err := parseKind(t, c.Kind, []byte(c.Document))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("Parse: got %+v, want %+v", got, want)
			}
			if version, kind := Head([]byte(c.Document)); version != VersionTPM || kind != c.Kind {
				t.Errorf("Head: %q, %q", version, kind)
			}
			// Nor is it a document of another kind.
			for _, other := range []string{KindHello, KindChallenge, KindProof, KindOrigin} {
				if _, err := parseKind(t, other, []byte(c.Document)); (err == nil) != (other == c.Kind) {
					t.Errorf("as %s: %v", other, err)
				}
			}
		})
	}
}

func TestRefusedDocumentVectors(t *testing.T) {
	for _, c := range loadVectors(t).RefusedDocuments {
		t.Run(c.Kind+" "+c.Name, func(t *testing.T) {
			_, err := parseKind(t, c.Kind, c.data())
			var malformed *DocumentError
			if !errors.As(err, &malformed) {
				t.Fatalf("got %v, want a DocumentError", err)
			}
			if malformed.Kind != c.Kind || malformed.Field != c.Field {
				t.Errorf("got kind %q and field %q: %v; want field %q", malformed.Kind, malformed.Field, err, c.Field)
			}
		})
	}
}

func TestRefusedRequestVectors(t *testing.T) {
	for _, c := range loadVectors(t).RefusedRequests {
		t.Run(c.Name, func(t *testing.T) {
			_, err := Parse([]byte(c.Request))
			var malformed *FormatError
			if !errors.As(err, &malformed) {
				t.Errorf("got %v, want a FormatError", err)
			}
		})
	}
}

// The exchange from end to end, as a verifier sees it that knows its own key and the two objects.
func TestExchangeVector(t *testing.T) {
	v := loadVectors(t)
	x := v.Exchange
	for _, c := range []struct{ request, document string }{{x.HelloRequest, x.HelloDocument}, {x.ProofRequest, x.ProofDocument}} {
		request := Request{PKCS10: x.PKCS10, Provider: "tpm", Data: []byte(c.document)}
		if data, err := request.Marshal(); err != nil || string(data) != c.request {
			t.Errorf("spec.request: %v\n%s\nwant\n%s", err, data, c.request)
		}
		if got, err := Parse([]byte(c.request)); err != nil || !reflect.DeepEqual(got, request) {
			t.Errorf("Parse: %v, %+v", err, got)
		}
	}
	certification, err := x509.ParseCertificateRequest(x.PKCS10)
	if err != nil {
		t.Fatal(err)
	}
	if err := certification.CheckSignature(); err != nil {
		t.Error(err)
	}
	if subject := certification.Subject; subject.CommonName != "system:node:worker-1" || !slices.Equal(subject.Organization, []string{"system:nodes"}) ||
		len(certification.Extensions) != 1 || certification.Extensions[0].Id.String() != "1.3.6.1.4.1.11129.2.1.21" {
		t.Errorf("subject %s, extensions %v", subject, certification.Extensions)
	}

	hello, err := ParseHello([]byte(x.HelloDocument))
	if err != nil {
		t.Fatal(err)
	}
	challenge, err := ParseChallenge([]byte(x.Challenge))
	if err != nil {
		t.Fatal(err)
	}
	proof, err := ParseProof([]byte(x.ProofDocument))
	if err != nil {
		t.Fatal(err)
	}
	if proof.KeyID != challenge.KeyID || proof.Expires != challenge.Expires || !reflect.DeepEqual(proof.Selection(), challenge.PCRs) {
		t.Error("the proof does not answer the challenge")
	}
	secret, err := Secret(x.ControllerKey, proof.HelloUID, SecretInfo{
		Version: proof.Version, ClusterUID: x.ClusterUID, SignerName: hello.SignerName, EKPublicKey: x.EKPublicKey, AKName: x.AKName,
		HelloRequest: []byte(x.HelloRequest), Expires: proof.Expires, PCRs: proof.Selection(),
	})
	if err != nil || !bytes.Equal(secret, x.Secret) {
		t.Errorf("secret: %x, %v", secret, err)
	}
	mac := Transcript{
		Version: proof.Version, SignerName: x.SignerName, HelloName: x.HelloName, HelloUID: x.HelloUID, HelloRequest: []byte(x.HelloRequest),
		ProofName: x.ProofName, PKCS10: x.PKCS10, Usages: x.Usages, KeyID: proof.KeyID, PCRs: proof.Selection(),
	}.MAC(secret)
	if !bytes.Equal(mac, x.MAC) {
		t.Errorf("MAC: %x", mac)
	}

	// docs/spec.md, section 12: the quote is over that MAC and those PCRs, by the AK of the hello.
	name := sha256.Sum256(hello.AKPublic)
	qualified := sha256.Sum256(slices.Concat([]byte{0x40, 0, 0, 0x0b, 0, 0x0b}, name[:]))
	pcrs := sha256.New()
	for _, pcr := range proof.PCRs {
		pcrs.Write(pcr.Value)
	}
	want := slices.Concat([]byte("\xffTCG\x80\x18\x00\x22\x00\x0b"), qualified[:], []byte{0, 32}, mac, proof.Quote[76:101],
		[]byte{0, 0, 0, 1, 0, 0x0b, 3, 0x95, 0, 0, 0, 32}, pcrs.Sum(nil))
	if !bytes.Equal(proof.Quote, want) {
		t.Errorf("quote:\n%x\nwant\n%x", proof.Quote, want)
	}
	if !bytes.Equal(x.AKName[2:], name[:]) || !bytes.Equal(x.QualifiedSigner[2:], qualified[:]) || !bytes.Equal(x.PCRDigest, pcrs.Sum(nil)) {
		t.Error("AK name, qualified signer or PCR digest")
	}
	point := append([]byte{4}, append(slices.Clone(hello.AKPublic[22:54]), hello.AKPublic[56:88]...)...)
	spki, err := x509.ParsePKIXPublicKey(x.EKPublicKey)
	if err != nil {
		t.Fatal(err)
	}
	ak, err := ecdsa.ParseUncompressedPublicKey(spki.(*ecdsa.PublicKey).Curve, point)
	if err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256(proof.Quote)
	if r, s := proof.Signature[:38], proof.Signature[38:]; len(s) != 34 || !bytes.HasPrefix(r, []byte{0, 0x18, 0, 0x0b, 0, 32}) || !bytes.HasPrefix(s, []byte{0, 32}) {
		t.Fatalf("signature: %x", proof.Signature)
	}
	signature, err := asn1.Marshal(struct{ R, S *big.Int }{new(big.Int).SetBytes(proof.Signature[6:38]), new(big.Int).SetBytes(proof.Signature[40:72])})
	if err != nil || !ecdsa.VerifyASN1(ak, digest[:], signature) {
		t.Error("the signature is not the AK's")
	}
}

// The credential holds the secret, for the TPM that has the EK (TPM 2.0 Part 1, "Credential
// Protection").
func TestExchangeVectorCredential(t *testing.T) {
	x := loadVectors(t).Exchange
	challenge, err := ParseChallenge([]byte(x.Challenge))
	if err != nil {
		t.Fatal(err)
	}
	ek, err := ecdh.P256().NewPrivateKey(x.EKPrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	blob, encrypted := challenge.CredentialBlob, challenge.EncryptedSecret
	if len(blob) != 70 || !bytes.HasPrefix(blob, []byte{0, 68, 0, 32}) || len(encrypted) != 70 || !bytes.HasPrefix(encrypted, []byte{0, 68, 0, 32}) {
		t.Fatalf("credential %x, secret %x", blob, encrypted)
	}
	integrity, identity := blob[4:36], blob[36:]
	ephemeral, err := ecdh.P256().NewPublicKey(slices.Concat([]byte{4}, encrypted[4:36], encrypted[38:]))
	if err != nil {
		t.Fatal(err)
	}
	z, err := ek.ECDH(ephemeral)
	if err != nil {
		t.Fatal(err)
	}
	seed := sha256.Sum256(slices.Concat([]byte{0, 0, 0, 1}, z, []byte("IDENTITY\x00"), encrypted[4:36], ek.PublicKey().Bytes()[1:33]))
	sum := func(key []byte, parts ...[]byte) []byte {
		mac := hmac.New(sha256.New, key)
		mac.Write(slices.Concat(parts...))
		return mac.Sum(nil)
	}
	one := []byte{0, 0, 0, 1}
	if got := sum(sum(seed[:], one, []byte("INTEGRITY\x00"), []byte{0, 0, 1, 0}), identity, x.AKName); !bytes.Equal(got, integrity) {
		t.Errorf("integrity: %x, want %x", got, integrity)
	}
	block, err := aes.NewCipher(sum(seed[:], one, []byte("STORAGE\x00"), x.AKName, []byte{0, 0, 0, 128})[:16])
	if err != nil {
		t.Fatal(err)
	}
	var secret []byte
	feedback := make([]byte, aes.BlockSize)
	for part := range slices.Chunk(identity, aes.BlockSize) { // cipher feedback mode
		block.Encrypt(feedback, feedback)
		for i := range part {
			secret = append(secret, part[i]^feedback[i])
		}
		copy(feedback, part)
	}
	if want := append([]byte{0, 32}, x.Secret...); !bytes.Equal(secret, want) {
		t.Errorf("secret: %x, want %x", secret, want)
	}
}

func TestHeadVectors(t *testing.T) {
	for _, c := range loadVectors(t).Heads {
		if version, kind := Head([]byte(c.Document)); version != c.Version || kind != c.Kind {
			t.Errorf("%s: got %q and %q, want %q and %q", c.Document, version, kind, c.Version, c.Kind)
		}
	}
}

func TestVersionVectors(t *testing.T) {
	v := loadVectors(t).Versions
	for _, text := range v.Accepted {
		if list, err := ParseVersions(text); err != nil || list.String() != text {
			t.Errorf("%q: %v, %v", text, list, err)
		}
	}
	for _, text := range v.Refused {
		if list, err := ParseVersions(text); err == nil || list != nil {
			t.Errorf("%q: accepted as %v", text, list)
		}
	}
	for _, c := range v.Common {
		ours, err := ParseVersions(c.Ours)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := ParseVersions(c.Theirs)
		if err != nil {
			t.Fatal(err)
		}
		if got := ours.Common(theirs, c.Tried...); got != c.Want {
			t.Errorf("%s with %s but %v: got %q, want %q", c.Ours, c.Theirs, c.Tried, got, c.Want)
		}
		if got := theirs.Common(ours, c.Tried...); got != c.Want {
			t.Errorf("the other way, %s with %s but %v: got %q, want %q", c.Theirs, c.Ours, c.Tried, got, c.Want)
		}
	}
}

func TestAnnouncementVectors(t *testing.T) {
	for _, c := range loadVectors(t).Announcements.Cases {
		announced, err := ParseAnnouncement([]byte(c.Entry))
		if err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		name, at, due := announced.Due(c.Node, time.Unix(c.NotBefore, 0), c.Done)
		if name != c.Renewal || due != (c.Renewal != "") || due && at.Unix() != c.At {
			t.Errorf("%s: %q at %d, %t, want %q at %d", c.Name, name, at.Unix(), due, c.Renewal, c.At)
		}
	}
	for _, c := range loadVectors(t).Announcements.Refused {
		if got, err := ParseAnnouncement([]byte(c.Entry)); err == nil {
			t.Errorf("%s: %+v", c.Name, got)
		}
	}
}

func TestOriginDataVector(t *testing.T) {
	v := loadVectors(t).Origins
	if got := OriginData(v.ObjectName, v.Request); !bytes.Equal(got, v.ExtraData) {
		t.Errorf("%x, want %x", got, []byte(v.ExtraData))
	}
}

func TestWaitingVectors(t *testing.T) {
	v := loadVectors(t).Waiting
	for _, c := range v.Accepted {
		if got, err := ParseStatement(c.Value); err != nil || got != (Statement{c.Reason, c.Text}) || got.String() != c.Value {
			t.Errorf("%q: %+v, %v", c.Value, got, err)
		}
	}
	for _, value := range v.Refused {
		if got, err := ParseStatement(value); err == nil {
			t.Errorf("%q: %+v", value, got)
		}
	}
}
