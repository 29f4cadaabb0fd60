// SPDX-License-Identifier: Apache-2.0

package cloudprovider

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/lookup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2role"
)

// stsFresh is how long a verdict is kept. The request is judged again until it is signed or denied,
// and Kubernetes deletes pending requests after a day. STS accepts its signature only for some
// minutes.
const stsFresh = 24 * time.Hour

// STS has the verdicts on calls of AWS STS. Each region has its own cache, since the node chooses
// the region: one that is away must not delay nodes of others.
type STS struct {
	send    Send
	metrics *telemetry.LookupMetrics

	mu      sync.Mutex
	regions map[string]*lookup.Cache[stsVerdict]
}

// Send sends a call to STS, such as sts.Client.Send.
type Send func(ctx context.Context, call *ec2role.Call) (status int, body []byte, err error)

// stsVerdict is what an answer is worth: err is a verifier.Refusals, or nil.
type stsVerdict struct {
	verified *cloud.Verified
	err      error
}

// NewSTS returns the verdicts on what send gets.
func NewSTS(send Send, metrics *telemetry.LookupMetrics) *STS {
	return &STS{send: send, metrics: metrics, regions: map[string]*lookup.Cache[stsVerdict]{}}
}

// of returns the cache of a call's region, which the policy lists.
func (s *STS) of(call *ec2role.Call) *lookup.Cache[stsVerdict] {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.regions[call.URL] == nil {
		s.regions[call.URL] = lookup.New[stsVerdict](lookup.Config{
			Service: ec2role.Name, Concurrency: 16, Timeout: 15 * time.Second, Size: 4096, Metrics: s.metrics,
		})
	}
	return s.regions[call.URL]
}

// EC2Role returns the Judge of provider ec2-role.
func EC2Role(v *ec2role.Verifier, sts *STS) Judge {
	return func(ctx context.Context, request verifier.Filed, _ string) (*cloud.Verified, error) {
		call, err := v.Parse(request)
		if err != nil {
			return nil, err
		}
		verdict, err := sts.of(call).Get(ctx, request.UID+"/"+digestOf(call), func(ctx context.Context) (stsVerdict, time.Duration, error) {
			status, body, err := sts.send(ctx, call)
			if err != nil {
				return stsVerdict{}, 0, err
			}
			verified, err := v.Judge(call, status, body)
			if err != nil && !evidence.IsVerdict(err) { // an answer that decides nothing
				return stsVerdict{}, 0, err
			}
			return stsVerdict{verified, err}, stsFresh, nil
		})
		if err != nil {
			return nil, err
		}
		return verdict.verified, verdict.err
	}
}

// digestOf identifies a call. Go prints maps in the order of their keys.
func digestOf(call *ec2role.Call) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %q", call.Method, call.URL, call.Header, call.Body))
	return hex.EncodeToString(sum[:])
}
