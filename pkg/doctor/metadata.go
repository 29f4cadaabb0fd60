// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"net/http"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// ec2Role is the name of the provider whose metadata service may answer without a token.
const ec2Role = "ec2-role"

// podProbe returns the command that shows, from a pod, whether pods reach the metadata service of a
// provider's cloud. It is empty if the provider's evidence does not come from such a service.
//
// The node cannot see it itself. The service answers the node in any case, no service shows its hop
// limit, and the rules that keep pods away may be in iptables, nftables, BPF or the CNI's policies.
func podProbe(provider string) string {
	const run = "kubectl run metadata-probe --rm -i --restart=Never --image=curlimages/curl -- curl -sS -m 5 "
	switch provider {
	case ec2Role:
		return run + "-X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token"
	case "gce":
		return run + "-H 'Metadata-Flavor: Google' http://169.254.169.254/computeMetadata/v1/instance/id"
	case "azure":
		return run + "-H 'Metadata: true' 'http://169.254.169.254/metadata/instance?api-version=2021-02-01'"
	}
	return ""
}

func checkMetadataService(_ context.Context, e *examination) checkup.Result {
	p, err := e.attestor()
	if err != nil {
		return skipped("%v", errNoProvider)
	}
	probe := podProbe(p.Name())
	if probe == "" {
		return skipped("provider %s makes its evidence without a metadata service", p.Name())
	}
	id, err := p.ProviderID(e.ctx)
	if err != nil {
		remedy := "check that this process may reach 169.254.169.254"
		if failed, ok := errors.AsType[*provider.Error](err); ok && failed.Hint != "" {
			remedy = failed.Hint
		}
		return failure(remedy, "%v", err)
	}
	if p.Name() == ec2Role {
		// The hop limit is that of the token's answer. It stops no request that needs no token.
		if _, err := e.Metadata.Call(e.ctx, http.MethodGet, "/latest/meta-data/", nil, nil); err == nil {
			return warning("require tokens: aws ec2 modify-instance-metadata-options --http-tokens required --http-put-response-hop-limit 1 --instance-id ...",
				"it answers without a token (IMDSv1), so the hop limit keeps no pod away")
		}
	}
	return ok("it answers: provider ID %s. The node cannot see whether pods reach it, and they must not. This has to time out: %s", id, probe)
}
