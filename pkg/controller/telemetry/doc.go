// SPDX-License-Identifier: Apache-2.0

// Package telemetry reports for the controllers. It has metrics, a recorder that repeats no Event,
// conditions on a Namespace's status, and a handler of watch errors that names the missing right.
package telemetry

import "github.com/kubelet-authenticator/kubelet-authenticator/internal/text"

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

// Message makes a message safe to show, and as short as an Event's note or a condition may be.
// Parts of the message may come from a peer.
func Message(message string) string { return text.Line(message, MaxMessage-len(" ...")) }
