// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"context"
	"errors"
	"net/http"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// The calls of IMDSv2 ("Use the Instance Metadata Service to access instance metadata" in the EC2
// User Guide). A session is used for a few calls at once, so a minute is enough.
const (
	ec2SessionPath      = "/latest/api/token"
	ec2SessionHeader    = "X-Aws-Ec2-Metadata-Token"
	ec2SessionTTLHeader = "X-Aws-Ec2-Metadata-Token-Ttl-Seconds"
	ec2SessionTTL       = "60"
)

// EC2 is a session of IMDSv2, the metadata service of EC2. The service gives its token only for a
// PUT, which a confused proxy does not send.
type EC2 struct {
	client Client
	token  string
}

// EC2 begins a session. If the instance's owner has switched the service off, the error wraps a
// *StatusError with status 403.
func (c Client) EC2(ctx context.Context) (EC2, error) {
	token, err := c.Call(ctx, http.MethodPut, ec2SessionPath, http.Header{ec2SessionTTLHeader: {ec2SessionTTL}}, nil)
	return EC2{c, string(token)}, err
}

// Get returns a category ("Instance metadata categories" in the EC2 User Guide), such as
// instance-id. It is the path below /latest/meta-data/.
func (s EC2) Get(ctx context.Context, category string) ([]byte, error) {
	return s.client.Call(ctx, http.MethodGet, "/latest/meta-data/"+category, http.Header{ec2SessionHeader: {s.token}}, nil)
}

// ProviderID returns aws:///<zone>/<instance ID>, as AWS's cloud provider sets it.
func (s EC2) ProviderID(ctx context.Context) (string, error) {
	zone, err := s.Get(ctx, "placement/availability-zone")
	if err != nil {
		return "", err
	}
	instance, err := s.Get(ctx, "instance-id")
	if err != nil {
		return "", err
	}
	id := cloudname.EC2ProviderID(string(zone), string(instance))
	if id == "" {
		return "", &provider.Error{
			Class: provider.DeviceFailed, Hint: "does something else than EC2's metadata service answer at 169.254.169.254?",
			Err: errors.New("the metadata service returns no usable zone or instance ID"),
		}
	}
	return id, nil
}
