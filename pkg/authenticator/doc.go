// SPDX-License-Identifier: Apache-2.0

// Package authenticator gives the kubelet the client certificate of its node, and gets a new one if
// there is none or it is due.
//
// New makes an Authenticator from Options. Run answers one call of client-go: it prints the
// certificate on disk at once, because client-go holds a lock meanwhile that every request of the
// kubelet waits for. A detached process calls Work, which gets the certificate. A certificate's way
// goes through these files:
//
//	run.go          Run: load the status, wait for a worker if needed, print
//	status.go       loadStatus: what the certificate directory holds, and whether it will do
//	rejection.go    noticeRejection: ask the API server after a 401
//	supervisor.go   start the worker, wait for it
//	worker.go       Work: one worker, from the lock to its result
//	enrolment.go    enrol: from a key to a decision on its requests
//	request.go      the requests: key, PKCS#10, evidence
//	conclude.go     check and install the certificate
//
// README.md, "What the plugin does", numbers the steps. reason.go has each reason for a failure.
//
// The package writes to no standard descriptor and never exits. pkg/authenticator/command does, for
// a main.
package authenticator
