// SPDX-License-Identifier: Apache-2.0

//go:build certmanager

package policies

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

var (
	issuers        = schema.GroupVersionResource{Group: certManagerGroup, Version: "v1", Resource: "issuers"}
	clusterIssuers = schema.GroupVersionResource{Group: certManagerGroup, Version: "v1", Resource: "clusterissuers"}
)

// realCertManager is cert-manager's controllers, as its service account.
type realCertManager struct {
	*live
	binary, kubeconfig, log string
	process                 *testbed.Process
	admin                   dynamic.Interface
}

// newRealCertManager installs cert-manager, with a ClusterIssuer "node-ca" that has the cluster's
// client CA. Its webhook is left out: it validates objects, and checks who may approve.
func newRealCertManager(t *testing.T, l *live) *realCertManager {
	t.Helper()
	ctx := t.Context()
	c := &realCertManager{
		live: l, admin: dynamicAs(t, l.ControlPlane, "admin", "system:masters"),
		binary: filepath.Join(l.dir, "cert-manager"), kubeconfig: filepath.Join(l.dir, "cert-manager.kubeconfig"), log: filepath.Join(l.dir, "cert-manager.log"),
	}
	harness.Must(t, compile.Program(ctx, certManagerModule, c.binary, "./controller"))
	installCertManager(t, l.ControlPlane)
	// certManager makes namespace, account and the rights for CertificateSigningRequests.
	const name = "cert-manager"
	l.certManager(t)
	meta := metav1.ObjectMeta{Name: name + "-rest"}
	_, err := l.admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{certManagerGroup}, Resources: []string{"*"}, Verbs: strings.Fields("get list watch create update patch delete")},
		{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: strings.Fields("get list watch create update patch delete")},
		{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
		{APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}, Verbs: []string{"create"}},
	}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = l.admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbac, Kind: "ClusterRole", Name: meta.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: name, Namespace: name}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	token, err := l.admin.CoreV1().ServiceAccounts(name).CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	harness.Must(t, err)
	harness.Must(t, l.WriteKubeconfig(c.kubeconfig, testbed.TokenUser(token.Status.Token)))
	t.Cleanup(func() {
		if c.process != nil {
			ended(t, c.process.Stop(5*time.Second))
			if t.Failed() {
				t.Log(c.process.LogTail())
			}
		}
	})

	key, err := l.ClientCA().KeyPEM()
	harness.Must(t, err)
	c.issuer(t, clusterIssuers, name, "node-ca", l.ClientCA().CertPEM(), key)
	return c
}

// issuer makes an issuer of kind CA, and the Secret with its CA in a namespace.
func (c *realCertManager) issuer(t *testing.T, resource schema.GroupVersionResource, namespace, name string, certificate, key []byte) {
	t.Helper()
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: certificate, corev1.TLSPrivateKeyKey: key},
	}
	_, err := c.live.admin.CoreV1().Secrets(namespace).Create(t.Context(), secret, metav1.CreateOptions{})
	harness.Must(t, err)
	u := &unstructured.Unstructured{Object: object{"spec": object{"ca": object{"secretName": name}}}}
	u.SetAPIVersion(resource.GroupVersion().String())
	u.SetName(name)
	if resource == clusterIssuers {
		u.SetKind("ClusterIssuer")
		_, err = c.admin.Resource(resource).Create(t.Context(), u, metav1.CreateOptions{})
	} else {
		u.SetKind("Issuer")
		_, err = c.admin.Resource(resource).Namespace(namespace).Create(t.Context(), u, metav1.CreateOptions{})
	}
	harness.Must(t, err)
}

// restart starts it again, with the controllers that --controllers names.
func (c *realCertManager) restart(t *testing.T, controllers string) {
	t.Helper()
	if c.process != nil {
		harness.Must(t, c.process.Stop(5*time.Second))
	}
	var err error
	c.process, err = testbed.StartProcess(testbed.Command{Path: c.binary, Args: []string{"--kubeconfig=" + c.kubeconfig, "--controllers=" + controllers}, LogFile: c.log})
	harness.Must(t, err)
}

// secret waits for the certificate that cert-manager puts into a Secret of the tenant's.
func (c *realCertManager) secret(t *testing.T, name string) (found *corev1.Secret) {
	t.Helper()
	harness.Eventually(t, patience, "cert-manager fills Secret "+name, func() bool {
		secret, err := c.live.admin.CoreV1().Secrets(tenantNamespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil || len(secret.Data[corev1.TLSCertKey]) == 0 {
			return false
		}
		found = secret
		return true
	})
	return found
}

// with returns a client with a certificate.
func (c *realCertManager) with(t *testing.T, certificate, key []byte) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: c.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: c.ServerCA(), CertData: certificate, KeyData: key},
	})
	harness.Must(t, err)
	return client
}

// isClusterAdmin reports whether a certificate's owner may do everything.
func (c *realCertManager) isClusterAdmin(t *testing.T, secret *corev1.Secret) bool {
	t.Helper()
	return may(t, c.with(t, secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]), right{verb: "*", group: "*", resource: "*"})
}

// subCA has cert-manager issue for a request that asks to be a CA. It returns the certificate, and
// whether the API server accepts an administrator's certificate below it. It needs an
// administrator's approval, and so a cluster without our policies.
func (c *realCertManager) subCA(t *testing.T, usages ...certificatesv1.KeyUsage) (issued *x509.Certificate, trusted bool) {
	t.Helper()
	ctx := t.Context()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Must(t, err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + nodeName, Organization: []string{"system:nodes"}}}, key)
	harness.Must(t, err)
	name := c.file(t, certManagerSigner, annotated("experimental.cert-manager.io/request-is-ca", "true"), func(csr *certificatesv1.CertificateSigningRequest) {
		csr.Spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
		csr.Spec.Usages = append([]certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}, usages...)
	})
	harness.Must(t, decide(ctx, c.live.admin, name, certificatesv1.CertificateApproved, nil))
	var chain []byte
	harness.Eventually(t, patience, "cert-manager issues for "+name, func() bool {
		chain = c.get(t, name).Status.Certificate
		return len(chain) > 0
	})
	block, _ := pem.Decode(chain)
	issued, err = x509.ParseCertificate(block.Bytes)
	harness.Must(t, err)

	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Must(t, err)
	leaf, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "anybody", Organization: []string{"system:masters"}},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, issued, leafKey.Public(), key)
	harness.Must(t, err)
	leafKeyDER, err := x509.MarshalECPrivateKey(leafKey)
	harness.Must(t, err)
	pair, err := tls.X509KeyPair(append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf}), chain...),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: leafKeyDER}))
	harness.Must(t, err)
	if len(pair.Certificate) < 2 {
		t.Fatal("the chain is not sent")
	}
	client := c.with(t, append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf}), chain...), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: leafKeyDER}))
	_, err = client.CoreV1().Secrets("kube-system").List(ctx, metav1.ListOptions{})
	if err != nil && !apierrors.IsUnauthorized(err) {
		t.Fatal(err)
	}
	return issued, err == nil
}

// The real cert-manager, before our policies and after. Before, a tenant of one namespace is
// cluster-admin within seconds. After, that issuer issues nothing more for the tenant, the tenant's
// own issuer does, and a machine enrols.
func TestRealCertManager(t *testing.T) {
	ctx := t.Context()
	l := newLive(t)
	c := newRealCertManager(t, l)
	tenant := dynamicAs(t, l.ControlPlane, tenantUser)
	nodes := object{"kind": "ClusterIssuer", "name": "node-ca"}
	masters := func(name string) *unstructured.Unstructured {
		u := newCertManagerObject(certificates, name, nodes)
		harness.Must(t, unstructured.SetNestedField(u.Object, object{"organizations": []any{"system:masters"}}, "spec", "subject"))
		harness.Must(t, unstructured.SetNestedStringSlice(u.Object, []string{"client auth"}, "spec", "usages"))
		return u
	}
	create := func(resource schema.GroupVersionResource, u *unstructured.Unstructured) error {
		_, err := tenant.Resource(resource).Namespace(tenantNamespace).Create(ctx, u, metav1.CreateOptions{})
		return err
	}

	// Before the policies.
	c.restart(t, "*")
	began := time.Now()
	harness.Must(t, create(certificates, masters("early")))
	early := c.secret(t, "early")
	if !c.isClusterAdmin(t, early) {
		t.Error("the tenant is no cluster-admin without the policy")
	}
	t.Logf("a tenant was cluster-admin after %s", time.Since(began).Round(time.Millisecond))

	weak, trusted := c.subCA(t)
	if !weak.IsCA || weak.KeyUsage != x509.KeyUsageDigitalSignature || trusted {
		t.Errorf("request-is-ca: CA %t, usage %b, trusted %t", weak.IsCA, weak.KeyUsage, trusted)
	}
	strong, trusted := c.subCA(t, certificatesv1.UsageCertSign)
	if !strong.IsCA || strong.KeyUsage&x509.KeyUsageCertSign == 0 || !trusted {
		t.Errorf("request-is-ca with the usage cert sign: CA %t, usage %b, trusted %t", strong.IsCA, strong.KeyUsage, trusted)
	}

	// Without its approver nothing is approved.
	c.restart(t, "*,-certificaterequests-approver")
	harness.Must(t, create(certificateRequests, newCertManagerObject(certificateRequests, "waiting", nodes)))
	harness.Eventually(t, patience, "cert-manager waits for an approval", func() bool {
		events, err := l.admin.CoreV1().Events(tenantNamespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=WaitingForApproval"})
		harness.Must(t, err)
		return slices.ContainsFunc(events.Items, func(e corev1.Event) bool { return e.InvolvedObject.Name == "waiting" })
	})

	l.install(t)
	apply := []string{"apply", "--server-side", "--validate=strict", "--force-conflicts"}
	l.kubectl(t, append(apply, "-k", documentedOverlay(t, "cert-manager"))...)
	l.kubectl(t, append(apply, "-f", optionalCertManager)...)
	harness.Eventually(t, patience, "the policy is in effect", func() bool {
		_, err := tenant.Resource(certificateRequests).Namespace(tenantNamespace).Create(ctx,
			newCertManagerObject(certificateRequests, "probe", nodes), metav1.CreateOptions{DryRun: dryRun})
		return refusedBy(err, issuersPolicy)
	})
	wantRefusedBy(t, create(certificates, masters("late")), issuersPolicy)
	wantRefusedBy(t, create(certificateRequests, newCertManagerObject(certificateRequests, "late", nodes)), issuersPolicy)
	c.restart(t, "*")
	// It asks again for a Certificate from before, once the Secret is gone.
	harness.Must(t, l.admin.CoreV1().Secrets(tenantNamespace).Delete(ctx, "early", metav1.DeleteOptions{}))
	for _, name := range []string{"waiting", `early-\d+`} {
		refused := regexp.MustCompile(name + `\W+ is forbidden: ValidatingAdmissionPolicy '` + issuersPolicy + "'")
		harness.Eventually(t, patience, "cert-manager is refused: "+name, func() bool {
			log, err := os.ReadFile(c.log)
			harness.Must(t, err)
			return refused.Match(log)
		})
	}
	if !c.isClusterAdmin(t, early) {
		t.Error("what was issued before ended; say so in docs/cluster-setup.md")
	}

	// What has nothing to do with nodes goes on.
	own, err := testbed.NewCA("the tenant's own")
	harness.Must(t, err)
	key, err := own.KeyPEM()
	harness.Must(t, err)
	c.issuer(t, issuers, tenantNamespace, "own", own.CertPEM(), key)
	harness.Must(t, create(certificates, newCertManagerObject(certificates, "honest", object{"name": "own"})))
	c.secret(t, "honest")

	m := l.newMachine(t, "issued-by-cert-manager")
	m.Signer = certManagerSigner
	l.inventoried(t, m)
	l.startReady(t, func(c *config.Config) {
		c.Signers = []config.Signer{{Name: certManagerSigner}}
		c.Signing = config.Signing{Mode: config.ApproveOnly}
	})
	leaf := m.begin(t).succeeds(t)
	if leaf.IsCA {
		t.Error("a machine has a CA certificate")
	}
	for _, name := range []string{"waiting", "late"} {
		u, err := c.admin.Resource(certificateRequests).Namespace(tenantNamespace).Get(ctx, name, metav1.GetOptions{})
		if name == "late" && apierrors.IsNotFound(err) {
			continue
		}
		harness.Must(t, err)
		status, _, err := unstructured.NestedMap(u.Object, "status")
		harness.Must(t, err)
		if certificate, ok := status["certificate"]; ok {
			t.Errorf("%s: %v", name, certificate)
		}
	}
	for _, name := range []string{"early", "late"} {
		if _, err := l.admin.CoreV1().Secrets(tenantNamespace).Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("Secret %s: %v", name, err)
		}
	}
}
