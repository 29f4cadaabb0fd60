// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"errors"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A watch that a thief has opened before the revocation goes on. It ends when the connections of
// the API server are ended, as docs/revocation.md says, and the thief cannot open it again. Others
// connect again. It does not run beside the other tests, which have such connections.
func TestOpenWatchesEndWithTheirConnections(t *testing.T) {
	ctx, server := t.Context(), shared.servers[0]
	v := shared.newVictim(t, "watcher", server)
	stolen := v.credential().Client(t)
	year := int64(365 * 24 * 60 * 60)
	w, err := stolen.CoreV1().Services("").Watch(ctx, metav1.ListOptions{TimeoutSeconds: &year})
	harness.Must(t, err)
	defer w.Stop()
	harness.NextSecond()
	revoke(t, v.Name)
	again := func() error {
		w, err := stolen.CoreV1().Services("").Watch(ctx, metav1.ListOptions{TimeoutSeconds: &year})
		if err == nil {
			w.Stop()
		}
		return err
	}
	harness.Eventually(t, refusedIn, "a new watch is refused", func() bool { return harness.IsRefused(again(), attestation.MessageRevoked) })

	const created = "watched"
	_, err = server.Client().CoreV1().Services(metav1.NamespaceDefault).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: created}, Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Port: 1}}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	err = harness.AwaitEvent(w, func(e watch.Event) bool {
		service, ok := e.Object.(*corev1.Service)
		return ok && service.Name == created
	})
	if err != nil {
		t.Fatalf("an open watch of a revoked certificate: %v", err)
	}

	endConnections(t, server)
	if err := harness.AwaitEvent(w, func(watch.Event) bool { return false }); !errors.Is(err, io.EOF) {
		t.Errorf("the open watch, after its connection was ended: %v", err)
	}
	if err := again(); !harness.IsRefused(err, attestation.MessageRevoked) {
		t.Errorf("a new watch: %v", err)
	}
	harness.Eventually(t, harness.Soon, "an administrator is connected again", func() bool {
		_, err := server.Client().CoreV1().Services("").List(ctx, metav1.ListOptions{})
		return err == nil
	})
}

// endConnections runs the command of docs/revocation.md for an API server. It needs a kernel with
// CONFIG_INET_DIAG_DESTROY.
func endConnections(t *testing.T, server *testbed.APIServer) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(module, "docs", "revocation.md"))
	harness.Must(t, err)
	_, after, found := strings.Cut(string(page), "\n    ss --kill ")
	command, _, _ := strings.Cut(after, "\n")
	at, err := url.Parse(server.URL())
	harness.Must(t, err)
	here := strings.ReplaceAll(command, ":6443", ":"+at.Port())
	if !found || here == command {
		t.Fatalf("docs/revocation.md does not end the connections to port 6443: %q", command)
	}
	out, err := exec.CommandContext(t.Context(), "sh", "-c", "ss --kill "+here).CombinedOutput()
	t.Logf("%s: %v\n%s", here, err, out)
}
