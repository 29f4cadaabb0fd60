// SPDX-License-Identifier: Apache-2.0

//go:build simulator

// vcenter runs an imitation of vCenter for end-to-end tests. It writes ca.crt, user and password
// into the folder of its only argument, and prints its addresses in JSON: server for the
// controller, and control for the test. PUT and DELETE of control/<BIOS UUID> replace and remove a
// virtual machine, and POST adds one. GET of control says which calls were made since the last
// time. It ends when its standard input does.
package main

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/platforms/vsphere/internal/imitation"
)

const user, password = "attestation@vsphere.local", "correct horse"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return fmt.Errorf("usage: %s FOLDER", os.Args[0])
	}
	vcenter := imitation.New(user, password)
	server, control := httptest.NewTLSServer(vcenter), httptest.NewServer(controls(vcenter))
	defer server.Close()
	defer control.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	for name, content := range map[string]string{"ca.crt": string(ca), "user": user + "\n", "password": password + "\n"} {
		if err := os.WriteFile(filepath.Join(os.Args[1], name), []byte(content), 0o600); err != nil { //nolint:gosec // G703: the test names the folder
			return err
		}
	}
	addresses := map[string]string{"server": strings.TrimPrefix(server.URL, "https://"), "control": control.URL}
	if err := json.NewEncoder(os.Stdout).Encode(addresses); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// controls changes the virtual machines.
func controls(vcenter *imitation.VCenter) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(vcenter.Calls()) })
	mux.HandleFunc("/{uuid}", func(w http.ResponseWriter, r *http.Request) {
		m := imitation.Machine{}
		if r.Method != http.MethodDelete {
			if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
		}
		m.UUID = r.PathValue("uuid")
		if r.Method != http.MethodPost {
			vcenter.Remove(m.UUID)
		}
		if r.Method != http.MethodDelete {
			vcenter.Add(m)
		}
	})
	return mux
}
