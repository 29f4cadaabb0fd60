// SPDX-License-Identifier: Apache-2.0

// Package gce is the node's half of provider gce. Its evidence is an instance identity token of
// Google Compute Engine: a JWT in which Google names the instance. The metadata service of the
// instance returns one for any audience. Ours is bound to the request.
package gce

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
)

const (
	// Name is the provider's name in requests and in the configuration.
	Name = "gce"
	// SignerName is the signer to request from.
	SignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-gce"
)

// The service answers only requests with this header, and sets it in its answers, so that neither
// side talks to another service by mistake.
const flavorHeader, flavor = "Metadata-Flavor", "Google"

// Factory makes the provider.
func Factory() provider.Factory {
	return provider.Factory{
		Name:     Name,
		Versions: []string{attestation.VersionGCE},
		New: func(s provider.Settings) (provider.Provider, error) {
			if err := attestation.CheckClusterUID(s.ClusterUID); err != nil {
				return nil, fmt.Errorf("cluster UID: %w", err)
			}
			return Provider{ClusterUID: s.ClusterUID}, nil
		},
	}
}

// Provider implements provider.Provider.
type Provider struct {
	// Metadata asks the metadata service of the instance.
	Metadata metadata.Client
	// ClusterUID is the node's clusterUID setting, empty if unset.
	ClusterUID string
}

var _ provider.Provider = Provider{}

// Name returns "gce".
func (Provider) Name() string { return Name }

// SignerName returns the default signer.
func (Provider) SignerName() string { return SignerName }

// Renews is true: each renewal comes with evidence of its own.
func (Provider) Renews() bool { return true }

// Caution says who else can make this evidence. Google Compute Engine has no hop limit.
func (Provider) Caution() string {
	return "provider gce proves what the metadata service says: any process or pod that reaches 169.254.169.254 from this machine can make the same evidence, so block that address for pods"
}

// ProviderID returns gce://<project>/<zone>/<name>, as the cloud provider's controller sets it.
func (p Provider) ProviderID(ctx context.Context) (string, error) {
	project, err := p.get(ctx, "project/project-id")
	if err != nil {
		return "", err
	}
	path, err := p.get(ctx, "instance/zone") // projects/<number>/zones/<zone>
	if err != nil {
		return "", err
	}
	name, err := p.get(ctx, "instance/name")
	if err != nil {
		return "", err
	}
	_, zone, _ := strings.Cut(string(path), "/zones/")
	for what, value := range map[string]string{"project ID": string(project), "zone": zone, "name": string(name)} {
		if value == "" || strings.ContainsFunc(value, func(c rune) bool { return c <= ' ' || c > '~' || c == '/' }) {
			return "", failure("", fmt.Errorf("the metadata service returns no usable %s", what))
		}
	}
	return fmt.Sprintf("gce://%s/%s/%s", project, zone, name), nil
}

// Evidence has Google sign a token for this request, and no other: every node can read it in the
// request.
func (p Provider) Evidence(ctx context.Context, request provider.Request) ([]byte, error) {
	binding := request.Binding(attestation.VersionGCE, p.ClusterUID)
	// format=full adds the instance. Without it, the token names the service account alone.
	query := url.Values{"audience": {binding.Audience()}, "format": {"full"}}
	token, err := p.get(ctx, "instance/service-accounts/default/identity?"+query.Encode())
	if refused, ok := errors.AsType[*metadata.StatusError](err); ok && refused.Status == http.StatusNotFound {
		return nil, failure("does the instance have a service account? it needs one, with no roles", err)
	}
	if err != nil {
		return nil, err
	}
	// A token that would be denied is not filed: here the error reaches the operator who can fix
	// it.
	if err := check(token, binding.Audience()); err != nil {
		return nil, failure("does something else than Google's metadata service answer at 169.254.169.254?", err)
	}
	return attestation.Identity{Version: attestation.VersionGCE, ClusterUID: p.ClusterUID, Statement: token}.Marshal()
}

// get asks the metadata service. path is relative to computeMetadata/v1/.
func (p Provider) get(ctx context.Context, path string) ([]byte, error) {
	answer, header, err := p.Metadata.Exchange(ctx, http.MethodGet, "/computeMetadata/v1/"+path, http.Header{flavorHeader: {flavor}}, nil)
	if err != nil {
		return nil, err
	}
	if header.Get(flavorHeader) != flavor {
		return nil, failure("is this an instance of Google Compute Engine?", errors.New("the metadata service is not Google's"))
	}
	return answer, nil
}

// check returns an error if the controller would certainly refuse the token. It does not verify the
// signature: the keys are the controller's.
func check(token []byte, audience string) error {
	parts := strings.Split(string(token), ".")
	if len(parts) != 3 {
		return errors.New("identity token: not a JWT in compact form")
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return errors.New("identity token: the payload is not base64url")
	}
	var claims struct {
		Audience string `json:"aud"`
		Google   struct {
			ComputeEngine struct {
				InstanceID string `json:"instance_id"`
			} `json:"compute_engine"`
		} `json:"google"`
	}
	if err := json.Unmarshal(payload, &claims); err != nil {
		return errors.New("identity token: the payload is not the JSON of an identity token")
	}
	switch {
	case claims.Audience != audience:
		return errors.New("identity token: it has another audience")
	case claims.Google.ComputeEngine.InstanceID == "":
		return errors.New("identity token: it names no instance")
	}
	return nil
}

func failure(hint string, err error) error {
	return &provider.Error{Class: provider.DeviceFailed, Hint: hint, Err: err}
}
