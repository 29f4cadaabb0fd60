// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// takeExecFlags gives a command that a person runs the settings that the kubelet uses. It reads the
// kubelet's kubeconfig. If the exec user there is this program, its flags become those of this
// command. A flag on the command line wins. With --config on the command line, no flags are taken,
// since that file is another configuration. The ExecFlags are nil if none are to be taken.
func (i *invocation) takeExecFlags() (kubelet.Kubeconfig, *nodestatus.ExecFlags) {
	given := i.root.PersistentFlags()
	config, _ := i.settings() // on an error, the defaults suffice
	k := kubelet.ReadKubeconfig(config.KubeletKubeconfig, "")
	taken := &nodestatus.ExecFlags{Kubeconfig: k.Path, Flags: []string{}}
	switch {
	case given.Changed("config"):
		return k, nil
	case errors.Is(k.Problem, fs.ErrPermission):
		taken.Problem = "this user may not read it: run this as root"
		return k, taken
	case k.Kind != kubelet.Ours || !i.isThisProgram(k.Command):
		return k, nil
	}
	flags, err := i.parseExecArgs(k.Args)
	if err != nil {
		taken.Problem = err.Error()
		return k, taken
	}
	flags.VisitAll(func(f *pflag.Flag) {
		// the log verbosity in the kubeconfig is not meant for this command
		if !f.Changed || given.Changed(f.Name) || f.Name == "v" {
			return
		}
		_ = given.Set(f.Name, f.Value.String()) // cannot fail: the value was parsed before
		taken.Flags = append(taken.Flags, "--"+f.Name+"="+f.Value.String())
	})
	return k, taken
}

// parseExecArgs parses the arguments that a kubeconfig gives this program.
func (i *invocation) parseExecArgs(args []string) (*pflag.FlagSet, error) {
	var config authenticator.Config
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.SetOutput(i.Stderr)
	bind(flags, &config)
	flags.String("config", "", "")
	flags.StringP("v", "v", "", "")
	if err := flags.Parse(args); err != nil {
		return nil, fmt.Errorf("its args: %w", err)
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("its args: %.64q is not a flag", flags.Arg(0))
	}
	return flags, nil
}

// isThisProgram reports whether a kubeconfig's command is the program that runs. A machine may also
// have another binary of this package, with other providers.
func (i *invocation) isThisProgram(command string) bool {
	if filepath.Base(command) == i.Name {
		return true
	}
	named, err := os.Stat(command)
	if err != nil {
		return false
	}
	self, err := os.Stat("/proc/self/exe")
	return err == nil && os.SameFile(named, self)
}

// givesSetting reports whether the command line has a setting. --kubelet-kubeconfig and -v do not
// count: they say where to look, and how much to log.
func (i *invocation) givesSetting() bool {
	gives := false
	i.root.PersistentFlags().VisitAll(func(f *pflag.Flag) {
		gives = gives || f.Changed && f.Name != "v" && f.Name != "kubelet-kubeconfig"
	})
	return gives
}
