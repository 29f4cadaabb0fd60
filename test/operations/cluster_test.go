// SPDX-License-Identifier: Apache-2.0

package operations

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// The plugin is upgraded to a release with a later protocol version, and downgraded again.
func testPlugin(t *testing.T) {
	n := newNode(t, "plugin")
	n.joins()
	for _, release := range []struct{ program, version string }{{shared.newer, "newer"}, {shared.plugin, ""}} {
		const file = "kubelet-authenticator.deb"
		r := newRecipe(t, "Plugin upgraded or downgraded", map[string]string{"NODE": n.name, "PACKAGE": file})
		harness.Must(t, os.Symlink(release.program, filepath.Join(r.Dir, file)))
		if version := r.step("dpkg -i"); strings.Contains(version, "newer") != (release.version == "newer") {
			t.Errorf("it is %s", version)
		}
		r.step("--dry-run")
		n.removeState()
		n.bootstrap()
		if user := n.user(); user != "system:node:"+n.name {
			t.Errorf("with the plugin %q it is %q", release.version, user)
		}
	}
}

// The recipe finds requests of an attacker with the leaked key, and replaces the key. Then the
// Secret is deleted.
func testChallengeKey(t *testing.T) {
	n := newNode(t, "same-ak")
	n.joins()
	victim := newBystander(t, "other-ak")
	harness.Must(t, os.WriteFile(filepath.Join(shared.hosts(), victim.Name), []byte("#!/bin/sh\nexec cat "+machineFile(victim.Name)+"\n"), 0o700))
	record := records(t, victim.Name)[0]
	record.Spec.AKName = "000b" + strings.Repeat("0a", 32)
	config := shared.AdminConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + namespace + ":" + controllerprocess.Account}
	as, err := client.New(config, client.Options{Scheme: shared.client.Scheme()})
	harness.Must(t, err)
	harness.Must(t, as.Update(t.Context(), &record))
	key := func() string {
		secret, err := shared.Client().CoreV1().Secrets(namespace).Get(t.Context(), "node-attestation-controller-key", metav1.GetOptions{})
		harness.Must(t, err)
		return string(secret.Data["current"])
	}
	before := key()

	r := newRecipe(t, "Challenge key leaked", nil)
	r.step("\"data\":null")
	if after := key(); after == before || after == "" {
		t.Errorf("the key is %q, and was %q", after, before)
	}
	if found := r.step("akName"); !strings.Contains(found, victim.Name+"\n") || strings.Contains(found, n.name+"\n") {
		t.Errorf("these have another AK: %s", found)
	}
	if listed := r.step("ENDS"); !strings.Contains(listed, record.Status.Certificates[0].SHA256) {
		t.Errorf("its certificate is not listed: %s", listed)
	}

	r = newRecipe(t, "Challenge key lost", nil)
	r.Shell("kubectl -n $NAMESPACE delete secret node-attestation-controller-key\n")
	harness.Eventually(t, patience, "the controller says that the Secret is not there", func() bool {
		return strings.Contains(read(t, shared.controller.LogFile()), "challenge keys: secret "+namespace+"/node-attestation-controller-key: secrets is forbidden")
	})
	r.step("create secret generic")
	r.step("get secret")
	n.removeState()
	n.bootstrap()
	n.user()
}

// A node renews under the new CA before the old one goes, and another one does not.
func testCARotation(t *testing.T) {
	late := newNode(t, "late")
	late.joins()
	b := newBystander(t, "in-time")
	r := newRecipe(t, "CA rotation", map[string]string{"CLIENT_CA_FILE": shared.clientCAFile()})
	harness.WriteFile(t, filepath.Join(r.Dir, "other-cas.crt"), shared.ClientCA().CertPEM())
	old := rest.CopyConfig(b.Credential(fleet.Cluster{URL: shared.ServerURL(), CA: shared.ServerCA()}))
	r.step("openssl req")
	block, _ := pem.Decode([]byte(read(t, filepath.Join(r.Dir, "new-ca.crt"))))
	issuer, err := x509.ParseCertificate(block.Bytes)
	harness.Must(t, err)
	r.step("cat new-ca.crt >>")
	r.step("extension-apiserver-authentication")
	b.renews() // under the old one
	r.step("create secret tls")
	shared.issuer = issuer
	listed := func() string {
		again := *r.Recipe // the block stays the next one
		return recipe{&again}.step("awk")
	}
	harness.Eventually(t, patience, "who has renewed is listed no more", func() bool {
		b.renews()
		return !strings.Contains(listed(), b.Name)
	})
	if late := r.step("awk"); !strings.Contains(late, "late") {
		t.Errorf("who has not renewed is not listed: %s", late)
	}
	late.bootstrap()
	r.step("cat other-cas.crt new-ca.crt >")
	before := late.fingerprint()
	harness.Eventually(t, patience, "the old certificate is rejected", func() bool {
		api, err := kubernetes.NewForConfig(old)
		harness.Must(t, err)
		_, err = api.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		return apierrors.IsUnauthorized(err)
	})
	b.renews()
	// once a minute the plugin checks whether its certificate is accepted
	harness.Must(t, os.RemoveAll(late.At("/run/kubelet-authenticator")))
	harness.Eventually(t, patience, "the node comes back with its bootstrap credential", func() bool {
		// as the kubelet does repeatedly
		_ = late.run("kubectl --kubeconfig=" + kubelet.KubeconfigFile + " auth whoami")
		return late.fingerprint() != before
	})
	late.user()
}

func (n *node) fingerprint() string {
	n.t.Helper()
	pair, err := n.kept().Current()
	harness.Must(n.t, err)
	return pair.Fingerprint()
}

// An upgrade and a downgrade. No other release exists so far: the image has another tag, and
// the process is of this release each time. TestVersionMatrix has plugins and controllers of
// several releases.
func testController(t *testing.T) {
	b := newBystander(t, "beside-a-rollout")
	follow := func(tag string, before func(recipe)) {
		r := newRecipe(t, "Controller upgraded or downgraded", nil)
		before(r)
		harness.WriteFile(t, filepath.Join(shared.dir, "cluster", "kustomization.yaml"), []byte(overlay+"images: [{name: registry.invalid/node-attestation-controller, newTag: "+tag+"}]\n"))
		r.step("apply --server-side")
		r.step("rollout status")
		d, err := shared.Client().AppsV1().Deployments(namespace).Get(t.Context(), "node-attestation-controller", metav1.GetOptions{})
		harness.Must(t, err)
		if image := d.Spec.Template.Spec.Containers[0].Image; !strings.HasSuffix(image, ":"+tag) || d.Status.ReadyReplicas == 0 {
			t.Errorf("image %s, %+v", image, d.Status)
		}
	}
	stop := b.keepsRenewing()
	follow("v2", func(recipe) {})
	stop()

	// A field of the later release is still in the configuration.
	path := filepath.Join(shared.dir, "cluster", "config.yaml")
	settings := read(t, path)
	follow("v1", func(r recipe) {
		harness.WriteFile(t, path, []byte(settings+"settingOfV2: true\n"))
		r.Shell("kubectl apply --server-side -k cluster\n" +
			"kubectl -n $NAMESPACE rollout restart deployment/node-attestation-controller\n")
		harness.Eventually(t, patience, "the controller does not start", func() bool {
			return strings.Contains(read(t, shared.controller.LogFile()), "settingOfV2")
		})
		harness.WriteFile(t, path, []byte(settings))
	})
	b.renews()
}

// The backup lacks a certificate of one node, the record of another one, and changes of the
// inventory.
func testEtcdRestored(t *testing.T) {
	untouched := newBystander(t, "untouched")
	n := newNode(t, "restored")
	n.joinsDue()
	backup := filepath.Join(t.TempDir(), "etcd")
	harness.Must(t, shared.Backup(t.Context(), backup))
	since := newBystander(t, "since-the-backup")
	n.enrolsDue()
	harness.Must(t, shared.Restore(t.Context(), backup))
	if len(records(t, since.Name)) > 0 {
		t.Fatal("the cluster is not that of the backup")
	}
	// The controller sees no current request: its watches wait for versions that are still to
	// come.
	r := newRecipe(t, "etcd restored", nil)
	r.step("--replicas=0")
	r.step("\"data\":null")
	r.step("inventory.yaml")
	stop := untouched.keepsRenewing()
	n.user()
	hasEvent(t, n.name, string(verifier.ReasonUnknownCredential))
	r.step(string(verifier.ReasonUnknownCredential))
	n.goesOn()
	n.user()
	hasEvent(t, n.name, string(verifier.ReasonRecordRecovered))
	if !strings.Contains(r.step(string(verifier.ReasonRecordRecovered)), n.name) {
		t.Error("it is not listed")
	}
	n.hasRecord()
	since.renews()
	stop()
}

// A kubelet that fetches its certificates by itself gets its first certificate and its renewal,
// before and after the controller is removed.
func testUninstall(t *testing.T) {
	n := newNode(t, "leaving")
	n.joins()
	b := newBystander(t, "leaves-later")
	ca := filepath.Join(t.TempDir(), "ca.crt") // it takes one certificate only
	harness.WriteFile(t, ca, shared.ClientCA().CertPEM())
	harness.Must(t, shared.StartControllerManager(t.Context(), "--cluster-signing-cert-file="+ca))
	token, err := shared.CreateBootstrapToken(t.Context(), 0)
	harness.Must(t, err)

	r := newRecipe(t, "Uninstall", map[string]string{"NODE": n.name})
	harness.WriteFile(t, filepath.Join(r.Dir, "bootstrap.kubeconfig"), shared.BootstrapKubeconfig(token))
	r.step("kubeadm:node-autoapprove-bootstrap")
	stock := newStockKubelet(t, n.name, &rest.Config{Host: shared.ServerURL(), BearerToken: token, TLSClientConfig: rest.TLSClientConfig{CAData: shared.ServerCA()}})
	stock.asks()
	harness.Eventually(t, patience, "the policy keeps kube-controller-manager from approving", func() bool { return strings.Contains(shared.Logs(), "node-attestation-approval") })
	if stock.isIssued() {
		t.Fatal("it is issued in spite of the policies")
	}
	stop := b.keepsRenewing()
	r.step("policies.yaml")
	stock.gets() // the same request
	stop()
	r.step("reset --kubeconfig")
	for _, path := range []string{kubelet.KubeconfigFile, kubelet.EnvFile, "/etc/kubelet-authenticator/config.yaml", "/var/lib/kubelet-authenticator"} {
		if _, err := os.Lstat(n.At(path)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
	if listed := r.step("--wait=false -k"); !strings.Contains(listed, b.Name) {
		t.Errorf("who has not left is not listed: %s", listed)
	}
	harness.Eventually(t, patience, "the records are gone", func() bool {
		err := shared.client.List(t.Context(), &v1alpha1.NodeAttestationList{})
		return meta.IsNoMatchError(err) || apierrors.IsNotFound(err)
	})
	space, err := shared.Client().CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{})
	harness.Must(t, err)
	if space.DeletionTimestamp == nil { // nothing here finishes it
		t.Error("the namespace stays")
	}
	stock.renews()
}

// stockKubelet requests certificates like a kubelet without the plugin.
type stockKubelet struct {
	t          *testing.T
	name       string
	credential *rest.Config
	key        []byte
	request    string
}

func newStockKubelet(t *testing.T, name string, credential *rest.Config) *stockKubelet {
	return &stockKubelet{t: t, name: name, credential: credential}
}

// asks files a request.
func (s *stockKubelet) asks() {
	s.t.Helper()
	key, keyPEM, err := csr.NewKey()
	harness.Must(s.t, err)
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: s.name}, key)
	harness.Must(s.t, err)
	api, err := csr.NewClient(s.credential)
	harness.Must(s.t, err)
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: pkcs10})
	filed, err := api.Create(s.t.Context(), csr.Object(csr.NewName(), certificatesv1.KubeAPIServerClientKubeletSignerName, content, key.Public(), nil), false)
	harness.Must(s.t, err)
	s.request, s.key = filed.Name, keyPEM
}

func (s *stockKubelet) certificate() []byte {
	s.t.Helper()
	filed, err := shared.Client().CertificatesV1().CertificateSigningRequests().Get(s.t.Context(), s.request, metav1.GetOptions{})
	harness.Must(s.t, err)
	return filed.Status.Certificate
}

func (s *stockKubelet) isIssued() bool { return len(s.certificate()) > 0 }

// gets waits for the certificate, and uses it from now on.
func (s *stockKubelet) gets() {
	s.t.Helper()
	harness.Eventually(s.t, patience, "kube-controller-manager approves and signs", s.isIssued)
	s.credential = &rest.Config{
		Host: shared.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: shared.ServerCA(), CertData: bytes.Clone(s.certificate()), KeyData: s.key},
	}
}

func (s *stockKubelet) renews() {
	s.t.Helper()
	s.asks()
	s.gets()
}
