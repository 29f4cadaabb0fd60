// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/watch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// unnamed has nothing say which EK the machine has.
func unnamed(m *machine) { m.object.Annotations = nil }

// Where no source of EKs is configured, a new Machine's token speaks for the TPM that comes with
// it.
func TestTrustOnFirstUse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	controller := w.start(t, func(file map[string]any) {
		clusterAPI(file)["trustOnFirstUse"], clusterAPI(file)["trustAnyTPM"] = true, true
		delete(clusterAPI(file), "ekSources")
	})

	t.Run("a new Machine", func(t *testing.T) {
		m := c.newMachine(t, "new", unnamed)
		m.enrols(t)
		m.remembered(t)
		m.registered(t)
		m.attests(t) // a renewal
		m.certificate = nil
		m.attests(t) // its disk was lost: the record knows its EK
		m.remembered(t)
	})
	for _, refused := range []struct {
		name string
		// by makes the one that tries, with a TPM that nothing is said of unless it says so.
		by   func(t *testing.T, m *machine) *peer
		want verifier.Reason
		// good says that the machine itself is not kept from its certificate.
		good bool
	}{
		{"token-of-another", func(t *testing.T, m *machine) *peer {
			other := c.newMachine(t, "whose-token-it-is", unnamed)
			return c.newPeer(t, other.computer, other.credential(), m.name, m.providerID)
		}, verifier.ReasonTokenNotForMachine, true},
		{"another-with-its-token", func(t *testing.T, m *machine) *peer {
			other := c.newMachine(t, "claimed", unnamed)
			return c.newPeer(t, m.computer, m.credential(), other.name, other.providerID)
		}, verifier.ReasonTokenNotForMachine, true},
		{"instance-of-a-pool", func(t *testing.T, _ *machine) *peer {
			instance := c.newInstance(t, "instance")
			c.newPool(t, "pool", instance.token, instance.providerID)
			return instance.peer(t)
		}, verifier.ReasonTokenNotForMachine, true},
		{"two-hours-old", func(t *testing.T, m *machine) *peer {
			m.madeAgo(t, 2*time.Hour)
			return m.peer(t)
		}, verifier.ReasonTrustExpired, false},
		{"referring-to-a-node", func(t *testing.T, m *machine) *peer {
			updateStatus(t, m.client, m.object, func(o *clusterv1.Machine) { o.Status.NodeRef.Name = "any" })
			return m.peer(t)
		}, verifier.ReasonNodeAlreadyRegistered, false},
		{"with-a-record", func(t *testing.T, m *machine) *peer {
			m.attests(t)
			return m.impostor(t).peer(t)
		}, verifier.ReasonIdentityBound, true},
		{"whose-record-was-deleted", func(t *testing.T, m *machine) *peer {
			m.attests(t)
			m.registered(t)
			if err := m.client.Delete(t.Context(), m.remembered(t)); err != nil {
				t.Fatal(err)
			}
			m.certificate = nil
			return m.peer(t)
		}, verifier.ReasonNodeAlreadyRegistered, false},
		{"ek-of-another", func(t *testing.T, m *machine) *peer {
			other := c.newMachine(t, "whose-ek-it-is", unnamed)
			other.attests(t)
			return c.newPeer(t, other.computer, m.credential(), m.name, m.providerID)
		}, verifier.ReasonTokenNotForMachine, true}, // the EK selects the other one
	} {
		t.Run(refused.name, func(t *testing.T) {
			m := c.newMachine(t, refused.name, unnamed)
			p := refused.by(t, m)
			c.catchesUp(t, unnamed) // else it might yet go by the Machine as it was
			before := m.version(t)
			c.refuses(t, p, refused.want)
			if m.version(t) != before {
				t.Error("the record was written")
			}
			if refused.good {
				m.attests(t)
				m.remembered(t)
			}
		})
	}
	// An attested node registers with this Machine's provider ID, and Cluster API ties the Machine
	// to that Node.
	t.Run("referring to the Node of another", func(t *testing.T) {
		thief, victim := c.newMachine(t, "claims-ids", unnamed), c.newMachine(t, "claimed-id", unnamed)
		thief.attests(t)
		thief.claimsNode(t, victim.providerID)
		updateStatus(t, c.client, victim.object, func(o *clusterv1.Machine) { o.Status.NodeRef.Name = thief.name })
		c.catchesUp(t, unnamed)
		victim.attests(t)
		victim.remembered(t)
	})
	t.Run("almost two hours old", func(t *testing.T) {
		m := c.newMachine(t, "almost-two-hours-old", unnamed)
		m.madeAgo(t, 2*time.Hour-2*time.Minute)
		m.attests(t)
	})
	t.Run("a token that nobody is known to have yet", func(t *testing.T) {
		m := c.newMachine(t, "without-a-token", func(m *machine) { unnamed(m); m.late.config, m.config = m.config, nil })
		a := m.begins(t)
		c.waits(t, verifier.ReasonMachineNotFound, m.filed(t))
		since := time.Now()
		m.putConfig(t, m.late.config, m.owner())
		a.follows(t, "the token is known", since)
	})
	t.Run("what it does not stop", func(t *testing.T) { whoeverIsFirst(t, c) })

	if err := controller.Kill(); err != nil {
		t.Fatal(err)
	}
	roots, intermediates := makerFiles(t, shared.maker)
	w.start(t, func(file map[string]any) {
		clusterAPI(file)["trustOnFirstUse"] = true
		of := file["tpm"].(map[string]any)
		of["rootsFile"], of["intermediatesFile"] = roots, intermediates
	})
	// The controller compares the records of each Cluster every 30 s. So these run at once.
	for name, run := range map[string]func(*testing.T, *cluster){"with roots": trustWithRoots, "corrected": correctedFirstUse, "held": manyFirstUses} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			on := c
			if name == "held" {
				on = w.newCluster(t, name, nil) // its changes count apart
			}
			run(t, on)
		})
	}
}

// comparison is long enough for the next comparison of records and sources.
const comparison = 30*time.Second + harness.Soon

// names annotates a Machine with an EK.
func (m *machine) names(t *testing.T, ek string) {
	t.Helper()
	update(t, m.client, m.object, func(o *clusterv1.Machine) { metav1.SetMetaDataAnnotation(&o.ObjectMeta, attestation.AnnotationEK, ek) })
}

// An impostor was first. The operator annotates the Machine with the genuine EK: the impostor is
// refused from then on, and the machine gets its certificate.
func correctedFirstUse(t *testing.T, c *cluster) {
	victim := c.newMachine(t, "corrected", unnamed)
	thief := victim.impostor(t)
	thief.attests(t)
	thief.attests(t) // a renewal
	c.refuses(t, victim.peer(t), verifier.ReasonIdentityBound)
	victim.names(t, victim.ek)
	harness.Eventually(t, comparison, "the correction is accepted", func() bool { return c.record(t, victim.name).Status.EKReplaced != nil })
	c.refuses(t, thief.peer(t), verifier.ReasonEKReplaced)
	c.refuses(t, c.newPeer(t, thief.computer, c.asToken(victim.token), victim.name, victim.providerID), verifier.ReasonEKReplaced)
	victim.attests(t)
	record := victim.remembered(t)
	if record.Spec.EK.Source != string(verifier.EKAnnotation) || len(record.Status.EKHistory) != 1 || record.Status.EKHistory[0].Fingerprint != thief.ek {
		t.Errorf("%+v, %+v", record.Spec.EK, record.Status.EKHistory)
	}
	for i, certificate := range record.Status.Certificates {
		if former := i < len(record.Status.Certificates)-1; certificate.FormerEK != former {
			t.Errorf("certificate %d is of the former EK: %t", i, certificate.FormerEK)
		}
	}
	c.refuses(t, thief.peer(t), verifier.ReasonEKReplaced)
}

// Four corrections at once are more than the controller accepts by itself. The machines renew by
// their records.
func manyFirstUses(t *testing.T, c *cluster) {
	var machines []*machine
	for i := range 4 {
		m := c.newMachine(t, fmt.Sprintf("first-%d", i), unnamed)
		m.attests(t)
		m.registered(t)
		machines = append(machines, m)
	}
	for i, m := range machines {
		m.names(t, strings.Repeat(fmt.Sprint(i), 64))
	}
	last := machines[3] // a comparison may have accepted the others, one by one
	harness.Eventually(t, comparison, "the change is held", func() bool { return c.said(t, last.name, watch.ReasonEKChangeHeld) })
	last.attests(t)
	if last.remembered(t).Status.EKReplaced != nil {
		t.Error("a fourth record was overridden without an acknowledgement")
	}
}

// A client that has a Machine's token, knows its provider ID, and is first, becomes its node with a
// TPM of its own. Only the token's secrecy protects against that. The machine itself is then
// refused, and that is when the operator sees it.
func whoeverIsFirst(t *testing.T, c *cluster) {
	victim := c.newMachine(t, "robbed", unnamed)
	thief := victim.impostor(t)
	if r := thief.run(t); r.Code != 0 || r.Leaf.Subject.CommonName != "system:node:"+victim.name {
		t.Fatalf("the limit has moved: exit code %d: %s", r.Code, r.Stderr)
	}
	record := victim.record(t, victim.name)
	if record == nil || record.Spec.EK.Fingerprint != thief.ek || record.OwnerReferences[0].UID != victim.object.UID {
		t.Fatalf("%+v", record)
	}
	victim.denied(t, verifier.ReasonIdentityBound)
	refused := slices.DeleteFunc(c.filedWith(t, victim.token), func(r certificatesv1.CertificateSigningRequest) bool {
		return reasonOf(&r) != string(verifier.ReasonIdentityBound)
	})
	if len(refused) != 1 {
		t.Fatalf("%d requests of the machine were refused for what its record says", len(refused))
	}
	harness.Eventually(t, harness.Soon, "there is an Event", func() bool { return c.said(t, refused[0].Name, verifier.ReasonIdentityBound) })
	if after := victim.version(t); after != record.ResourceVersion {
		t.Error("the record was written")
	}
}

// With the makers' roots configured, an EK needs a certificate of theirs on first use, too. If a
// machine's EK is named, no other EK can become that machine.
func trustWithRoots(t *testing.T, c *cluster) {
	genuine := c.newMachine(t, "of-a-known-maker", unnamed)
	genuine.attests(t)
	genuine.remembered(t)
	maker, err := swtpm.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	for name, options := range map[string]swtpm.Options{
		"of-an-unknown-maker": {Certified: []string{"ecc-p256"}, CA: maker}, "without-a-certificate": {CA: maker},
	} {
		m := c.newMachineOf(t, newComputerWith(t, options), name, unnamed)
		a := m.begins(t)
		c.waits(t, verifier.ReasonMachineNotFound, m.filed(t))
		since := time.Now()
		m.names(t, m.ek)
		a.follows(t, name+": its EK is named", since)
	}
	named := c.newMachine(t, "of-which-an-ek-is-named", nil)
	c.refuses(t, named.impostor(t).peer(t), verifier.ReasonNodeNameMismatch)
	named.attests(t)
}

// madeAgo writes the Machine's time of creation into etcd: an API server takes it from nobody.
func (m *machine) madeAgo(t *testing.T, ago time.Duration) {
	t.Helper()
	key := []byte("/registry/cluster.x-k8s.io/machines/" + m.namespace + "/" + m.object.Name)
	var found struct {
		KVs []struct {
			Value []byte `json:"value"`
		} `json:"kvs"`
	}
	m.etcd(t, "range", map[string]any{"key": key}, &found)
	if len(found.KVs) != 1 {
		t.Fatalf("etcd: %d values of %s", len(found.KVs), key)
	}
	var object map[string]any
	if err := json.Unmarshal(found.KVs[0].Value, &object); err != nil {
		t.Fatal(err)
	}
	object["metadata"].(map[string]any)["creationTimestamp"] = time.Now().Add(-ago).UTC().Format(time.RFC3339)
	value, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	m.etcd(t, "put", map[string]any{"key": key, "value": value}, &struct{}{})
}

// etcd asks the management cluster's etcd, which has a gateway that takes JSON.
func (m *management) etcd(t *testing.T, method string, ask, answer any) {
	t.Helper()
	body, err := json.Marshal(ask)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, m.EtcdURL()+"/v3/kv/"+method, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		t.Fatalf("etcd: %s: %s", method, response.Status)
	}
	if err := json.NewDecoder(response.Body).Decode(answer); err != nil {
		t.Fatal(err)
	}
}

// filedWith returns the requests that a bootstrap token filed.
func (c *cluster) filedWith(t *testing.T, token string) (filed []certificatesv1.CertificateSigningRequest) {
	t.Helper()
	id, _, _ := strings.Cut(token, ".")
	for _, r := range c.requests(t) {
		if r.Spec.Username == "system:bootstrap:"+id {
			filed = append(filed, r)
		}
	}
	return filed
}

// filed waits for the machine's first request.
func (m *machine) filed(t *testing.T) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	harness.Eventually(t, harness.Soon, "its hello is there", func() bool { return len(m.filedWith(t, m.token)) > 0 })
	return &m.filedWith(t, m.token)[0]
}
