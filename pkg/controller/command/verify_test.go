// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

func manifest(t *testing.T, object any) string {
	t.Helper()
	out, err := yaml.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// admission is what a real TPM attested for worker-1, with the configuration and the challenge keys
// to judge it by.
type admission struct {
	hello, proof *certificatesv1.CertificateSigningRequest
	judge        tpmprovider.Provider
	config       string
	secret       *corev1.Secret
}

func newAdmission(t *testing.T) admission {
	t.Helper()
	maker, err := swtpm.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}, CA: maker})
	made, err := tpm.Factory().New(provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	key, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: "worker-1"}, key)
	if err != nil {
		t.Fatal(err)
	}
	ask := provider.Request{PKCS10: pkcs10, Name: csr.NewName(), SignerName: tpm.SignerName, Version: attestation.VersionTPM}
	for _, usage := range csr.Usages(key.Public()) {
		ask.Usages = append(ask.Usages, string(usage))
	}
	object := func(name, signer string, document []byte) *certificatesv1.CertificateSigningRequest {
		t.Helper()
		content, err := attestation.Request{PKCS10: pkcs10, Provider: tpm.Name, Data: document}.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		o := csr.Object(name, signer, content, key.Public(), nil)
		o.APIVersion, o.Kind = certificatesv1.SchemeGroupVersion.String(), "CertificateSigningRequest"
		o.UID = "uid-of-" + o.UID
		o.Spec.Username, o.Spec.Groups = "system:bootstrap:abcdef", []string{"system:bootstrappers"}
		return o
	}
	challenger := made.(provider.Challenger)
	document, _, err := challenger.Hello(t.Context(), ask)
	if err != nil {
		t.Fatal(err)
	}
	hello := object(csr.NewName(), attestation.HelloSignerName, document)

	roots := write(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: maker.Root.Raw})))
	intermediates := write(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: maker.Intermediate.Raw})))
	conf := strings.Replace(good, "tpm: {", "tpm: {rootsFile: "+roots+", intermediatesFile: "+intermediates+", ", 1)
	parsed, err := config.Parse([]byte(conf))
	if err != nil {
		t.Fatal(err)
	}
	settings, err := config.New(parsed)
	if err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{Data: map[string][]byte{"current": []byte("k1"), "k1": []byte("0123456789abcdef0123456789abcdef")}}
	secret.APIVersion, secret.Kind = "v1", "Secret"
	keys, err := sources.ParseKeys(secret.Data)
	if err != nil {
		t.Fatal(err)
	}
	judge, err := settings.Verifier(keys)
	if err != nil {
		t.Fatal(err)
	}
	half := tpmprovider.Provider{Verifier: judge}
	answer, _, err := half.Challenge(hello, false, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ask.Challenge = &provider.Challenge{HelloName: hello.Name, HelloUID: string(hello.UID), HelloRequest: hello.Spec.Request, Answer: []byte(answer), Fresh: true}
	if document, err = challenger.Evidence(t.Context(), ask); err != nil {
		t.Fatal(err)
	}
	proof := object(ask.Name, tpm.SignerName, document)
	// It was decided on long ago.
	proof.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue}}
	return admission{hello, proof, half, conf, secret}
}

// inventoryOf returns an inventory in which worker-1 has an EK.
func inventoryOf(t *testing.T, ek string) string {
	t.Helper()
	return write(t, "nodeName: worker-1\neks:\n- fingerprint: "+ek+"\n")
}

// What a real TPM attests passes, and what contradicts the policy is refused with its reason.
func TestVerify(t *testing.T) {
	a := newAdmission(t)
	hello, proof, half, conf, secret := a.hello, a.proof, a.judge, a.config, a.secret
	right, other := inventoryOf(t, half.EK(hello, nil)), inventoryOf(t, strings.Repeat("ab", 32))
	usage := proof.DeepCopy()
	usage.Spec.Usages = usage.Spec.Usages[:1]
	foreign := proof.DeepCopy()
	foreign.Spec.SignerName = "kubernetes.io/kube-apiserver-client-kubelet"
	inJSON, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": []any{hello, proof}})
	if err != nil {
		t.Fatal(err)
	}
	secretFile, both := write(t, manifest(t, secret)), write(t, manifest(t, hello)+"---\n"+manifest(t, proof))
	configFile := write(t, conf)
	for name, c := range map[string]struct {
		args []string
		code int
		says []string
	}{
		"a hello":                  {[]string{"--inventory", right, write(t, manifest(t, hello))}, 0, []string{"pass  evidence", "passed, class first, outcome Challenge", "  node worker-1, EK " + half.EK(hello, nil) + ", template ecc-p256, class first\n"}},
		"a hello in PEM":           {[]string{"--inventory", right, write(t, string(hello.Spec.Request))}, 0, []string{"assumed: signer " + attestation.HelloSignerName, "outcome Challenge"}},
		"hello and proof":          {[]string{"--inventory", right, "--challenge-keys", secretFile, both}, 0, []string{"pass  record", "passed, class first, outcome Approve"}},
		"in JSON":                  {[]string{"--inventory", right, "--challenge-keys", secretFile, write(t, string(inJSON))}, 0, []string{"outcome Approve"}},
		"without keys":             {[]string{"--inventory", right, both}, codeRefused, []string{"FAIL  evidence", "AttestationChallengeKeyUnknown", "without --challenge-keys"}},
		"without hello":            {[]string{"--inventory", right, "--challenge-keys", secretFile, write(t, manifest(t, proof))}, codeRefused, []string{"FAIL  hello", "HelloNotFound"}},
		"a day later":              {[]string{"--inventory", right, "--challenge-keys", secretFile, "--time", time.Now().Add(24 * time.Hour).Format(time.RFC3339), both}, codeRefused, []string{"AttestationChallengeExpired"}},
		"another machine":          {[]string{"--inventory", other, write(t, manifest(t, hello))}, codeRefused, []string{"FAIL  node name", "NodeNameMismatch", "EK " + half.EK(hello, nil) + ", template ecc-p256"}},
		"other usages":             {[]string{"--inventory", right, "--challenge-keys", secretFile, write(t, manifest(t, hello)), write(t, manifest(t, usage))}, codeRefused, []string{"FAIL  request", "UsageMismatch"}},
		"another's signer":         {[]string{"--inventory", right, write(t, manifest(t, foreign))}, codeRefused, []string{"not judged"}},
		"PEM that is none of ours": {[]string{"--inventory", right, write(t, "-----BEGIN CERTIFICATE REQUEST-----\n")}, codeRefused, []string{"MalformedRequest"}},
		"no request":               {[]string{"--inventory", right, write(t, manifest(t, secret))}, cli.CodeUsage, []string{`"Secret"`}},
		"an empty file":            {[]string{"--inventory", right, write(t, "")}, cli.CodeUsage, []string{"holds no"}},
		"no file":                  {[]string{"--inventory", right}, cli.CodeUsage, []string{"no file"}},
		"a file that is not there": {[]string{"--inventory", right, "/nonexistent"}, cli.CodeUsage, []string{"/nonexistent"}},
		"no inventory":             {[]string{both}, CodeConfiguration, []string{"/inventory.yaml"}},
		"a time that is none":      {[]string{"--time", "yesterday", both}, cli.CodeUsage, []string{"--time"}},
		"keys that are none":       {[]string{"--inventory", right, "--challenge-keys", both, both}, CodeConfiguration, []string{"holds no Secret"}},
		"a broken configuration":   {[]string{"--config", both, both}, CodeConfiguration, []string{"configuration file"}},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			args := append([]string{"verify", "--config", configFile}, c.args...)
			code := Program{}.Run(t.Context(), Process{Args: args, Stdout: &stdout, Stderr: &stderr})
			all := stdout.String() + stderr.String()
			if code != c.code {
				t.Errorf("exit code %d, not %d:\n%s", code, c.code, all)
			}
			for _, says := range c.says {
				if !strings.Contains(all, says) {
					t.Errorf("does not say %q:\n%s", says, all)
				}
			}
			if strings.Contains(all, "0123456789abcdef") {
				t.Error("it prints a key")
			}
		})
	}
}
