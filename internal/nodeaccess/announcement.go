// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// maxConfigMap bounds the ConfigMap with the announcement, in bytes. In JSON a byte of the
// announcement takes up to six.
const maxConfigMap = 6*attestation.MaxAnnouncement + 64<<10

// StatusError is an answer of the API server that is no success.
type StatusError struct {
	// Status is the HTTP status code. Message is the API server's message, shortened and made
	// printable.
	Status  int
	Message string
}

func (e *StatusError) Error() string {
	if e.Message == "" {
		return fmt.Sprintf("%d %s", e.Status, http.StatusText(e.Status))
	}
	return fmt.Sprintf("%d: %s", e.Status, e.Message)
}

// Announcement returns the announcement of renewals, for nodes. It is nil if the cluster has none:
// the ConfigMap does not exist, or nodes may not read it.
func (a Access) Announcement(ctx context.Context) (*attestation.Announcement, error) {
	announcement, err := a.announcement(ctx)
	if err != nil {
		return nil, fmt.Errorf("get ConfigMap %s/%s: %w", attestation.AnnouncementNamespace, attestation.AnnouncementName, err)
	}
	return announcement, nil
}

func (a Access) announcement(ctx context.Context) (*attestation.Announcement, error) {
	const path = "/api/v1/namespaces/" + attestation.AnnouncementNamespace + "/configmaps/" + attestation.AnnouncementName
	status, body, err := a.call(ctx, http.MethodGet, path, nil, "", maxConfigMap)
	switch {
	case err != nil:
		return nil, err
	case status == http.StatusNotFound, status == http.StatusForbidden:
		return nil, nil
	case status != http.StatusOK:
		return nil, refusal(status, body)
	}
	var object struct {
		Kind string            `json:"kind"`
		Data map[string]string `json:"data"`
	}
	if json.Unmarshal(body, &object) != nil || object.Kind != "ConfigMap" {
		return nil, fmt.Errorf("the answer is not a ConfigMap of at most %d bytes", maxConfigMap)
	}
	announcement, err := attestation.ParseAnnouncement([]byte(object.Data[attestation.AnnouncementKey]))
	return &announcement, err
}

// Annotate sets an annotation of the Node. The NodeRestriction admission plugin lets a node do that
// to its own Node.
func (a Access) Annotate(ctx context.Context, node, key, value string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{key: value}}})
	if err == nil {
		err = a.patchNode(ctx, node, patch, nil)
	}
	if err != nil {
		return fmt.Errorf("annotate Node %s: %w", node, err)
	}
	return nil
}

// TryWrite shows whether the node may write its Node. It sends the API server a patch without
// changes, as a dry run. If there is no Node, it sends a dry run that creates the Node: API servers
// answer 404 to a patch before policies see it. The error is a *StatusError if the API server
// refuses the write.
func (a Access) TryWrite(ctx context.Context, node string) error {
	dryRun := url.Values{"dryRun": {"All"}}
	err := a.patchNode(ctx, node, []byte("{}"), dryRun)
	if answer := (*StatusError)(nil); !errors.As(err, &answer) || answer.Status != http.StatusNotFound {
		return err
	}
	object, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": node}})
	if err != nil {
		return err
	}
	status, body, err := a.call(ctx, http.MethodPost, "/api/v1/nodes", dryRun, string(object), maxRefusal)
	if err == nil && status != http.StatusCreated {
		err = refusal(status, body)
	}
	return err
}

// patchNode applies a merge patch (RFC 7386) to the Node.
func (a Access) patchNode(ctx context.Context, node string, patch []byte, query url.Values) error {
	path := "/api/v1/nodes/" + url.PathEscape(node)
	status, body, err := a.call(ctx, http.MethodPatch, path, query, string(patch), maxRefusal)
	if err == nil && status != http.StatusOK {
		err = refusal(status, body)
	}
	return err
}

// maxRefusal bounds the bytes that are read of an answer to a write. The start of a longer answer
// is of no use: it is not parsed.
const maxRefusal = 64 << 10

// refusal returns the API server's message, if body is a metav1.Status.
func refusal(status int, body []byte) error {
	var answer struct {
		Message string `json:"message"`
	}
	_ = json.Unmarshal(body, &answer) // a proxy may have answered
	return &StatusError{status, text.Line(answer.Message, 512)}
}

// call makes one request, once. It reads at most limit bytes of the answer, and drops the rest.
func (a Access) call(ctx context.Context, method, path string, query url.Values, body string, limit int64) (status int, answer []byte, err error) {
	client, err := csr.HTTPClient(a.Config)
	if err != nil {
		return 0, nil, err
	}
	target, err := url.JoinPath(a.Config.Host, path)
	if err != nil {
		return 0, nil, err
	}
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	request, err := http.NewRequestWithContext(ctx, method, target, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	switch method {
	case http.MethodPatch:
		request.Header.Set("Content-Type", "application/merge-patch+json")
	case http.MethodPost:
		request.Header.Set("Content-Type", "application/json")
	}
	request.Header.Set("Accept", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	answer, err = io.ReadAll(io.LimitReader(response.Body, limit))
	return response.StatusCode, answer, err
}
