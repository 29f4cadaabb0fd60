// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
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
	answer, err := a.Call(ctx, http.MethodGet, path, nil, nil, maxConfigMap)
	switch {
	case err != nil:
		return nil, err
	case answer.Status == http.StatusNotFound, answer.Status == http.StatusForbidden:
		return nil, nil
	case answer.Status != http.StatusOK:
		return nil, refusal(answer)
	}
	var object struct {
		Kind string            `json:"kind"`
		Data map[string]string `json:"data"`
	}
	if json.Unmarshal(answer.Body, &object) != nil || object.Kind != "ConfigMap" {
		return nil, fmt.Errorf("the answer is not a ConfigMap of at most %d bytes", maxConfigMap)
	}
	announcement, err := attestation.ParseAnnouncement([]byte(object.Data[attestation.AnnouncementKey]))
	return &announcement, err
}

// Annotate sets an annotation of the Node. The NodeRestriction admission plugin lets a node do that
// to its own Node.
func (a Access) Annotate(ctx context.Context, node, key, value string) error {
	patch := map[string]any{"metadata": map[string]any{"annotations": map[string]string{key: value}}}
	if err := a.write(ctx, http.MethodPatch, nodePath(node), nil, patch, http.StatusOK); err != nil {
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
	err := a.write(ctx, http.MethodPatch, nodePath(node), dryRun, struct{}{}, http.StatusOK)
	if answer := (*StatusError)(nil); !errors.As(err, &answer) || answer.Status != http.StatusNotFound {
		return err
	}
	object := map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": node}}
	return a.write(ctx, http.MethodPost, "/api/v1/nodes", dryRun, object, http.StatusCreated)
}

func nodePath(node string) string { return "/api/v1/nodes/" + url.PathEscape(node) }

// maxRefusal bounds the bytes that are read of an answer to a write. The start of a longer answer
// is of no use: it is not parsed.
const maxRefusal = 64 << 10

// write makes a call that changes an object. Any other status than the wanted one is a
// *StatusError.
func (a Access) write(ctx context.Context, method, path string, query url.Values, body any, want int) error {
	answer, err := a.Call(ctx, method, path, query, body, maxRefusal)
	if err == nil && answer.Status != want {
		err = refusal(answer)
	}
	return err
}

func refusal(answer *Answer) error {
	return &StatusError{answer.Status, text.Line(answer.Message(), 512)}
}
