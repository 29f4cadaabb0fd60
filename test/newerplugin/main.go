// SPDX-License-Identifier: Apache-2.0

// newerplugin imitates the plugin of a later release. It accepts the versions of the document that
// TPM_VERSIONS lists. It writes versions that do not exist yet as tpm/v1 with another name.
package main

import (
	"bytes"
	"context"
	"os"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

func main() {
	versions := strings.Split(os.Getenv("TPM_VERSIONS"), ",")
	factory := tpm.Factory()
	factory.Versions, factory.Inspects = versions, false
	makeTPM := factory.New
	factory.New = func(s provider.Settings) (provider.Provider, error) {
		made, err := makeTPM(s)
		if err != nil {
			return nil, err
		}
		n := newer{Challenger: made.(provider.Challenger)}
		for _, v := range versions {
			n.versions = append(n.versions, attestation.Version(v))
		}
		return n, nil
	}
	os.Exit(command.Program{
		Name: "kubelet-authenticator", Version: "newer", Providers: []provider.Factory{factory}, DefaultProvider: tpm.Name,
	}.Main())
}

type newer struct {
	provider.Challenger
	versions attestation.Versions
}

func (n newer) Versions() attestation.Versions { return n.versions }

func (n newer) Hello(ctx context.Context, request provider.Request) (document []byte, remember string, err error) {
	wanted := request.Version
	request.Version = attestation.VersionTPM
	document, remember, err = n.Challenger.Hello(ctx, request)
	if err != nil {
		return nil, "", err
	}
	hello, err := attestation.ParseHello(document)
	if err != nil {
		return nil, "", err
	}
	if wanted == attestation.VersionTPM {
		hello.Versions = n.versions
		document, err = hello.Marshal()
		return document, remember, err
	}
	return bytes.ReplaceAll(document, []byte(attestation.VersionTPM), []byte(wanted)), remember, nil
}
