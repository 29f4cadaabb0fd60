// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// ExecInfoVariable is the environment variable with client-go's request
// (client.authentication.k8s.io).
const ExecInfoVariable = "KUBERNETES_EXEC_INFO"

// The supported versions of the exec API. The answer has the version of the request. The fields of
// both have the same names.
const (
	execGroup   = "client.authentication.k8s.io/"
	execV1      = execGroup + "v1"
	execV1beta1 = execGroup + "v1beta1"
)

// ExecAPIVersions returns the supported versions of the exec API.
func ExecAPIVersions() []string { return []string{execV1, execV1beta1} }

// ExecInfo is client-go's request. The zero value means a call by a person, which is answered in
// v1.
type ExecInfo struct {
	// APIVersion is the version to answer in.
	APIVersion string
	// Cluster is the cluster to authenticate to, nil if the kubeconfig lacks
	// provideClusterInfo.
	Cluster *clientauthentication.Cluster
	// Source names the file that Cluster was read from. Default: ExecInfoVariable.
	Source string
}

// ParseExecInfo reads the value of ExecInfoVariable. An empty value is a call by a person. Errors
// are Failures with reason ExecAPI.
func ParseExecInfo(value string) (ExecInfo, error) {
	if value == "" {
		return ExecInfo{}, nil
	}
	// The type has no status, which belongs to the answer: reflecting on its fields would take as
	// long as reading the request.
	var ask struct {
		metav1.TypeMeta `json:",inline"`
		Spec            clientauthentication.ExecCredentialSpec `json:"spec"`
	}
	if err := json.Unmarshal([]byte(value), &ask); err != nil {
		return ExecInfo{}, reason.ExecAPI.Failure("client-go sets it for the plugin; to run the plugin by hand, unset it",
			fmt.Errorf("%s: not an ExecCredential in JSON", ExecInfoVariable))
	}
	if ask.Kind != "ExecCredential" || ask.APIVersion != execV1 && ask.APIVersion != execV1beta1 {
		return ExecInfo{}, reason.ExecAPI.Failure("set apiVersion in the kubeconfig's exec stanza to "+execV1,
			fmt.Errorf("%s: asks for %.64q of %.64q, not for an ExecCredential of %s or %s", ExecInfoVariable, ask.Kind, ask.APIVersion, execV1, execV1beta1))
	}
	return ExecInfo{APIVersion: ask.APIVersion, Cluster: ask.Spec.Cluster}, nil
}

// origin returns the cluster in the request, nil if it has none.
func (e ExecInfo) origin() *cache.Origin {
	if e.Cluster == nil {
		return nil
	}
	return &cache.Origin{
		Server:                   e.Cluster.Server,
		TLSServerName:            e.Cluster.TLSServerName,
		CertificateAuthorityData: e.Cluster.CertificateAuthorityData,
		ProxyURL:                 e.Cluster.ProxyURL,
	}
}

// insecure reports whether the request names a cluster whose certificate client-go does not check.
func (e ExecInfo) insecure() bool { return e.Cluster != nil && e.Cluster.InsecureSkipTLSVerify }

// render returns the ExecCredential with the certificate, in the version of the request.
func (e ExecInfo) render(pair *cache.Pair, expiration time.Time) ([]byte, error) {
	version := e.APIVersion
	if version == "" {
		version = execV1
	}
	// The type has no spec, which belongs to the request: reflecting on its fields would take
	// longer than writing the answer.
	credential := struct {
		metav1.TypeMeta `json:",inline"`
		Status          clientauthentication.ExecCredentialStatus `json:"status"`
	}{
		metav1.TypeMeta{APIVersion: version, Kind: "ExecCredential"},
		clientauthentication.ExecCredentialStatus{
			ExpirationTimestamp:   &metav1.Time{Time: expiration},
			ClientCertificateData: string(pair.Chain),
			ClientKeyData:         string(pair.Key),
		},
	}
	data, err := json.Marshal(credential)
	if err != nil {
		return nil, fmt.Errorf("print credential: %w", err)
	}
	return append(data, '\n'), nil
}

// Answer is the output of a run.
type Answer struct {
	// Credential is one ExecCredential in JSON, for standard output. It is empty if the run has no
	// certificate.
	Credential []byte
	// Remarks are messages for people, for standard error.
	Remarks []error
}

// caution adds the provider's caution, once.
func (a *Answer) caution(p provider.Provider) {
	caution := p.Caution()
	if caution == "" || slices.ContainsFunc(a.Remarks, func(r error) bool { return r.Error() == caution }) {
		return
	}
	a.Remarks = append(a.Remarks, errors.New(caution))
}
