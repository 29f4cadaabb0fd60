// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/workload"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// annotationClusterUID is on a cluster's Secret of challenge keys. It identifies the cluster: the
// UID that its Cluster object had when it was first served. Another management cluster gives the
// object another UID, and records are bound to the first one.
const annotationClusterUID = "attestation.cluster.x-k8s.io/cluster-uid"

// challengeKeysPurpose names Secrets of challenge keys in Cluster API's way:
// <cluster>-node-attestation.
const challengeKeysPurpose = secret.Purpose("node-attestation")

// impersonatingReader reads the Secrets of kubeconfigs, and makes their users impersonate another
// one. That user has fewer rights than the administrator, whose credential Cluster API keeps.
// Policies in workload clusters name it.
type impersonatingReader struct {
	client.Reader
	user string
}

// Get reads a Secret, and puts the impersonated user into it.
func (r impersonatingReader) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	kubeconfig, ok := object.(*corev1.Secret)
	if !ok {
		return fmt.Errorf("%T %s: is no kubeconfig", object, key)
	}
	if err := r.Reader.Get(ctx, key, kubeconfig, options...); err != nil {
		return err
	}
	impersonating, err := impersonate(kubeconfig.Data[secret.KubeconfigDataName], r.user)
	if err != nil {
		return fmt.Errorf("secret %s: %w", key, err)
	}
	kubeconfig.Data[secret.KubeconfigDataName] = impersonating
	return nil
}

// impersonate puts an impersonated service account into a kubeconfig that needs nothing outside of
// itself. The API server knows the account's groups. Constrained impersonation (KEP-5284) of a
// service account refuses groups.
func impersonate(kubeconfig []byte, user string) ([]byte, error) {
	config, err := workload.ParseKubeconfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", secret.KubeconfigDataName, err)
	}
	for _, info := range config.AuthInfos {
		info.Impersonate = user
		info.ImpersonateGroups, info.ImpersonateUID, info.ImpersonateUserExtra = nil, "", nil
	}
	return clientcmd.Write(*config)
}

// keySecret names a cluster's Secret of challenge keys.
func keySecret(cluster types.NamespacedName) types.NamespacedName {
	return types.NamespacedName{Namespace: cluster.Namespace, Name: secret.Name(cluster.Name, challengeKeysPurpose)}
}

// loadClusterUID returns what identifies a cluster. If that is not stored yet, it is written into
// the Secret that moves with the Cluster. The challenge keys are put into that Secret later.
func loadClusterUID(ctx context.Context, live client.Client, cluster *clusterv1.Cluster) (string, error) {
	key := keySecret(client.ObjectKeyFromObject(cluster))
	object := &corev1.Secret{}
	err := live.Get(ctx, key, object)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("secret %s: %w", key, err)
	}
	if uid := object.Annotations[annotationClusterUID]; err == nil && uid != "" {
		return uid, nil
	}
	uid, recordsErr := uidFromRecords(ctx, live, cluster)
	if recordsErr != nil {
		return "", recordsErr
	}
	metav1.SetMetaDataAnnotation(&object.ObjectMeta, annotationClusterUID, uid)
	if err == nil {
		err = live.Update(ctx, object) // of the version that was read
	} else {
		object.Namespace, object.Name, object.Type = key.Namespace, key.Name, clusterv1.ClusterSecretType
		object.Labels = map[string]string{clusterv1.ClusterNameLabel: cluster.Name}
		object.OwnerReferences = []metav1.OwnerReference{ownedBy(cluster)}
		err = live.Create(ctx, object)
	}
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		return "", fmt.Errorf("secret %s: another writer changed it first: %w", key, err)
	}
	if err != nil {
		return "", fmt.Errorf("secret %s: %w", key, err)
	}
	return uid, nil
}

// uidFromRecords returns the cluster UID in the cluster's records, if there are any. Otherwise,
// after the Secret was deleted, each of its nodes would count as another cluster's. Without records
// it is the object's UID.
func uidFromRecords(ctx context.Context, live client.Reader, cluster *clusterv1.Cluster) (string, error) {
	records := &v1alpha1.NodeAttestationList{}
	if err := live.List(ctx, records, client.InNamespace(cluster.Namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: cluster.Name}); err != nil {
		return "", fmt.Errorf("records of cluster %s: %w", cluster.Name, err)
	}
	uid := ""
	for i := range records.Items {
		switch is := records.Items[i].Spec.Cluster; {
		case uid == "":
			uid = is
		case is != uid:
			return "", fmt.Errorf("records of cluster %s: they name different clusters; set the annotation %s on the Secret %s",
				cluster.Name, annotationClusterUID, keySecret(client.ObjectKeyFromObject(cluster)))
		}
	}
	if uid == "" {
		uid = string(cluster.UID)
	}
	return uid, nil
}

func ownedBy(cluster *clusterv1.Cluster) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: cluster.Name, UID: cluster.UID}
}
