// SPDX-License-Identifier: Apache-2.0

// Package enrol gets certificates for a node. Enroller.Work is the whole life of a worker, which is
// a process that the plugin starts. Read these files in order:
//
//	worker.go        Work: one worker, from the lock to its result
//	choose.go        the provider, where the operator left the choice to the program
//	announcement.go  check whether the cluster announced renewals
//	enrolment.go     enrol: from a key to a decision on its requests
//	request.go       the requests: key, PKCS#10, evidence
//	waiting.go       wait for the decision
//	conclude.go      check and install the certificate
//	bootstrap.go     delete the bootstrap kubeconfig
//	backoff.go       when the next worker may start
//
// Rehearse and DryRun build the same requests and write nothing.
package enrol

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Enroller gets the certificates of a node.
type Enroller struct {
	// Node has the certificate directory, the clock, and what selects the credential.
	Node *nodestate.Node
	// Provider is nil if the settings are invalid.
	Provider provider.Provider
	// Choose replaces Provider and SignerName before a request is made. It is nil if the provider
	// is known: the operator named it, or the node has enrolled with it.
	Choose func(context.Context) (Chosen, error)
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

// worker is the state of one call of Work. It holds the lock.
type worker struct {
	enroller  *Enroller
	lock      *cache.Lock
	log       klog.Logger
	result    cache.Result
	stepBegan time.Time
	// servedUntil is the end of the certificate that runs print meanwhile, zero if there is none.
	servedUntil time.Time
	// canWait says that this certificate is due for its age, and for no other reason.
	canWait bool
	// installed is the certificate that this worker got. replaced is the previous one, nil if there
	// was none. spent says that the pending request is of no use any more, as after its decision.
	installed, replaced *cache.Pair
	spent               bool
	// onlyChecked says that this worker only checked for announced renewals.
	onlyChecked bool
	// version is the version of the provider's documents to write, "" for the newest. tried are the
	// versions that the controller does not serve.
	version attestation.Version
	tried   []attestation.Version
}

// enter begins a step and ends the previous one.
func (w *worker) enter(step Step) {
	now := time.Now()
	if n := len(w.result.Phases); n > 0 {
		w.result.Phases[n-1].Milliseconds = float64(now.Sub(w.stepBegan).Microseconds()) / 1000
	}
	w.result.Phases = append(w.result.Phases, cache.Phase{Name: string(step)})
	w.stepBegan = now
	w.log.V(1).Info("step", "name", step)
	w.enroller.Step(step)
}

func (w *worker) setAside(name string, why error) error {
	aside, err := w.enroller.Node.Dir().SetAside(name, w.enroller.Node.Now())
	if err == nil {
		w.log.Info("set aside", "file", aside, "why", why.Error())
	}
	return err
}

// enrolment gets one certificate with one credential.
type enrolment struct {
	worker *worker
	status nodestate.Status
	to     nodeaccess.Access
	client *csr.Client
	// pending has the requests of the pending file. It is nil until resume or prepare.
	pending *cache.Pending
}
