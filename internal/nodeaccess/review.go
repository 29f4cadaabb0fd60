// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
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
	review, err := a.review(ctx)
	if err != nil {
		return Review{}, fmt.Errorf("review credential: %w", err)
	}
	return review, nil
}

func (a Access) review(ctx context.Context) (Review, error) {
	client, err := csr.HTTPClient(a.Config)
	if err != nil {
		return Review{}, err
	}
	target, err := url.JoinPath(a.Config.Host, "/apis/authentication.k8s.io/v1/selfsubjectreviews")
	if err != nil {
		return Review{}, err
	}
	const body = `{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, target, strings.NewReader(body))
	if err != nil {
		return Review{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Accept", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return Review{}, err
	}
	defer func() { _ = response.Body.Close() }()
	var answer struct {
		Status struct {
			UserInfo struct {
				Username string `json:"username"`
			} `json:"userInfo"`
		} `json:"status"`
	}
	if response.StatusCode == http.StatusCreated {
		if err := json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(&answer); err != nil {
			return Review{}, err
		}
	}
	return Review{response.StatusCode, answer.Status.UserInfo.Username}, nil
}
