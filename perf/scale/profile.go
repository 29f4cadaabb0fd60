// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// profileAddress is the variable that tells package profiled where to listen.
	profileAddress = "SCALE_PROFILE_ADDRESS"
	// profiledFor is how many seconds a profile has.
	profiledFor = 8
)

// chooseProfileAddress has the controllers that are started from now on serve profiles. One can run
// at a time.
func (b *bench) chooseProfileAddress() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	b.profileAddress = listener.Addr().String()
	return errors.Join(listener.Close(), os.Setenv(profileAddress, b.profileAddress), os.MkdirAll(b.profiles, 0o750))
}

// profile writes profiles of the controller and of the API server, from now on, where some are
// wanted. The function that it returns waits for them.
func (b *bench) profile(ctx context.Context, cp *testbed.ControlPlane, name string, ours bool) (wait func() error) {
	if b.profiles == "" {
		return func() error { return nil }
	}
	path := fmt.Sprintf("/debug/pprof/profile?seconds=%d", profiledFor)
	sources := map[string]func() ([]byte, error){
		"kube-apiserver": func() ([]byte, error) {
			return cp.Client().CoreV1().RESTClient().Get().RequestURI(path).DoRaw(ctx)
		},
	}
	if ours {
		sources["node-attestation-controller"] = func() ([]byte, error) { return fetch(ctx, "http://"+b.profileAddress+path) }
	}
	results := make(chan error)
	for of, read := range sources {
		go func() {
			content, err := read()
			if err == nil {
				file := strings.NewReplacer(", ", "-", " ", "-").Replace(name) + "." + of + ".pprof"
				err = os.WriteFile(filepath.Join(b.profiles, file), content, 0o600)
			}
			results <- err
		}()
	}
	return func() (err error) {
		for range sources {
			err = errors.Join(err, <-results)
		}
		return err
	}
}

func fetch(ctx context.Context, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	client := &http.Client{Timeout: profiledFor*time.Second + time.Minute}
	answer, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	content, err := io.ReadAll(answer.Body)
	if err := errors.Join(err, answer.Body.Close()); err != nil {
		return nil, err
	}
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, answer.Status)
	}
	return content, nil
}
