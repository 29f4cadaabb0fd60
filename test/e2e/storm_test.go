// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A certificate that does not help does not make the node file requests without end.
func TestUselessCertificatesMakeNoStorm(t *testing.T) {
	for name, lifetime := range map[string]struct{ since, until time.Duration }{
		"rejected":        {-time.Minute, time.Hour},         // signed by a CA that the API server does not know
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
					}
				}
				if r := n.run(t); r.code != 0 {
					t.Fatalf("exit code %d: %s", r.code, r.stderr)
				}
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

// A request that the API server refuses outright is not held on to.
func TestRefusedRequestIsForgotten(t *testing.T) {
	n := newNode(t)
	nobody, err := n.ClientCA().IssueClient("nobody", nil, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	good := n.readPath(t, n.bootstrap)
	if err := n.WriteKubeconfig(n.bootstrap, testbed.CertificateUser(nobody)); err != nil {
		t.Fatal(err)
	}
	if r := n.run(t); r.code != 20 {
		t.Fatalf("exit code %d: %s", r.code, r.stderr)
	}
	if pending, err := n.dir.Pending(); pending != nil || err != nil {
		t.Errorf("it is still pending: %v", err)
	}
	n.write(t, n.bootstrap, good)
	n.enrol(t)
}
