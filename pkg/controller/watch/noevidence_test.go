// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"context"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// requestList is a cache of requests.
type requestList struct {
	client.Reader
	items *atomic.Pointer[[]certificatesv1.CertificateSigningRequest]
}

func (r requestList) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*certificatesv1.CertificateSigningRequestList).Items = *r.items.Load()
	return nil
}

// A request that a kubelet made by itself is counted once it is older than a minute, and logged at
// once and again after 15 minutes. Requests of ours, decided ones, and those of other signers are
// not. After the end of the watch nothing is counted.
func TestRequestsWithoutEvidenceAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		made := func(name, signer string) certificatesv1.CertificateSigningRequest {
			return certificatesv1.CertificateSigningRequest{
				ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Now()}, Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: signer, Request: []byte("x")},
			}
		}
		decided := made("decided", certificatesv1.KubeAPIServerClientKubeletSignerName)
		decided.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied, Status: "True"}}
		items := []certificatesv1.CertificateSigningRequest{
			made("bare", certificatesv1.KubeAPIServerClientKubeletSignerName), made("ours", "example.com/tpm"), made("other", "example.com/other"), decided,
		}
		cached := &atomic.Pointer[[]certificatesv1.CertificateSigningRequest]{}
		cached.Store(&items)
		rules, err := verifier.New(verifier.Policy{
			Cluster: "c", Providers: []verifier.Provider{{Name: "tpm", Challenges: true}}, Signers: []verifier.Signer{{Name: "example.com/tpm", Providers: []string{"tpm"}}},
			Token: verifier.Off, Credential: verifier.Required, BootCounters: verifier.Warn,
			EKSources: []verifier.EKSource{verifier.EKInventory}, NameSources: []verifier.NameSource{verifier.NameInventory},
		})
		if err != nil {
			t.Fatal(err)
		}
		w := &NoEvidence{Intake: &intake.Intake{Rules: rules, Now: time.Now}, Cached: requestList{nil, cached}, Now: time.Now}
		var lines atomic.Int64
		log := funcr.New(func(_, _ string) { lines.Add(1) }, funcr.Options{})
		ctx, stop := context.WithCancel(t.Context())
		if err := w.Source(log).Start(ctx, nil); err != nil {
			t.Fatal(err)
		}
		after := func(pause time.Duration, want map[string]int, logged int64) {
			t.Helper()
			time.Sleep(pause)
			synctest.Wait()
			if got := w.AddTo(map[string]int{"A": 1}); !maps.Equal(got, want) || lines.Load() != logged {
				t.Errorf("%v, %d lines", got, lines.Load())
			}
		}
		none, one := map[string]int{"A": 1}, map[string]int{"A": 1, telemetry.ReasonNoEvidence: 1}
		after(45*time.Second, none, 0)
		after(time.Minute, one, 1)
		after(14*time.Minute, one, 1)
		after(2*time.Minute, one, 2)
		fewer := items[1:]
		cached.Store(&fewer)
		after(time.Minute, none, 2)
		more := append(slices.Clone(fewer), made("another", certificatesv1.KubeAPIServerClientKubeletSignerName))
		cached.Store(&more)
		after(3*time.Minute, one, 2)
		stop()
		after(time.Second, none, 2)
	})
}
