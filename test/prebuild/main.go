// SPDX-License-Identifier: Apache-2.0

// prebuild compiles what the demo or the tests run, so that neither begins with minutes of silence.
// It says at which step it is. What is compiled already costs a second a step.
//
//	go run ./prebuild demo|test|test-all
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "prebuild:", err)
		stop()
		os.Exit(1)
	}
}

// step compiles one thing.
type step struct {
	what    string
	compile func(context.Context) error
}

func run(ctx context.Context, args []string) error {
	dir, err := os.MkdirTemp("", "prebuild-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program := func(name string) step {
		return step{name, func(ctx context.Context) error {
			return compile.Program(ctx, "..", filepath.Join(dir, name), "./cmd/"+name)
		}}
	}
	steps := []step{
		program("kubelet-authenticator"), program("node-attestation-controller"), program("kubectl-attest"),
		{"etcd, kube-apiserver, kube-controller-manager, kubectl", func(ctx context.Context) error {
			_, err := compile.ControlPlane(ctx, os.Stderr)
			return err
		}},
	}
	kubelet := step{"kubelet", func(ctx context.Context) error {
		_, err := compile.Kubelet(ctx, os.Stderr)
		return err
	}}
	switch {
	case len(args) == 1 && args[0] == "demo":
		steps = append(steps, step{"the demo", func(ctx context.Context) error {
			return compile.Program(ctx, ".", filepath.Join("..", "bin", "demo"), "./demo")
		}})
	case len(args) == 1 && args[0] == "test":
		steps = append(steps, kubelet)
	case len(args) == 1 && args[0] == "test-all":
		steps = append(steps, kubelet, step{"kubeadm", func(ctx context.Context) error {
			_, err := compile.Kubeadm(ctx, os.Stderr)
			return err
		}}, step{"clusterctl", func(ctx context.Context) error {
			_, err := compile.Clusterctl(ctx, os.Stderr)
			return err
		}}, step{"Cluster API's managers", func(ctx context.Context) error {
			_, err := compile.ClusterAPI(ctx, os.Stderr)
			return err
		}})
	default:
		return errors.New("name what to compile for: demo, test or test-all")
	}
	began := time.Now()
	for i, s := range steps {
		fmt.Fprintf(os.Stderr, "step %d of %d, %3.0f s: %s\n", i+1, len(steps), time.Since(began).Seconds(), s.what)
		if err := s.compile(ctx); err != nil {
			return err
		}
	}
	fmt.Fprintf(os.Stderr, "all %d steps, %3.0f s\n", len(steps), time.Since(began).Seconds())
	return nil
}
