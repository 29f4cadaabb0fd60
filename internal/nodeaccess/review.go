// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// Review is the API server's answer about a credential.
type Review struct {
	// Status is the HTTP status code: 201 with a Username, 401 if the API server does not know the
	// credential. Any other status means neither.
	Status   int
	Username string
}

// Review asks the API server about the credential (SelfSubjectReview, authentication.k8s.io/v1),
// which changes nothing.
func (a Access) Review(ctx context.Context) (Review, error) {
	body := map[string]string{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
	answer, err := a.Call(ctx, http.MethodPost, "/apis/authentication.k8s.io/v1/selfsubjectreviews", nil, body, 1<<20)
	var review struct {
		Status struct {
			UserInfo struct {
				Username string `json:"username"`
			} `json:"userInfo"`
		} `json:"status"`
	}
	if err == nil && answer.Status == http.StatusCreated {
		err = json.Unmarshal(answer.Body, &review)
	}
	if err != nil {
		return Review{}, fmt.Errorf("review credential: %w", err)
	}
	return Review{answer.Status, review.Status.UserInfo.Username}, nil
}

// Review asks the API server which user it authenticates by the node's own certificate.
func (n Node) Review(ctx context.Context, pair *cache.Pair) (Review, error) {
	to, err := n.OwnAccess(pair)
	if err != nil {
		return Review{}, err
	}
	return to.Review(ctx)
}

// Accepts reports whether the API server authenticated the certificate as the node that it names.
func (r Review) Accepts(pair *cache.Pair) bool {
	return r.Status == http.StatusCreated && r.Username == pair.Leaf.Subject.CommonName
}
