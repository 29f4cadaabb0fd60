// SPDX-License-Identifier: Apache-2.0

// Package azure is the node's half of provider azure. Its evidence is an attested document of
// Azure's instance metadata service: a PKCS#7 message in which Azure names the VM. The service
// signs one for any nonce. Ours is bound to the request.
package azure

import (
	"context"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/form"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
)

const (
	// Name is the provider's name in requests and in the configuration.
	Name = "azure"
	// SignerName is the signer to request from.
	SignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-azure"
)

// apiVersion is that of the metadata service.
const apiVersion = "2025-04-07"

// Factory makes the provider.
func Factory() provider.Factory {
	return provider.Factory{
		Name:     Name,
		Versions: []string{attestation.VersionAzure},
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
	// Metadata asks the metadata service of the VM.
	Metadata metadata.Client
	// ClusterUID is the node's clusterUID setting, empty if unset.
	ClusterUID string
}

var _ provider.Provider = Provider{}

// Name returns "azure".
func (Provider) Name() string { return Name }

// SignerName returns the default signer.
func (Provider) SignerName() string { return SignerName }

// Renews is true: each renewal comes with evidence of its own.
func (Provider) Renews() bool { return true }

// Caution says who else can make this evidence. Azure has no hop limit.
func (Provider) Caution() string {
	return "provider azure proves what the metadata service says: any process or pod that reaches 169.254.169.254 from this machine can make the same evidence, so block that address for pods"
}

// resourceForm is the form of a resource ID. The first group is the name of the resource group.
var resourceForm = form.New(`(?i)^/subscriptions/[^/]+/resourceGroups/([^/]+)/providers/Microsoft\.Compute/[!-.0-~]+/[!-~]+$`)

// ProviderID returns azure:// and the VM's resource ID. The name of the resource group is in lower
// case, and the rest as Azure has it: so the cloud provider's controller and Cluster API write it.
func (p Provider) ProviderID(ctx context.Context) (string, error) {
	answer, err := p.get(ctx, "instance/compute", url.Values{})
	if err != nil {
		return "", err
	}
	var compute struct {
		ResourceID string `json:"resourceId"`
	}
	if err := json.Unmarshal(answer, &compute); err != nil {
		return "", failure(errors.New("instance metadata: not the JSON of a VM"))
	}
	group := resourceForm.Get().FindStringSubmatchIndex(compute.ResourceID)
	if group == nil {
		return "", failure(errors.New("instance metadata: resourceId is not the resource ID of a VM"))
	}
	id := compute.ResourceID
	return "azure://" + id[:group[2]] + strings.ToLower(id[group[2]:group[3]]) + id[group[3]:], nil
}

// Evidence has Azure sign a document for this request, and no other: every node can read it in the
// request.
func (p Provider) Evidence(ctx context.Context, request provider.Request) ([]byte, error) {
	nonce := request.Binding(attestation.VersionAzure, p.ClusterUID).Alphanumeric()
	answer, err := p.get(ctx, "attested/document", url.Values{"nonce": {nonce}})
	if err != nil {
		return nil, err
	}
	// A document that would be denied is not filed: here the error reaches the operator who can fix
	// it.
	document, err := decode(answer)
	if err == nil {
		err = check(document, nonce)
	}
	if err != nil {
		return nil, failure(fmt.Errorf("attested document: %w", err))
	}
	return attestation.Identity{Version: attestation.VersionAzure, ClusterUID: p.ClusterUID, Statement: document}.Marshal()
}

// get asks the metadata service. path is relative to metadata/. The service answers only requests
// with the header.
func (p Provider) get(ctx context.Context, path string, query url.Values) ([]byte, error) {
	query.Set("api-version", apiVersion)
	return p.Metadata.Call(ctx, http.MethodGet, "/metadata/"+path+"?"+query.Encode(), http.Header{"Metadata": {"true"}}, nil)
}

// decode returns the document in an answer, in DER.
func decode(answer []byte) ([]byte, error) {
	var attested struct{ Encoding, Signature string }
	if err := json.Unmarshal(answer, &attested); err != nil {
		return nil, errors.New("the answer is not the JSON of one")
	}
	if attested.Encoding != "pkcs7" {
		return nil, fmt.Errorf("its encoding is %.32q, not pkcs7", attested.Encoding)
	}
	document, err := base64.StdEncoding.DecodeString(attested.Signature)
	if err != nil {
		return nil, errors.New("it is not base64")
	}
	return document, nil
}

// check returns an error if the controller would certainly refuse the document. It does not verify
// the signature: the policy for certificates is the controller's.
func check(document []byte, nonce string) error {
	// The members of a PKCS#7 SignedData up to the content (RFC 2315, section 9.1).
	var form struct {
		Type asn1.ObjectIdentifier
		Data struct {
			Version int
			Digests asn1.RawValue
			Content struct {
				Type asn1.ObjectIdentifier
				Data []byte `asn1:"explicit,tag:0"`
			}
		} `asn1:"explicit,tag:0"`
	}
	rest, err := asn1.Unmarshal(document, &form)
	if err != nil || len(rest) > 0 {
		return errors.New("it is not a PKCS#7 SignedData with content")
	}
	var content struct {
		Nonce string `json:"nonce"`
		VMID  string `json:"vmId"`
	}
	switch err := json.Unmarshal(form.Data.Content.Data, &content); {
	case err != nil:
		return errors.New("its content is not JSON")
	case content.Nonce != nonce:
		return errors.New("it has another nonce")
	case content.VMID == "":
		return errors.New("it names no VM")
	}
	return nil
}

func failure(err error) error {
	return &provider.Error{Class: provider.DeviceFailed, Hint: "does something else than Azure's metadata service answer at 169.254.169.254?", Err: err}
}
