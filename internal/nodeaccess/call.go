// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// Answer is an answer of the API server.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Message returns the API server's message if the body is a metav1.Status. A proxy may have
// answered: then it returns "".
func (a *Answer) Message() string {
	var status struct {
		Message string `json:"message"`
	}
	_ = json.Unmarshal(a.Body, &status)
	return status.Message
}

// Call makes one request, once, without a clientset: that would make the plugin start later. A body
// is sent as JSON, and with PATCH as a merge patch (RFC 7386). Call reads at most limit bytes of
// the answer, and drops the rest. Of a watch that is allowed it reads nothing.
func (a Access) Call(ctx context.Context, method, path string, query url.Values, body any, limit int64) (*Answer, error) {
	client, err := csr.HTTPClient(a.Config)
	if err != nil {
		return nil, err
	}
	target, err := url.JoinPath(a.Config.Host, path)
	if err != nil {
		return nil, err
	}
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	var content io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		content = bytes.NewReader(data)
	}
	request, err := http.NewRequestWithContext(ctx, method, target, content)
	if err != nil {
		return nil, err
	}
	switch {
	case method == http.MethodPatch:
		request.Header.Set("Content-Type", "application/merge-patch+json")
	case body != nil:
		request.Header.Set("Content-Type", "application/json")
	}
	request.Header.Set("Accept", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	answer := &Answer{Status: response.StatusCode, Header: response.Header}
	if query.Has("watch") && answer.Status == http.StatusOK {
		return answer, nil
	}
	answer.Body, err = io.ReadAll(io.LimitReader(response.Body, limit))
	return answer, err
}
