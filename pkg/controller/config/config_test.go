// SPDX-License-Identifier: Apache-2.0

package config

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/bindings"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/gce"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const head = "apiVersion: " + APIVersion + "\nkind: " + Kind + "\n"

// parts are the fields of the minimal configuration.
var parts = map[string]string{
	"clusterUID": "clusterUID: c\n",
	"signing":    "signing: {mode: Sign, secretName: ca}\n",
	"inventory":  "inventory: {file: /inventory.yaml}\n",
	"tpm":        "tpm: {pcrs: {bank: sha256, indexes: [7]}}\n",
}

// with returns the minimal configuration with some fields replaced, and others added.
func with(fields ...string) string {
	left := map[string]string{}
	for name, part := range parts {
		left[name] = part
	}
	out := head
	for _, field := range fields {
		name, _, _ := strings.Cut(field, ":")
		delete(left, name)
		if !strings.HasPrefix(field, "no ") {
			out += field + "\n"
			continue
		}
		delete(left, strings.TrimPrefix(field, "no "))
	}
	for _, part := range left {
		out += part
	}
	return out
}

// serving is the minimal section for serving certificates.
const serving = "serving: {signers: [kubernetes.io/kubelet-serving], forbiddenAddresses: [api.example.com]}"

// withClusterAPI returns the minimal configuration of a management cluster.
func withClusterAPI(section string, changes ...string) string {
	fields := append([]string{"no clusterUID", "no inventory", "clusterAPI: {" + section + "}"}, changes...)
	if !slices.ContainsFunc(changes, func(c string) bool { return strings.HasPrefix(c, "signing:") }) {
		fields = append(fields, "signing: {mode: Sign}")
	}
	return with(fields...)
}

func newSettings(data string) (*Settings, error) {
	c, err := Parse([]byte(data))
	if err != nil {
		return nil, err
	}
	return New(c)
}

func writeCA(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "maker"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return write(t, "# a maker\n"+string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
}

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A missing or invalid field is an error that names the field.
func TestNewFailsClosed(t *testing.T) {
	ca := writeCA(t)
	eks := strings.Repeat("ab", 32)
	const guid = "0f8fad5b-d9cb-469f-a165-70867728950e"
	for name, c := range map[string]struct{ data, says string }{
		"least":                               {with(), ""},
		"files":                               {with("signing: {mode: Sign, caFile: /ca.crt, keyFile: /ca.key}"), ""},
		"approve only":                        {with("signing: {mode: ApproveOnly}", "signers: [{name: kubernetes.io/kube-apiserver-client-kubelet, shared: true}]"), ""},
		"a ConfigMap":                         {with("inventory: {configMap: {name: a, key: b.yaml}}"), ""},
		"roots":                               {with("tpm: {rootsFile: " + ca + ", intermediatesFile: " + ca + ", pcrs: {bank: sha256, indexes: [0]}}"), ""},
		"values":                              {with("tpm: {pcrs: {bank: sha256, indexes: [7], values: {\"7\": [" + eks + "]}}, allowedEKs: [" + eks + "], minimumFirmware: {IFX: \"0007000200000000\"}, eventLog: true, chainTime: 2025-01-02T03:04:05Z, challengeLifetime: 1m}"), ""},
		"bootstrapper":                        {with("bootstrappers: [{username: a, group: b}]"), ""},
		"the insecure signer, by name":        {with("insecureSigner: cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure"), ""},
		"Cluster API":                         {withClusterAPI("ekSources: [Annotation]"), ""},
		"Cluster API, all of it":              {withClusterAPI("ekSources: [Annotation, Platform], platform: metal3, nodeNames: [Hostname, MachineName], namespaces: [a, b], watchFilter: x, user: 'system:serviceaccount:a:b', trustOnFirstUse: true, trustAnyTPM: true, unattestedControlPlanes: true"), ""},
		"a decision log":                      {with("decisionLog: {file: /var/log/decisions.jsonl, archive: true}"), ""},
		"an archive of nothing":               {with("decisionLog: {archive: true}"), "decisionLog.archive: needs decisionLog.file"},
		"a decision log at a relative path":   {with("decisionLog: {file: decisions.jsonl}"), "decisionLog.file: must be an absolute path"},
		"a decision log elsewhere":            {with("decisionLog: {endpoint: {url: 'https://example.com/'}}"), "decisionLog.endpoint: was removed; set decisionLog.file, and let a log shipper"},
		"first use of any TPM":                {withClusterAPI("trustOnFirstUse: true, trustAnyTPM: true"), ""},
		"first use of a maker's TPM":          {withClusterAPI("trustOnFirstUse: true", "tpm: {rootsFile: "+ca+", pcrs: {bank: sha256, indexes: [0]}}"), ""},
		"first use of a listed TPM":           {withClusterAPI("trustOnFirstUse: true", "tpm: {allowedEKs: ["+eks+"], pcrs: {bank: sha256, indexes: [0]}}"), ""},
		"first use of software":               {withClusterAPI("trustOnFirstUse: true"), "clusterAPI.trustOnFirstUse: needs tpm.rootsFile"},
		"first use of software, its remedy":   {withClusterAPI("trustOnFirstUse: true"), "set it, or clusterAPI.trustAnyTPM: true"},
		"first use of software, some named":   {withClusterAPI("ekSources: [Annotation], trustOnFirstUse: true"), "clusterAPI.trustOnFirstUse"},
		"first use of software, for certain":  {withClusterAPI("trustOnFirstUse: true, trustAnyTPM: false"), "clusterAPI.trustOnFirstUse"},
		"any TPM, no first use":               {withClusterAPI("ekSources: [Annotation], trustAnyTPM: true"), "clusterAPI.trustAnyTPM: is for clusterAPI.trustOnFirstUse, which is not set: remove it"},
		"any TPM, of a maker":                 {withClusterAPI("trustOnFirstUse: true, trustAnyTPM: true", "tpm: {rootsFile: "+ca+", pcrs: {bank: sha256, indexes: [0]}}"), "clusterAPI.trustAnyTPM: contradicts tpm.rootsFile"},
		"any TPM, of a list":                  {withClusterAPI("trustOnFirstUse: true, trustAnyTPM: true", "tpm: {allowedEKs: ["+eks+"], pcrs: {bank: sha256, indexes: [0]}}"), "clusterAPI.trustAnyTPM: contradicts tpm.rootsFile and tpm.allowedEKs"},
		"several files":                       {with("inventory: {files: [/a, /b]}"), ""},
		"several ConfigMaps":                  {with("inventory: {configMaps: [{name: a, key: b}, {name: a, key: c}, {name: d, key: b}]}"), ""},
		"Cluster API, several files":          {withClusterAPI("ekSources: [Inventory]", "inventory: {files: [/a, /b]}"), ""},
		"Cluster API, an inventory":           {withClusterAPI("ekSources: [Inventory]", "inventory: {file: /a}"), ""},
		"Cluster API, inventory's name first": {withClusterAPI("ekSources: [Inventory], nodeNames: [Inventory, Hostname]", "inventory: {file: /a}"), ""},
		"Cluster API, serving":                {withClusterAPI("ekSources: [Annotation], servingAddresses: [Hostname, InternalIP, ExternalIP, InternalDNS, ExternalDNS]", serving), ""},
		"Cluster API, serving what says who":  {withClusterAPI("ekSources: [Annotation]", serving), "clusterAPI.servingAddresses"},
		"Cluster API, serving nothing":        {withClusterAPI("ekSources: [Annotation], servingAddresses: []", serving), "clusterAPI.servingAddresses"},
		"Cluster API, serving node names":     {withClusterAPI("ekSources: [Annotation], servingAddresses: [MachineName]", serving), "clusterAPI.servingAddresses"},
		"Cluster API, serving twice":          {withClusterAPI("ekSources: [Annotation], servingAddresses: [InternalIP, InternalIP]", serving), "clusterAPI.servingAddresses"},
		"Cluster API, addresses for nothing":  {withClusterAPI("ekSources: [Annotation], servingAddresses: [InternalIP]"), "clusterAPI.servingAddresses"},
		"serving without Cluster API":         {with(serving), ""},
		"Cluster API and a cluster":           {with("clusterAPI: {ekSources: [Annotation]}", "no inventory", "signing: {mode: Sign}"), "clusterUID"},
		"Cluster API, no source of EKs":       {withClusterAPI(""), "clusterAPI.ekSources"},
		"Cluster API, which platform":         {withClusterAPI("ekSources: [Annotation, Platform]"), "clusterAPI.platform"},
		"Cluster API, an unasked platform":    {withClusterAPI("ekSources: [Annotation], platform: metal3"), "clusterAPI.platform"},
		"Cluster API, another source":         {withClusterAPI("ekSources: [annotation]"), "annotation"},
		"Cluster API, inventory's name":       {withClusterAPI("ekSources: [Annotation], nodeNames: [Inventory]"), "clusterAPI.nodeNames"},
		"Cluster API, an admin":               {withClusterAPI("ekSources: [Annotation], user: 'kubernetes-admin'"), "clusterAPI.user"},
		"Cluster API, half a user":            {withClusterAPI("ekSources: [Annotation], user: 'system:serviceaccount:a'"), "clusterAPI.user"},
		"Cluster API, a filter":               {withClusterAPI("ekSources: [Annotation], watchFilter: 'a b'"), "clusterAPI.watchFilter"},
		"Cluster API, a namespace":            {withClusterAPI("ekSources: [Annotation], namespaces: [a, a]"), "clusterAPI.namespaces"},
		"Cluster API, a CA of its own":        {withClusterAPI("ekSources: [Annotation]", "signing: {mode: Sign, secretName: ca}"), "signing"},
		"Cluster API, unasked inventory":      {withClusterAPI("ekSources: [Annotation]", "inventory: {file: /a}"), "inventory"},
		"Cluster API, no inventory":           {withClusterAPI("ekSources: [Inventory]"), "inventory"},
		"Cluster API, first use, no token":    {withClusterAPI("trustOnFirstUse: true, trustAnyTPM: true", "token: Warn"), "token"},
		"Cluster API, nodes left alone":       {withClusterAPI("ekSources: [Annotation]", "unattestedNodes: [a]"), "unattestedNodes"},
		"no cluster":                          {with("no clusterUID"), "clusterUID"},
		"an empty cluster":                    {with("clusterUID: \"\""), "clusterUID"},
		"a cluster with a space":              {with("clusterUID: a b"), "clusterUID"},
		"no signing":                          {with("no signing"), "signing.mode"},
		"another mode":                        {with("signing: {mode: sign, secretName: ca}"), "signing.mode"},
		"no CA":                               {with("signing: {mode: Sign}"), "signing"},
		"two CAs":                             {with("signing: {mode: Sign, secretName: ca, caFile: /a, keyFile: /b}"), "signing"},
		"no key":                              {with("signing: {mode: Sign, caFile: /a}"), "keyFile"},
		"relative":                            {with("signing: {mode: Sign, caFile: a, keyFile: b}"), "absolute"},
		"a CA that is not used":               {with("signing: {mode: ApproveOnly, secretName: ca}", "signers: [{name: a.b/c}]"), "signing"},
		"approve only for no one":             {with("signing: {mode: ApproveOnly}"), "signers"},
		"the CA in the keys' Secret":          {with("signing: {mode: Sign, secretName: node-attestation-controller-key}"), "signing.secretName"},
		"another's signer":                    {with("signers: [{name: kubernetes.io/kube-apiserver-client-kubelet, shared: true}]"), "signers"},
		"a signer of others":                  {with("signing: {mode: ApproveOnly}", "signers: [{name: kubernetes.io/kube-apiserver-client-kubelet}]"), "signers"},
		"no signers":                          {with("signers: []"), "signers"},
		"the signer of hellos":                {with("signers: [{name: cluster.x-k8s.io/attestation-hello}]"), "signers"},
		"the insecure signer, listed":         {with("signers: [{name: cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure}]"), "signers"},
		"the insecure signer, by yes":         {with("insecureSigner: \"yes\""), "insecureSigner"},
		"no inventory":                        {with("no inventory"), "inventory"},
		"an empty inventory":                  {with("inventory: {}"), "inventory"},
		"two inventories":                     {with("inventory: {file: /a, configMap: {name: a, key: b}}"), "inventory"},
		"a relative inventory":                {with("inventory: {file: a}"), "inventory.file"},
		"two inventories of parts":            {with("inventory: {files: [/a], configMaps: [{name: a, key: b}]}"), "inventory: has files and configMaps"},
		"a file and files":                    {with("inventory: {file: /a, files: [/b]}"), "inventory: has file and files"},
		"a ConfigMap and ConfigMaps":          {with("inventory: {configMap: {name: a, key: b}, configMaps: [{name: c, key: d}]}"), "inventory: has configMap and configMaps"},
		"no files":                            {with("inventory: {files: []}"), "inventory.files: is empty"},
		"no ConfigMaps":                       {with("inventory: {configMaps: []}"), "inventory.configMaps: is empty"},
		"a file twice":                        {with("inventory: {files: [/a, /b, /a]}"), `inventory.files: "/a" is listed twice`},
		"a ConfigMap's key twice":             {with("inventory: {configMaps: [{name: a, key: b}, {name: a, key: b}]}"), "inventory.configMaps: key"},
		"a relative file of several":          {with("inventory: {files: [/a, b]}"), `inventory.files: "b"`},
		"a ConfigMap of several without key":  {with("inventory: {configMaps: [{name: a, key: b}, {name: a}]}"), "inventory.configMaps.key"},
		"too many files":                      {with("inventory: {files: [" + strings.Repeat("/a, ", maxInventoryParts+1) + "]}"), "inventory.files: has more than 64"},
		"Cluster API, a ConfigMap":            {withClusterAPI("ekSources: [Inventory]", "inventory: {configMaps: [{name: a, key: b}]}"), "inventory.configMap"},
		"a ConfigMap without key":             {with("inventory: {configMap: {name: a}}"), "inventory.configMap.key"},
		"a ConfigMap without name":            {with("inventory: {configMap: {key: a}}"), "inventory.configMap.name"},
		"no policy":                           {with("no tpm"), "tpm: must be set, or"},
		"GCE alone":                           {with("no tpm", "gce: {projects: [some-project]}"), ""},
		"GCE, keys in a file":                 {with("gce: {keysFile: /keys.json}"), ""},
		"GCE, keys of a mirror":               {with("gce: {keysURL: 'https://example.com/keys'}"), ""},
		"GCE, keys twice":                     {with("gce: {keysFile: /keys.json, keysURL: 'https://example.com/keys'}"), "gce: keysFile and keysURL"},
		"GCE, keys without TLS":               {with("gce: {keysURL: 'http://example.com/keys'}"), "gce: keysURL"},
		"GCE, a relative file":                {with("gce: {keysFile: keys.json}"), "gce: keysFile"},
		"GCE, no project":                     {with("gce: {projects: [P]}"), "gce: project"},
		"GCE, Cluster API":                    {withClusterAPI("", "no tpm", "gce: {}"), ""},
		"GCE beside TPMs, Cluster API":        {withClusterAPI("", "gce: {}"), "clusterAPI.ekSources"},
		"GCE, first use":                      {withClusterAPI("trustOnFirstUse: true", "no tpm", "gce: {}"), "clusterAPI.trustOnFirstUse: not together with a cloud"},
		"EC2 alone":                           {with("no tpm", "ec2: {}"), ""},
		"EC2, PCRs":                           {with("ec2: {pcrValues: {\"7\": [" + strings.Repeat("ab", 48) + "]}, rootsFile: " + ca + "}"), ""},
		"EC2, a PCR of another bank":          {with("ec2: {pcrValues: {\"7\": [" + eks + "]}}"), "ec2: PCR 7"},
		"EC2, no PCR":                         {with("ec2: {pcrValues: {x: [" + eks + "]}}"), "ec2: pcrValues"},
		"EC2, PCRs that are not hex":          {with("ec2: {pcrValues: {\"7\": [x]}}"), "ec2: pcrValues"},
		"EC2, no root":                        {with("ec2: {rootsFile: /missing}"), "ec2: rootsFile"},
		"EC2's role":                          {with("no tpm", "ec2Role: {regions: [eu-west-1], accounts: [\"123456789012\"]}"), ""},
		"EC2's role, no region":               {with("ec2Role: {}"), "ec2Role: regions"},
		"EC2's role, no account":              {with("ec2Role: {regions: [eu-west-1], accounts: [a]}"), "ec2Role: account"},
		"Azure":                               {with("no tpm", "azure: {}"), ""},
		"Azure, all of it":                    {with("azure: {cloud: China, rootsFile: " + ca + ", intermediatesFile: " + ca + ", subscriptions: [" + guid + "], lookup: {tenantID: " + guid + ", clientID: " + guid + ", tokenFile: /token}}"), ""},
		"Azure, no cloud":                     {with("azure: {cloud: Moon}"), "azure: cloud"},
		"Azure, no intermediates":             {with("azure: {intermediatesFile: /missing}"), "azure: intermediatesFile"},
		"Azure, no subscription":              {with("azure: {subscriptions: [a]}"), "azure: subscription"},
		"Azure, no tenant":                    {with("azure: {lookup: {clientID: " + guid + ", tokenFile: /token}}"), "azure: lookup"},
		"Azure, a relative token":             {with("azure: {lookup: {tenantID: " + guid + ", clientID: " + guid + ", tokenFile: token}}"), "azure: lookup.tokenFile"},
		"a signer of no provider":             {with("signers: [{name: example.com/a, provider: gce}]"), "signers: provider"},
		"no PCRs":                             {with("tpm: {}"), "tpm.pcrs"},
		"no indexes":                          {with("tpm: {pcrs: {bank: sha256, indexes: []}}"), "tpm.pcrs"},
		"SHA-1":                               {with("tpm: {pcrs: {bank: sha1, indexes: [7]}}"), "PCR"},
		"a PCR that is not quoted":            {with("tpm: {pcrs: {bank: sha256, indexes: [7], values: {\"4\": [" + eks + "]}}}"), "PCR 4"},
		"a PCR without value":                 {with("tpm: {pcrs: {bank: sha256, indexes: [7], values: {\"7\": []}}}"), "PCR 7"},
		"a PCR by another name":               {with("tpm: {pcrs: {bank: sha256, indexes: [7], values: {\"07\": [" + eks + "]}}}"), "tpm.pcrs.values"},
		"a value that is not hex":             {with("tpm: {pcrs: {bank: sha256, indexes: [7], values: {\"7\": [x]}}}"), "tpm.pcrs.values"},
		"no roots in the file":                {with("tpm: {rootsFile: " + write(t, "# none yet\n") + ", pcrs: {bank: sha256, indexes: [7]}}"), "tpm.rootsFile"},
		"a broken root":                       {with("tpm: {rootsFile: " + write(t, string(mustRead(t, ca))+"-----BEGIN CERTIFICATE-----\n") + ", pcrs: {bank: sha256, indexes: [7]}}"), "tpm.rootsFile"},
		"no file of roots":                    {with("tpm: {rootsFile: /nonexistent, pcrs: {bank: sha256, indexes: [7]}}"), "tpm.rootsFile"},
		"intermediates alone":                 {with("tpm: {intermediatesFile: " + ca + ", pcrs: {bank: sha256, indexes: [7]}}"), "tpm"},
		"an EK in upper case":                 {with("tpm: {deniedEKs: [" + strings.ToUpper(eks) + "], pcrs: {bank: sha256, indexes: [7]}}"), "tpm.deniedEKs"},
		"a short EK":                          {with("tpm: {allowedEKs: [ab], pcrs: {bank: sha256, indexes: [7]}}"), "tpm.allowedEKs"},
		"firmware as people write it":         {with("tpm: {minimumFirmware: {IFX: \"7.2\"}, pcrs: {bank: sha256, indexes: [7]}}"), "tpm.minimumFirmware"},
		"firmware of no maker":                {with("tpm: {minimumFirmware: {Infineon Technologies: \"0007000200000000\"}, pcrs: {bank: sha256, indexes: [7]}}"), "MinimumFirmware"},
		"a challenge for a day":               {with("tpm: {challengeLifetime: 24h, pcrs: {bank: sha256, indexes: [7]}}"), "ChallengeLifetime"},
		"no namespace":                        {with("namespace: \"\""), "namespace"},
		"no keys' Secret":                     {with("challengeKeySecret: \"\""), "challengeKeySecret"},
		"no lease":                            {with("leaderElection: {leaseName: \"\"}"), "leaderElection.leaseName"},
		"no address":                          {with("healthBindAddress: \"\""), "healthBindAddress"},
		"no mode for credentials":             {with("credential: \"\""), "credential"},
		"another mode for tokens":             {with("token: \"off\""), "token"},
		"another mode for counters":           {with("bootCounters: deny"), "bootCounters"},
		"unattested nodes":                    {with("unattestedNodes: [control-plane-1, control-plane-2.example.com]"), ""},
		"an unattested node, twice":           {with("unattestedNodes: [a, b, a]"), "unattestedNodes"},
		"an unattested pattern":               {with("unattestedNodes: [\"control-plane-*\"]"), "unattestedNodes"},
		"an unattested node of no name":       {with("unattestedNodes: [\"\"]"), "unattestedNodes"},
		"an unattested user":                  {with("unattestedNodes: [\"system:node:a\"]"), "unattestedNodes"},
		"bindings that are removed":           {with("autoApprovingBindings: Remove"), "autoApprovingBindings: was removed; remove it: the controller reports these bindings"},
		"rates":                               {with("rates: {perRequester: {every: 1s}, perCluster: {every: 1ms, burst: 5000}, perMachine: {burst: 1}}"), ""},
		"a rate of never":                     {with("rates: {perRequester: {every: 0s}}"), "rates.perRequester.every"},
		"a rate that goes back":               {with("rates: {perCluster: {every: -1s}}"), "rates.perCluster.every"},
		"a rate with no burst":                {with("rates: {perMachine: {burst: 0}}"), "rates.perMachine.burst"},
		"a rate that is a number":             {with("rates: {perMachine: {every: 10}}"), "rates.perMachine.every"},
		"an unknown rate":                     {with("rates: {perNode: {every: 1s}}"), "perNode"},
		"too long a lifetime":                 {with("lifetimes: {max: 2161h}"), "lifetimes"},
		"no lifetime":                         {with("lifetimes: {default: 0s}"), "lifetimes"},
		"no deadline":                         {with("waitDeadline: 0s"), "waitDeadline"},
		"too late a deadline":                 {with("waitDeadline: 24h"), "waitDeadline"},
		"a bootstrapper without group":        {with("bootstrappers: [{username: a}]"), "bootstrappers"},
		"a node as bootstrapper":              {with("bootstrappers: [{username: \"system:node:a\", group: b}]"), "bootstrappers"},
		"administrators as token group":       {with("tokenGroup: system:masters"), "tokenGroup"},
		"an unknown field":                    {with("audti: true"), "line 3: audti: unknown field; did you mean audit?"},
		"an unknown field below":              {with("signing: {mode: Sign, secretname: ca}"), "line 3: signing.secretname: unknown field; did you mean secretName?"},
		"an unknown field in a list":          {with("signers: [{name: a.b/c, providers: [x]}]"), "provider"},
		"a field twice":                       {with("audit: true\naudit: false"), "audit: comes a second time"},
		"a field in another case":             {with("Audit: true"), "Audit: unknown field; did you mean audit?"},
		"a second document":                   {with() + "---\naudit: true\n", "more than one document"},
		"another kind":                        {strings.Replace(with(), Kind, "KubeletAuthenticatorConfiguration", 1), Kind},
		"another version":                     {strings.Replace(with(), "v1alpha1", "v1", 1), APIVersion},
		"empty":                               {"", Kind},
	} {
		t.Run(name, func(t *testing.T) {
			settings, err := newSettings(c.data)
			switch {
			case c.says == "" && (err != nil || settings.Rules() == nil && settings.Config().ClusterAPI == nil):
				t.Error(err)
			case c.says != "" && (err == nil || settings != nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n")):
				t.Errorf("does not say %q on one line: %v", c.says, err)
			}
		})
	}
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestLoad(t *testing.T) {
	c, err := Load(write(t, with("leaderElection: {enabled: false}", "lifetimes: {default: 24h}")))
	if err != nil || c.LeaderElection.Enabled || c.LeaderElection.LeaseName == "" || c.Lifetimes.Default.Duration != 24*time.Hour ||
		c.Lifetimes.Max.Duration != signing.DefaultLimits().Max {
		t.Errorf("%+v, %v", c, err)
	}
	broken := write(t, "clusterUID: [")
	for path, says := range map[string]string{"": "none is named", "/nonexistent": "/nonexistent", broken: broken} {
		if _, err := Load(path); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", path, err)
		}
	}
}

// Decision records go to the configured file, and name the cluster.
func TestDecisionLog(t *testing.T) {
	settings, err := newSettings(with())
	if err != nil {
		t.Fatal(err)
	}
	process := decisionlog.Controller{Version: "v1", Identity: "replica-1"}
	if log := settings.OpenDecisionLog(process, logr.Discard(), nil); log != nil {
		t.Error("there is a log that nobody configured")
	}
	parts, _ := settings.Controller(nil, nil)
	if want := (decisionlog.Config{Controller: process, Cluster: decisionlog.Cluster{UID: "c"}}); parts.Decisions != want {
		t.Errorf("%+v", parts.Decisions)
	}
	path := filepath.Join(t.TempDir(), "decisions.jsonl")
	if settings, err = newSettings(withClusterAPI("ekSources: [Annotation]", "decisionLog: {file: "+path+", archive: true}")); err != nil {
		t.Fatal(err)
	}
	log := settings.OpenDecisionLog(process, logr.Discard(), nil)
	workload, err := settings.ForWorkload(Workload{UID: "workload"})
	if err != nil {
		t.Fatal(err)
	}
	got := workload.Assemble(workload.Keys(nil, nil), nil, nil).Decisions
	if want := (decisionlog.Config{Log: log, Archive: true, Controller: process, Cluster: decisionlog.Cluster{UID: "workload"}}); log == nil || got != want {
		t.Errorf("%+v", got)
	}
	log.Add(&decisionlog.Record{ID: "u/Issued"})
	log.Close()
	if content := mustRead(t, path); !strings.Contains(string(content), `"u/Issued"`) {
		t.Errorf("%q", content)
	}
}

// Each part of the configuration becomes a part of the controller.
func TestSettingsMakeAController(t *testing.T) {
	settings, err := newSettings(with("audit: true", "namespace: other"))
	if err != nil {
		t.Fatal(err)
	}
	parts, keys := settings.Controller(nil, nil)
	if _, ok := sources.Uncompared(parts.CA).(*sources.SecretCA); !ok || parts.CA == sources.Uncompared(parts.CA) || parts.Rules == nil || !parts.Audit || parts.Namespace != "other" || parts.Limits != signing.DefaultLimits() {
		t.Errorf("%+v", parts)
	}
	if parts.Rates != fairqueue.DefaultRates() || settings.bindings(nil) != (bindings.Config{Audit: true}) {
		t.Errorf("%+v, %+v", parts.Rates, settings.bindings(nil))
	}
	if gate := settings.Preflight(keys, nil, nil, logr.Discard()); gate.Keys != keys || gate.Cluster != "c" || gate.Namespace != "other" || !gate.Audit || len(gate.Unattested()) > 0 {
		t.Errorf("%+v", gate)
	}
	if _, ok := parts.Machines.(*sources.Inventory); !ok || len(parts.Providers) != 1 || keys.Verifier() != nil {
		t.Errorf("%+v", parts)
	}
	if settings, err = newSettings(with("inventory: {configMap: {name: a, key: b}}", "signing: {mode: Sign, caFile: /a, keyFile: /b}")); err != nil {
		t.Fatal(err)
	}
	if _, ok := settings.Machines(nil).(*sources.Inventory); !ok {
		t.Errorf("%T", settings.Machines(nil))
	}
	if _, ok := sources.Uncompared(settings.ca(nil)).(*signing.Files); !ok {
		t.Errorf("%T", settings.ca(nil))
	}
	if settings, err = newSettings(with("signing: {mode: ApproveOnly}", "signers: [{name: a.b/c}]")); err != nil || settings.ca(nil) != nil {
		t.Error("there is a CA", err)
	}
	if _, err := settings.Verifier(verifiertpm.Keys{}); err == nil {
		t.Error("a verifier without keys")
	}
	if settings, err = newSettings(with("unattestedNodes: [a, b]", "rates: {perMachine: {burst: 3}}")); err != nil {
		t.Fatal(err)
	}
	parts, keys = settings.Controller(nil, nil)
	rates := fairqueue.DefaultRates()
	if rates.Machine.Burst = 3; parts.Rates != rates || settings.bindings(nil) != (bindings.Config{}) {
		t.Errorf("%+v, %+v", parts.Rates, settings.bindings(nil))
	}
	if gate := settings.Preflight(keys, nil, nil, logr.Discard()); gate.Audit || !slices.Equal(gate.Unattested(), []string{"a", "b"}) {
		t.Errorf("%+v", gate)
	}
}

// The controller accepts an endorsement key on first use without another authority only with
// trustAnyTPM.
func TestSoftwareTPMIsNotTrustedByDefault(t *testing.T) {
	roots := "tpm: {rootsFile: " + writeCA(t) + ", pcrs: {bank: sha256, indexes: [7]}}"
	list := "tpm: {allowedEKs: [" + strings.Repeat("ab", 32) + "], pcrs: {bank: sha256, indexes: [7]}}"
	for name, c := range map[string]struct {
		data string
		any  bool
	}{
		"any TPM":       {withClusterAPI("trustOnFirstUse: true, trustAnyTPM: true"), true},
		"roots":         {withClusterAPI("trustOnFirstUse: true", roots), false},
		"a list":        {withClusterAPI("trustOnFirstUse: true", list), false},
		"no first use":  {withClusterAPI("ekSources: [Annotation]"), false},
		"no management": {with(), false},
	} {
		settings, err := newSettings(c.data)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := settings.Assemble(settings.Keys(nil, nil), nil, nil).TrustUnnamed; got != c.any {
			t.Errorf("%s: TrustUnnamed is %v", name, got)
		}
	}
}

// Each workload cluster has its own rules. Common settings are the same for all.
func TestWorkloadClusters(t *testing.T) {
	all, err := newSettings(withClusterAPI("ekSources: [Annotation], servingAddresses: [InternalIP]", serving))
	if err != nil {
		t.Fatal(err)
	}
	if c := all.Config(); c.Token != modeRequired || c.ClusterAPI.User != DefaultUser || !slices.Equal(c.ClusterAPI.NodeNames, []verifier.NameSource{verifier.NameMachine}) {
		t.Errorf("%+v", c)
	}
	of, err := all.ForWorkload(Workload{UID: "u", Namespace: "n", KeySecret: "s", ForbiddenAddresses: []string{"10.96.0.0/12"}, UnattestedNodes: []string{"cp"}})
	if err != nil {
		t.Fatal(err)
	}
	c := of.Config()
	if of.Rules() == nil || all.Rules() != nil || c.ClusterUID != "u" || c.Namespace != "n" || c.ChallengeKeySecret != "s" ||
		!slices.Equal(c.Serving.ForbiddenAddresses, []string{"api.example.com", "10.96.0.0/12"}) || !slices.Equal(c.UnattestedNodes, []string{"cp"}) {
		t.Errorf("%+v", c)
	}
	if c := all.Config(); c.ClusterUID != "" || len(c.Serving.ForbiddenAddresses) != 1 || c.UnattestedNodes != nil {
		t.Errorf("one cluster's changed what is common: %+v", c)
	}
	for name, w := range map[string]Workload{"no UID": {Namespace: "n"}, "an address that is none": {UID: "u", ForbiddenAddresses: []string{"*"}}, "a node that is none": {UID: "u", UnattestedNodes: []string{"*"}}} {
		if _, err := all.ForWorkload(w); err == nil {
			t.Errorf("%s passes", name)
		}
	}
}

// The default signers are those that the plugin's providers use, in the order of strength.
func TestDefaultSignersAreThePlugins(t *testing.T) {
	for data, want := range map[string][]string{
		with():                    {tpm.SignerName},
		with("gce: {}"):           {tpm.SignerName, gce.SignerName},
		with("no tpm", "gce: {}"): {gce.SignerName},
		with("azure: {}", "gce: {}", "ec2Role: {regions: [eu-west-1]}", "ec2: {}"): {
			tpm.SignerName, signerPrefix + "ec2", signerPrefix + "ec2-role", gce.SignerName, signerPrefix + "azure",
		},
	} {
		s, err := newSettings(data)
		if err != nil {
			t.Error(err)
			continue
		}
		var got []string
		for _, signer := range s.Config().Signers {
			got = append(got, signer.Name)
		}
		parts, _ := s.Controller(nil, nil)
		if !slices.Equal(got, want) || len(parts.Providers) != len(want) {
			t.Errorf("%q, %d providers, want %q", got, len(parts.Providers), want)
		}
		if wanted, _ := s.Rules().Needs(); len(wanted) != len(want) || wanted[0].Challenges != strings.Contains(data, "tpm:") {
			t.Errorf("%+v", wanted)
		}
	}
}

// Which providers' evidence a signer accepts.
func TestProvidersOfSigners(t *testing.T) {
	const custom, shared = "example.com/nodes", "kubernetes.io/kube-apiserver-client-kubelet"
	for _, c := range []struct {
		set    string
		signer Signer
		want   []string
	}{
		{"tpm, gce", Signer{Name: tpm.SignerName}, []string{"tpm"}},
		{"tpm, gce", Signer{Name: gce.SignerName}, []string{"gce"}},
		{"tpm, gce", Signer{Name: gce.SignerName, Provider: "tpm"}, []string{"tpm"}},
		{"tpm, gce", Signer{Name: custom}, []string{"tpm"}},
		{"tpm, gce", Signer{Name: custom, Provider: "gce"}, []string{"gce"}},
		{"tpm, gce", Signer{Name: shared, Shared: true}, []string{"tpm", "gce"}},
		{"gce", Signer{Name: custom}, []string{"gce"}},
		{"gce", Signer{Name: custom, Provider: "tpm"}, nil},
		{"tpm", Signer{Name: gce.SignerName}, nil},
		{"", Signer{Name: custom}, nil},
	} {
		var config Config
		if strings.Contains(c.set, "tpm") {
			config.TPM = &TPM{}
		}
		if strings.Contains(c.set, "gce") {
			config.GCE = &GCE{}
		}
		if got, err := config.providersOf(c.signer); !slices.Equal(got, c.want) || (err == nil) != (c.want != nil) {
			t.Errorf("%s, %+v: %q, %v", c.set, c.signer, got, err)
		}
	}
}

// Each field is documented, with its default.
func TestConfigurationIsDocumented(t *testing.T) {
	document := string(mustRead(t, "../../../docs/controller-configuration.md"))
	_, table, _ := strings.Cut(document, "<!-- table -->")
	table, _, _ = strings.Cut(table, "<!-- /table -->")
	rows := 0
	var walk func(prefix string, value reflect.Value)
	walk = func(prefix string, value reflect.Value) {
		for i := range value.NumField() {
			name, _, _ := strings.Cut(value.Type().Field(i).Tag.Get("json"), ",")
			if name == "" {
				continue // kind and version
			}
			name = prefix + name
			field := value.Field(i)
			if field.Kind() == reflect.Pointer && field.Type().Elem().PkgPath() == value.Type().PkgPath() {
				field = reflect.Zero(field.Type().Elem())
			}
			if field.Kind() == reflect.Struct && field.Type().PkgPath() == value.Type().PkgPath() {
				walk(name+".", field)
				continue
			}
			row := regexp.MustCompile("(?m)^\\| `" + regexp.QuoteMeta(name) + "` \\| [a-z0-9 ]+ \\| (.*?) \\|").FindStringSubmatch(table)
			if row == nil {
				t.Errorf("%s has no row", name)
				continue
			}
			rows++
			if field.Kind() == reflect.Struct && field.FieldByName("Duration").IsValid() {
				d := time.Duration(field.FieldByName("Duration").Int())
				if d != 0 && !strings.Contains(row[1], strings.TrimSuffix(strings.TrimSuffix(d.String(), "0s"), "0m")) {
					t.Errorf("%s: the default %s is not in %q", name, d, row[1])
				}
			}
			if field.Kind() == reflect.String && field.String() != "" && !strings.Contains(row[1], "`"+field.String()+"`") ||
				field.Kind() == reflect.Bool && !strings.Contains(row[1], map[bool]string{true: "`true`", false: "`false`"}[field.Bool()]) {
				t.Errorf("%s: the default %v is not in %q", name, field, row[1])
			}
			if field.Kind() == reflect.Int && !strings.Contains(row[1], "`"+strconv.FormatInt(field.Int(), 10)+"`") {
				t.Errorf("%s: the default %d is not in %q", name, field.Int(), row[1])
			}
			if field.Kind() == reflect.Slice && field.Type().Elem().Kind() == reflect.Struct {
				walk(name+"[].", reflect.Zero(field.Type().Elem()))
			}
		}
	}
	walk("", reflect.ValueOf(Default()))
	if got := strings.Count(table, "\n| `"); got != rows {
		t.Errorf("%d rows for %d fields", got, rows)
	}
	if !strings.Contains(table, signerPrefix+"<provider>") {
		t.Error("signers: the default is not in its row")
	}
}

// The examples are valid.
func TestConfigurationExamplesAreAccepted(t *testing.T) {
	examples := strings.Split(string(mustRead(t, "../../../docs/controller-configuration.md")), "```yaml\n")[1:]
	if len(examples) != 2 {
		t.Errorf("%d examples", len(examples))
	}
	for _, example := range examples {
		example, _, _ = strings.Cut(example, "```")
		if _, err := newSettings(example); err != nil {
			t.Error(err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(with()))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %q", err)
			}
			return
		}
		if c.TPM != nil {
			c.TPM.RootsFile, c.TPM.IntermediatesFile = "", "" // no files are read here
		}
		if c.EC2 != nil {
			c.EC2.RootsFile = ""
		}
		if c.Azure != nil {
			c.Azure.RootsFile, c.Azure.IntermediatesFile = "", ""
		}
		if settings, err := New(c); (err == nil) != (settings != nil) {
			t.Error(err)
		}
	})
}
