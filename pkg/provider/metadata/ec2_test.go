// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"errors"
	"net/http"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

func TestEC2ProviderID(t *testing.T) {
	const zonePath, instancePath = "/latest/meta-data/placement/availability-zone", "/latest/meta-data/instance-id"
	for _, c := range []struct {
		name, path, answer, want string
	}{
		{"availability zone", "", "", "aws:///eu-west-1a/i-0123456789abcdef0"},
		{"local zone", zonePath, "us-west-2-lax-1a", "aws:///us-west-2-lax-1a/i-0123456789abcdef0"},
		{"zone with a slash", zonePath, "eu/west-1a", ""},
		{"empty zone", zonePath, "", ""},
		{"no instance", instancePath, "worker", ""},
		{"line end", instancePath, "i-0123456789abcdef0\n", ""},
	} {
		instance := &aws.Instance{AWS: aws.New(t), Zone: "eu-west-1a", ID: "i-0123456789abcdef0", Override: map[string]string{c.path: c.answer}}
		session, err := serve(t, instance.ServeHTTP).EC2(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		id, err := session.ProviderID(t.Context())
		if id != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s: %q, %v", c.name, id, err)
		}
		if err != nil {
			wantClass(t, c.name, err, provider.DeviceFailed, "no usable zone")
		}
	}
}

// A failed call ends the session or the search for the provider ID.
func TestEC2Fails(t *testing.T) {
	_, err := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }).EC2(t.Context())
	if refused, ok := errors.AsType[*StatusError](err); !ok || refused.Status != http.StatusForbidden {
		t.Errorf("switched off: %v", err)
	}
	for _, missing := range []string{"/latest/meta-data/placement/availability-zone", "/latest/meta-data/instance-id"} {
		instance := &aws.Instance{AWS: aws.New(t), Zone: "eu-west-1a", ID: "i-0123456789abcdef0"}
		session, err := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == missing {
				http.NotFound(w, r)
				return
			}
			instance.ServeHTTP(w, r)
		}).EC2(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		id, err := session.ProviderID(t.Context())
		if _, ok := errors.AsType[*StatusError](err); !ok || id != "" {
			t.Errorf("without %s: %q, %v", missing, id, err)
		}
	}
}
