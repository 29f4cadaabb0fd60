// SPDX-License-Identifier: Apache-2.0

package cloudprovider

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/lookup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2role"
)

// stsFresh is how long an answer of STS is kept. The request is judged again until it is signed or
// denied, and Kubernetes deletes pending requests after a day. STS accepts its signature only for
// some minutes.
const stsFresh = 24 * time.Hour

// STS has the answers of AWS STS, by the call.
type STS struct {
	send  Send
	cache *lookup.Cache[stsAnswer]
}

// Send sends a call to STS, such as sts.Client.Send.
type Send func(ctx context.Context, call *ec2role.Call) (status int, body []byte, err error)

type stsAnswer struct {
	status int
	body   []byte
}

// NewSTS returns the answers that send gets.
func NewSTS(send Send, metrics *telemetry.LookupMetrics) *STS {
	return &STS{send: send, cache: lookup.New[stsAnswer](lookup.Config{
		Service: ec2role.Name, Concurrency: 16, Timeout: 15 * time.Second, Size: 4096, Metrics: metrics,
	})}
}

// EC2Role returns the Judge of provider ec2-role.
func EC2Role(v *ec2role.Verifier, sts *STS) Judge {
	return func(ctx context.Context, request verifier.Filed, _ string) (*cloud.Verified, error) {
		call, err := v.Parse(request)
		if err != nil {
			return nil, err
		}
		answer, err := sts.cache.Get(ctx, request.UID+"/"+digestOf(call), func(ctx context.Context) (stsAnswer, time.Duration, error) {
			status, body, err := sts.send(ctx, call)
			if err != nil {
				return stsAnswer{}, 0, err
			}
			// What is no verdict is asked for again.
			if _, err := v.Judge(call, status, body); err != nil && !evidence.IsVerdict(err) {
				return stsAnswer{}, 0, err
			}
			return stsAnswer{status, body}, stsFresh, nil
		})
		if err != nil {
			return nil, err
		}
		return v.Judge(call, answer.status, answer.body)
	}
}

// digestOf identifies a call. Go prints maps in the order of their keys.
func digestOf(call *ec2role.Call) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %q", call.Method, call.URL, call.Header, call.Body))
	return hex.EncodeToString(sum[:])
}
