// SPDX-License-Identifier: Apache-2.0

// Package controllerprocess runs the shipped binary of node-attestation-controller. It uses its
// service account's credential and a configuration file, in a cluster with the manifests of
// packaging/kubernetes. Tests that want to look into it, or to have its writes fail, run the
// library instead.
//
//	controllerprocess.Build(ctx, module, binary)
//	controllerprocess.Install(ctx, cp, module)
//	o := controllerprocess.Options{ControlPlane: cp, Dir: dir, Binary: binary}
//	c, err := controllerprocess.New(o)
//	c.Start(ctx)
//	c.Ready(ctx)
//	controllerprocess.SetInventory(ctx, cp, machines)
//	c.Stop()
package controllerprocess

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	pollInterval = 25 * time.Millisecond
	readyTimeout = 30 * time.Second
	// stopTimeout is more than what the controller gives to what is under way (20 s).
	stopTimeout = 25 * time.Second
	maxAnswer   = 1 << 20
)

// Build builds the binary of the module in a folder as it is shipped.
func Build(ctx context.Context, module, output string) error {
	return compile.Program(ctx, module, output, "./cmd/node-attestation-controller")
}

// Options say what to run.
type Options struct {
	// ControlPlane has been given to Install.
	ControlPlane *testbed.ControlPlane
	// Dir takes the process's files: configuration, kubeconfig, log. It exists, and is no other
	// process's.
	Dir string
	// Binary is what Build built.
	Binary string
	// Kubeconfig is whom the process acts as; nil is a new token of its service account with each
	// Start.
	Kubeconfig []byte
	// Configure changes the configuration before it is written: see New for what it is without
	// that.
	Configure func(*config.Config)
	// Edit changes what is about to be written, by the names of fields: after Configure, and
	// without what is the default.
	Edit func(map[string]any)
	// Args are added to the command line, such as -v=2.
	Args []string
	// Env is added to the environment.
	Env []string
	// Memory limits the process's memory. Optional.
	Memory *testbed.MemoryGroup
}

// Controller is a controller that can be started, ended, and started again. Its methods are for one
// goroutine at a time.
type Controller struct {
	options         Options
	health, metrics *testbed.Port // also while no process runs
	process         *testbed.Process
}

// New writes the configuration file. It has mode Sign with the Secret and the ConfigMap of Install,
// PCRs 0 to 7 in SHA-256, and leader election. The addresses are on loopback, and stay reserved
// while the process is stopped.
func New(options Options) (*Controller, error) {
	c := &Controller{options: options}
	var err error
	if c.health, err = testbed.TakePort(); err != nil {
		return nil, err
	}
	if c.metrics, err = testbed.TakePort(); err != nil {
		return nil, err
	}
	settings := config.Default()
	settings.TypeMeta = metav1.TypeMeta{APIVersion: config.APIVersion, Kind: config.Kind}
	settings.ClusterUID = ClusterUID
	settings.Signing = config.Signing{Mode: config.Sign, SecretName: CASecret}
	settings.Inventory.ConfigMap = &config.InventoryConfigMap{Name: Inventory, Key: InventoryKey}
	settings.TPM = &config.TPM{PCRs: config.PCRs{Bank: "sha256", Indexes: []int{0, 1, 2, 3, 4, 5, 6, 7}}}
	settings.HealthBindAddress, settings.MetricsBindAddress = c.health.Addr(), c.metrics.Addr()
	if options.Configure != nil {
		options.Configure(&settings)
	}
	fields, err := minimal(settings)
	if err != nil {
		return nil, err
	}
	if options.Edit != nil {
		options.Edit(fields)
	}
	content, err := yaml.Marshal(fields)
	if err != nil {
		return nil, err
	}
	return c, os.WriteFile(c.ConfigFile(), content, 0o600)
}

// minimal is the file as a person would write it: without what is the default.
func minimal(settings config.Config) (map[string]any, error) {
	var given, byDefault map[string]any
	for _, c := range []struct {
		from config.Config
		to   *map[string]any
	}{{settings, &given}, {config.Default(), &byDefault}} {
		content, err := yaml.Marshal(c.from)
		if err != nil {
			return nil, err
		}
		if err := yaml.Unmarshal(content, c.to); err != nil {
			return nil, err
		}
	}
	for field, value := range byDefault {
		if reflect.DeepEqual(given[field], value) {
			delete(given, field)
		}
	}
	return given, nil
}

// ConfigFile is the path of the configuration file.
func (c *Controller) ConfigFile() string { return filepath.Join(c.options.Dir, "config.yaml") }

// KubeconfigFile is the path of the credential.
func (c *Controller) KubeconfigFile() string { return filepath.Join(c.options.Dir, "kubeconfig") }

// LogFile is the path of what the process prints. It is appended to from one start to the next.
func (c *Controller) LogFile() string { return filepath.Join(c.options.Dir, "controller.log") }

// MetricsURL is where the process serves its metrics.
func (c *Controller) MetricsURL() string { return "http://" + c.metrics.Addr() + "/metrics" }

// ReadyURL is where it says whether it is ready.
func (c *Controller) ReadyURL() string { return "http://" + c.health.Addr() + "/readyz" }

// Process is the one that was started last, nil before the first.
func (c *Controller) Process() *testbed.Process { return c.process }

// LogTail is the end of the log, for the message of a failure.
func (c *Controller) LogTail() string {
	if c.process == nil {
		return "(the controller was not started)"
	}
	return c.process.LogTail()
}

// Start starts the process and does not wait for anything; see Ready.
func (c *Controller) Start(ctx context.Context) error {
	if c.running() {
		return errors.New("start the controller: it is running")
	}
	credential := c.options.Kubeconfig
	if credential == nil {
		var err error
		if credential, err = Kubeconfig(ctx, c.options.ControlPlane); err != nil {
			return err
		}
	}
	if err := os.WriteFile(c.KubeconfigFile(), credential, 0o600); err != nil {
		return err
	}
	command := testbed.Command{
		Path:    c.options.Binary,
		Args:    append([]string{"--config=" + c.ConfigFile(), "--kubeconfig=" + c.KubeconfigFile()}, c.options.Args...),
		Env:     c.options.Env,
		LogFile: c.LogFile(),
	}
	if c.options.Memory != nil {
		command = c.options.Memory.Within(command)
	}
	process, err := testbed.StartProcess(command)
	if err != nil {
		return err
	}
	c.process = process
	return nil
}

func (c *Controller) running() bool {
	if c.process == nil {
		return false
	}
	select {
	case <-c.process.Done():
		return false
	default:
		return true
	}
}

// Ready waits until /readyz is good: the replica could decide, whether it leads or stands by. Its
// error has what is missing, or how the process has ended, and the end of the log.
func (c *Controller) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		if !c.running() {
			return errors.Join(errors.New("the controller is not running"), c.failure())
		}
		_, err := get(ctx, c.ReadyURL())
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until the controller is ready: %w (last: %w)\n%s", ctx.Err(), err, c.LogTail())
		case <-time.After(pollInterval):
		}
	}
}

// Metrics returns the metrics in the text format.
func (c *Controller) Metrics(ctx context.Context) (string, error) { return get(ctx, c.MetricsURL()) }

// Kill ends the process as a crash does, with SIGKILL, and waits. Where it does not run, the error
// is how it ended.
func (c *Controller) Kill() error {
	if c.process == nil {
		return nil
	}
	return c.process.Kill()
}

// Stop ends the process as a pod is ended, with SIGTERM, and waits. The error says that it did not
// exit with 0, or not in time, or that it had ended before. It is nil if the process was never
// started, or was ended by Stop or Kill.
func (c *Controller) Stop() error {
	if !c.running() {
		return c.failure()
	}
	if err := c.process.Signal(syscall.SIGTERM); err != nil {
		return errors.Join(err, c.failure())
	}
	select {
	case <-c.process.Done():
		return c.failure()
	case <-time.After(stopTimeout):
		tail := c.LogTail()
		return errors.Join(fmt.Errorf("the controller still runs %s after SIGTERM\n%s", stopTimeout, tail), c.process.Kill())
	}
}

// failure is how the process ended by itself, nil if it runs, exited with 0, or was killed by Kill.
func (c *Controller) failure() error {
	if c.process == nil {
		return nil
	}
	return c.process.Err()
}

// get returns what a URL answers with 200, and in the error what it answers else.
func get(ctx context.Context, url string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err := errors.Join(err, answer.Body.Close()); err != nil {
		return "", err
	}
	if answer.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s: %s", url, answer.Status, body)
	}
	return string(body), nil
}
