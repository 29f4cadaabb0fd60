// SPDX-License-Identifier: Apache-2.0

// fakecri is a container runtime that runs no containers: enough for a kubelet to be ready. Its
// argument is the socket to serve.
package main

import (
	"fmt"
	"os"

	"k8s.io/cri-client/pkg/fake"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: fakecri SOCKET")
		os.Exit(3)
	}
	if err := fake.NewFakeRemoteRuntime().Start("unix://" + os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "fakecri:", err)
		os.Exit(1)
	}
	select {} // until it is killed, with its parent
}
