// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The policies from an API server's disk refuse and let pass what those in the API do. The cluster
// has none in the API. test/static has what differs.
func TestPoliciesFromDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "static")
	write := func() error {
		var out bytes.Buffer
		args := []string{"policies", "--static", dir, "--path", dir, "--kubernetes-version=v1.37.0"}
		if code := (command.Program{}).Run(t.Context(), command.Process{Args: args, Stdout: &out, Stderr: &out}); code != 0 {
			return errors.New(out.String())
		}
		return nil
	}
	// The API server begins without policies, since some requests are older than these.
	harness.Must(t, write())
	harness.Must(t, os.Remove(filepath.Join(dir, policyset.PoliciesFile)))
	cp, err := testbed.Start(t.Context(), testbed.Options{
		Progress: os.Stderr, APIServerArgs: []string{"--admission-control-config-file=" + filepath.Join(dir, policyset.AdmissionFile)},
	})
	harness.Must(t, err)
	t.Cleanup(func() { ended(t, cp.Stop()) })
	static := &bed{ControlPlane: cp, adminKubeconfig: filepath.Join(t.TempDir(), "admin.kubeconfig")}
	harness.Must(t, static.prepare(t.Context(), func(ctx context.Context) error {
		err := static.apply(ctx, "--filename="+manifests+"/namespace.yaml", "--filename="+manifests+"/crd.yaml", "--filename="+manifests+"/rbac.yaml")
		if err := errors.Join(err, write()); err != nil {
			return err
		}
		harness.Eventually(t, patience, "the API server has read its policies", func() bool {
			_, err := file(ctx, static.bootstrapper, clientSigner)
			return refusedBy(err, signersPolicy)
		})
		return nil
	}))
	// The tests below are not parallel, and use the cluster that they share.
	inAPI := shared
	shared = static
	defer func() { shared = inAPI }()
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"TestOnlyTheControllerApproves", TestOnlyTheControllerApproves},
		{"TestApprovalByOtherPaths", TestApprovalByOtherPaths},
		{"TestApprovalStaysAsTheControllerWroteIt", TestApprovalStaysAsTheControllerWroteIt},
		{"TestNobodyApprovesAHello", TestNobodyApprovesAHello},
		{"TestDenyingIsFree", TestDenyingIsFree},
		{"TestOtherSignersAreUntouched", TestOtherSignersAreUntouched},
		{"TestControllerManagerApprovesNothing", TestControllerManagerApprovesNothing},
		{"TestAnnotationsOnCreate", TestAnnotationsOnCreate},
		{"TestAnnotationsOnUpdate", TestAnnotationsOnUpdate},
		{"TestAnnotationFromBeforeThePolicies", TestAnnotationFromBeforeThePolicies},
		{"TestManyAnnotations", TestManyAnnotations},
		{"TestOnlyTheControllerIssues", TestOnlyTheControllerIssues},
		{"TestNoCertificateAfterADenialOrFailure", TestNoCertificateAfterADenialOrFailure},
		{"TestRequestSize", TestRequestSize},
		{"TestMetadataOnCreate", TestMetadataOnCreate},
		{"TestMetadataOnUpdate", TestMetadataOnUpdate},
		{"TestNamesOfRequests", TestNamesOfRequests},
		{"TestMachinesSetNoFinalizersAndOwners", TestMachinesSetNoFinalizersAndOwners},
		{"TestSignersForMachines", TestSignersForMachines},
		{"TestAnotherSignerIsNoWayRound", TestAnotherSignerIsNoWayRound},
		{"TestOnlyTheControllerWritesRecords", TestOnlyTheControllerWritesRecords},
		{"TestMachinesDoNotTouchRecords", TestMachinesDoNotTouchRecords},
	} {
		t.Run(test.name, test.run)
	}
}
