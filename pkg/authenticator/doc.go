// SPDX-License-Identifier: Apache-2.0

// Package authenticator gives the kubelet the client certificate of its node, and gets a new one if
// there is none or it is due.
//
// New makes an Authenticator from Options. Run answers one call of client-go: it returns the
// certificate on disk at once. client-go holds a lock meanwhile, and every request of the kubelet
// waits for that lock. A detached process calls Work, which gets the certificate. Read in this
// order:
//
//	run.go             Run: load the status, wait for a worker if needed, respond
//	nodestate          Node.Load: what the node's files hold, and when a certificate is due
//	rejection.go       noticeRejection: if client-go calls again early, ask the API server whether
//	                   it rejects the certificate
//	supervisor.go      start the worker, wait for it
//	execcredential.go  the printed credential
//	enrol              Enroller.Work: one worker, from the lock to an installed certificate
//
// docs/architecture.md, "The steps", numbers them. Imports run one way: this package uses enrol,
// nodestatus (for the command status), nodestate and reason (why there is no certificate), and each
// of these uses only those after it.
//
// The package never writes to a standard descriptor and never exits the process.
// pkg/authenticator/command does both, for a main function.
package authenticator
