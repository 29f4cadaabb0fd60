// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

// kubeconfig returns a kubeconfig like Cluster API's, with these fields in its user and its
// cluster.
func kubeconfig(user, cluster string) []byte {
	return []byte(`apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443"` + cluster + `}}]
users: [{name: u, user: {` + user + `}}]
`)
}

const goodCredential = `client-certificate-data: Zm9v, client-key-data: YmFy`

// In a workload cluster the controller never acts as the administrator of the kubeconfig. The
// kubeconfig cannot make it read a file or start a program of its own machine.
func TestKubeconfigImpersonates(t *testing.T) {
	t.Parallel()
	section := config.ClusterAPI{User: config.DefaultUser}
	for name, c := range map[string]struct {
		data []byte
		says string
	}{
		"as it is made":           {kubeconfig(goodCredential, ""), ""},
		"a token":                 {kubeconfig("token: abc", ""), ""},
		"somebody else":           {kubeconfig(goodCredential+", as: root, as-uid: '0', as-groups: ['system:masters'], as-user-extra: {a: [b]}", ""), ""},
		"a file with a token":     {kubeconfig("tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token", ""), "tokenFile"},
		"a file beside a token":   {kubeconfig("token: abc, tokenFile: /token", ""), "tokenFile"},
		"a file of a certificate": {kubeconfig("client-certificate: /a, client-key-data: YmFy", ""), "client-certificate"},
		"a file of a key":         {kubeconfig("client-certificate-data: Zm9v, client-key: /b", ""), "client-key"},
		"a program":               {kubeconfig("exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/sh, interactiveMode: Never}", ""), "exec"},
		"an auth-provider":        {kubeconfig("auth-provider: {name: oidc}", ""), "auth-provider"},
		"a file of a CA":          {kubeconfig(goodCredential, ", certificate-authority: /etc/passwd"), "certificate-authority"},
		"no TLS":                  {bytes.Replace(kubeconfig(goodCredential, ""), []byte("https://"), []byte("http://"), 1), "not reached by https"},
		"no server":               {bytes.Replace(kubeconfig(goodCredential, ""), []byte("https://192.0.2.1:6443"), nil, 1), "not reached by https"},
		"an unverified server":    {kubeconfig(goodCredential, ", insecure-skip-tls-verify: true"), "insecure-skip-tls-verify"},
		"metadata":                {withServer("https://169.254.169.254"), "link-local"},
		"metadata, mapped":        {withServer("https://[::ffff:169.254.169.254]:443/latest"), "link-local"},
		"metadata, mapped in hex": {withServer("HTTPS://user@[::FFFF:a9fe:a9fe]"), "link-local"},
		"a neighbour":             {withServer("https://[fe80::1%25eth0]:6443"), "link-local"},
		"a neighbour, no zone":    {withServer("https://[FE80:0::1]:6443"), "link-local"},
		"no URL":                  {withServer("https://[fe80::1:6443"), "not a URL"},
		"no host":                 {withServer("https:///169.254.169.254"), "not a URL"},
		"no host's name":          {withServer("https://a\u202eb.example"), "not a URL"}, // client-go's metrics have the host
		"no text":                 {withServer("https://%FF.example"), "not a URL"},
		"no host's length":        {withServer("https://" + strings.Repeat("a", 1<<20)), "not a URL"},
		"a proxy":                 {kubeconfig(goodCredential, ", proxy-url: 'http://192.0.2.7:22'"), "proxy-url"},
		"empty":                   {nil, "does not hold a kubeconfig"},
		"not one":                 {[]byte("secret: [text"), "does not hold a kubeconfig"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := impersonate(c.data, section.User)
			if c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "/a") || strings.Contains(err.Error(), "/token") || strings.Contains(err.Error(), "text") {
					t.Errorf("does not say %q, or more than that: %v", c.says, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			rest, err := clientcmd.RESTConfigFromKubeConfig(out)
			if err != nil {
				t.Fatal(err)
			}
			as := rest.Impersonate
			if as.UserName != config.DefaultUser || len(as.Groups) > 0 || as.UID != "" || len(as.Extra) > 0 {
				t.Errorf("%+v", as)
			}
			if !rest.DisableCompression {
				t.Error("an answer may be compressed")
			}
			if rest.Host != "https://192.0.2.1:6443" || rest.BearerToken == "" && string(rest.KeyData) != "bar" {
				t.Errorf("%+v", rest)
			}
		})
	}
}

// withServer returns a good kubeconfig with another server.
func withServer(server string) []byte {
	return bytes.Replace(kubeconfig(goodCredential, ""), []byte("https://192.0.2.1:6443"), []byte(server), 1)
}

func TestOnlySecretsAreKubeconfigs(t *testing.T) {
	t.Parallel()
	object := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c-kubeconfig"}, Data: map[string][]byte{secret.KubeconfigDataName: kubeconfig(goodCredential, "")}}
	r := impersonatingReader{fake.NewClientBuilder().WithObjects(object).Build(), config.DefaultUser}
	key := client.ObjectKeyFromObject(object)
	got := &corev1.Secret{}
	if err := r.Get(t.Context(), key, got); err != nil || !strings.Contains(string(got.Data[secret.KubeconfigDataName]), "as: "+config.DefaultUser) {
		t.Errorf("%v, %s", err, got.Data[secret.KubeconfigDataName])
	}
	if err := r.Get(t.Context(), key, &corev1.ConfigMap{}); err == nil {
		t.Error("a ConfigMap is taken for a kubeconfig")
	}
}

// A cluster keeps the identity with which it was first served. That holds after a move, which gives
// it another UID, and if somebody deletes the Secret.
func TestIdentify(t *testing.T) {
	t.Parallel()
	scheme, err := Management{}.Scheme()
	if err != nil {
		t.Fatal(err)
	}
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c", UID: "uid-now"}}
	existing := func(annotations map[string]string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c-node-attestation", Annotations: annotations}, Data: map[string][]byte{"current": []byte("k")}}
	}
	record := func(name, uid, of string) *v1alpha1.NodeAttestation {
		return &v1alpha1.NodeAttestation{
			ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: of}},
			Spec:       v1alpha1.NodeAttestationSpec{Cluster: uid},
		}
	}
	for name, c := range map[string]struct {
		objects []client.Object
		want    string
		says    string
	}{
		"new":                      {nil, "uid-now", ""},
		"known":                    {[]client.Object{existing(map[string]string{annotationClusterUID: "uid-first"})}, "uid-first", ""},
		"a Secret that is empty":   {[]client.Object{existing(nil)}, "uid-now", ""},
		"a Secret that was lost":   {[]client.Object{record("a", "uid-first", "c"), record("b", "uid-first", "c"), record("x", "uid-x", "another")}, "uid-first", ""},
		"records of two clusters":  {[]client.Object{record("a", "uid-first", "c"), record("b", "uid-second", "c")}, "", annotationClusterUID},
		"of another namespace's c": {[]client.Object{func() *v1alpha1.NodeAttestation { r := record("a", "uid-x", "c"); r.Namespace = "m"; return r }()}, "uid-now", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := fake.NewClientBuilder().WithScheme(scheme).WithObjects(c.objects...).Build()
			for range 2 { // the second time finds what the first wrote
				uid, err := loadClusterUID(t.Context(), api, cluster)
				if uid != c.want || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
					t.Fatalf("%q, %v", uid, err)
				}
			}
			if c.says != "" {
				return
			}
			kept := &corev1.Secret{}
			if err := api.Get(t.Context(), keySecret(client.ObjectKeyFromObject(cluster)), kept); err != nil || kept.Annotations[annotationClusterUID] != c.want {
				t.Fatalf("%v, %v", kept.Annotations, err)
			}
			made := !strings.HasPrefix(name, "known") && !strings.HasPrefix(name, "a Secret that is empty")
			if made && (kept.Type != clusterv1.ClusterSecretType || kept.Labels[clusterv1.ClusterNameLabel] != "c" || len(kept.OwnerReferences) != 1 || kept.OwnerReferences[0].UID != "uid-now") {
				t.Errorf("it does not go with its Cluster: %+v", kept.ObjectMeta)
			}
			if !made && string(kept.Data["current"]) != "k" {
				t.Error("the keys are gone")
			}
		})
	}
}
