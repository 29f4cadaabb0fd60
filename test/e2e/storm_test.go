// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Useless certificates do not make the node file requests without limit.
func TestUselessCertificatesMakeNoStorm(t *testing.T) {
	for name, lifetime := range map[string]struct{ since, until time.Duration }{
		// signed by a CA that the API server does not know
		"rejected":        {-time.Minute, time.Hour},
		"due when issued": {-2 * time.Hour, 5 * time.Minute}, // backdated by far
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			n := renewingNode(t)
			n.signer = "example.com/useless"
			ca := n.ClientCA()
			if name == "rejected" {
				var err error
				if ca, err = testbed.NewCA("other"); err != nil {
					t.Fatal(err)
				}
			}
			n.installDue(t)
			mark, err := n.AuditMark()
			if err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(15 * time.Second); time.Now().Before(end); {
				for _, request := range n.requests(t) {
					if len(request.Status.Conditions) == 0 {
						n.issue(t, request.Name, n.signBy(t, ca, request, lifetime.since, lifetime.until))
						// A run between the two would spend the minute's one review on the
						// certificate that is good.
						harness.WorkerEnds(t, n.dir)
					}
				}
				if r := n.run(t); r.Code != 0 {
					t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
				}
				// The same for a run before the worker's request is there.
				harness.Eventually(t, harness.Soon, "the worker has filed a request, or has ended", func() bool {
					return n.live(t) > 0 || !n.dir.Worker().Alive()
				})
			}
			if filed := len(n.requests(t)); filed > 3 {
				t.Errorf("%d requests were filed in 15 s", filed)
			}
			if all, _ := n.reviews(t, mark); all > 2 {
				t.Errorf("the API server was asked %d times about the certificate", all)
			}
			if filed := len(n.requests(t)); filed < 2 {
				t.Errorf("%d requests: the certificate was not useless", filed)
			}
		})
	}
}

// A request that the API server refuses, and that does not exist, is dropped: the next attempt
// files another one.
func TestRefusedRequestIsForgotten(t *testing.T) {
	n := newNode(t)
	n.signer = "example.com/refused"
	policies := n.Client().AdmissionregistrationV1()
	policy := &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "refuse"},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{"certificates.k8s.io"}, APIVersions: []string{"v1"}, Resources: []string{"certificatesigningrequests"}},
			}}}},
			Validations: []admissionv1.Validation{{Expression: `object.spec.signerName != "example.com/refused"`}},
		},
	}
	if _, err := policies.ValidatingAdmissionPolicies().Create(t.Context(), policy, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "refuse"},
		Spec:       admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: "refuse", ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}},
	}
	if _, err := policies.ValidatingAdmissionPolicyBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	lift := sync.OnceValue(func() error {
		return policies.ValidatingAdmissionPolicyBindings().Delete(context.WithoutCancel(t.Context()), "refuse", metav1.DeleteOptions{})
	})
	t.Cleanup(func() { _ = lift() })
	harness.Eventually(t, harness.Soon, "the policy holds", func() bool {
		_, _, code := n.dry(t)
		return code == 20
	})
	if r := n.run(t); r.Code != 20 {
		t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
	}
	if pending, err := n.dir.Pending(); pending != nil || err != nil {
		t.Errorf("it is still pending: %v", err)
	}
	if err := lift(); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, 30*time.Second, "a request is filed", func() bool {
		return n.run(t, "--wait-timeout=100ms").Code == 23
	})
	if got := len(n.requests(t)); got != 1 {
		t.Errorf("%d requests", got)
	}
}

// A request that the API server does not let the node read may exist: it is kept, and filed when
// that is allowed.
func TestRefusedRequestThatMayExistIsKept(t *testing.T) {
	n := newNode(t)
	nobody, err := n.ClientCA().IssueClient("nobody", nil, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	good := n.readPath(t, n.bootstrap)
	if err := n.WriteKubeconfig(n.bootstrap, testbed.CertificateUser(nobody)); err != nil {
		t.Fatal(err)
	}
	if r := n.run(t); r.Code != 20 {
		t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
	}
	pending, err := n.dir.Pending()
	if pending == nil || err != nil {
		t.Fatalf("it is not pending: %v", err)
	}
	harness.WriteFile(t, n.bootstrap, good)
	n.enrol(t)
	if requests := n.requests(t); len(requests) != 1 || requests[0].Name != pending.Last().Name {
		t.Errorf("%d requests", len(requests))
	}
}

// A run that waits for its certificate reads the metadata of a file now and then. A hundred of
// them, as when many programs use one kubeconfig, must not keep the machine busy.
func TestRunsThatWaitCostNothing(t *testing.T) {
	t.Parallel()
	const waits, runs = 15 * time.Second, 20
	n := newNode(t)
	n.signer = "example.com/by-hand"
	n.run(t, "--wait-timeout=100ms")
	harness.Eventually(t, harness.Soon, "a request is pending", func() bool { return len(n.requests(t)) == 1 })
	var waiting sync.WaitGroup
	var used [runs]time.Duration
	for i := range runs {
		waiting.Go(func() {
			cmd := exec.CommandContext(t.Context(), n.plugin, append(n.flags(), "--wait-timeout="+waits.String())...)
			cmd.Env = append(os.Environ(), n.ask())
			if err := cmd.Run(); cmd.ProcessState == nil {
				t.Error(err)
				return
			}
			used[i] = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
		})
	}
	waiting.Wait()
	slices.Sort(used[:])
	median := used[runs/2]
	t.Logf("half of %d runs that waited %s used up to %s of CPU time", runs, waits, median)
	// Reading the status every 15 ms took 300 ms of CPU time.
	if median > 150*time.Millisecond {
		t.Errorf("a run that waits uses %s", median)
	}
}
