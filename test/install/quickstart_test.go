// SPDX-License-Identifier: Apache-2.0

package install

import (
	"regexp"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// worker is the name of the machine.
const worker = "worker-1"

// attested is the line of kubectl attest status for a worker with a record: Node and machine have
// the same name.
var attested = regexp.MustCompile(`(?m)^` + worker + ` +Attested +` + worker + ` +[0-9a-f]{12} .* Attested `)

// Each command of docs/quickstart.md after "You have a cluster" is typed as it stands there. There
// are seven, as the document says, and three to look. At the end there is a node that has attested,
// and no other way was taken.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	const seven = 7
	commands := read(t, "quickstart.md").commands
	if len(commands) != seven+3 {
		t.Fatalf("%d commands", len(commands))
	}
	c := newCluster(t)
	o := newOperator(t, c, c.newWorker(t))
	for _, command := range commands[1:seven] { // the first was typed for all tests
		o.types(t, command)
	}
	if out := o.types(t, commands[seven]); !attested.MatchString(out) {
		t.Errorf("there is no record of %s", worker)
	}
	if out := o.types(t, commands[seven+1]); strings.Contains(out, "failure") {
		t.Errorf("doctor is not content")
	}
	if out := o.types(t, commands[seven+2]); !strings.Contains(out, "no request waits") || strings.Count(out, "warning ") != 1 || !strings.Contains(out, "warning  bindings ") {
		t.Errorf("other checks than the document says are not ok")
	}
	_, err := c.Client().CoreV1().Nodes().Get(t.Context(), worker, metav1.GetOptions{})
	harness.Must(t, err)
	for signer, count := range c.requests(t) {
		if strings.HasPrefix(signer, "kubernetes.io/") || count != 1 {
			t.Errorf("%d requests to %s", count, signer)
		}
	}
}

// requests counts those to each signer.
func (c *cluster) requests(t *testing.T) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for _, r := range c.list(t) {
		counts[r.Spec.SignerName]++
	}
	return counts
}

func (c *cluster) list(t *testing.T) []certificatesv1.CertificateSigningRequest {
	t.Helper()
	list, err := c.Client().CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	return list.Items
}
