// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"
)

// kubeletAddresses counts the addresses that were given to kubelets.
var kubeletAddresses atomic.Int32

// Nothing in it reaches beyond the kubelet's own folder and address. Serving is open to all, for Metrics: nobody else is in its network.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %[1]s
healthzBindAddress: %[1]s
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://%[2]s/cri.sock
podLogsDir: %[2]s/logs
volumePluginDir: %[2]s/volume-plugins
resolvConf: ""
rotateCertificates: false
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
`

// KubeletOptions say what StartKubelet starts.
type KubeletOptions struct {
	// Components are those of BuildKubelet.
	Components KubeletComponents
	NodeName   string
	Kubeconfig []byte
	// Config is added to the kubelet's configuration file: fields in YAML that StartKubelet does not set.
	Config string
	// Args are added to the kubelet's; of a flag given twice the last one counts.
	Args []string
}

// Kubelet is a real kubelet with a container runtime that runs nothing. Its methods are for one goroutine at a time.
type Kubelet struct {
	options KubeletOptions
	dir     string
	address string
	runtime *Process
	kubelet *Process
}

// StartKubelet starts a kubelet, and does not wait until its node is registered. It works in a program that Isolate has started, and nowhere
// else: a kubelet changes the machine that it runs on.
func StartKubelet(ctx context.Context, options KubeletOptions) (_ *Kubelet, err error) {
	if !Isolated() {
		return nil, errors.New("start a kubelet: not in namespaces of its own, see Isolate")
	}
	k := &Kubelet{options: options}
	// Not the test's folder: the path of a socket has at most 107 bytes.
	if k.dir, err = os.MkdirTemp("/tmp", "kubelet-"); err != nil {
		return nil, fmt.Errorf("make the kubelet's folder: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.Remove())
		}
	}()
	if k.address, err = newKubeletAddress(); err != nil {
		return nil, err
	}
	for name, content := range map[string]string{
		"config.yaml": fmt.Sprintf(kubeletConfig, k.address, k.dir) + options.Config,
		"kubeconfig":  string(options.Kubeconfig),
	} {
		if err := os.WriteFile(k.path(name), []byte(content), 0o600); err != nil {
			return nil, fmt.Errorf("write the kubelet's %s: %w", name, err)
		}
	}
	if err := k.startRuntime(ctx); err != nil {
		return nil, err
	}
	return k, k.Start()
}

// newKubeletAddress returns an address for one kubelet. It is on the loopback device, and no loopback address: a node with one has none, as
// the kubelet sees it.
func newKubeletAddress() (string, error) {
	address := fmt.Sprintf("10.99.99.%d", kubeletAddresses.Add(1))
	return address, ip("address", "add", address+"/32", "dev", "lo")
}

func (k *Kubelet) path(name string) string { return filepath.Join(k.dir, name) }

func (k *Kubelet) startRuntime(ctx context.Context) (err error) {
	k.runtime, err = StartProcess(Command{Path: k.options.Components.FakeCRI, Args: []string{k.path("cri.sock")}, LogFile: k.path("fakecri.log")})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return pollWhile(ctx, k.runtime, "the container runtime", func(context.Context) error {
		_, err := os.Stat(k.path("cri.sock"))
		return err
	})
}

// Start starts the kubelet again after Stop or Kill.
func (k *Kubelet) Start() (err error) {
	if k.kubelet != nil && !k.kubelet.ended() {
		return errors.New("start the kubelet: it is running")
	}
	k.kubelet, err = StartProcess(Command{
		Path: k.options.Components.Kubelet,
		Args: append([]string{
			"--config=" + k.path("config.yaml"),
			"--kubeconfig=" + k.path("kubeconfig"),
			"--hostname-override=" + k.options.NodeName,
			"--node-ip=" + k.address,
			"--root-dir=" + k.path("root"),
			"--cert-dir=" + k.path("pki"),
			"--v=2",
		}, k.options.Args...),
		LogFile: k.LogFile(),
	})
	return err
}

// Stop ends the kubelet with SIGTERM, and waits. It is an error if it had ended by itself, or does not end in time.
func (k *Kubelet) Stop() error {
	if k.kubelet.ended() {
		return k.kubelet.Err()
	}
	return k.kubelet.Stop(defaultGrace)
}

// Kill ends the kubelet with SIGKILL, and waits.
func (k *Kubelet) Kill() error { return k.kubelet.Kill() }

// Remove ends everything and removes every trace. It is an error if kubelet or runtime had ended by themselves.
func (k *Kubelet) Remove() error {
	var errs []error
	for _, p := range []*Process{k.kubelet, k.runtime} {
		if p != nil {
			errs = append(errs, p.Kill())
		}
	}
	// The kubelet mounts its root folder onto itself, each time that it starts: EINVAL says that no mount is left.
	for {
		if err := syscall.Unmount(k.path("root"), syscall.MNT_DETACH); err != nil {
			if !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOENT) {
				errs = append(errs, fmt.Errorf("unmount the kubelet's root folder: %w", err))
			}
			break
		}
	}
	return errors.Join(append(errs, os.RemoveAll(k.dir))...)
}

// Address is the node's IP, on which the kubelet serves.
func (k *Kubelet) Address() string { return k.address }

// LogFile is the path of the kubelet's log, which goes on after Start.
func (k *Kubelet) LogFile() string { return k.path("kubelet.log") }

// LogTail is the end of the log, for the message of a failed test.
func (k *Kubelet) LogTail() string {
	if k.kubelet == nil {
		return "(no kubelet was started)"
	}
	return k.kubelet.LogTail()
}

// Metrics returns the kubelet's metrics in the text format.
func (k *Kubelet) Metrics(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+k.address+":10250/metrics", nil)
	if err != nil {
		return "", err
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // G402: it signs its serving certificate itself
	defer transport.CloseIdleConnections()
	answer, err := transport.RoundTrip(request)
	if err != nil {
		return "", fmt.Errorf("read the kubelet's metrics: %w", err)
	}
	body, err := io.ReadAll(answer.Body)
	if err := errors.Join(err, answer.Body.Close()); err != nil {
		return "", fmt.Errorf("read the kubelet's metrics: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return "", fmt.Errorf("read the kubelet's metrics: %s: %s", answer.Status, body)
	}
	return string(body), nil
}
