// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const clusterUID = "0e4a9a4c-3a4e-4b1f-9f0b-6c2b1f6d2a11"

// tpmNode is a machine with a software TPM behind a proxy, and an attestor that answers its
// requests.
type tpmNode struct {
	*node
	tpm      *swtpm.TPM
	proxy    *swtpm.Proxy
	attestor *attestor.Attestor
	key      []byte
}

// newTPMNode returns a machine whose TPM was made with these options. change may alter the attestor
// before it begins.
func newTPMNode(t *testing.T, o swtpm.Options, change func(*tpmNode, *verifier.Config)) *tpmNode {
	t.Helper()
	chip := swtpm.Start(t, o)
	n := &tpmNode{node: newNode(t), tpm: chip, proxy: swtpm.NewProxy(t, chip), key: make([]byte, 32)}
	_, _ = rand.Read(n.key) // never fails
	n.provider, n.signer = tpm.Name, tpm.SignerName
	n.args = []string{"--tpm-device=" + n.proxy.Socket()}
	config := verifier.Config{
		Roots: []*x509.Certificate{chip.CA.Root}, Intermediates: []*x509.Certificate{chip.CA.Intermediate},
		PCRs:       attestation.PCRSelection{Bank: "sha256", Indexes: []int{0, 1, 2, 3, 4, 5, 6, 7}},
		ClusterUID: clusterUID,
		Keys:       verifier.Keys{Current: "k1", ByID: map[string][]byte{"k1": n.key}},
	}
	n.attestor = &attestor.Attestor{Cluster: n.ControlPlane, NodeName: n.name, Lifetime: time.Hour}
	if change != nil {
		change(n, &config)
	}
	var err error
	if n.attestor.Verifier, err = verifier.New(config); err != nil {
		t.Fatal(err)
	}
	n.attestor.RunUntilEnd(t)
	return n
}

// filed counts the node's hellos and proofs.
func (n *tpmNode) filed(t *testing.T) (hellos, proofs int) {
	t.Helper()
	for _, r := range n.requests(t) {
		if r.Spec.SignerName == attestation.HelloSignerName {
			hellos++
		} else {
			proofs++
		}
	}
	return hellos, proofs
}

func (n *tpmNode) wantFiled(t *testing.T, hellos, proofs int) {
	t.Helper()
	if a, b := n.filed(t); a != hellos || b != proofs {
		t.Errorf("%d hellos and %d proofs were filed, not %d and %d; refused: %v", a, b, hellos, proofs, n.attestor.Refused())
	}
}

// nothingLoaded checks that the TPM has no loaded objects or sessions.
func (n *tpmNode) nothingLoaded(t *testing.T) {
	t.Helper()
	if handles, err := n.tpm.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("left in the TPM: %x, %v", handles, err)
	}
}

// A node enrols and renews with each kind of EK: the real plugin, a software TPM, a real API
// server.
func TestTPMEnrolmentAndRenewal(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]swtpm.Options{
		"ecc-p256":      {Certified: []string{"ecc-p256"}, Chain: true},
		"ecc-p384-high": {Certified: []string{"ecc-p384-high"}},
		"rsa-2048":      {Certified: []string{"rsa-2048"}, Padding: bytes.Repeat([]byte{0xff}, 100)},
		"persistent":    {Certified: []string{"rsa-2048"}, Persistent: []string{"rsa-2048"}, Wrapped: true},
		"swtpm_setup":   {Setup: true},
	} {
		t.Run(name, func(t *testing.T) {
			n := newTPMNode(t, o, nil)
			first := n.enrol(t)
			if got := n.whoami(t, first); got != "system:node:"+n.name {
				t.Errorf("the API server takes it for %q", got)
			}
			n.wantFiled(t, 1, 1)
			commands := n.proxy.Count()
			t.Logf("%s: enrolled in %s with %d TPM commands", name, first.Took, commands)
			if commands > 30 {
				t.Errorf("%d TPM commands", commands)
			}
			n.nothingLoaded(t)

			// A valid certificate is printed without the TPM.
			n.proxy.Reset()
			if r := n.run(t); r.Code != 0 || n.proxy.Count() > 0 {
				t.Errorf("exit code %d and %d TPM commands for a valid certificate", r.Code, n.proxy.Count())
			}

			old := n.installDue(t)
			var r harness.Result
			harness.Eventually(t, harness.Soon, "a new certificate is printed", func() bool {
				r = n.run(t)
				return r.Code == 0 && !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw)
			})
			n.wantFiled(t, 2, 2)
			if last := n.requests(t); !slices.ContainsFunc(last, func(r certificatesv1.CertificateSigningRequest) bool { return r.Spec.Username == "system:node:"+n.name }) {
				t.Error("the renewal was not asked for by the node itself")
			}
			n.nothingLoaded(t)
		})
	}
}

// If the worker is killed before any step of either round, there is one hello, one proof, and a
// valid credential.
func TestTPMKilledBeforeEachStep(t *testing.T) {
	t.Parallel()
	chip := swtpm.Options{Certified: []string{"ecc-p256"}}
	steps := slices.DeleteFunc(authenticator.Steps(), func(step enrol.Step) bool {
		// TestKilledInAnAnnouncedRenewal
		return step == enrol.StepAnnouncement || step == enrol.StepReport
	})
	// The second round takes these steps again.
	for _, twice := range []enrol.Step{enrol.StepSave, enrol.StepFile, enrol.StepSaveUID} {
		steps = append(steps, twice+"#2")
	}
	for _, kind := range []string{"enrolment", "renewal"} {
		for _, step := range steps {
			t.Run(kind+"/"+strings.NewReplacer(" ", "-", "#", "-").Replace(string(step)), func(t *testing.T) {
				n := newTPMNode(t, chip, nil)
				n.plugin = n.testPlugin
				var old *cache.Pair
				if kind == "renewal" {
					old = n.installDue(t)
				}
				trap := filepath.Join(t.TempDir(), "kill")
				harness.WriteFile(t, trap, []byte(step))
				n.env = append(n.env, "TEST_KILL_FILE="+trap)
				n.survives(t, trap, old)
				n.wantFiled(t, 1, 1)
				n.nothingLoaded(t)
			})
		}
	}
}

// If a worker is killed during a TPM command, its objects stay loaded: the next worker flushes
// them.
func TestTPMKilledInTheMiddleOfACommand(t *testing.T) {
	t.Parallel()
	for name, code := range map[string]tpm2.TPMCC{
		"CreatePrimary": tpm2.TPMCCCreatePrimary, "StartAuthSession": tpm2.TPMCCStartAuthSession,
		"ActivateCredential": tpm2.TPMCCActivateCredential, "Quote": tpm2.TPMCCQuote, "FlushContext": tpm2.TPMCCFlushContext,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256"}}, nil)
			for range 3 { // more often than there are slots
				release := n.proxy.Hang(code)
				harness.Eventually(t, harness.Soon, "the command is sent", func() bool {
					n.run(t, "--wait-timeout=100ms") // which waits after a worker's second death
					return n.proxy.Count(code) > 0
				})
				n.killWorker(t)
				release()
				n.proxy.Reset()
			}
			r := n.enrol(t)
			if got := n.whoami(t, r); got != "system:node:"+n.name {
				t.Errorf("the API server takes it for %q", got)
			}
			n.wantFiled(t, 1, 1)
		})
	}
}

func (n *node) killWorker(t *testing.T) {
	t.Helper()
	id := n.dir.Worker()
	p, err := os.FindProcess(id.PID)
	if err != nil {
		t.Fatal(err)
	}
	_ = p.Kill()
	harness.Eventually(t, harness.Soon, "the worker ends", func() bool { return !id.Alive() })
}

// The private key of the certificate is in the current file, and before that in the pending one.
// The secret of the challenge is nowhere: not in what was sent to the TPM, not in any object, log
// or file.
func TestTPMSecretsStayWhereTheyBelong(t *testing.T) {
	var pending []byte
	n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256"}}, func(n *tpmNode, _ *verifier.Config) {
		n.attestor.BeforeIssue = func(string) { pending = n.read(t, cache.PendingFile) }
	})
	n.args = append(n.args, "-v=10")
	r := n.enrol(t)

	block, _ := pem.Decode([]byte(r.Credential.Status.ClientKeyData))
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	scalar, err := parsed.(*ecdsa.PrivateKey).Bytes()
	if err != nil {
		t.Fatal(err)
	}
	secret := n.secret(t)

	places := map[string][]byte{"standard error": []byte(r.Stderr), "audit log": n.readPath(t, filepath.Join(n.Dir(), "audit.log"))}
	for i, e := range n.proxy.Exchanges() {
		places["TPM command "+hex.EncodeToString([]byte{byte(i)})] = append(bytes.Clone(e.Command), e.Response...)
	}
	for _, object := range n.requests(t) {
		if places["object "+object.Name], err = json.Marshal(object); err != nil {
			t.Fatal(err)
		}
		places["request of "+object.Name] = object.Spec.Request
		for _, p := range pemBlocks(object.Spec.Request) {
			places["block "+p.Type+" of "+object.Name] = p.Bytes
		}
		places["challenge of "+object.Name] = []byte(object.Annotations[attestation.AnnotationChallenge])
	}
	for _, root := range []string{filepath.Dir(n.dir.Path()), filepath.Dir(n.proxy.Socket())} {
		walk(t, root, func(path string, data []byte) { places[path] = data })
	}
	places["pending file while the certificate was issued"] = pending

	current := n.dir.File(cache.CurrentFile)
	for place, data := range places {
		if holds(data, secret) {
			t.Errorf("the secret is in %s", place)
		}
		may := place == current || place == "pending file while the certificate was issued"
		if holds(data, scalar) != may {
			t.Errorf("%s holds the private key: %t", place, !may)
		}
	}
	if len(places) < 20 {
		t.Errorf("only %d places were searched", len(places))
	}
}

// secret derives the secret of the node's challenge as the controller does.
func (n *tpmNode) secret(t *testing.T) []byte {
	t.Helper()
	for _, object := range n.requests(t) {
		if object.Spec.SignerName != attestation.HelloSignerName {
			continue
		}
		content, err := attestation.Parse(object.Spec.Request)
		if err != nil {
			t.Fatal(err)
		}
		hello, err := attestation.ParseHello(content.Data)
		if err != nil {
			t.Fatal(err)
		}
		challenge, err := attestation.ParseChallenge([]byte(object.Annotations[attestation.AnnotationChallenge]))
		if err != nil {
			t.Fatal(err)
		}
		_, key, err := template.CheckEK(hello.EKPublic)
		if err != nil {
			t.Fatal(err)
		}
		spki, err := x509.MarshalPKIXPublicKey(key)
		if err != nil {
			t.Fatal(err)
		}
		name, err := template.Name(hello.AKPublic)
		if err != nil {
			t.Fatal(err)
		}
		secret, err := attestation.Secret(n.key, string(object.UID), attestation.SecretInfo{
			Version: hello.Version, ClusterUID: clusterUID, SignerName: hello.SignerName, EKPublicKey: spki, AKName: name,
			HelloRequest: object.Spec.Request, Expires: challenge.Expires, PCRs: challenge.PCRs,
		})
		if err != nil {
			t.Fatal(err)
		}
		return secret
	}
	t.Fatal("there is no hello")
	return nil
}

// holds searches data for a secret, in raw form and in hex and base64. It also looks into PEM and
// JSON in which base64 is used once more.
func holds(data, secret []byte) bool {
	seen := [][]byte{data}
	for _, p := range pemBlocks(data) {
		seen = append(seen, p.Bytes)
	}
	for _, run := range base64Runs(data) {
		seen = append(seen, run)
		for _, p := range pemBlocks(run) {
			seen = append(seen, p.Bytes)
		}
		seen = append(seen, base64Runs(run)...)
	}
	for _, s := range seen {
		lower := bytes.ToLower(s)
		if bytes.Contains(s, secret) || bytes.Contains(lower, []byte(hex.EncodeToString(secret))) {
			return true
		}
	}
	return false
}

func pemBlocks(data []byte) (blocks []*pem.Block) {
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			return blocks
		}
		blocks = append(blocks, block)
	}
}

// base64Runs decodes every run of characters that may be base64, from each of the four places where
// a quantum can begin.
func base64Runs(data []byte) (decoded [][]byte) {
	runs := bytes.FieldsFunc(data, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("+/-_", r)
	})
	for _, run := range runs {
		if len(run) < 40 {
			continue
		}
		standard := []byte(strings.NewReplacer("-", "+", "_", "/").Replace(string(run)))
		for shift := range 4 {
			part := standard[shift:]
			part = part[:len(part)/4*4]
			out := make([]byte, base64.StdEncoding.DecodedLen(len(part)))
			if n, err := base64.StdEncoding.Decode(out, part); err == nil {
				decoded = append(decoded, out[:n])
			}
		}
	}
	return decoded
}

func walk(t *testing.T, root string, visit func(path string, data []byte)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		visit(path, data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// With a slow chip, enrolment and renewal complete, and no run waits longer than its
// budget.
func TestTPMIsSlow(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]func(*swtpm.Proxy){
		"each command takes 100 ms": func(p *swtpm.Proxy) { p.Delay(100 * time.Millisecond) },
		"CreatePrimary takes 9 s":   func(p *swtpm.Proxy) { p.Delay(9*time.Second, tpm2.TPMCCCreatePrimary) },
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256"}}, nil)
			slow(n.proxy)
			began := time.Now()
			var r harness.Result
			harness.Eventually(t, 3*time.Minute, "the node enrols", func() bool {
				if r = n.run(t, "--wait-timeout=5s"); r.Took > 5*time.Second+slack {
					t.Errorf("a run took %s", r.Took)
				}
				return r.Code == 0
			})
			t.Logf("%s: enrolled in %s", name, time.Since(began))
			old := n.installDue(t)
			began = time.Now()
			harness.Eventually(t, 3*time.Minute, "the certificate is renewed", func() bool {
				if r = n.run(t); r.Code != 0 || r.Took > 2*time.Second+slack {
					t.Errorf("exit code %d after %s while the old certificate is valid", r.Code, r.Took)
				}
				return !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw)
			})
			t.Logf("%s: renewed in %s", name, time.Since(began))
			n.wantFiled(t, 2, 2)
		})
	}
}

// What may happen to a TPM between hello and proof. Where its keys become others the hello is void:
// there is a new one, twice at most, then an end.
func TestTPMChangesBetweenHelloAndProof(t *testing.T) {
	t.Parallel()
	must := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	for name, c := range map[string]struct {
		times  int // how often it happens
		change func(*testing.T, *tpmNode)
		hellos int
		code   int
	}{
		"rebooted":            {1, func(t *testing.T, n *tpmNode) { must(t, n.tpm.Reboot()) }, 1, 0},
		"cleared":             {1, func(t *testing.T, n *tpmNode) { must(t, n.tpm.Clear()) }, 1, 0},
		"power cut":           {1, func(t *testing.T, n *tpmNode) { n.tpm.Crash(); must(t, n.tpm.Boot()) }, 1, 0},
		"other keys":          {1, func(t *testing.T, n *tpmNode) { must(t, n.tpm.ChangeEPS()) }, 2, 0},
		"other keys twice":    {2, func(t *testing.T, n *tpmNode) { must(t, n.tpm.ChangeEPS()) }, 3, 0},
		"other keys for ever": {9, func(t *testing.T, n *tpmNode) { must(t, n.tpm.ChangeEPS()) }, 3, 28},
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			n := newTPMNode(t, swtpm.Options{}, func(n *tpmNode, config *verifier.Config) {
				n.attestor.AnyEK, config.NamedEKs = true, true
				times := 0
				n.attestor.BeforeChallenge = func(string) {
					if times++; times <= c.times {
						c.change(t, n)
					}
				}
			})
			r := n.run(t)
			if r.Code != c.code || r.Code != 0 && !strings.Contains(r.Stderr, "hint: ") {
				t.Errorf("exit code %d, want %d: %s", r.Code, c.code, r.Stderr)
			}
			if got := n.attestor.Hellos(); got != c.hellos {
				t.Errorf("%d hellos, want %d", got, c.hellos)
			}
			if c.code == 0 {
				return
			}
			// It does not start again at once.
			if again := n.run(t); again.Code != c.code || n.attestor.Hellos() != c.hellos {
				t.Errorf("exit code %d, %d hellos: %s", again.Code, n.attestor.Hellos(), again.Stderr)
			}
		})
	}
}

// The error names the cause on a machine without a TPM, and if the TPM refuses commands or hangs.
func TestTPMFails(t *testing.T) {
	for name, c := range map[string]struct {
		arrange func(*tpmNode)
		code    int
		says    string
	}{
		"none":    {func(n *tpmNode) { n.args = []string{"--tpm-device=/nonexistent/tpm"} }, 14, "/nonexistent/tpm"},
		"refuses": {func(n *tpmNode) { n.proxy.Answer(tpm2.TPMCCQuote, tpm2.TPMRCFailure, 99) }, 15, "TPM2_Quote"},
		"locked out": {func(n *tpmNode) {
			n.proxy.Answer(tpm2.TPMCCActivateCredential, tpm2.TPMRCLockout, 99)
		}, 15, "TPM2_ActivateCredential"},
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256"}}, nil)
			c.arrange(n)
			r := n.run(t)
			if r.Code != c.code || !strings.Contains(r.Stderr, c.says) || !strings.Contains(r.Stderr, "hint: ") {
				t.Errorf("exit code %d: %s", r.Code, r.Stderr)
			}
		})
	}
	t.Run("hangs", func(t *testing.T) {
		n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256"}}, nil)
		n.plugin = n.testPlugin
		n.env = append(n.env, "TEST_WORKER_DEADLINE=2s")
		defer n.proxy.Hang(tpm2.TPMCCCreatePrimary)()
		r := n.run(t, "--wait-timeout=10s")
		if r.Code != 15 || r.Took > 8*time.Second || !strings.Contains(r.Stderr, "TPM2_CreatePrimary") {
			t.Errorf("exit code %d after %s: %s", r.Code, r.Took, r.Stderr)
		}
	})
}

// openssl can verify our request and the EK's chain.
func TestTPMRequestAndChainByOpenSSL(t *testing.T) {
	n := newTPMNode(t, swtpm.Options{Certified: []string{"ecc-p256"}, Chain: true}, nil)
	n.enrol(t)
	dir := t.TempDir()
	for i, object := range n.requests(t) {
		file := filepath.Join(dir, string(rune('a'+i)))
		harness.WriteFile(t, file, object.Spec.Request)
		if out, err := exec.CommandContext(t.Context(), "openssl", "req", "-verify", "-noout", "-in", file).CombinedOutput(); err != nil || !bytes.Contains(bytes.ToLower(out), []byte("ok")) {
			t.Errorf("openssl req -verify: %v: %s", err, out)
		}
		content, err := attestation.Parse(object.Spec.Request)
		if err != nil {
			t.Fatal(err)
		}
		hello, err := attestation.ParseHello(content.Data)
		if err != nil {
			continue // the proof
		}
		if len(hello.EKCertificates) != 2 {
			t.Fatalf("%d certificates", len(hello.EKCertificates))
		}
		for name, der := range map[string][]byte{"leaf": hello.EKCertificates[0], "intermediate": hello.EKCertificates[1], "root": n.tpm.CA.Root.Raw} {
			harness.WriteFile(t, filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
		}
		out, err := exec.CommandContext(t.Context(), "openssl", "verify", "-CAfile", filepath.Join(dir, "root"),
			"-untrusted", filepath.Join(dir, "intermediate"), filepath.Join(dir, "leaf")).CombinedOutput()
		if err != nil {
			t.Errorf("openssl verify: %v: %s", err, out)
		}
	}
}
