// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

const (
	// noEvidenceInterval is the time between two counts. noEvidenceAge is the age from which such a
	// request counts: another approver may decide at once.
	noEvidenceInterval, noEvidenceAge = 30 * time.Second, time.Minute
	// noEvidenceRemind is the time until such requests are logged again.
	noEvidenceRemind = 15 * time.Minute
)

// NoEvidence counts the requests that kubelets made by themselves, and logs that there are
// some. On a standby replica the count is 0.
type NoEvidence struct {
	Now    func() time.Time
	Intake *intake.Intake
	Cached client.Reader
	count  atomic.Int64
}

// Source runs the watch. It wakes no request.
func (w *NoEvidence) Source(log logr.Logger) source.Source {
	return InBackground(func(ctx context.Context, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) { w.run(ctx, log) })
}

func (w *NoEvidence) run(ctx context.Context, log logr.Logger) {
	defer w.count.Store(0)
	var logged telemetry.Once
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(noEvidenceInterval):
		}
		found, err := w.find(ctx)
		if err != nil {
			continue // the cache is not filled yet
		}
		w.count.Store(int64(len(found)))
		if len(found) > 0 && logged.MarkReported("", "", w.Now(), noEvidenceRemind) {
			log.Info("pending requests of kubelets have no evidence; kubectl attest pending shows their nodes",
				"requests", len(found), "names", text.Names(found))
		}
	}
}

// find returns the names of the requests.
func (w *NoEvidence) find(ctx context.Context) (names []string, err error) {
	all := &certificatesv1.CertificateSigningRequestList{}
	if err := w.Cached.List(ctx, all, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	for i := range all.Items {
		request := &all.Items[i]
		if request.Spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName && csrstate.Of(request) == csrstate.Pending &&
			w.Now().Sub(request.CreationTimestamp.Time) >= noEvidenceAge && !w.Intake.IsOurs(request) {
			names = append(names, request.Name)
		}
	}
	return names, nil
}

// AddTo adds the count to the waiting requests by reason.
func (w *NoEvidence) AddTo(causes map[string]int) map[string]int {
	if n := w.count.Load(); n > 0 {
		causes[telemetry.ReasonNoEvidence] = int(n)
	}
	return causes
}
