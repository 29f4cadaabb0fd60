// SPDX-License-Identifier: Apache-2.0

// Package docs has the pages that programs show.
package docs

import _ "embed"

// Reasons is reasons.md: what each reason of the controller means, and what to do.
//
//go:embed reasons.md
var Reasons string
