// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"errors"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// originProvider is a provider whose device shows the origin of requests.
type originProvider struct {
	plugintest.Provider
	origin func(ctx context.Context, name string, request []byte) (string, error)
}

func (p originProvider) Origin(ctx context.Context, name string, request []byte) (string, error) {
	return p.origin(ctx, name, request)
}

// A request with the node's own certificate shows its origin. Nothing that goes wrong with that
// keeps it from being filed.
func TestRequestsShowTheirOrigin(t *testing.T) {
	good := func(_ context.Context, name string, request []byte) (string, error) {
		return name + " " + string(request), nil
	}
	for title, c := range map[string]struct {
		origin func(context.Context, string, []byte) (string, error)
		own    bool
		want   map[string]string
	}{
		"own certificate":      {good, true, map[string]string{attestation.AnnotationOrigin: "name request"}},
		"bootstrap credential": {good, false, nil},
		"the device refuses":   {func(context.Context, string, []byte) (string, error) { return "half", errors.New("refused") }, true, nil},
		"the device hangs": {func(ctx context.Context, _ string, _ []byte) (string, error) {
			<-ctx.Done()
			return "", ctx.Err()
		}, true, nil},
		"no such device": {nil, true, nil},
	} {
		t.Run(title, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &Enroller{Node: &nodestate.Node{}, Provider: plugintest.Provider{}}
				if c.origin != nil {
					a.use(originProvider{origin: c.origin})
				}
				e := &enrolment{worker: &worker{enroller: a, log: klog.Background()}, to: nodeaccess.Access{Own: c.own}}
				object, began := csr.Object("name", "signer", []byte("request"), nil, nil), time.Now()
				e.showOrigin(t.Context(), object)
				if !maps.Equal(object.Annotations, c.want) {
					t.Errorf("%q", object.Annotations)
				}
				if took := time.Since(began); took > originTimeout {
					t.Errorf("it took %s", took)
				}
			})
		})
	}
}
