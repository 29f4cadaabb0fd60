// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"
	"k8s.io/client-go/pkg/apis/clientauthentication/v1beta1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// enableRemedy says how the kubelet is made to start with the plugin as its credential.
func (e *examination) enableRemedy() string {
	if e.isUnconfigured() {
		return "write " + e.ConfigFile + ": see configuration"
	}
	return "enable the drop-in for kubelet.service (packaging/systemd), which sets --kubeconfig and --rotate-certificates=false alone; then: systemctl daemon-reload; systemctl restart kubelet"
}

// confPath returns the path of a kubelet's kubeconfig. For a kubelet without --kubeconfig it is the
// path in the configuration.
func (e *examination) confPath(k *kubeletProcess) string {
	if k.flags.Kubeconfig == "" {
		return e.Config.KubeletKubeconfig
	}
	return k.path(k.flags.Kubeconfig)
}

// readConf reads the kubeconfig of the first running kubelet, else the one that the configuration
// names.
func (e *examination) readConf() kubelet.Kubeconfig {
	path := e.Config.KubeletKubeconfig
	if all, err := e.running(); err == nil {
		path = e.confPath(all[0])
	}
	return kubelet.ReadKubeconfig(path, "")
}

// eachKubelet returns the worst result of the running kubelets. It is not OK if a kubelet could not
// be assessed.
func (e *examination) eachKubelet(assess func(*kubeletProcess) checkup.Result) checkup.Result {
	all, err := e.running()
	if err != nil {
		return skipped("no running kubelet")
	}
	var findings []checkup.Result
	var notAssessed *checkup.Result
	for _, k := range all {
		f := assess(k)
		if len(all) > 1 {
			f.Message = fmt.Sprintf("process %d: %s", k.pid, f.Message)
		}
		if f.Status == checkup.Skipped {
			notAssessed = &f
		}
		findings = append(findings, f)
	}
	if f := checkup.Worst(findings...); f.Status != checkup.OK || notAssessed == nil {
		return f
	}
	return *notAssessed
}

func checkKubelet(_ context.Context, e *examination) checkup.Result {
	all, err := e.running()
	switch {
	case errors.Is(err, errNoKubelet):
		return warning("systemctl status kubelet", "no kubelet runs: the checks below read only its files")
	case err != nil:
		return skipped("%v", err)
	}
	f := e.eachKubelet(e.assessStart)
	if len(all) == 1 {
		return f
	}
	pids := make([]int, 0, len(all))
	for _, k := range all {
		pids = append(pids, k.pid)
	}
	return checkup.Worst(warning("stop all but one", "several kubelets run, processes %v: the checks below examine each", pids), f)
}

// assessStart warns about files that changed after the kubelet started.
func (e *examination) assessStart(k *kubeletProcess) checkup.Result {
	files, err := k.configFiles()
	if err != nil {
		files = nil // kubelet-rotation reports the error
	}
	// The kubelet uses a kubeconfig that it wrote itself without reading the file again.
	if conf := e.confPath(k); kubelet.ReadKubeconfig(conf, "").Kind != kubelet.Bootstrapped {
		files = append([]string{conf}, files...)
	}
	if newer := k.unread(files...); len(newer) > 0 {
		return warning("systemctl restart kubelet", "process %d was started at %s, before %s was written: the running kubelet has not read the change",
			k.pid, since(k.started), strings.Join(newer, ", "))
	}
	return ok("process %d", k.pid)
}

func checkKubeletBootstrap(_ context.Context, e *examination) checkup.Result {
	return e.eachKubelet(func(k *kubeletProcess) checkup.Result {
		path := k.flags.BootstrapKubeconfig
		if path == "" {
			return ok("no --bootstrap-kubeconfig")
		}
		return failure(e.enableRemedy(), "--bootstrap-kubeconfig=%s: the kubelet ignores a kubeconfig with an exec user, gets a certificate without attestation, and overwrites %s", path, e.confPath(k))
	})
}

func checkKubeletRotation(_ context.Context, e *examination) checkup.Result {
	return e.eachKubelet(func(k *kubeletProcess) checkup.Result {
		on, source, err := k.rotates()
		switch {
		case errors.Is(err, fs.ErrPermission):
			return skipped("%v: run this as root", err)
		case err != nil:
			return failure(trustedfile.Hint(err, "correct the file, so that the kubelet can read it"), "%v", err)
		case on:
			return failure(e.enableRemedy(), "%s: the kubelet uses the plugin's certificate only to request another one without attestation", source)
		}
		return ok("off, %s", source)
	})
}

// eachConf returns the worst result of the running kubelets' kubeconfigs. If no kubelet runs, it
// assesses the kubeconfig that the configuration names.
func (e *examination) eachConf(assess func(kubelet.Kubeconfig) checkup.Result) checkup.Result {
	if _, err := e.running(); err != nil {
		return assess(e.conf())
	}
	return e.eachKubelet(func(k *kubeletProcess) checkup.Result { return assess(kubelet.ReadKubeconfig(e.confPath(k), "")) })
}

func checkKubeconfig(_ context.Context, e *examination) checkup.Result {
	if all, err := e.running(); err == nil {
		for _, k := range all {
			if k.flags.Kubeconfig == "" {
				return failure(e.enableRemedy(), "the running kubelet, process %d, has no --kubeconfig: it talks to no API server", k.pid)
			}
		}
	}
	return e.eachConf(e.assessConf)
}

func (e *examination) assessConf(k kubelet.Kubeconfig) checkup.Result {
	// The kubelet's own certificate is removed, or the kubelet would use it again. Without a
	// configuration file nothing is removed: only that kubeconfig keeps the node up.
	rewrite := e.enableRemedy()
	if !e.isUnconfigured() {
		rewrite = fmt.Sprintf("systemctl stop kubelet; rm %s %s; %s", k.Path, filepath.Join(filepath.Dir(kubelet.RotatedFile), "kubelet-client-*"), rewrite)
	}
	switch k.Kind {
	case kubelet.Ours:
		return e.assessOurs(k)
	case kubelet.Missing:
		return failure("the command `prepare` writes it if a bootstrap kubeconfig names the cluster", "%s: the file does not exist", k.Path)
	case kubelet.Bootstrapped:
		return failure(rewrite, "%s: the kubelet wrote it after its own bootstrap; it uses %s, a certificate without attestation", k.Path, kubelet.RotatedFile)
	case kubelet.ClientCertificate:
		f := failure(rewrite, "%s: its user is a client certificate, not the plugin", k.Path)
		if _, err := os.Stat(filepath.Join(e.Manifests, kubelet.ServerManifest)); err == nil {
			f.Status = checkup.Warning
			f.Message += "; kubeadm init sets up control plane nodes like this"
			f.Remedy = "list the node in the controller's unattestedNodes, or migrate it: " + f.Remedy
		}
		return f
	case kubelet.Unreadable:
		if errors.Is(k.Problem, fs.ErrPermission) {
			return skipped("%s: %v", k.Path, errNeedsRoot)
		}
		return failure(trustedfile.Hint(k.Problem, "correct it: a current-context with a cluster and a user"), "%v", k.Problem)
	}
	// With any other user, or a kind that is not known here, the kubelet bypasses the plugin.
	return failure("move it away, and: "+rewrite, "%s: %s", k.Path, k.Kind)
}

// assessOurs checks a file whose user is the plugin.
func (e *examination) assessOurs(k kubelet.Kubeconfig) checkup.Result {
	findings := []checkup.Result{ok("%s: its user is the plugin, its cluster %s", k.Path, k.Cluster.Server)}
	if k.ClusterProblem != nil {
		findings = append(findings, failure("correct its cluster, or write the file again with the command `kubeconfig`", "%v", k.ClusterProblem))
	}
	if info, err := os.Stat(k.Path); err == nil {
		findings = append(findings, assessFile(k.Path, info, private))
	}
	return checkup.Worst(findings...)
}

func checkExec(_ context.Context, e *examination) checkup.Result { return e.eachConf(assessExec) }

func assessExec(k kubelet.Kubeconfig) checkup.Result {
	if k.Kind != kubelet.Ours {
		return skipped("the plugin is not its user: see kubelet-kubeconfig")
	}
	data, err := trustedfile.Read(k.Path)
	if err != nil {
		return skipped("see kubelet-kubeconfig")
	}
	config, err := clientcmd.Load(data)
	if err != nil {
		return skipped("see kubelet-kubeconfig")
	}
	// Kind Ours guarantees that the user and its exec stanza exist.
	user := config.AuthInfos[config.Contexts[config.CurrentContext].AuthInfo].Exec
	findings := append([]checkup.Result{ok("%s, %s", user.Command, user.APIVersion)}, assessCommand(user.Command)...)
	const writeAgain = "write the file again with the command `kubeconfig`"
	switch user.APIVersion {
	case clientauthentication.SchemeGroupVersion.String():
	case v1beta1.SchemeGroupVersion.String():
		findings = append(findings, warning(writeAgain, "apiVersion is %s: use v1", user.APIVersion))
	default:
		findings = append(findings, failure(writeAgain, "apiVersion is %.64q: the plugin answers %s", user.APIVersion, clientauthentication.SchemeGroupVersion))
	}
	switch user.InteractiveMode {
	case clientcmdapi.NeverExecInteractiveMode:
	case clientcmdapi.IfAvailableExecInteractiveMode:
		findings = append(findings, warning(writeAgain, "interactiveMode is IfAvailable: use Never"))
	default:
		findings = append(findings, failure(writeAgain, "interactiveMode is %.64q: it must be Never, because the kubelet has no terminal", string(user.InteractiveMode)))
	}
	if !user.ProvideClusterInfo {
		findings = append(findings, warning(writeAgain, "provideClusterInfo is not set: the plugin cannot notice that the kubelet uses another cluster"))
	}
	return checkup.Worst(findings...)
}

// assessCommand checks the program that the kubelet would start as root.
func assessCommand(command string) []checkup.Result {
	if !filepath.IsAbs(command) {
		where := "looks for it in PATH"
		if strings.ContainsRune(command, filepath.Separator) {
			where = "looks for it beside the kubeconfig"
		}
		return []checkup.Result{failure("use an absolute path, as the command `kubeconfig` does", "command %q is relative: client-go %s", command, where)}
	}
	const remedy = "install the package again, or correct the path of the command"
	info, err := os.Stat(command)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return []checkup.Result{skipped("command: %v: run this as root", err)}
	case err != nil:
		return []checkup.Result{failure(remedy, "command: %v", err)}
	case !info.Mode().IsRegular():
		return []checkup.Result{failure(remedy, "command %s: is not a regular file", command)}
	case info.Mode().Perm()&0o111 == 0:
		return []checkup.Result{failure("chmod 0755 "+command, "command %s: is not executable (mode %04o)", command, info.Mode().Perm())}
	case trustedfile.Problem(info) != "":
		return []checkup.Result{failure(trustedfile.Remedy(command), "command %s: %s, and the kubelet starts it as root", command, trustedfile.Problem(info))}
	}
	return assessParents(command)
}
