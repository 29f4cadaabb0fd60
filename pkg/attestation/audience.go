// SPDX-License-Identifier: Apache-2.0

package attestation

// audiencePrefix begins each audience of ours. Other services choose audiences for their tokens,
// too, and some choose a random one for each token. A machine that asks for such a token never
// makes evidence of ours, and our tokens are of no use to other services.
const audiencePrefix = "https://kubelet-authenticator/"

// Audience returns the nonce for platforms that sign no nonce, but an audience of the caller's
// choice (RFC 7519, section 4.1.3): a URI that ends with Hex. It is compared, never resolved.
func (b Binding) Audience() string { return audiencePrefix + b.Hex() }
