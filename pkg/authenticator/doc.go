// SPDX-License-Identifier: Apache-2.0

// Package authenticator gives the kubelet the client certificate of its node, and gets a new one if
// there is none or it is due.
//
// New makes an Authenticator from Options. Run answers one call of client-go: it prints the
// certificate on disk at once. client-go holds a lock meanwhile, and every request of the kubelet
// waits for that lock. A detached process calls Work, which gets the certificate. Read these files
// in order:
//
//	run.go          Run: load the status, wait for a worker if needed, print
//	nodestate       Node.Load: what the certificate directory holds, and whether it can be used
//	rejection.go    noticeRejection: if client-go calls again early, ask the API server whether it
//	                rejects the certificate
//	supervisor.go   start the worker, wait for it
//	worker.go       Work: one worker, from the lock to its result
//	enrolment.go    enrol: from a key to a decision on its requests
//	request.go      the requests: key, PKCS#10, evidence
//	conclude.go     check and install the certificate
//
// docs/architecture.md, "The steps", numbers them. Package nodestate judges when the certificate is
// due, and when the next worker may start. reason.go has each reason for a failure.
//
// The package never writes to a standard descriptor and never exits the process.
// pkg/authenticator/command does both, for a main function.
package authenticator
