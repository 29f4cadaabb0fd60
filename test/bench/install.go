// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"time"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// install puts a certificate that is valid for a year into dir, with its origin, as a kubelet's node has it. It returns what
// client-go would say of the cluster.
func install(dir string) (string, error) {
	ca, err := testbed.NewCA("bench")
	if err != nil {
		return "", err
	}
	now := time.Now()
	client, err := ca.IssueClient("system:node:bench", []string{"system:nodes"}, now.Add(-time.Minute), now.AddDate(1, 0, 0))
	if err != nil {
		return "", err
	}
	pair, err := cache.ParsePair(append(client.CertPEM, client.KeyPEM...))
	if err != nil {
		return "", err
	}
	pair.Origin = &cache.Origin{Server: "https://127.0.0.1:6443", CertificateAuthorityData: ca.CertPEM()}
	lock, err := cache.At(dir).TryLock()
	if err != nil {
		return "", err
	}
	defer lock.Unlock()
	if err := lock.Install(pair); err != nil {
		return "", err
	}
	ask := clientauthentication.ExecCredential{Spec: clientauthentication.ExecCredentialSpec{
		Cluster: &clientauthentication.Cluster{Server: pair.Origin.Server, CertificateAuthorityData: pair.Origin.CertificateAuthorityData},
	}}
	ask.APIVersion, ask.Kind = clientauthentication.SchemeGroupVersion.String(), "ExecCredential"
	data, err := json.Marshal(ask)
	return string(data), err
}
