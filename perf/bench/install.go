// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// install puts a certificate into a certificate directory, with the cluster that it came from, as a
// kubelet's node has it.
func install(dir string, client testbed.KeyPair, origin cache.Origin) error {
	pair, err := cache.ParsePair(append(append([]byte{}, client.CertPEM...), client.KeyPEM...))
	if err != nil {
		return err
	}
	pair.Origin = &origin
	lock, err := cache.At(dir).TryLock()
	if err != nil {
		return err
	}
	defer lock.Unlock()
	return lock.Install(pair)
}

// execInfo is what client-go says of a cluster in KUBERNETES_EXEC_INFO.
func execInfo(cluster cache.Origin) (string, error) {
	ask := clientauthentication.ExecCredential{Spec: clientauthentication.ExecCredentialSpec{
		Cluster: &clientauthentication.Cluster{Server: cluster.Server, CertificateAuthorityData: cluster.CertificateAuthorityData},
	}}
	ask.APIVersion, ask.Kind = clientauthentication.SchemeGroupVersion.String(), "ExecCredential"
	data, err := json.Marshal(ask)
	return "KUBERNETES_EXEC_INFO=" + string(data), err
}
