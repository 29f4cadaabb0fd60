// SPDX-License-Identifier: Apache-2.0

// Package telemetry has what the controllers report by: metrics, a recorder that repeats no Event,
// conditions on a Namespace's status, and a handler of watch errors that names the missing right.
package telemetry

// Component is the name of the controllers in Events and metrics.
const Component = "node-attestation-controller"

const (
	// MaxMessage bounds an Event's note and a condition's message, in bytes: the API server takes
	// 1 KiB of a note.
	MaxMessage = 1024
	// MaxLogged bounds what is logged of one error, in bytes: others wrote some of it.
	MaxLogged = 2048
)

// Message returns a message that fits into an Event's note or a condition.
func Message(message string) string { return message[:min(len(message), MaxMessage)] }
