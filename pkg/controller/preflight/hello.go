// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"fmt"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/internal/statuspatch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// prove checks that the API server evaluates the policies. It tries to approve a hello in a dry
// run, which nobody may, not even the controller. It returns the time until the next try, 0 to wait
// for the next hello.
func (w *PolicyWatch) prove(ctx context.Context, v verdict) (again time.Duration) {
	name := w.again
	if name == "" {
		if hello := w.hello.Load(); hello != nil {
			name = *hello
		}
	}
	now := time.Now()
	pause := w.Prove
	if w.again != "" {
		pause = min(proveAgain, w.Prove)
	}
	if name == "" || w.since.IsZero() || now.Sub(w.since) < min(firstListsTimeout, w.Prove) || now.Sub(w.tried) < pause {
		return 0
	}
	w.tried, w.again = now, ""
	w.hello.Store(nil)
	switch refused, err := w.refuses(ctx, name); {
	case err != nil:
		w.log.V(1).Info("a policy could not be proven", "request", name, "cause", err.Error())
		if apierrors.IsForbidden(err) && !w.unproven {
			w.unproven = true
			w.log.Error(nil, "an admission policy cannot be proven: patch on certificatesigningrequests/approval is needed, see packaging/kubernetes/rbac.yaml", "cause", err.Error())
		}
	case refused:
		if w.passed > 0 {
			w.passed = 0
			return policiesSettle // the policy is in force again
		}
	default:
		if w.passed++; w.passed == 1 {
			w.again = name
			return min(proveAgain, w.Prove) + policiesSettle
		}
		if v.Status == corev1.ConditionTrue {
			return policiesSettle
		}
	}
	return 0
}

// refuses reports whether the policy refuses the approval of a hello. Any other answer is an error.
func (w *PolicyWatch) refuses(ctx context.Context, name string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	hello := &certificatesv1.CertificateSigningRequest{}
	if err := w.api.Get(ctx, types.NamespacedName{Name: name}, hello); err != nil {
		return false, err
	}
	if state.Of(hello) != state.Pending {
		return false, fmt.Errorf("request %s: is decided", name)
	}
	// A patch, as the controller approves: it has no right to update.
	patch, err := statuspatch.New(hello, map[string]any{"conditions": []certificatesv1.CertificateSigningRequestCondition{
		statuspatch.Condition(certificatesv1.CertificateApproved, "DryRun", "whether a policy refuses it"),
	}})
	if err != nil {
		return false, err
	}
	err = w.api.SubResource("approval").Patch(ctx, hello, patch, client.DryRunAll)
	if err == nil {
		return false, nil
	}
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
		for _, policy := range []string{approvalPolicy, approvalPolicy + policyset.Suffix} {
			if strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+policy+"'") {
				return true, nil
			}
		}
	}
	return false, err
}
