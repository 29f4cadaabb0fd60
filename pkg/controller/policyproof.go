// SPDX-License-Identifier: Apache-2.0

package controller

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
)

// prove tries whether the API server evaluates the policies: nobody may approve a hello, the
// controller neither. It is a dry run. The result is how soon to try again, 0 for when there is the
// next hello.
func (p *Policies) prove(ctx context.Context, v verdict) (again time.Duration) {
	name := p.again
	if name == "" {
		if hello := p.hello.Load(); hello != nil {
			name = *hello
		}
	}
	now := time.Now()
	pause := p.Prove
	if p.again != "" {
		pause = min(proveAgain, p.Prove)
	}
	if name == "" || p.since.IsZero() || now.Sub(p.since) < min(policiesPatience, p.Prove) || now.Sub(p.tried) < pause {
		return 0
	}
	p.tried, p.again = now, ""
	p.hello.Store(nil)
	switch refused, err := p.refuses(ctx, name); {
	case err != nil:
		p.log.V(1).Info("a policy could not be proven", "request", name, "cause", err.Error())
		if apierrors.IsForbidden(err) && !p.unproven {
			p.unproven = true
			p.log.Info("an admission policy cannot be proven: patch on certificatesigningrequests/approval is needed, see packaging/kubernetes/rbac.yaml", "cause", err.Error())
		}
	case refused:
		if p.passed > 0 {
			p.passed = 0
			return policiesSettle // it is in force again
		}
	default:
		if p.passed++; p.passed == 1 {
			p.again = name
			return min(proveAgain, p.Prove) + policiesSettle
		}
		if v.status == corev1.ConditionTrue {
			return policiesSettle
		}
	}
	return 0
}

// refuses reports whether the policy refuses the approval of a hello. Any other answer is an error.
func (p *Policies) refuses(ctx context.Context, name string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	hello := &certificatesv1.CertificateSigningRequest{}
	if err := p.api.Get(ctx, types.NamespacedName{Name: name}, hello); err != nil {
		return false, err
	}
	if stateOf(hello) != undecided {
		return false, fmt.Errorf("request %s: is decided", name)
	}
	// As the controller approves: by a patch, for which alone it has the right.
	patch, err := statusPatch(hello, map[string]any{"conditions": []certificatesv1.CertificateSigningRequestCondition{
		condition(certificatesv1.CertificateApproved, "DryRun", "whether a policy refuses it"),
	}})
	if err != nil {
		return false, err
	}
	err = p.api.SubResource("approval").Patch(ctx, hello, patch, client.DryRunAll)
	if err == nil {
		return false, nil
	}
	if (apierrors.IsForbidden(err) || apierrors.IsInvalid(err)) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+provenPolicy+"'") {
		return true, nil
	}
	return false, err
}
