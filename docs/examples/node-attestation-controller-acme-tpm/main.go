// SPDX-License-Identifier: Apache-2.0

// node-attestation-controller-acme-tpm is node-attestation-controller for Cluster API on the
// imaginary platform Acme, which says what TPMs its instances have. Flags and configuration are the
// shipped program's, with Platform among clusterAPI.ekSources (docs/providers.md).
package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/node-attestation-controller-acme/ektrust"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
)

var version, commit = "devel", "unknown"

func main() {
	fleet, err := platform(os.Getenv("ACME_URL"), os.Getenv("ACME_CA_FILE"), os.Getenv("ACME_TOKEN_FILE"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "node-attestation-controller-acme-tpm:", err)
		os.Exit(command.CodeConfiguration)
	}
	os.Exit(command.Program{Version: version, Commit: commit, Management: clusterapi.Management{Trust: fleet}}.Main())
}

// platform is Acme's API, with the CA that its certificate is from, and no other.
func platform(url, caFile, tokenFile string) (*ektrust.Fleet, error) {
	if url == "" || caFile == "" || tokenFile == "" {
		return nil, errors.New("ACME_URL, ACME_CA_FILE, ACME_TOKEN_FILE: must be set")
	}
	ca, err := os.ReadFile(caFile) //nolint:gosec // G703: a file that the operator names
	if err != nil {
		return nil, fmt.Errorf("ACME_CA_FILE: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("ACME_CA_FILE: %s has no certificate", caFile)
	}
	if _, err := os.Stat(tokenFile); err != nil { //nolint:gosec // G703: a file that the operator names
		return nil, fmt.Errorf("ACME_TOKEN_FILE: %w", err)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	return ektrust.New(url, bearer{transport, tokenFile})
}

// bearer shows a token, which is read each time: it is replaced before it ends.
type bearer struct {
	http.RoundTripper
	tokenFile string
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	token, err := os.ReadFile(b.tokenFile)
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	return b.RoundTripper.RoundTrip(r)
}
