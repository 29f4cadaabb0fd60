// SPDX-License-Identifier: Apache-2.0

package ec2

import (
	"crypto/elliptic"
	"crypto/x509"
	"encoding/base64"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
)

// fixture has an instance "a" with a NitroTPM, and an adapter that reads its keys with each call.
type fixture struct {
	*imitation
	trust clusterapi.EKTrust
}

func newFixture(t *testing.T) fixture {
	t.Helper()
	i := newImitation(t)
	i.Launch("a", platformkittest.TPM{Number: 1})
	return fixture{i, i.Trust(t, platformkit.Options{Refresh: time.Nanosecond}, platformkit.NewBudget(1000, 1000))}
}

// change changes the instance "a" in EC2's answers.
func (f fixture) change(change func(*aws.EC2Instance)) {
	instance, _ := f.ec2.Get(instanceID("a"))
	change(&instance)
	f.ec2.Put(instance)
}

func (f fixture) ask(t *testing.T, m clusterapi.PlatformMachine) (clusterapi.PlatformAnswer, bool, error) {
	t.Helper()
	answers, err := f.trust.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{m})
	answer, ok := answers[m]
	return answer, ok && !answer.Unknown, err
}

// Each state of an instance, and each zone: only an instance that exists at its provider ID has an
// answer.
func TestStates(t *testing.T) {
	t.Parallel()
	for state, exists := range map[string]bool{
		"pending": true, "running": true, "stopping": true, "stopped": true, "shutting-down": false, "terminated": false, "": false, "new-state": false,
	} {
		f := newFixture(t)
		f.change(func(i *aws.EC2Instance) { i.State = state })
		if state == "" {
			f.change(func(i *aws.EC2Instance) { i.State = " " })
		}
		_, known, err := f.ask(t, f.Machine("a"))
		if refused := !exists && !slices.Contains([]string{"shutting-down", "terminated"}, state); known != exists || (err != nil) != refused {
			t.Errorf("state %q: answered %v, %v", state, known, err)
		}
	}
	f := newFixture(t)
	f.change(func(i *aws.EC2Instance) { i.Zone = "eu-west-1b" })
	if _, known, err := f.ask(t, f.Machine("a")); known || err == nil || !strings.Contains(err.Error(), "zone") {
		t.Errorf("in another zone: answered %v, %v", known, err)
	}
}

// "No TPM" is an answer only for an instance that never had one. For others it may be a fault of
// EC2, and the last known keys count.
func TestNoTPM(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*aws.EC2Instance)
		before bool // the instance was asked about while it had a NitroTPM
		want   string
	}{
		"running":           {func(i *aws.EC2Instance) { i.TPMSupport = "" }, false, ""},
		"pending":           {func(i *aws.EC2Instance) { i.TPMSupport, i.State = "", "pending" }, false, "no tpmSupport"},
		"stopped":           {func(i *aws.EC2Instance) { i.TPMSupport, i.State = "", "stopped" }, false, "no tpmSupport"},
		"had one":           {func(i *aws.EC2Instance) { i.TPMSupport = "" }, true, "had a NitroTPM"},
		"of another kind":   {func(i *aws.EC2Instance) { i.TPMSupport = "v3.0" }, false, "only v2.0"},
		"one key is absent": {func(i *aws.EC2Instance) { delete(i.Keys, "ecc-sec-p384") }, false, "UnsupportedOperation"},
	} {
		f := newFixture(t)
		if c.before {
			if _, known, err := f.ask(t, f.Machine("a")); !known || err != nil {
				t.Fatalf("%s: answered %v, %v", name, known, err)
			}
		}
		f.change(c.change)
		answer, known, err := f.ask(t, f.Machine("a"))
		switch {
		case c.want == "":
			if err != nil || !known || len(answer.EKs) != 0 {
				t.Errorf("%s: %v, %v, %v", name, answer, known, err)
			}
		case err == nil || !strings.Contains(err.Error(), c.want):
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		case c.before != (known && len(answer.EKs) == 2):
			t.Errorf("%s: the last known keys must count, if there are any: %v", name, answer)
		}
	}
}

// An answer with another key than the requested one is an error.
func TestWrongKeys(t *testing.T) {
	t.Parallel()
	encode := func(key any) string {
		der, err := x509.MarshalPKIXPublicKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return base64.StdEncoding.EncodeToString(der)
	}
	p384, p256, rsa2048 := encode(platformkittest.ECCKey(elliptic.P384(), 1)), encode(platformkittest.ECCKey(elliptic.P256(), 1)), encode(platformkittest.RSAKey(1))
	for name, c := range map[string]struct{ kind, value string }{
		"another curve":  {"ecc-sec-p384", p256},
		"another type":   {"ecc-sec-p384", rsa2048},
		"RSA as ECC":     {"rsa-2048", p384},
		"no key":         {"rsa-2048", ""},
		"not base64":     {"rsa-2048", "{" + rsa2048},
		"trailing bytes": {"ecc-sec-p384", base64.StdEncoding.EncodeToString(append(mustDecode(t, p384), 0))},
		"PEM":            {"ecc-sec-p384", base64.StdEncoding.EncodeToString([]byte("-----BEGIN PUBLIC KEY-----\n" + p384 + "\n-----END PUBLIC KEY-----\n"))},
	} {
		f := newFixture(t)
		f.change(func(i *aws.EC2Instance) { i.Keys[c.kind] = c.value })
		if answer, known, err := f.ask(t, f.Machine("a")); known || err == nil || !strings.Contains(err.Error(), "GetInstanceTpmEkPub") {
			t.Errorf("%s: %v, %v, %v", name, answer, known, err)
		}
	}
	f := newFixture(t)
	f.change(func(i *aws.EC2Instance) { i.Keys["ecc-sec-p384"] = "\n" + p384[:64] + "\n " + p384[64:] + "\n" })
	if _, known, err := f.ask(t, f.Machine("a")); !known || err != nil {
		t.Errorf("with line breaks: %v, %v", known, err)
	}
}

func mustDecode(t *testing.T, text string) []byte {
	t.Helper()
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// The keys are read again after a start: the instance may have another NitroTPM.
func TestKeysAfterAStart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.trust = f.Trust(t, platformkit.Options{}, platformkit.NewBudget(1000, 1000))
	m := f.Machine("a")
	if _, known, err := f.ask(t, m); !known || err != nil {
		t.Fatal(known, err)
	}
	eks, _ := f.Change("a", platformkittest.TPM{Number: 2})
	if answer, _, err := f.ask(t, m); err != nil || slices.Equal(answer.EKs, eks) {
		t.Fatalf("the keys were read again without a start: %v, %v", answer, err)
	}
	f.change(func(i *aws.EC2Instance) { i.LaunchTime = i.LaunchTime.Add(time.Hour) })
	if answer, _, err := f.ask(t, m); err != nil || !slices.Equal(answer.EKs, eks) {
		t.Errorf("after a start: %v, %v, want %v", answer, err, eks)
	}
}

// EC2 may divide an answer into pages, and the credential may lack a right.
func TestPagesAndRights(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.ec2.Page = 7
	machines := []clusterapi.PlatformMachine{f.Machine("a")}
	for _, name := range []string{"b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"} {
		f.Launch(name, platformkittest.TPM{Number: int(name[0])})
		machines = append(machines, f.Machine(name))
	}
	answers, err := f.trust.EndorsementKeys(t.Context(), machines)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range machines {
		if answer := answers[m]; answer.Unknown || len(answer.EKs) != 2 {
			t.Errorf("%s: %+v", m.Name, answer)
		}
	}
	for _, action := range []string{"DescribeInstances", "GetInstanceTpmEkPub"} {
		f.ec2.Deny(action)
		_, _, err := f.ask(t, f.Machine("a"))
		if err == nil || !strings.Contains(err.Error(), action+": 403 Forbidden: the credential lacks a right (UnauthorizedOperation)") {
			t.Errorf("%s: %v", action, err)
		}
	}
}

// A signature of another secret, or for another region, is refused: the imitation checks it.
func TestSignature(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.ec2.Region = "eu-west-2"
	if _, known, err := f.ask(t, f.Machine("a")); known || err == nil || !strings.Contains(err.Error(), "SignatureDoesNotMatch") {
		t.Errorf("for another region: %v, %v", known, err)
	}
}

// A call only reads, so it is made again if EC2 has closed the connection meanwhile.
func TestClosedConnections(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for range 5 {
		if _, known, err := f.ask(t, f.Machine("a")); !known || err != nil {
			t.Errorf("answered %v, %v", known, err)
		}
		f.Server().Set(platformkittest.NoFault) // closes all connections
	}
}
