// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// kubeletAddresses counts the addresses that were given to kubelets.
var kubeletAddresses atomic.Int32

// The configuration uses only the kubelet's own folder and address. Serving needs no
// authentication, for Metrics: the network has no other users.
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
	// Components are those of compile.Kubelet.
	Components compile.KubeletComponents
	NodeName   string
	Kubeconfig []byte
	// Config is added to the kubelet's configuration file: fields in YAML that StartKubelet does
	// not set.
	Config string
	// Args are added to the kubelet's; of a flag given twice the last one counts.
	Args []string
	// IPv6 gives the node an IPv6 address. IPv4 goes with it unless IPv6Only is set.
	IPv6, IPv6Only bool
}

// Kubelet is a real kubelet with a container runtime that runs nothing. Its methods are for one
// goroutine at a time.
type Kubelet struct {
	options KubeletOptions
	dir     string
	// addresses are the node's IPs; on the last one the kubelet serves.
	addresses []string
	runtime   *Process
	kubelet   *Process
}

// StartKubelet starts a kubelet, and does not wait until its node is registered. It works only in a
// program that Isolate has started, since a kubelet changes the machine that it runs on.
func StartKubelet(ctx context.Context, options KubeletOptions) (_ *Kubelet, err error) {
	if !Isolated() {
		return nil, errors.New("start a kubelet: not in namespaces of its own, see Isolate")
	}
	k := &Kubelet{options: options}
	// The test's folder would be too long: the path of a socket has at most 107 bytes.
	if k.dir, err = os.MkdirTemp("/tmp", "kubelet-"); err != nil {
		return nil, fmt.Errorf("make the kubelet's folder: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.Remove())
		}
	}()
	if k.addresses, err = newKubeletAddresses(options); err != nil {
		return nil, err
	}
	for name, content := range map[string]string{
		"config.yaml": fmt.Sprintf(kubeletConfig, strconv.Quote(k.Address()), k.dir) + options.Config,
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

// newKubeletAddresses returns the addresses of one kubelet. They are on the loopback device, but
// they are not loopback addresses: the kubelet ignores those.
func newKubeletAddresses(options KubeletOptions) (addresses []string, err error) {
	n := kubeletAddresses.Add(1)
	if !options.IPv6Only {
		addresses = append(addresses, fmt.Sprintf("10.99.99.%d", n))
	}
	if options.IPv6 || options.IPv6Only {
		addresses = append(addresses, fmt.Sprintf("fd00:99:99::%x", n))
	}
	for _, address := range addresses {
		bits := "/32"
		if strings.Contains(address, ":") {
			bits = "/128"
		}
		if err := ip("address", "add", address+bits, "dev", "lo"); err != nil {
			return nil, err
		}
	}
	return addresses, nil
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
			"--node-ip=" + strings.Join(k.addresses, ","),
			"--root-dir=" + k.path("root"),
			"--cert-dir=" + k.path("pki"),
			"--v=2",
		}, k.options.Args...),
		LogFile: k.LogFile(),
	})
	return err
}

// Stop ends the kubelet with SIGTERM, and waits. It is an error if the kubelet had already ended,
// or does not end in time.
func (k *Kubelet) Stop() error {
	if k.kubelet.ended() {
		return k.kubelet.Err()
	}
	return k.kubelet.Stop(defaultGrace)
}

// Kill ends the kubelet with SIGKILL, and waits.
func (k *Kubelet) Kill() error { return k.kubelet.Kill() }

// Remove ends everything and removes every trace. It is an error if kubelet or runtime had already
// ended.
func (k *Kubelet) Remove() error {
	var errs []error
	for _, p := range []*Process{k.kubelet, k.runtime} {
		if p != nil {
			errs = append(errs, p.Kill())
		}
	}
	// The kubelet mounts its root folder onto itself, each time that it starts: EINVAL says that no
	// mount is left.
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

// Address is the node's IP on which the kubelet serves: the IPv6 one if it has two.
func (k *Kubelet) Address() string { return k.addresses[len(k.addresses)-1] }

// Addresses are all IPs of the node.
func (k *Kubelet) Addresses() []string { return k.addresses }

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
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+net.JoinHostPort(k.Address(), "10250")+"/metrics", nil)
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

var callMetric = regexp.MustCompile(`(?m)^rest_client_exec_plugin_call_total\{call_status="([^"]*)",code="[^"]*"\} (\d+)$`)

// PluginCalls returns how often the kubelet has called its plugin since it was started, and how
// many calls failed.
func (k *Kubelet) PluginCalls(ctx context.Context) (total, failed int, err error) {
	metrics, err := k.Metrics(ctx)
	if err != nil {
		return 0, 0, err
	}
	for _, match := range callMetric.FindAllStringSubmatch(metrics, -1) {
		n, err := strconv.Atoi(match[2])
		if err != nil {
			return 0, 0, fmt.Errorf("read the kubelet's metrics: %w", err)
		}
		total += n
		if match[1] != "no_error" {
			failed += n
		}
	}
	return total, failed, nil
}
