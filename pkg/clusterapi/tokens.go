// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The parts of a bootstrap token, <id>.<secret>, both of [a-z0-9].
const (
	tokenIDSize     = 6
	tokenSecretSize = 16
)

// tokensRetry is the back-off while there is no kind KubeadmConfig. Looking for a kind costs
// discovery.
const tokensRetry = 10 * time.Second

// tokenCache has the tokens of a namespace by ID, as they were read last.
type tokenCache struct {
	mu     sync.Mutex
	readAt time.Time
	byID   map[string]tokenHolders
	// noKindAt is when there last was no kind KubeadmConfig.
	noKindAt time.Time
}

// tokenHolders says which objects have a token, or a KubeadmConfig.
type tokenHolders struct {
	// holders counts the Machines and MachinePools, of any Cluster, and configs the KubeadmConfigs.
	holders, configs int
	// inCluster says that one of them is in this Cluster. machine is that one, unless it is a
	// MachinePool.
	inCluster bool
	machine   verifier.MachineRef
}

// Token returns the machine that a bootstrap token was made for. The token is in the KubeadmConfig
// of that one Machine, and in no other of the namespace. A token was made for no machine if several
// Machines have it, even of another Cluster, or if a MachinePool has it.
func (s *machineSource) Token(ctx context.Context, id string, now time.Time) (verifier.Token, error) {
	s.tokens.mu.Lock()
	defer s.tokens.mu.Unlock()
	if s.tokens.byID == nil || now.Sub(s.tokens.readAt).Abs() >= readInterval {
		byID, err := s.readTokens(ctx, now)
		if err != nil {
			return verifier.Token{}, err
		}
		s.tokens.readAt, s.tokens.byID = now, byID
	}
	token := s.tokens.byID[id]
	if token.holders > 1 || token.configs > 1 {
		token.machine = verifier.MachineRef{}
	}
	return verifier.Token{Known: token.inCluster, Machine: token.machine}, nil
}

// readTokens returns the holders of each token. s.tokens.mu is held.
func (s *machineSource) readTokens(ctx context.Context, now time.Time) (map[string]tokenHolders, error) {
	if now.Sub(s.tokens.noKindAt).Abs() < tokensRetry {
		return map[string]tokenHolders{}, nil
	}
	list := &bootstrapv1.KubeadmConfigList{}
	err := s.Reader.List(ctx, list, client.InNamespace(s.Cluster.Namespace), client.UnsafeDisableDeepCopy)
	if meta.IsNoMatchError(err) { // another bootstrap provider's management cluster
		s.tokens.noKindAt = now
		return map[string]tokenHolders{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("kubeadm configs of cluster %s: %w", s.Cluster, err)
	}
	configs, err := s.readConfigs(ctx)
	if err != nil {
		return nil, err
	}
	byID := map[string]tokenHolders{}
	for i := range list.Items {
		discovery := &list.Items[i].Spec.JoinConfiguration.Discovery
		ids := map[string]bool{tokenID(discovery.BootstrapToken.Token): true, tokenID(discovery.TLSBootstrapToken): true}
		delete(ids, "")
		for id := range ids {
			token := byID[id]
			token.add(configs[list.Items[i].Name])
			token.configs++
			byID[id] = token
		}
	}
	return byID, nil
}

// readConfigs returns the holders of each KubeadmConfig.
func (s *machineSource) readConfigs(ctx context.Context) (map[string]tokenHolders, error) {
	machines, err := s.listMachines(ctx)
	if err != nil {
		return nil, err
	}
	pools, err := s.listPools(ctx)
	if err != nil {
		return nil, err
	}
	configs := map[string]tokenHolders{}
	add := func(ref clusterv1.ContractVersionedObjectReference, by tokenHolders) {
		if ref.APIGroup == bootstrapv1.GroupVersion.Group && ref.Kind == "KubeadmConfig" {
			config := configs[ref.Name]
			config.add(by)
			configs[ref.Name] = config
		}
	}
	for i := range machines {
		by := tokenHolders{holders: 1}
		if m := &machines[i]; m.Spec.ClusterName == s.Cluster.Name {
			by.inCluster, by.machine = true, verifier.MachineRef{Name: m.Name, UID: string(m.UID)}
		}
		add(machines[i].Spec.Bootstrap.ConfigRef, by)
	}
	for i := range pools {
		add(pools[i].Spec.Template.Spec.Bootstrap.ConfigRef, tokenHolders{holders: 1, inCluster: pools[i].Spec.ClusterName == s.Cluster.Name})
	}
	return configs, nil
}

func (h *tokenHolders) add(other tokenHolders) {
	h.holders += other.holders
	h.inCluster = h.inCluster || other.inCluster
	if other.machine.Name != "" {
		h.machine = other.machine
	}
}

// tokenID returns the ID of a token, whether or not its secret follows. Otherwise it returns "".
func tokenID(token string) string {
	id, secret, ok := strings.Cut(token, ".")
	if !ok || !isTokenPart(id, tokenIDSize) || secret != "" && !isTokenPart(secret, tokenSecretSize) {
		return ""
	}
	return id
}

func isTokenPart(part string, size int) bool {
	return len(part) == size && strings.Trim(part, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}

// stripKubeadmConfig is a transform for a cache's KubeadmConfigs. It keeps the object's metadata
// and the tokens' IDs, each with its dot. So no secret of a token, no file, user or command of a
// machine stays in memory. Other objects are returned as they are.
func stripKubeadmConfig(object any) (any, error) {
	config, ok := object.(*bootstrapv1.KubeadmConfig)
	if !ok {
		return object, nil
	}
	stripped := &bootstrapv1.KubeadmConfig{
		TypeMeta: config.TypeMeta,
		// Annotations are dropped, since kubectl apply keeps the whole object in one.
		ObjectMeta: metav1.ObjectMeta{
			Name: config.Name, Namespace: config.Namespace, UID: config.UID, ResourceVersion: config.ResourceVersion,
			Generation: config.Generation, CreationTimestamp: config.CreationTimestamp, DeletionTimestamp: config.DeletionTimestamp,
			Labels: config.Labels, OwnerReferences: config.OwnerReferences,
		},
	}
	from, to := &config.Spec.JoinConfiguration.Discovery, &stripped.Spec.JoinConfiguration.Discovery
	to.BootstrapToken.Token = stripToken(from.BootstrapToken.Token)
	to.TLSBootstrapToken = stripToken(from.TLSBootstrapToken)
	return stripped, nil
}

func stripToken(token string) string {
	id := tokenID(token)
	if id == "" {
		return ""
	}
	return id + "."
}
