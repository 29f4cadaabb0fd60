// SPDX-License-Identifier: Apache-2.0

// Package ektrust shows how an infrastructure provider for Cluster API names the TPM of each
// machine to the controller. It queries the API of the platform, Acme, which made the virtual TPMs.
// The machines attest with the provider "tpm", and need no software of Acme's.
package ektrust

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const (
	// MaxInstances is how many instances the platform describes in one answer.
	MaxInstances = 100
	maxAnswer    = 1 << 20
	callTimeout  = 10 * time.Second
)

// Fleet is the platform's API. The zero value asks nobody.
type Fleet struct {
	url    string
	client http.Client
}

var _ clusterapi.EKTrust = (*Fleet)(nil)

// New returns the API at a URL. The transport has the controller's credential, and the CA that the
// platform's certificate is from. A server that can answer in the platform's place decides which
// machine gets in. So the URL must be HTTPS, and no redirect is followed.
func New(address string, transport http.RoundTripper) (*Fleet, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "https" || u.Host == "" || transport == nil {
		return nil, fmt.Errorf("the platform's API %q: must be an https URL, with a transport of its own", address)
	}
	return &Fleet{url: u.JoinPath("v1/instances").String(), client: http.Client{
		Transport: transport, Timeout: callTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// instance is what the platform says of one.
type instance struct {
	ID string `json:"id"`
	// EndorsementKeys are of the virtual TPM that the platform gave it: SubjectPublicKeyInfo in
	// PEM, one for each kind of key.
	EndorsementKeys []string `json:"endorsementKeys"`
	// Hostname is what the platform's DNS calls it.
	Hostname string `json:"hostname"`
	// UserData is the guest's to write. There is more of that sort in a platform's answer, and
	// nothing of it is evidence.
	UserData string `json:"userData"`
}

// EndorsementKeys asks for the instances that the machines are. One that the platform does not name
// is left out: it may not be there yet. What is wrong with one keeps no other from its answer.
func (f *Fleet) EndorsementKeys(ctx context.Context, machines []clusterapi.PlatformMachine) (map[clusterapi.PlatformMachine]clusterapi.PlatformAnswer, error) {
	byID := map[string][]clusterapi.PlatformMachine{}
	var errs []error
	for _, m := range machines {
		id, err := identity.Instance(m.ProviderID)
		if err != nil {
			errs = append(errs, fmt.Errorf("machine %s: %w", m.Name, err))
			continue
		}
		byID[id] = append(byID[id], m)
	}
	answers := map[clusterapi.PlatformMachine]clusterapi.PlatformAnswer{}
	for ids := range slices.Chunk(slices.Sorted(maps.Keys(byID)), MaxInstances) {
		described, err := f.describe(ctx, ids)
		if err != nil {
			return answers, errors.Join(append(errs, err)...)
		}
		for _, i := range described {
			answer, err := i.answer()
			if err != nil {
				errs = append(errs, err)
				continue
			}
			for _, m := range byID[i.ID] {
				answers[m] = answer
			}
		}
	}
	return answers, errors.Join(errs...)
}

// answer has every key of the instance, or none: a key that cannot be read may be the one that its
// node shows.
func (i instance) answer() (clusterapi.PlatformAnswer, error) {
	eks := []tpm.Fingerprint{}
	for _, text := range i.EndorsementKeys {
		block, rest := pem.Decode([]byte(text))
		if block == nil || block.Type != "PUBLIC KEY" || len(bytes.TrimSpace(rest)) > 0 {
			return clusterapi.PlatformAnswer{}, fmt.Errorf("instance %s: an endorsement key is not one PEM block of type PUBLIC KEY", i.ID)
		}
		key, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			return clusterapi.PlatformAnswer{}, fmt.Errorf("instance %s: endorsement key: %w", i.ID, err)
		}
		ek, err := clusterapi.EKFingerprint(key)
		if err != nil {
			return clusterapi.PlatformAnswer{}, fmt.Errorf("instance %s: %w", i.ID, err)
		}
		eks = append(eks, ek)
	}
	answer := clusterapi.PlatformAnswer{EKs: eks}
	if i.Hostname != "" {
		answer.Addresses = clusterv1.MachineAddresses{{Type: clusterv1.MachineHostName, Address: i.Hostname}}
	}
	return answer, nil
}

// describe asks for some instances.
func (f *Fleet) describe(ctx context.Context, ids []string) ([]instance, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url+"?id="+url.QueryEscape(strings.Join(ids, ",")), nil)
	if err != nil {
		return nil, err
	}
	response, err := f.client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("the platform's API: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the platform's API: %s", response.Status)
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("the platform's API: %w", err)
	}
	var list struct {
		Instances []instance `json:"instances"`
	}
	if err := json.Unmarshal(body, &list); err != nil || len(body) > maxAnswer {
		return nil, errors.New("the platform's API: the answer is not the JSON that it should be")
	}
	seen := map[string]bool{}
	for _, i := range list.Instances {
		if seen[i.ID] || !slices.Contains(ids, i.ID) {
			return nil, fmt.Errorf("the platform's API: instance %.64q is listed twice in the answer, or was not asked for", i.ID)
		}
		seen[i.ID] = true
	}
	return list.Instances, nil
}
