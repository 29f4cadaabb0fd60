// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

// copyMark begins each copy of a bootstrap kubeconfig that Prepare makes. A file of an operator
// does not begin with it.
const copyMark = "# Copied by kubelet-authenticator prepare.\n"

// IsCopy reports whether a bootstrap.kubeconfig is the copy that Prepare made.
func IsCopy(data []byte) bool { return bytes.HasPrefix(data, []byte(copyMark)) }

// Fingerprint identifies a copy without revealing its credential.
func Fingerprint(copied []byte) string {
	sum := sha256.Sum256(copied)
	return hex.EncodeToString(sum[:])
}

// copyOf returns the copy of a bootstrap kubeconfig: its current context alone, with the CA in it
// and absolute paths. An exec user is refused, since the copy would start this program for ever.
func copyOf(k Kubeconfig) ([]byte, error) {
	switch {
	case k.Problem != nil:
		return nil, k.Problem
	case k.ClusterProblem != nil:
		return nil, k.ClusterProblem
	case !k.hasCredential():
		return nil, fmt.Errorf("%s: %s, and a credential that can be copied is a token or a client certificate", k.Path, k.Kind)
	}
	data, err := write("kubernetes", "bootstrap", k.Cluster, k.user)
	return append([]byte(copyMark), data...), err
}
