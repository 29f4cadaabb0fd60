// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const tokenSecret = "0123456789abcdef"

// kubeadmConfig returns the KubeadmConfig that machine(name) and pool(name) refer to.
func kubeadmConfig(name, token string) *bootstrapv1.KubeadmConfig {
	c := &bootstrapv1.KubeadmConfig{ObjectMeta: metav1.ObjectMeta{Namespace: blue.Namespace, Name: "config-" + name}}
	c.Spec.JoinConfiguration.Discovery.BootstrapToken.Token = token
	return c
}

func TestToken(t *testing.T) {
	const id = "abcdef"
	refersTo := func(ref clusterv1.ContractVersionedObjectReference) func(*clusterv1.Machine) {
		return func(m *clusterv1.Machine) { m.Spec.Bootstrap.ConfigRef = ref }
	}
	kubeadm := func(name string) clusterv1.ContractVersionedObjectReference {
		return clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.cluster.x-k8s.io", Kind: "KubeadmConfig", Name: name}
	}
	red := func(m *clusterv1.Machine) { m.Spec.ClusterName = "red" }
	overriding := kubeadmConfig("m", "zzzzzz."+tokenSecret)
	overriding.Spec.JoinConfiguration.Discovery.TLSBootstrapToken = id + "." + tokenSecret
	elsewhere := kubeadmConfig("m", id+"."+tokenSecret)
	elsewhere.Namespace = "another"
	redPool := pool("p")
	redPool.Spec.ClusterName = "red"

	unknown, nobody := verifier.Token{}, verifier.Token{Known: true}
	ofM := verifier.Token{Known: true, Machine: verifier.MachineRef{Name: "m", UID: "uid-m"}}
	for name, test := range map[string]struct {
		objects []client.Object
		want    verifier.Token
	}{
		"nothing":             {nil, unknown},
		"of a Machine":        {[]client.Object{machine("m"), machine("x"), kubeadmConfig("m", id+"."+tokenSecret), kubeadmConfig("x", "ghijkl."+tokenSecret)}, ofM},
		"stripped":            {[]client.Object{machine("m"), kubeadmConfig("m", id+".")}, ofM},
		"for TLS alone":       {[]client.Object{machine("m"), overriding}, ofM},
		"of another Machine":  {[]client.Object{machine("m"), kubeadmConfig("m", "ghijkl."+tokenSecret)}, unknown},
		"not made yet":        {[]client.Object{machine("m"), kubeadmConfig("m", "")}, unknown},
		"no secret, no dot":   {[]client.Object{machine("m"), kubeadmConfig("m", id)}, unknown},
		"secret too short":    {[]client.Object{machine("m"), kubeadmConfig("m", id+".0123")}, unknown},
		"secret too long":     {[]client.Object{machine("m"), kubeadmConfig("m", id+"."+tokenSecret+"0")}, unknown},
		"upper case":          {[]client.Object{machine("m"), kubeadmConfig("m", "ABCDEF."+tokenSecret)}, unknown},
		"two dots":            {[]client.Object{machine("m"), kubeadmConfig("m", id+".."+tokenSecret[1:])}, unknown},
		"very long":           {[]client.Object{machine("m"), kubeadmConfig("m", id+"."+strings.Repeat("0", 1<<20))}, unknown},
		"config nobody needs": {[]client.Object{machine("x"), kubeadmConfig("m", id+"."+tokenSecret)}, unknown},
		"config of another namespace": {
			[]client.Object{machine("m"), elsewhere}, unknown,
		},
		"config of two Machines": {
			[]client.Object{machine("m"), machine("x", refersTo(kubeadm("config-m"))), kubeadmConfig("m", id+"."+tokenSecret)}, nobody,
		},
		"config of a Machine of another Cluster, too": {
			[]client.Object{machine("m"), machine("x", red, refersTo(kubeadm("config-m"))), kubeadmConfig("m", id+"."+tokenSecret)}, nobody,
		},
		"config of a Machine of another Cluster alone": {
			[]client.Object{machine("x", red, refersTo(kubeadm("config-m"))), kubeadmConfig("m", id+"."+tokenSecret)}, unknown,
		},
		"in the configs of two Machines": {
			[]client.Object{machine("m"), machine("x"), kubeadmConfig("m", id+"."+tokenSecret), kubeadmConfig("x", id+"."+tokenSecret)}, nobody,
		},
		// a template's, or of a machine that may still run
		"in a config that nobody refers to, too": {
			[]client.Object{machine("m"), kubeadmConfig("m", id+"."+tokenSecret), kubeadmConfig("x", id+"."+tokenSecret)}, nobody,
		},
		"of a pool":                     {[]client.Object{pool("p", "metal://1"), kubeadmConfig("p", id+"."+tokenSecret)}, nobody},
		"of a pool of another Cluster":  {[]client.Object{redPool, kubeadmConfig("p", id+"."+tokenSecret)}, unknown},
		"of a pool and a Machine":       {[]client.Object{machine("m"), pool("p"), kubeadmConfig("m", id+"."+tokenSecret), kubeadmConfig("p", id+"."+tokenSecret)}, nobody},
		"one config of a pool and more": {[]client.Object{pool("p"), machine("m", refersTo(kubeadm("config-p"))), kubeadmConfig("p", id+"."+tokenSecret)}, nobody},
		"of a foreign pool and a Machine": {
			[]client.Object{redPool, machine("m", refersTo(kubeadm("config-p"))), kubeadmConfig("p", id+"."+tokenSecret)}, nobody,
		},
		"another kind of config": {
			[]client.Object{
				machine("m", refersTo(clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.cluster.x-k8s.io", Kind: "OtherConfig", Name: "config-m"})),
				kubeadmConfig("m", id+"."+tokenSecret),
			}, unknown,
		},
		"a kind of that name elsewhere": {
			[]client.Object{
				machine("m", refersTo(clusterv1.ContractVersionedObjectReference{APIGroup: "bootstrap.example.org", Kind: "KubeadmConfig", Name: "config-m"})),
				kubeadmConfig("m", id+"."+tokenSecret),
			}, unknown,
		},
		"no config": {[]client.Object{machine("m", refersTo(clusterv1.ContractVersionedObjectReference{})), kubeadmConfig("m", id+"."+tokenSecret)}, unknown},
	} {
		t.Run(name, func(t *testing.T) {
			s := newMachineSource(machineSourceConfig{Reader: newStore(t, test.objects...), Cluster: blue})
			if got, err := s.Token(ctx, id, start); err != nil || got != test.want {
				t.Errorf("got %+v, %v, want %+v", got, err, test.want)
			}
		})
	}
	t.Run("IDs that are none", func(t *testing.T) {
		s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m"), kubeadmConfig("m", "")), Cluster: blue})
		for _, id := range []string{"", "abcde", "ABCDEF", "abcdef.", "abcdefg"} {
			if got, err := s.Token(ctx, id, start); err != nil || got != unknown {
				t.Errorf("%q: got %+v, %v", id, got, err)
			}
		}
	})
}

// The token must be of the very machine that Machines returns.
func TestTokenAndMachineAgree(t *testing.T) {
	s := newMachineSource(machineSourceConfig{Reader: newStore(t, machine("m"), kubeadmConfig("m", "abcdef."+tokenSecret)), Cluster: blue})
	token, err := s.Token(ctx, "abcdef", start)
	if err != nil || token.Machine != read(t, s, start)["m"].Ref {
		t.Errorf("got %+v, %v", token, err)
	}
}

// lacking is a cache that may lack a kind, and counts who asks for it.
type lacking struct {
	client.Reader

	lacks bool
	asked int
}

func (l *lacking) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if _, ok := list.(*bootstrapv1.KubeadmConfigList); ok {
		if l.asked++; l.lacks {
			kind := schema.GroupKind{Group: bootstrapv1.GroupVersion.Group, Kind: "KubeadmConfig"}
			return fmt.Errorf("informer: %w", &meta.NoKindMatchError{GroupKind: kind, SearchedVersions: []string{"v1beta2"}})
		}
	}
	return l.Reader.List(ctx, list, opts...)
}

// With another bootstrap provider, no tokens are known. That is no error, and the kind is looked up
// only after a back-off.
func TestNoKubeadmConfigs(t *testing.T) {
	cache := &lacking{Reader: newStore(t, machine("m"), kubeadmConfig("m", "abcdef.")), lacks: true}
	s := newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue})
	for i := range 20 {
		if got, err := s.Token(ctx, "abcdef", start.Add(time.Duration(i)*tokensRetry/20)); err != nil || got.Known {
			t.Errorf("got %+v, %v", got, err)
		}
	}
	if cache.asked != 1 {
		t.Errorf("asked %d times", cache.asked)
	}
	cache.lacks = false
	if got, err := s.Token(ctx, "abcdef", start.Add(tokensRetry)); err != nil || got.Machine.Name != "m" {
		t.Errorf("got %+v, %v: the kind was installed", got, err)
	}
}

func TestTokensChange(t *testing.T) {
	cache := newStore(t, machine("m"), kubeadmConfig("m", ""))
	s := newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue})
	for i, test := range []struct {
		token string
		known bool
	}{{"", false}, {"abcdef.", true}, {"ghijkl.", false}} {
		cache.put(kubeadmConfig("m", test.token))
		if got, err := s.Token(ctx, "abcdef", start.Add(time.Duration(i)*readInterval)); err != nil || got.Known != test.known {
			t.Errorf("%q: got %+v, %v", test.token, got, err)
		}
	}
}

func TestStripKubeadmConfig(t *testing.T) {
	full := func() *bootstrapv1.KubeadmConfig {
		c := kubeadmConfig("m", "abcdef."+tokenSecret)
		c.Spec.JoinConfiguration.Discovery.TLSBootstrapToken = "ghijkl." + tokenSecret
		c.Spec.JoinConfiguration.Discovery.BootstrapToken.CACertHashes = []string{"private"}
		c.Spec.Files = []bootstrapv1.File{{Path: "/private", Content: "private"}}
		c.Spec.Users = []bootstrapv1.User{{Name: "private"}}
		c.Spec.PreKubeadmCommands = []string{"private"}
		c.Spec.InitConfiguration.BootstrapTokens = []bootstrapv1.BootstrapToken{{Token: bootstrapv1.BootstrapTokenString{ID: "abcdef", Secret: tokenSecret}}}
		c.Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "private " + tokenSecret}
		c.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "private"}}
		c.Status.DataSecretName = "private"
		c.UID, c.ResourceVersion, c.Labels = "u", "5", map[string]string{clusterv1.ClusterNameLabel: blue.Name}
		c.OwnerReferences = []metav1.OwnerReference{{Kind: "Machine", Name: "m", UID: "uid-m"}}
		return c
	}
	once, err := stripKubeadmConfig(full())
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(once)
	if err != nil {
		t.Fatal(err)
	}
	for _, gone := range []string{tokenSecret, "private"} {
		if strings.Contains(string(data), gone) {
			t.Errorf("%q is still there: %s", gone, data)
		}
	}
	c := once.(*bootstrapv1.KubeadmConfig)
	if c.Name != "config-m" || c.Namespace != blue.Namespace || c.UID != "u" || c.ResourceVersion != "5" ||
		c.Labels[clusterv1.ClusterNameLabel] != blue.Name || len(c.OwnerReferences) != 1 {
		t.Errorf("which object it is is lost: %s", data)
	}
	if d := c.Spec.JoinConfiguration.Discovery; d.BootstrapToken.Token != "abcdef." || d.TLSBootstrapToken != "ghijkl." {
		t.Errorf("the tokens' IDs are lost: %s", data)
	}
	if twice, err := stripKubeadmConfig(c.DeepCopy()); err != nil || !reflect.DeepEqual(twice, once) {
		t.Errorf("twice is not once: %+v, %v", twice, err)
	}

	for _, token := range []string{"", "abcdef", tokenSecret, "abcdef." + tokenSecret + "0", "abcdef " + tokenSecret, tokenSecret + ".abcdef"} {
		got, _ := stripKubeadmConfig(kubeadmConfig("m", token))
		if left := got.(*bootstrapv1.KubeadmConfig).Spec.JoinConfiguration.Discovery.BootstrapToken.Token; left != "" {
			t.Errorf("%q leaves %q", token, left)
		}
	}
	other := machine("m")
	if got, err := stripKubeadmConfig(other); err != nil || got != any(other) {
		t.Errorf("got %v, %v", got, err)
	}
}
