// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

const auditLog = "audit.log"

// The audit policy logs only the product's requests.
const defaultAuditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  resources:
  - group: certificates.k8s.io
    resources: [certificatesigningrequests, "certificatesigningrequests/*"]
  - group: authentication.k8s.io
    resources: [selfsubjectreviews]
- level: None
`

// Stages of a request in the audit log. A watch has both: it is started when it
// is accepted, and complete when it has ended.
const (
	StageResponseStarted  = "ResponseStarted"
	StageResponseComplete = "ResponseComplete"
)

// AuditEvent is one line of the API server's audit log.
type AuditEvent struct {
	ID          string
	Stage       string
	Verb        string
	Resource    string
	Subresource string
	Name        string
	User        string // empty if the request was not authenticated
	Groups      []string
	// ImpersonatedUser is whom the user acted as, empty if as itself.
	ImpersonatedUser string
	UserAgent        string
	RequestURI       string
	Code             int
	Time             time.Time
}

// AuditMark is a point in the audit log. The zero value is its beginning.
type AuditMark int64

// Audit returns all events: requests about CertificateSigningRequests, and
// SelfSubjectReviews ("whoami"), by anybody.
func (cp *ControlPlane) Audit() ([]AuditEvent, error) { return cp.AuditSince(0) }

// AuditMark marks the present end of the audit log.
func (cp *ControlPlane) AuditMark() (AuditMark, error) {
	info, err := os.Stat(cp.path(auditLog))
	if errors.Is(err, os.ErrNotExist) { // nothing has been logged yet
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look at the audit log: %w", err)
	}
	return AuditMark(info.Size()), nil
}

// AuditSince returns the events after a mark. A request that has been answered
// is in the log, or will be in a moment: see AwaitAudit.
func (cp *ControlPlane) AuditSince(mark AuditMark) ([]AuditEvent, error) {
	file, err := os.Open(cp.path(auditLog))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	defer func() { _ = file.Close() }() // only read
	if _, err := file.Seek(int64(mark), io.SeekStart); err != nil {
		return nil, fmt.Errorf("go to the mark in the audit log: %w", err)
	}
	data, err := io.ReadAll(file)
	if err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	// A line without its end is being written.
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	var events []AuditEvent
	for line := range bytes.Lines(data) {
		event, err := parseAuditEvent(line)
		if err != nil {
			return nil, err
		}
		events = append(events, event)
	}
	return events, nil
}

// AwaitAudit waits until the events after a mark satisfy the condition, and
// returns them.
func (cp *ControlPlane) AwaitAudit(ctx context.Context, mark AuditMark, enough func([]AuditEvent) bool) ([]AuditEvent, error) {
	ctx, cancel := context.WithTimeout(ctx, effectTimeout)
	defer cancel()
	var events []AuditEvent
	err := poll(ctx, "audit events", func(context.Context) error {
		var err error
		if events, err = cp.AuditSince(mark); err != nil {
			return err
		}
		if !enough(events) {
			return fmt.Errorf("%d events, not yet those wanted", len(events))
		}
		return nil
	})
	return events, err
}

func parseAuditEvent(line []byte) (AuditEvent, error) {
	var raw struct {
		AuditID    string `json:"auditID"`
		Stage      string `json:"stage"`
		RequestURI string `json:"requestURI"`
		Verb       string `json:"verb"`
		User       struct {
			Username string   `json:"username"`
			Groups   []string `json:"groups"`
		} `json:"user"`
		ImpersonatedUser struct {
			Username string `json:"username"`
		} `json:"impersonatedUser"`
		UserAgent string `json:"userAgent"`
		ObjectRef struct {
			Resource    string `json:"resource"`
			Subresource string `json:"subresource"`
			Name        string `json:"name"`
		} `json:"objectRef"`
		ResponseStatus struct {
			Code int `json:"code"`
		} `json:"responseStatus"`
		StageTimestamp time.Time `json:"stageTimestamp"`
	}
	if err := json.Unmarshal(line, &raw); err != nil {
		return AuditEvent{}, fmt.Errorf("parse a line of the audit log: %w", err)
	}
	return AuditEvent{
		ID:          raw.AuditID,
		Stage:       raw.Stage,
		Verb:        raw.Verb,
		Resource:    raw.ObjectRef.Resource,
		Subresource: raw.ObjectRef.Subresource,
		Name:        raw.ObjectRef.Name,
		User:        raw.User.Username,
		Groups:      raw.User.Groups,

		ImpersonatedUser: raw.ImpersonatedUser.Username,

		UserAgent:  raw.UserAgent,
		RequestURI: raw.RequestURI,
		Code:       raw.ResponseStatus.Code,
		Time:       raw.StageTimestamp,
	}, nil
}
