// SPDX-License-Identifier: Apache-2.0

package vsphere

import (
	"context"
	"fmt"
	"os"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
)

const (
	// callsPerSecond and burst limit the calls to vCenter, for all Clusters together.
	callsPerSecond, burst = 100, 100
	// logoutTimeout is how long the program waits for the logout when it ends.
	logoutTimeout = 5 * time.Second
)

// Open implements clusterapi.OpenPlatform. The environment says which vCenter, and as which user:
// VSPHERE_SERVER, VSPHERE_CA_FILE, VSPHERE_USER_FILE and VSPHERE_PASSWORD_FILE. It checks them, and
// makes no call.
func Open(_ context.Context, mgr manager.Manager) (clusterapi.EKTrust, error) {
	vcenter, err := fromEnvironment(os.Getenv)
	if err != nil {
		return nil, err
	}
	// A vCenter limits the number of sessions, and keeps an abandoned one for half an hour.
	err = mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		<-ctx.Done()
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), logoutTimeout)
		defer cancel()
		vcenter.Logout(last)
		return nil
	}))
	return platformkit.New(vcenter, platformkit.Options{}), err
}

func fromEnvironment(getenv func(string) string) (*VCenter, error) {
	config := Config{
		Server: getenv("VSPHERE_SERVER"), UserFile: getenv("VSPHERE_USER_FILE"), PasswordFile: getenv("VSPHERE_PASSWORD_FILE"),
		Budget: platformkit.NewBudget(callsPerSecond, burst),
	}
	if caFile := getenv("VSPHERE_CA_FILE"); caFile != "" {
		roots, err := platformkit.Roots(caFile)
		if err != nil {
			return nil, fmt.Errorf("VSPHERE_CA_FILE: %w", err)
		}
		config.Roots = roots
	}
	for _, variable := range []string{"VSPHERE_SERVER", "VSPHERE_USER_FILE", "VSPHERE_PASSWORD_FILE"} {
		if getenv(variable) == "" {
			return nil, fmt.Errorf("%s: must be set", variable)
		}
	}
	return New(config)
}
