// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const (
	signerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-gce"
	clusterUID = "some-cluster"
)

// created is when the requests of the tests are filed. Their tokens are issued a second before.
var created = time.Date(2026, 11, 28, 12, 0, 1, 0, time.UTC)

// theGoogle publishes two keys. stranger is a key that it never published.
var (
	theGoogle = sync.OnceValue(func() *google.Google { return google.New("test") })
	stranger  = sync.OnceValue(func() google.Key { return google.NewKey("stranger") })
)

func someVM() google.VM {
	return google.VM{
		Project: "some-project", ProjectNumber: 123456789012, Zone: "europe-west1-b", Name: "worker-0", ID: "2875949485074006138",
	}
}

func someFiled() verifier.Filed {
	lifetime := int32(86400)
	return verifier.Filed{
		Name: "node-csr-a", UID: "u", SignerName: signerName, Created: created,
		Usages: []string{"client auth", "digital signature"}, ExpirationSeconds: &lifetime,
	}
}

// attempt is one request with its evidence, and how it is judged. A test changes one part of it.
type attempt struct {
	// node is the request as the node knows it: the token is bound to it.
	node   verifier.Filed
	pkcs10 string
	vm     google.VM
	key    google.Key
	issued time.Time
	header string
	// claims changes the claims before they are signed, and token the signed token.
	claims func(claims, engine map[string]any)
	// payload replaces the claims.
	payload string
	token   func(token string) string
	// document changes the document, and file the request as it was filed.
	document func(*attestation.Identity)
	file     func(*attestation.Request, *verifier.Filed)

	config Config
	keys   KeySet
}

func someAttempt(t testing.TB) *attempt {
	t.Helper()
	keys, err := ParseKeySet(theGoogle().KeySet())
	if err != nil {
		t.Fatal(err)
	}
	return &attempt{
		node: someFiled(), pkcs10: "PKCS#10", vm: someVM(), key: theGoogle().Key(), issued: created.Add(-time.Second),
		config: Config{ClusterUID: clusterUID, Projects: []string{"another-project", "some-project"}}, keys: keys,
	}
}

// filed returns the request with its evidence.
func (a *attempt) filed(t testing.TB) verifier.Filed {
	t.Helper()
	binding := attestation.Binding{
		Version: attestation.VersionGCE, ClusterUID: clusterUID, SignerName: a.node.SignerName, Name: a.node.Name,
		PKCS10: []byte(a.pkcs10), Usages: a.node.Usages, ExpirationSeconds: a.node.ExpirationSeconds,
	}
	payload, header := a.vm.Claims(binding.Audience(), true, a.issued), a.header
	if a.claims != nil {
		var claims map[string]any
		if err := json.Unmarshal([]byte(payload), &claims); err != nil {
			t.Fatal(err)
		}
		claims["iat"], claims["exp"] = a.issued.Unix(), a.issued.Add(time.Hour).Unix() // as integers
		engine := claims["google"].(map[string]any)["compute_engine"].(map[string]any)
		engine["project_number"] = a.vm.ProjectNumber
		a.claims(claims, engine)
		changed, err := json.Marshal(claims)
		if err != nil {
			t.Fatal(err)
		}
		payload = string(changed)
	}
	if a.payload != "" {
		payload = a.payload
	}
	if header == "" {
		header = a.key.Header()
	}
	token := string(a.key.Sign(header, payload))
	if a.token != nil {
		token = a.token(token)
	}
	identity := attestation.Identity{Version: attestation.VersionGCE, ClusterUID: clusterUID, Statement: []byte(token)}
	if a.document != nil {
		a.document(&identity)
	}
	data, err := identity.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	request, filed := attestation.Request{PKCS10: []byte(a.pkcs10), Provider: Name, Data: data}, a.node
	if a.file != nil {
		a.file(&request, &filed)
	}
	if filed.Request, err = request.Marshal(); err != nil {
		t.Fatal(err)
	}
	return filed
}
