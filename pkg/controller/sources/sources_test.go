// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func newTestCA(t *testing.T, end time.Time) map[string][]byte {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: end.Add(-24 * time.Hour), NotAfter: end,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		"tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
	}
}

// A rotated CA is used at the next read. Until then, or while the Secret is invalid, the last known
// good CA is used.
func TestSecretCA(t *testing.T) {
	now := time.Now()
	api := &secretAPI{}
	ca := NewSecretCA(api, types.NamespacedName{Namespace: "n", Name: "ca"})
	look := func(good, problem bool) string {
		t.Helper()
		now = now.Add(maxAge)
		got, err := ca.CA(t.Context(), now)
		if (err == nil) != good || (ca.Problem() != nil) != problem {
			t.Fatalf("%v, problem %v", err, ca.Problem())
		}
		return got.Fingerprint()
	}
	look(false, true)
	old, next := newTestCA(t, now.Add(time.Hour)), newTestCA(t, now.Add(2*time.Hour))
	api.set(old)
	first := look(true, false)
	api.set(map[string][]byte{"tls.crt": next["tls.crt"], "tls.key": old["tls.key"]})
	if look(true, true) != first {
		t.Error("a pair that does not match is used")
	}
	api.set(next)
	second := look(true, false)
	if second == first {
		t.Error("the new CA is not used")
	}
	api.set(map[string][]byte{"tls.crt": next["tls.crt"]})
	if look(true, true) != second {
		t.Error("the last good one is not used")
	}
	api.fail = errors.New("no answer")
	if look(true, true) != second {
		t.Error("the last good one is not used")
	}
	api.fail = nil
	api.set(next)
	look(true, false)
	now = now.Add(3 * time.Hour)
	look(false, true)
}

func TestSecretCAReadsOnceForMany(t *testing.T) {
	now := time.Now()
	api := &secretAPI{}
	api.set(newTestCA(t, now.Add(time.Hour)))
	reads := 0
	ca := NewSecretCA(counted{api, &reads}, keySecret)
	for range 10 {
		if _, err := ca.CA(t.Context(), now); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ca.CA(t.Context(), now.Add(-time.Minute)); err != nil || reads != 2 {
		t.Errorf("%v, %d reads", err, reads)
	}
}

type counted struct {
	client.Reader
	reads *int
}

func (c counted) Get(ctx context.Context, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
	*c.reads++
	return c.Reader.Get(ctx, key, into, options...)
}

// configMapAPI is an API server with one ConfigMap.
type configMapAPI struct {
	client.Reader
	data map[string]string
	// whole counts the full reads.
	whole int
}

func (a *configMapAPI) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	if a.data == nil {
		return apierrors.NewNotFound(corev1.Resource("configmaps"), key.Name)
	}
	version, err := json.Marshal(a.data)
	into.SetResourceVersion(string(version))
	if object, whole := into.(*corev1.ConfigMap); whole {
		object.Data = a.data
		a.whole++
	}
	return err
}

func TestConfigMapInventory(t *testing.T) {
	now := time.Now()
	api := &configMapAPI{}
	source := NewConfigMapInventory(api, ConfigMapEntry{types.NamespacedName{Namespace: "n", Name: "machines"}, "inventory.yaml"})
	look := func(want int, says string) {
		t.Helper()
		now = now.Add(maxAge)
		machines, err := source.Machines(t.Context(), now)
		if want < 0 && err == nil || want >= 0 && (err != nil || len(machines) != want) {
			t.Errorf("%d machines, %v", len(machines), err)
		}
		problem := ""
		if source.Problem() != nil {
			problem = source.Problem().Error()
		}
		if (problem == "") != (says == "") || !strings.Contains(problem, says) {
			t.Errorf("the problem is %q, not %q", problem, says)
		}
	}
	look(-1, "not found")
	api.data = map[string]string{"other": ""}
	look(-1, `no entry "inventory.yaml"`)
	api.data = map[string]string{"inventory.yaml": "nodeName: a\neks:\n- fingerprint: " + strings.Repeat("ab", 32) + "\n"}
	look(1, "")
	api.data = map[string]string{"inventory.yaml": "nodeName: a\n"}
	look(1, "no endorsement keys")
	api.data = nil
	look(1, "not found")
}

// While one decision reads an object again, the others use the last value.
func TestObjectsAreReadByOne(t *testing.T) {
	// In a synctest bubble a goroutine that waits for a mutex waits for ever, because its time
	// stands still then.
	hangs := time.AfterFunc(time.Minute, func() { panic("TestObjectsAreReadByOne: somebody waits until another has read") })
	defer hangs.Stop()
	name := types.NamespacedName{Namespace: "n", Name: "o"}
	for object, sourceOf := range map[string]func(count func(client.Reader) client.Reader) func(context.Context, time.Time) error{
		"inventory": func(count func(client.Reader) client.Reader) func(context.Context, time.Time) error {
			api := &configMapAPI{data: map[string]string{"inventory.yaml": "nodeName: a\neks:\n- fingerprint: " + strings.Repeat("ab", 32) + "\n"}}
			source := NewConfigMapInventory(count(api), ConfigMapEntry{name, "inventory.yaml"})
			return func(ctx context.Context, now time.Time) error {
				machines, err := source.Machines(ctx, now)
				if err == nil && len(machines) != 1 {
					return fmt.Errorf("%d machines", len(machines))
				}
				return err
			}
		},
		"CA": func(count func(client.Reader) client.Reader) func(context.Context, time.Time) error {
			api := &secretAPI{}
			api.set(newTestCA(t, time.Now().Add(24*time.Hour)))
			source := NewSecretCA(count(api), name)
			return func(ctx context.Context, now time.Time) error {
				_, err := source.CA(ctx, now)
				return err
			}
		},
	} {
		t.Run(object, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				reads := 0
				source := sourceOf(func(r client.Reader) client.Reader { return slowly{counted{r, &reads}} })
				look := func(now time.Time) time.Duration {
					began := time.Now()
					if err := source(t.Context(), now); err != nil {
						t.Error(err)
					}
					return time.Since(began)
				}
				began := time.Now()
				if look(began) != time.Second {
					t.Error("it was not read")
				}
				done := make(chan time.Duration)
				go func() { done <- look(began.Add(maxAge)) }()
				synctest.Wait()
				for _, now := range []time.Time{began.Add(-time.Second), began, began.Add(maxAge + time.Second)} {
					if took := look(now); took != 0 {
						t.Errorf("it took %v", took)
					}
				}
				if took := <-done; took != time.Second || reads != 2 {
					t.Errorf("it took %v, and there were %d reads", took, reads)
				}
			})
		})
	}
}

// slowly takes a second for each object.
type slowly struct{ client.Reader }

func (s slowly) Get(ctx context.Context, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
	time.Sleep(time.Second)
	return s.Reader.Get(ctx, key, into, options...)
}
