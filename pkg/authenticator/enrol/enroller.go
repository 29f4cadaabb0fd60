// SPDX-License-Identifier: Apache-2.0

// Package enrol gets certificates for a node. Enroller.Work is the whole life of a worker, which is
// a process that the plugin starts. Read these files in order:
//
//	worker.go        Work: one worker, from the lock to its result
//	announcement.go  check whether the cluster announced renewals
//	enrolment.go     enrol: from a key to a decision on its requests
//	request.go       the requests: key, PKCS#10, evidence
//	conclude.go      check and install the certificate
//	backoff.go       when the next worker may start
//
// Rehearse and DryRun build the same requests and write nothing.
package enrol

import (
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Enroller gets the certificates of a node.
type Enroller struct {
	// Node has the certificate directory, the clock, and what selects the credential.
	Node *nodestate.Node
	// Provider is nil if the settings are invalid.
	Provider provider.Provider
	// ProviderID is the machine's, as given, else empty.
	ProviderID string
	// SignerName is the signer to request from.
	SignerName string
	// ExpirationSeconds is the lifetime to request. nil leaves it to the signer.
	ExpirationSeconds *int32
	// KeepBootstrap keeps the copy of the bootstrap kubeconfig.
	KeepBootstrap bool
	// MetricsTextfile is the file for metrics, "" for none.
	MetricsTextfile string
	// Deadline is the longest life of one worker.
	Deadline time.Duration
	// ReviewTimeout bounds a question to the API server about a certificate.
	ReviewTimeout time.Duration
	// Built is the time of the commit that the program was built from. A clock before that time is
	// wrong. The zero time means unknown.
	Built time.Time
	// Step is called before each step.
	Step func(Step)
}

// Step names a step of a run or a worker.
type Step string

// The steps of a worker.
const (
	StepLock      Step = "lock"
	StepTidy      Step = "tidy"
	StepPrepare   Step = "prepare"
	StepSave      Step = "save"
	StepFile      Step = "file"
	StepSaveUID   Step = "note"
	StepChallenge Step = "challenge"
	StepProve     Step = "prove"
	StepWait      Step = "wait"
	StepCheck     Step = "check"
	StepInstall   Step = "install"
	stepRecord    Step = "record"
	stepForget    Step = "forget"

	// These two precede StepPrepare. They run only when a check for announced renewals is due.
	StepAnnouncement Step = "announcement"
	StepReport       Step = "report"
)

// Steps lists the steps of a worker, in their order.
func Steps() []Step {
	return []Step{
		StepLock, StepTidy, StepAnnouncement, StepReport, StepPrepare, StepSave, StepFile, StepSaveUID, StepChallenge, StepProve, StepWait, StepCheck, StepInstall, stepRecord, stepForget,
	}
}
