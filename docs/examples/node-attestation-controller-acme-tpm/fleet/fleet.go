// SPDX-License-Identifier: Apache-2.0

// Package fleet is an example of an adapter: it tells the controller which TPM each machine of the
// imaginary platform Acme has. It asks Acme's API, because Acme made the virtual TPMs. The machines
// attest with the provider "tpm", and need no software of Acme's.
package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const (
	// maxInstances is how many instances the platform describes in one answer.
	maxInstances = 100
	maxAnswer    = 1 << 20
	// callsPerSecond and burst are below the platform's limit for one credential.
	callsPerSecond, burst = 20, 40
)

// Open implements clusterapi.OpenPlatform. ACME_URL is the https URL of Acme's API, ACME_CA_FILE
// has its CA in PEM, and ACME_TOKEN_FILE the credential.
func Open(context.Context, manager.Manager) (clusterapi.EKTrust, error) {
	endpoint, err := platformkit.ParseEndpoint(os.Getenv("ACME_URL"))
	if err != nil {
		return nil, fmt.Errorf("ACME_URL: %w", err)
	}
	roots, err := platformkit.Roots(os.Getenv("ACME_CA_FILE"))
	if err != nil {
		return nil, fmt.Errorf("ACME_CA_FILE: %w", err)
	}
	f := &fleet{url: endpoint, tokenFile: os.Getenv("ACME_TOKEN_FILE"), client: platformkit.NewClient(roots, platformkit.NewBudget(callsPerSecond, burst))}
	if _, err := os.ReadFile(f.tokenFile); err != nil { //nolint:gosec // G703: a file that the operator names
		return nil, fmt.Errorf("ACME_TOKEN_FILE: %w", err)
	}
	return platformkit.New(f, platformkit.Options{}), nil
}

// fleet is a platformkit.Platform.
type fleet struct {
	url       *url.URL
	client    *http.Client
	tokenFile string
}

// instance has the fields of an instance in Acme's answer.
type instance struct {
	ID string `json:"id"`
	// Serial is never used again, also if the ID is.
	Serial string `json:"serial"`
	// Hostname is the instance's name in the platform's DNS.
	Hostname string `json:"hostname"`
	// UserData can be written by the guest. An adapter must use no such field.
	UserData string `json:"userData"`
}

// Location returns the instance's ID.
func (*fleet) Location(m clusterapi.PlatformMachine) (string, error) {
	return identity.Instance(m.ProviderID)
}

// Find asks for many instances at once. The platform leaves out those that do not exist.
func (f *fleet) Find(ctx context.Context, _ types.NamespacedName, ids []string) ([]platformkit.Instance, error) {
	var found []platformkit.Instance
	for some := range slices.Chunk(ids, maxInstances) {
		var list struct {
			Instances []instance `json:"instances"`
		}
		if err := f.get(ctx, &list, "?id="+url.QueryEscape(strings.Join(some, ","))); err != nil {
			return found, err
		}
		if list.Instances == nil {
			return found, errors.New("the platform's answer has no list of instances")
		}
		for _, i := range list.Instances {
			described := platformkit.Instance{Location: i.ID, ID: i.Serial}
			if i.Hostname != "" {
				described.Addresses = clusterv1.MachineAddresses{{Type: clusterv1.MachineHostName, Address: i.Hostname}}
			}
			found = append(found, described)
		}
	}
	return found, nil
}

// EndorsementKeys asks for the keys of the virtual TPM that the platform gave an instance: each in
// PEM, one for each kind of key.
func (f *fleet) EndorsementKeys(ctx context.Context, i platformkit.Instance) ([]tpm.Fingerprint, error) {
	var chip struct {
		Serial          string   `json:"serial"`
		EndorsementKeys []string `json:"endorsementKeys"`
	}
	if err := f.get(ctx, &chip, "/"+i.Location+"/tpm"); err != nil {
		return nil, err
	}
	if chip.Serial != i.ID {
		return nil, errors.New("another instance has its ID meanwhile")
	}
	if chip.EndorsementKeys == nil {
		return nil, errors.New("the answer has no list of endorsement keys") // an empty list is one: there is no TPM
	}
	eks := []tpm.Fingerprint{}
	for _, key := range chip.EndorsementKeys {
		ek, err := clusterapi.EKFingerprintPEM(key)
		if err != nil {
			return nil, err
		}
		eks = append(eks, ek)
	}
	return eks, nil
}

// get reads an answer into a value. The token is read each time: it is replaced before it ends.
func (f *fleet) get(ctx context.Context, into any, path string) error {
	token, err := os.ReadFile(f.tokenFile)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url.JoinPath("v1/instances").String()+path, nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	response, err := f.client.Do(request)
	if err != nil {
		return fmt.Errorf("the platform's API: %w", err)
	}
	body, err := platformkit.ReadBody(response, maxAnswer)
	if err := cmp.Or(err, json.Unmarshal(body, into)); err != nil {
		return fmt.Errorf("the platform's API: %w", err)
	}
	return nil
}
