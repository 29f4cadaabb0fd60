// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// StopEtcd ends etcd as a crash does. The API servers go on without it. A second call does nothing.
func (cp *ControlPlane) StopEtcd() error {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if cp.etcd == nil {
		return errors.New("stop etcd: it is another control plane's")
	}
	return cp.etcd.Kill()
}

// StartEtcd starts it again with its data, and returns when it answers.
func (cp *ControlPlane) StartEtcd(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if cp.stopped || cp.etcd == nil || !cp.etcd.ended() {
		return errors.New("start etcd: it is running, or the control plane is stopped")
	}
	return cp.runEtcd(ctx)
}

// CompactEtcd removes all revisions before the present one, and gives the space back. It returns
// that revision.
func (cp *ControlPlane) CompactEtcd(ctx context.Context) (revision string, err error) {
	status := struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}{}
	if err := cp.askEtcd(ctx, "/v3/maintenance/status", "{}", &status); err != nil {
		return "", err
	}
	revision = status.Header.Revision
	if err := cp.askEtcd(ctx, "/v3/kv/compaction", `{"revision":"`+revision+`","physical":true}`, nil); err != nil {
		return "", err
	}
	return revision, cp.askEtcd(ctx, "/v3/maintenance/defragment", "{}", nil)
}

// askEtcd calls a method of etcd's gRPC gateway.
func (cp *ControlPlane) askEtcd(ctx context.Context, path, body string, answer any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, cp.etcdURL+path, bytes.NewBufferString(body))
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	content, err := io.ReadAll(io.LimitReader(response.Body, logTailBytes))
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s of etcd: %s: %s", path, response.Status, content)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(content, answer)
}
