// SPDX-License-Identifier: Apache-2.0

package ec2

import (
	"context"
	"crypto/elliptic"
	"crypto/sha256"
	"fmt"
	"net/http"
	"testing"

	awssdk "github.com/aws/aws-sdk-go-v2/aws"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit/platformkittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const (
	region = "eu-west-1"
	zone   = region + "a"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	platformkittest.Run(t, func(t *testing.T) platformkittest.Imitation { return newImitation(t) })
}

// imitation is EC2 in one region.
type imitation struct {
	ec2    *aws.EC2
	server *platformkittest.Server
}

func newImitation(t *testing.T) *imitation {
	t.Helper()
	i := &imitation{ec2: &aws.EC2{AWS: aws.Unserved(), Region: region}}
	i.server = platformkittest.NewServer(t, i.ec2)
	i.server.Throttle = func(w http.ResponseWriter, _ *http.Request) {
		aws.WriteEC2Error(w, http.StatusServiceUnavailable, "RequestLimitExceeded", "Request limit exceeded.")
	}
	i.server.Expire = func(w http.ResponseWriter, _ *http.Request) {
		aws.WriteEC2Error(w, http.StatusBadRequest, "RequestExpired", "Request has expired.")
	}
	return i
}

func (i *imitation) Server() *platformkittest.Server { return i.server }

func (i *imitation) config(t *testing.T) Config {
	t.Helper()
	roots, err := platformkit.Roots(i.server.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	c := i.ec2.AWS.AssumeRole("aws", "123456789012", "node-attestation", "controller")
	return Config{Region: region, Endpoint: i.server.URL, Roots: roots, Credentials: awssdk.CredentialsProviderFunc(func(context.Context) (awssdk.Credentials, error) {
		return awssdk.Credentials{AccessKeyID: c.AccessKeyID, SecretAccessKey: c.SecretAccessKey, SessionToken: c.SessionToken}, nil
	})}
}

func (i *imitation) Trust(t *testing.T, options platformkit.Options, budget *platformkit.Budget) clusterapi.EKTrust {
	t.Helper()
	trust, err := New(i.config(t), options, budget)
	if err != nil {
		t.Fatal(err)
	}
	return trust
}

// instanceID returns the ID of the instance with a name.
func instanceID(name string) string { return fmt.Sprintf("i-%x", sha256.Sum256([]byte(name)))[:19] }

func (*imitation) Machine(name string) clusterapi.PlatformMachine {
	return clusterapi.PlatformMachine{
		Cluster: types.NamespacedName{Namespace: "default", Name: "c"}, Name: name, UID: types.UID("uid-" + name),
		ProviderID: "aws:///" + zone + "/" + instanceID(name),
	}
}

func (i *imitation) Foreign() []clusterapi.PlatformMachine {
	id := instanceID("a")
	var all []clusterapi.PlatformMachine
	for n, providerID := range []string{
		"gce://p/europe-west1-b/a", "aws:////" + id, "aws:///" + zone + "/", "aws:///" + zone + "/" + id + "/a", "aws:///" + zone + "/i-1",
		"aws:///" + zone + "/" + "I" + id[1:], "aws://" + zone + "/" + id, " aws:///" + zone + "/" + id, "aws:///" + zone + "/" + id + "\n",
		"aws:///eu-west-2a/" + id, "aws:///eu-west-11a/" + id, "aws:///" + region + "/" + id, "aws:///%65u-west-1a/" + id,
	} {
		m := i.Machine(fmt.Sprintf("foreign%d", n))
		m.ProviderID = providerID
		all = append(all, m)
	}
	return all
}

// Launch is false for a name that was used: an instance ID is never used again.
func (i *imitation) Launch(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	if _, used := i.ec2.Get(instanceID(name)); used {
		return nil, false
	}
	return i.Change(name, chip)
}

func (i *imitation) Change(name string, chip platformkittest.TPM) ([]tpm.Fingerprint, bool) {
	instance, exists := i.ec2.Get(instanceID(name))
	if !exists {
		instance = aws.EC2Instance{ID: instanceID(name), Zone: zone}
	}
	instance.Silent = chip.Silent
	if chip.None {
		instance.TPMSupport, instance.Keys = "", nil
		i.ec2.Put(instance)
		return nil, true
	}
	rsaKey, eccKey := platformkittest.RSAKey(chip.Number), platformkittest.ECCKey(elliptic.P384(), chip.Number)
	keys, err := aws.NitroTPMKeys(rsaKey, eccKey)
	if err != nil {
		panic(err)
	}
	if chip.Broken {
		keys["ecc-sec-p384"] = "AAAA"
	}
	instance.TPMSupport, instance.Keys = "v2.0", keys
	i.ec2.Put(instance)
	return platformkittest.Fingerprints(rsaKey, eccKey), true
}

// Terminate leaves the instance in the answers, as EC2 does for an hour.
func (i *imitation) Terminate(name string) {
	instance, _ := i.ec2.Get(instanceID(name))
	instance.State = "terminated"
	i.ec2.Put(instance)
}

func (i *imitation) Double(name string) bool {
	instance, _ := i.ec2.Get(instanceID(name))
	instance.Twice = true
	i.ec2.Put(instance)
	return true
}

func (*imitation) Twins() bool { return true }
