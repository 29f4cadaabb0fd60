// SPDX-License-Identifier: Apache-2.0

// Package telemetry reports for the controllers. It has metrics, a recorder that repeats no Event,
// conditions on a Namespace's status, and a handler of watch errors that names the missing right.
package telemetry

// Component is the name of the controllers in Events and metrics.
const Component = "node-attestation-controller"

const (
	// MaxMessage bounds an Event's note and a condition's message, in bytes. The API server accepts
	// a note of 1 KiB.
	MaxMessage = 1024
	// MaxLogged bounds the logged text of one error, in bytes, since parts of it may come from
	// others.
	MaxLogged = 2048
)

// Message cuts a message to the length of an Event's note or a condition.
func Message(message string) string { return message[:min(len(message), MaxMessage)] }
