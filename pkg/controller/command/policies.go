// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/atomicfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
)

const (
	// shippedController is the user of packaging/kubernetes.
	shippedController = "system:serviceaccount:node-attestation-system:node-attestation-controller"
	// staticPath is the folder of the static form on a control plane, unless --path names another.
	staticPath = "/etc/kubernetes/node-attestation"
	// staticGate is the feature gate of kube-apiserver for policies from its disk. It is on since
	// staticVersion.
	staticGate, staticVersion = "ManifestBasedAdmissionControlConfig", "1.37.0"
)

// policiesFlags are the flags of the command policies.
type policiesFlags struct {
	policyset.Options
	dir, scope, path         string
	kubernetesVersion, gates string
}

func (i *invocation) policiesCommand() *cobra.Command {
	var f policiesFlags
	c := &cobra.Command{
		Use:   "policies",
		Short: "Write the admission policies in the form that an API server reads from its own disk, offline",
		Long: `policies writes the release's admission policies and bindings in the form that an API server of Kubernetes 1.37 or later reads from
its own disk. Nobody can change or delete these through the API, and they hold from the first request.

Every API server of the cluster needs two of the files: policies/node-attestation.yaml, and admission.yaml for --admission-control-config-file. The
others have the entries for kubeadm's ClusterConfiguration, and for a KubeadmControlPlane of Cluster API. With the same options the command writes the
same files. It changes no cluster.`,
		Args: cli.NoArgs,
		RunE: func(*cobra.Command, []string) error { return i.writePolicies(f) },
	}
	c.Flags().StringVar(&f.dir, "static", "", "folder to write into; it may have no other files")
	c.Flags().StringVar(&f.kubernetesVersion, "kubernetes-version", "", "the oldest version of the cluster's API servers, such as v1.37.2")
	c.Flags().StringVar(&f.gates, "feature-gates", "", "value of kube-apiserver's --feature-gates, if that is set")
	c.Flags().StringVar(&f.scope, "scope", policyset.Alone.String(), "kind of the cluster: "+strings.Join(policyset.Scopes(), ", ")+"; workload and management are for Cluster API")
	cli.CompleteFlag(c, "scope", policyset.Scopes())
	c.Flags().StringArrayVar(&f.Controllers, "controller-user", []string{shippedController}, "user that the policies name as the controller; may be repeated for several controllers")
	c.Flags().StringArrayVar(&f.Signers, "signer", nil, "another client signer that only the controller approves for; may be repeated")
	c.Flags().StringArrayVar(&f.MachineSigners, "machine-signer", nil, "another signer that machines may ask; may be repeated")
	c.Flags().StringArrayVar(&f.Bootstrappers, "bootstrapper", nil, "user under bootstrappers in the controller's configuration; may be repeated")
	c.Flags().StringArrayVar(&f.Movers, "mover", nil, "user that may write records as the controller does, for clusterctl move or a restored backup; may be repeated")
	c.Flags().StringArrayVar(&f.Upgraders, "upgrader", nil, "user that may change the release's CustomResourceDefinitions, for an upgrade that changes them; may be repeated")
	c.Flags().BoolVar(&f.Revocation, "revocation", false, "also the static policies and guards of revocation, for a cluster with revocation.enabled: true")
	c.Flags().StringVar(&f.path, "path", staticPath, "the folder's path on each node of the control plane")
	return c
}

func (i *invocation) writePolicies(f policiesFlags) error {
	// 1. The command line.
	if f.dir == "" {
		return cli.Usage(errors.New("--static is required: the folder to write into"))
	}
	scope, err := policyset.ParseScope(f.scope)
	if err != nil {
		return cli.Usage(fmt.Errorf("--scope: %w", err))
	}
	f.Scope = scope
	if err := readsFromDisk(f.kubernetesVersion, f.gates); err != nil {
		return err
	}
	// 2. All files, before the first is written.
	files, err := policyset.RenderFiles(f.Options, f.path)
	if err != nil {
		return cli.Usage(err)
	}
	if err := onlyOurs(f.dir, files); err != nil {
		return cli.Fail(CodeConfiguration, "name a folder that has only files of this command, or a new one", err)
	}
	changed, err := replaceFiles(f.dir, files)
	if err != nil {
		return err
	}
	// 3. What happened.
	for _, name := range slices.Sorted(maps.Keys(files)) {
		state := "unchanged"
		if slices.Contains(changed, name) {
			state = "written"
		}
		if _, err := fmt.Fprintf(i.Stdout, "%s: %s\n", filepath.Join(f.dir, name), state); err != nil {
			return err
		}
	}
	return nil
}

// readsFromDisk returns an error unless API servers of that version, with these feature gates, read
// policies from their disk.
func readsFromDisk(kubernetes, gates string) error {
	if kubernetes == "" {
		return cli.Usage(errors.New("--kubernetes-version has to name the oldest version of the cluster's API servers, such as v1.37.2"))
	}
	parsed, err := version.ParseSemantic(kubernetes)
	if err != nil {
		return cli.Usage(fmt.Errorf("--kubernetes-version %.64q: must be like v1.37.2", kubernetes))
	}
	const stay = "keep the policies in the API (docs/cluster-setup.md)"
	if parsed.LessThan(version.MustParseSemantic(staticVersion)) {
		return cli.Fail(CodeConfiguration, stay, fmt.Errorf("kube-apiserver %s does not read policies from its disk; %s and later do. Nothing was written", kubernetes, staticVersion))
	}
	on := true
	for gate := range strings.SplitSeq(gates, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(gate), "=")
		if name == staticGate {
			on = strings.EqualFold(value, "true")
		}
	}
	if !on {
		return cli.Fail(CodeConfiguration, stay, fmt.Errorf("the feature gate %s is off, so kube-apiserver does not read policies from its disk. Nothing was written", staticGate))
	}
	return nil
}

// onlyOurs returns an error if a folder has anything that replaceFiles does not write. A folder
// that does not exist has nothing.
func onlyOurs(dir string, files map[string][]byte) error {
	return filepath.WalkDir(dir, func(at string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && at == dir {
			return nil
		}
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name != "." && name != filepath.Dir(policyset.PoliciesFile) {
				return fmt.Errorf("folder %s: was not written by this command", at)
			}
			return nil
		}
		if _, known := files[strings.TrimSuffix(name, atomicfile.Temporary)]; !known || !entry.Type().IsRegular() {
			return fmt.Errorf("%s: was not written by this command", at)
		}
		if strings.HasSuffix(name, atomicfile.Temporary) {
			return nil // left by a crash
		}
		content, err := bounded.ReadFile(at, maxFile)
		if err == nil && !bytes.HasPrefix(content, []byte(policyset.Mark)) {
			err = fmt.Errorf("%s: was not written by this command", at)
		}
		return err
	})
}

// replaceFiles writes the files that differ, and returns their names. Nothing in them is secret. No
// file is replaced unless all could be written. An API server does not read the temporary files,
// because of their names.
func replaceFiles(dir string, files map[string][]byte) (changed []string, err error) {
	if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(policyset.PoliciesFile)), 0o755); err != nil { //nolint:gosec // G301: nothing in it is secret
		return nil, err
	}
	var replaced []atomicfile.File
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(dir, name)
		if before, err := os.ReadFile(path); err != nil || !bytes.Equal(before, files[name]) {
			changed, replaced = append(changed, name), append(replaced, atomicfile.File{Path: path, Content: files[name]})
		}
	}
	return changed, atomicfile.Replace(0o644, replaced...)
}
