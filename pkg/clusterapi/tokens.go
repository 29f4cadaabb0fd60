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

// tokensRetry is how soon it is tried again to find KubeadmConfigs where there is no such kind: looking for a kind costs discovery.
const tokensRetry = 10 * time.Second

// tokens are those of a namespace, by ID, as they were read last.
type tokens struct {
	mu   sync.Mutex
	at   time.Time
	byID map[string]holding
	// lacking is when there last was no such kind as KubeadmConfig.
	lacking time.Time
}

// holding says who has a token, or a KubeadmConfig.
type holding struct {
	// holders counts the Machines and MachinePools, of any Cluster, and configs the KubeadmConfigs.
	holders, configs int
	// ours says that one is of this Cluster, and machine is that one, unless it is a MachinePool.
	ours    bool
	machine verifier.MachineRef
}

// Token returns the machine that a bootstrap token was made for: it is in the KubeadmConfig of one Machine, and in no other of the namespace.
// One that several Machines were given, be it of another Cluster, or a MachinePool, was made for none.
func (s *Machines) Token(ctx context.Context, id string, now time.Time) (verifier.Token, error) {
	s.tokens.mu.Lock()
	defer s.tokens.mu.Unlock()
	if s.tokens.byID == nil || now.Sub(s.tokens.at).Abs() >= sharedFor {
		byID, err := s.readTokens(ctx, now)
		if err != nil {
			return verifier.Token{}, err
		}
		s.tokens.at, s.tokens.byID = now, byID
	}
	token := s.tokens.byID[id]
	if token.holders > 1 || token.configs > 1 {
		token.machine = verifier.MachineRef{}
	}
	return verifier.Token{Known: token.ours, Machine: token.machine}, nil
}

// readTokens returns who has which token. Under s.tokens.mu.
func (s *Machines) readTokens(ctx context.Context, now time.Time) (map[string]holding, error) {
	if now.Sub(s.tokens.lacking).Abs() < tokensRetry {
		return map[string]holding{}, nil
	}
	list := &bootstrapv1.KubeadmConfigList{}
	err := s.Reader.List(ctx, list, client.InNamespace(s.Cluster.Namespace), client.UnsafeDisableDeepCopy)
	if meta.IsNoMatchError(err) { // another bootstrap provider's management cluster
		s.tokens.lacking = now
		return map[string]holding{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("kubeadm configs of cluster %s: %w", s.Cluster, err)
	}
	configs, err := s.readConfigs(ctx)
	if err != nil {
		return nil, err
	}
	byID := map[string]holding{}
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

// readConfigs returns who has which KubeadmConfig.
func (s *Machines) readConfigs(ctx context.Context) (map[string]holding, error) {
	machines, err := s.listMachines(ctx)
	if err != nil {
		return nil, err
	}
	pools, err := s.listPools(ctx)
	if err != nil {
		return nil, err
	}
	configs := map[string]holding{}
	add := func(ref clusterv1.ContractVersionedObjectReference, by holding) {
		if ref.APIGroup == bootstrapv1.GroupVersion.Group && ref.Kind == "KubeadmConfig" {
			config := configs[ref.Name]
			config.add(by)
			configs[ref.Name] = config
		}
	}
	for i := range machines {
		by := holding{holders: 1}
		if m := &machines[i]; m.Spec.ClusterName == s.Cluster.Name {
			by.ours, by.machine = true, verifier.MachineRef{Name: m.Name, UID: string(m.UID)}
		}
		add(machines[i].Spec.Bootstrap.ConfigRef, by)
	}
	for i := range pools {
		add(pools[i].Spec.Template.Spec.Bootstrap.ConfigRef, holding{holders: 1, ours: pools[i].Spec.ClusterName == s.Cluster.Name})
	}
	return configs, nil
}

func (h *holding) add(other holding) {
	h.holders += other.holders
	h.ours = h.ours || other.ours
	if other.machine.Name != "" {
		h.machine = other.machine
	}
}

// tokenID returns the ID of a token, be its secret still there or not, and nothing of what is not one.
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

// StripKubeadmConfig leaves of a KubeadmConfig what tells whose tokens are in it: which object it is, and the tokens' IDs, each with its dot.
// It is a transform for a cache's KubeadmConfigs, so that no secret of a token, no file, user or command of a machine stays in memory. Anything
// else is returned as it is.
func StripKubeadmConfig(object any) (any, error) {
	config, ok := object.(*bootstrapv1.KubeadmConfig)
	if !ok {
		return object, nil
	}
	stripped := &bootstrapv1.KubeadmConfig{
		TypeMeta: config.TypeMeta,
		// Annotations stay behind: kubectl apply keeps the whole object in one.
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
