// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Credential is a certificate of a node and its key, as a thief may have copied them.
type Credential struct {
	Node   string
	Config *rest.Config
}

// At returns the credential, used at another API server.
func (c Credential) At(url string) Credential {
	config := rest.CopyConfig(c.Config)
	config.Host = url
	return Credential{c.Node, config}
}

// Client returns a client with the credential.
func (c Credential) Client(t testing.TB) kubernetes.Interface {
	t.Helper()
	api, err := kubernetes.NewForConfig(c.Config)
	Must(t, err)
	return api
}

// Write renews the node's Lease, as a kubelet does every 10 s.
func (c Credential) Write(ctx context.Context, api kubernetes.Interface) error {
	now := metav1.NowMicro()
	patch := fmt.Sprintf(`{"spec":{"renewTime":%q}}`, now.UTC().Format(metav1.RFC3339Micro))
	_, err := api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Patch(ctx, c.Node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// MustWrite fails the test if the certificate may not write.
func (c Credential) MustWrite(t testing.TB) {
	t.Helper()
	if err := c.Write(t.Context(), c.Client(t)); err != nil {
		t.Errorf("%s: %v", c.Node, err)
	}
}

// RefusedWithin fails the test unless the writes of the certificate are refused within a time, and
// stay refused. It returns the time of that.
func (c Credential) RefusedWithin(t testing.TB, limit time.Duration, message string) time.Duration {
	t.Helper()
	api, began := c.Client(t), time.Now()
	for {
		err := c.Write(t.Context(), api)
		if IsRefused(err, message) {
			break
		}
		// it may be refused for another reason before
		if err != nil && !apierrors.IsForbidden(err) {
			t.Fatalf("%s: %v", c.Node, err)
		}
		if time.Since(began) > limit {
			t.Fatalf("%s: not refused after %s: %v", c.Node, time.Since(began), err)
		}
		time.Sleep(pollInterval)
	}
	took := time.Since(began)
	for range 5 {
		if err := c.Write(t.Context(), api); !IsRefused(err, message) {
			t.Fatalf("%s: writes again: %v", c.Node, err)
		}
	}
	return took
}

// IsRefused reports whether an API server answered 403, with this message in its answer.
func IsRefused(err error, message string) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), message)
}
