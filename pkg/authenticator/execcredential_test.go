// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/pkg/apis/clientauthentication"
	"k8s.io/client-go/pkg/apis/clientauthentication/install"
	clientauthenticationv1 "k8s.io/client-go/pkg/apis/clientauthentication/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// asKubelet is what client-go sets with provideClusterInfo: true.
const asKubelet = `{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","spec":{"cluster":{"server":"https://10.0.0.1:6443","tls-server-name":"kubernetes","certificate-authority-data":"Q0E=","config":null},"interactive":false}}`

func TestParseExecInfo(t *testing.T) {
	for name, c := range map[string]struct{ value, version, server string }{
		"by hand":              {"", "", ""},
		"as the kubelet asks":  {asKubelet, execV1, "https://10.0.0.1:6443"},
		"v1beta1":              {strings.Replace(asKubelet, "/v1", "/v1beta1", 1), execV1beta1, "https://10.0.0.1:6443"},
		"without a cluster":    {`{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","spec":{"interactive":false}}`, execV1, ""},
		"without a spec":       {`{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1"}`, execV1, ""},
		"with what is unknown": {strings.Replace(asKubelet, `"spec":`, `"later":{},"spec":`, 1), execV1, "https://10.0.0.1:6443"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseExecInfo(c.value)
			if err != nil || got.APIVersion != c.version {
				t.Fatalf("version %q, %v", got.APIVersion, err)
			}
			origin := got.origin()
			if (origin != nil) != (c.server != "") {
				t.Fatalf("cluster %+v", origin)
			}
			if origin != nil && (origin.Server != c.server || origin.TLSServerName != "kubernetes" || string(origin.CertificateAuthorityData) != "CA") {
				t.Errorf("cluster %+v", origin)
			}
		})
	}
}

func TestParseExecInfoRefuses(t *testing.T) {
	const secret = "hunter2hunter2hunter2"
	long := strings.Repeat(secret, 50_000)
	for name, value := range map[string]string{
		"garbage":         secret,
		"white space":     " ",
		"null":            "null",
		"an array":        "[" + asKubelet + "]",
		"a string":        `"` + secret + `"`,
		"an empty object": "{}",
		"half of it":      asKubelet[:len(asKubelet)/2],
		"two of them":     asKubelet + asKubelet,
		"wrong types":     `{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","spec":"` + secret + `"}`,
		"wrong kind":      strings.Replace(asKubelet, "ExecCredential", "TokenReview", 1),
		"no kind":         `{"apiVersion":"client.authentication.k8s.io/v1"}`,
		"v1alpha1":        strings.Replace(asKubelet, "/v1", "/v1alpha1", 1),
		"v2":              strings.Replace(asKubelet, "/v1", "/v2", 1),
		"no group":        strings.Replace(asKubelet, "client.authentication.k8s.io/v1", "v1", 1),
		"CA not base64":   strings.Replace(asKubelet, "Q0E=", secret, 1),
		"huge":            long,
		"huge kind":       strings.Replace(asKubelet, "ExecCredential", long, 1),
		"huge version":    strings.Replace(asKubelet, "client.authentication.k8s.io/v1", long, 1),
		"escapes":         strings.Replace(asKubelet, "ExecCredential", `\u001b]0;owned\u0007\n`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseExecInfo(value)
			failure := plugintest.WantFailure(t, err, reason.ExecAPI)
			if got != (ExecInfo{}) {
				t.Errorf("something came with the error: %+v", got)
			}
			if failure.Reason.Code() != 11 || failure.Hint == "" || !strings.Contains(failure.Error(), ExecInfoVariable) {
				t.Errorf("%d: %v, hint %q", failure.Reason.Code(), failure, failure.Hint)
			}
			if strings.Count(failure.Error(), "hunter2") > 64/len("hunter2")+1 || len(failure.Error()) > 500 {
				t.Errorf("it is quoted at length: %.200q", failure.Error())
			}
		})
	}
}

func FuzzParseExecInfo(f *testing.F) {
	for _, seed := range []string{"", asKubelet, "null", "[]", `{"kind":"ExecCredential"}`, `{"apiVersion":"client.authentication.k8s.io/v1beta1","kind":"ExecCredential","spec":{"cluster":{}}}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		got, err := ParseExecInfo(value)
		if err != nil {
			var failure *reason.Failure
			if !errors.As(err, &failure) || failure.Reason != reason.ExecAPI || len(failure.Error()) > 2000 || plugintest.NotOneLine(failure.Error()) != "" {
				t.Fatalf("%v", err)
			}
			return
		}
		if got.APIVersion == "" && value != "" || got.APIVersion != "" && got.APIVersion != execV1 && got.APIVersion != execV1beta1 {
			t.Fatalf("accepted version %q", got.APIVersion)
		}
		if got.Cluster != nil {
			_, _ = configFor(got) // must not panic, whatever the cluster is
		}
	})
}

func TestCredentialIsWhatClientGoReads(t *testing.T) {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder(clientauthentication.SchemeGroupVersion)
	pair := plugintest.NewPair(t, nil)
	expiration := plugintest.Noon.Add(time.Hour)
	for asked, want := range map[string]string{"": execV1, execV1: execV1, execV1beta1: execV1beta1} {
		t.Run("asked "+asked, func(t *testing.T) {
			info := ExecInfo{APIVersion: asked}
			data, err := info.render(pair, expiration)
			if err != nil {
				t.Fatal(err)
			}
			object, kind, err := decoder.Decode(data, nil, nil)
			if err != nil {
				t.Fatalf("client-go: %v\n%s", err, data)
			}
			if kind.GroupVersion().String() != want {
				t.Errorf("answered in %s, want %s", kind.GroupVersion(), want)
			}
			status := object.(*clientauthentication.ExecCredential).Status
			if status.ClientCertificateData != string(pair.Chain) || status.ClientKeyData != string(pair.Key) || status.Token != "" {
				t.Errorf("another certificate came out: %+v", status)
			}
			if !status.ExpirationTimestamp.Time.Equal(expiration) {
				t.Errorf("expires at %v, want %v", status.ExpirationTimestamp, expiration)
			}
			if bytes.Count(data, []byte("\n")) != 1 || !bytes.HasSuffix(data, []byte("}\n")) {
				t.Errorf("not one line: %q", data)
			}
			elsewhere := expiration.In(time.FixedZone("", 5*3600))
			if again, err := info.render(pair, elsewhere); err != nil || !bytes.Equal(again, data) {
				t.Errorf("the same answer has other bytes: %v", err)
			}
		})
	}
}

// configFor returns how the cluster that client-go names would be reached.
func configFor(exec ExecInfo) (*rest.Config, error) {
	to, err := nodeaccess.Node{Asked: exec.origin(), AskedBy: cmp.Or(exec.Source, ExecInfoVariable), Insecure: exec.insecure()}.OwnAccess(&cache.Pair{})
	return to.Config, err
}

func TestExecClusterIsTakenAsItIs(t *testing.T) {
	ca := plugintest.NewCA(t)
	good := clientauthenticationv1.Cluster{Server: "https://10.0.0.1:6443", TLSServerName: "kubernetes", CertificateAuthorityData: ca}
	config, err := configFor(ExecInfo{APIVersion: execV1, Cluster: &good})
	if err != nil || config.Host != good.Server || config.ServerName != "kubernetes" || !bytes.Equal(config.CAData, ca) || config.Insecure {
		t.Fatalf("%+v, %v", config, err)
	}
	for name, change := range map[string]func(*clientauthenticationv1.Cluster){
		"insecure": func(c *clientauthenticationv1.Cluster) {
			c.InsecureSkipTLSVerify, c.CertificateAuthorityData = true, nil
		},
		"http":            func(c *clientauthenticationv1.Cluster) { c.Server = "http://10.0.0.1:8080" },
		"no scheme":       func(c *clientauthenticationv1.Cluster) { c.Server = "10.0.0.1:6443" },
		"no server":       func(c *clientauthenticationv1.Cluster) { c.Server = "" },
		"a file":          func(c *clientauthenticationv1.Cluster) { c.Server = "file:///etc/passwd" },
		"no host":         func(c *clientauthenticationv1.Cluster) { c.Server = "https:///api" },
		"no URL":          func(c *clientauthenticationv1.Cluster) { c.Server = "https://[::1" },
		"proxy is no URL": func(c *clientauthenticationv1.Cluster) { c.ProxyURL = "http://user:hunter2@[::1" },
	} {
		t.Run(name, func(t *testing.T) {
			cluster := good
			change(&cluster)
			config, err := configFor(ExecInfo{APIVersion: execV1, Cluster: &cluster})
			if err == nil {
				t.Fatalf("accepted: %+v", config)
			}
			if strings.Contains(err.Error(), "hunter2") || plugintest.NotOneLine(err.Error()) != "" {
				t.Errorf("%v", err)
			}
		})
	}
}

// The fields of v1 and v1beta1 that this program reads and writes have the same names; else one
// type would not do for both.
func TestExecVersionsAgree(t *testing.T) {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	internal := &clientauthentication.ExecCredential{
		Spec:   clientauthentication.ExecCredentialSpec{Cluster: &clientauthentication.Cluster{Server: "s", TLSServerName: "n", CertificateAuthorityData: []byte("c"), ProxyURL: "p", InsecureSkipTLSVerify: true}},
		Status: &clientauthentication.ExecCredentialStatus{ClientCertificateData: "c", ClientKeyData: "k"},
	}
	var written []string
	for _, version := range scheme.PrioritizedVersionsForGroup(clientauthentication.GroupName) {
		if version.Version != "v1" && version.Version != "v1beta1" {
			continue
		}
		object, err := scheme.ConvertToVersion(internal, version)
		if err != nil {
			t.Fatal(err)
		}
		data, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		written = append(written, strings.Replace(string(data), version.String(), "", 1))
	}
	if len(written) != 2 || written[0] != written[1] {
		t.Errorf("%q", written)
	}
}
