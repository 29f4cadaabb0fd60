// SPDX-License-Identifier: Apache-2.0

// profiled is node-attestation-controller, but for Cluster API, with net/http/pprof beside it,
// which the one that is shipped does not serve.
package main

import (
	"fmt"
	"net"
	"net/http"
	_ "net/http/pprof" //nolint:gosec // G108: serving it, on loopback, is what this program is for
	"os"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
)

func main() {
	listener, err := net.Listen("tcp", os.Getenv("SCALE_PROFILE_ADDRESS"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "profiled:", err)
		os.Exit(1)
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }() // it ends with the process
	os.Exit(command.Program{Version: "profiled", Commit: "unknown"}.Main())
}
