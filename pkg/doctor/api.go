// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

const (
	// callTimeout bounds one request to the API server.
	callTimeout = 10 * time.Second
	// maxList is more than csr.HTTPClient reads of an answer, so a longer list is an error.
	maxList = 16 << 20
	// warnSkew and failSkew are how far this machine's clock may be off. Kubernetes' own tokens
	// and leases tolerate a few minutes.
	warnSkew, failSkew = 30 * time.Second, 5 * time.Minute

	csrPath = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
)

// call makes one request.
func (a *access) call(ctx context.Context, method, path string, query url.Values, body any) (*nodeaccess.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return a.Call(ctx, method, path, query, body, maxList)
}

// served is the answer of one server that was asked without a credential.
type served struct {
	server, source string
	header         http.Header
	// ahead is how far this machine's clock is ahead of the server's. dated is set if the
	// server sent its time.
	ahead time.Duration
	dated bool
	err   error
}

// askServers asks each server that the plugin would talk to.
func (e *examination) askServers() []served {
	var all []served
	own, ownErr := e.own()
	bootstrap, bootstrapErr := e.bootstrap()
	if ownErr == nil {
		all = append(all, e.ask(own.Cluster, own.Source))
	}
	needed := e.usable() == nil || !e.renews()
	if bootstrapErr == nil && (ownErr != nil || needed && bootstrap.Cluster.Server != own.Cluster.Server) {
		all = append(all, e.ask(bootstrap.Cluster, bootstrap.Source))
	}
	if asked := e.asked(); len(all) == 0 && asked != nil {
		// There is no credential yet, but the cluster is known.
		all = append(all, e.ask(*asked, e.conf().Path))
	}
	return all
}

// ask shows no credential: whether that is accepted is for other checks. Any answer over a verified
// connection counts.
func (e *examination) ask(cluster cache.Origin, source string) served {
	s := served{server: cluster.Server, source: source}
	config, err := nodeaccess.ClusterConfig(cluster)
	if err != nil {
		s.err = err
		return s
	}
	config.UserAgent = e.UserAgent
	a, err := open(nodeaccess.Access{Config: config, Cluster: cluster, Source: source})
	if err != nil {
		s.err = err
		return s
	}
	before := e.Now()
	result, err := a.call(e.ctx, http.MethodGet, "/version", nil, nil)
	if err != nil {
		s.err = err
		return s
	}
	s.header = result.Header
	if date, err := http.ParseTime(result.Header.Get("Date")); err == nil {
		// The server wrote the date at some time between the two, and cut it to the second.
		local := before.Add(e.Now().Sub(before) / 2)
		s.ahead, s.dated = local.Sub(date.Add(500*time.Millisecond)), true
	}
	return s
}

// badTime reports whether a server was refused because its certificate is not valid now.
func badTime(err error) bool {
	var invalid x509.CertificateInvalidError
	return errors.As(err, &invalid) && invalid.Reason == x509.Expired
}

func checkClock(_ context.Context, e *examination) checkup.Result {
	const remedy = "have the clock set: chronyc tracking, or timedatectl timesync-status"
	for _, s := range e.servers() {
		if badTime(s.err) {
			return failure(remedy+"; if it is right, renew the API server's certificate", "by this machine's clock, %s, the certificate of %s is not valid", e.Now().UTC().Format(time.RFC3339), s.server)
		}
	}
	for _, s := range e.servers() {
		if s.err != nil || !s.dated {
			continue
		}
		side := "ahead of"
		if s.ahead < 0 {
			side = "behind"
		}
		switch off := s.ahead.Abs().Round(time.Second); {
		case off >= failSkew:
			return failure(remedy, "%s %s the clock of %s", off, side, s.server)
		case off >= warnSkew:
			return warning(remedy, "%s %s the clock of %s", off, side, s.server)
		}
		return ok("within %s of the clock of %s", max(s.ahead.Abs().Round(time.Second), time.Second), s.server)
	}
	return skipped("no API server answered with its time")
}

func checkAPIServer(_ context.Context, e *examination) checkup.Result {
	all := e.servers()
	if len(all) == 0 {
		return skipped("no file that can be read names one")
	}
	findings := make([]checkup.Result, 0, len(all))
	for _, s := range all {
		findings = append(findings, judgeServer(s))
	}
	return checkup.Worst(findings...)
}

func judgeServer(s served) checkup.Result {
	var verification *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	switch {
	case s.err == nil:
		return ok("%s answers, as of %s", s.server, s.source)
	case badTime(s.err):
		return failure("see clock", "%s: %s", s.server, brief(s.err))
	case errors.As(s.err, &hostname):
		return failure("correct server or tls-server-name in "+s.source, "%s: %s", s.server, brief(s.err))
	case errors.As(s.err, &authority), errors.As(s.err, &verification):
		return failure("correct certificate-authority-data in "+s.source, "%s: the CA in %s did not issue its certificate: %s", s.server, s.source, brief(s.err))
	}
	return failure("check the address in "+s.source+", the network and the proxy", "%s: %s", s.server, brief(s.err))
}

// review asks whom the API server takes the credential for.
func (a *access) review(ctx context.Context) (nodeaccess.Review, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return a.Review(ctx)
}

func (e *examination) reviewOwn() (nodeaccess.Review, error) {
	own, err := e.own()
	if err != nil {
		return nodeaccess.Review{}, err
	}
	return own.review(e.ctx)
}

func checkCertificateAccepted(_ context.Context, e *examination) checkup.Result {
	if _, err := e.own(); err != nil {
		return skipped("%s", brief(err))
	}
	r, err := e.accepted()
	pair := e.usable()
	switch {
	case err != nil:
		return skipped("%s: see api-server", brief(err))
	case r.Status == http.StatusUnauthorized:
		return failure("add the signer's CA to kube-apiserver's --client-ca-file; the plugin requests another certificate meanwhile", "the API server rejects it (401)")
	case r.Status == http.StatusCreated && r.Username != pair.Leaf.Subject.CommonName:
		return failure("check what is between this node and the API server, such as a proxy", "the API server sees the user %.253q", r.Username)
	case r.Status == http.StatusCreated:
		return ok("the API server takes it for %s", r.Username)
	}
	// A credential that has no right to ask, or whose API server cannot answer, was accepted
	// nevertheless.
	return ok("it is accepted; the API server does not say for which user (%d)", r.Status)
}

// checkCertificateWrites has the API server judge a write with the node's certificate. Only a write
// shows that a certificate is revoked: admission sees no reads.
func checkCertificateWrites(ctx context.Context, e *examination) checkup.Result {
	own, err := e.own()
	if err != nil {
		return skipped("%s", brief(err))
	}
	node := e.usable().NodeName()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = own.TryWrite(ctx, node)
	var refused *nodeaccess.StatusError
	switch {
	case err == nil:
		return ok("a dry run of a write of Node %s is accepted", node)
	case !errors.As(err, &refused):
		return skipped("%s: see api-server", brief(err))
	case refused.Status == http.StatusUnauthorized:
		return skipped("the API server does not know the certificate: see certificate-accepted")
	case refused.Status != http.StatusForbidden:
		return skipped("the API server does not say: %v", refused)
	case nodeaccess.ClassifyRefusal(refused.Message) == nodeaccess.Suspended:
		return failure("ask the operator why; kubectl attest resume ends it", "this machine is suspended: %v", refused)
	case nodeaccess.ClassifyRefusal(refused.Message) == nodeaccess.Revoked:
		remedy := "the plugin gets another by attestation once it finds the renewal announced: see last-result"
		if e.Config.CheckInterval.Duration == 0 {
			remedy = "set checkInterval: without it the plugin does not learn that the certificate was revoked"
		}
		return failure(remedy, "the certificate was revoked: %v", refused)
	}
	return warning("check the Node authorizer, and the cluster's admission policies", "a change of Node %s is refused: %v", node, refused)
}

func checkBootstrapCredential(ctx context.Context, e *examination) checkup.Result {
	why := e.need()
	if err := e.unseen(); err != nil {
		return skipped("cannot tell whether it is needed: %v", err)
	}
	if why == "" {
		return skipped("not needed: the node renews with its own certificate")
	}
	a, err := e.bootstrap()
	if err != nil {
		return skipped("see bootstrap-kubeconfig")
	}
	if end := a.expires(); !end.IsZero() && !e.Now().Before(end) {
		return e.whileServed(failure("make a new one: kubeadm token create --print-join-command", "%s: the credential expired at %s", a.Source, end.UTC().Format(time.RFC3339)))
	}
	r, err := a.review(ctx)
	switch {
	case err != nil:
		return skipped("%s: see api-server", brief(err))
	case r.Status == http.StatusUnauthorized:
		return e.whileServed(failure("make a new one: kubeadm token create --print-join-command", "%s: the API server does not know the credential (401): it has expired, was deleted, or is another cluster's", a.Source))
	case r.Status == http.StatusCreated:
		return ok("the API server sees the user %s; needed because %s", r.Username, why)
	}
	return ok("it is accepted; the API server does not say for which user (%d); needed because %s", r.Status, why)
}

// expires is the end of a credential that carries one: a client certificate, or the token of a
// service account. A bootstrap token carries none.
func (a *access) expires() time.Time {
	if block, _ := pem.Decode(a.Config.CertData); block != nil {
		if leaf, err := x509.ParseCertificate(block.Bytes); err == nil {
			return leaf.NotAfter
		}
	}
	parts := strings.Split(a.Config.BearerToken, ".")
	if len(parts) != 3 {
		return time.Time{}
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	var claims struct {
		Expires int64 `json:"exp"`
	}
	if err != nil || json.Unmarshal(payload, &claims) != nil || claims.Expires == 0 {
		return time.Time{}
	}
	return time.Unix(claims.Expires, 0)
}

// signers are the signers of the requests, in the order of filing.
func (e *examination) signers() []string {
	p, err := e.attestor()
	if err != nil {
		return nil
	}
	name := e.Config.SignerName
	if name == "" {
		name = p.SignerName()
	}
	if _, ok := p.(provider.Challenger); ok {
		return []string{attestation.HelloSignerName, name}
	}
	return []string{name}
}

// sample is a request as the plugin would file it, with constant evidence that needs no TPM.
func (e *examination) sample(signer string) (*certificatesv1.CertificateSigningRequest, error) {
	node, _ := e.nodeName()
	if pair := e.usable(); pair != nil {
		node.Name = pair.NodeName()
	}
	key, _, err := csr.NewKey()
	if err != nil {
		return nil, err
	}
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: node.Name, ProviderID: e.Config.ProviderID}, key)
	if err != nil {
		return nil, err
	}
	request, err := attestation.Request{PKCS10: pkcs10, Provider: e.Config.Provider, Data: []byte(`{"version":"doctor/v1"}`)}.Marshal()
	if err != nil {
		return nil, err
	}
	var expiration *int32
	if d := e.Config.Expiration.Duration; d > 0 {
		seconds := int32(min(d, 10*365*24*time.Hour) / time.Second)
		expiration = &seconds
	}
	return csr.Object(csr.NewName(), signer, request, key.Public(), expiration), nil
}

// asRequester returns the access that a request would be filed with, or why that cannot be tried.
func (e *examination) asRequester() (*access, *checkup.Result) {
	a, err := e.requester()
	if err != nil {
		f := skipped("no credential for this check: %s", brief(err))
		return nil, &f
	}
	return a, nil
}

// unanswered is the finding of a check whose call failed, or whose credential is unknown. It is nil
// otherwise.
func unanswered(result *nodeaccess.Answer, err error) *checkup.Result {
	var f checkup.Result
	switch {
	case err != nil:
		f = skipped("%s: see api-server", brief(err))
	case result.Status == http.StatusUnauthorized:
		f = skipped("the API server does not know the credential: see bootstrap-credential and certificate-accepted")
	default:
		return nil
	}
	return &f
}

func checkCreate(ctx context.Context, e *examination) checkup.Result {
	signers := e.signers()
	if len(signers) == 0 {
		return skipped("no provider: see configuration")
	}
	a, f := e.asRequester()
	if f != nil {
		return *f
	}
	findings := []checkup.Result{ok("with %s, under %s: a dry run is accepted", a.credential, strings.Join(signers, " and "))}
	for _, signer := range signers {
		object, err := e.sample(signer)
		if err != nil {
			return failure("see configuration", "%v", err)
		}
		result, err := a.call(ctx, http.MethodPost, csrPath, url.Values{"dryRun": {"All"}}, object)
		if f := unanswered(result, err); f != nil {
			return *f
		}
		switch {
		case result.Status == http.StatusForbidden:
			findings = append(findings, failure(nodeaccess.ClassifyRefusal(says(result)).Remedy(), "with %s, under %s: refused (403): %s", a.credential, signer, says(result)))
		case result.Status != http.StatusCreated:
			findings = append(findings, failure("see what is refused with --dry-run, and the cluster's admission policies", "with %s, under %s: refused (%d): %s", a.credential, signer, result.Status, says(result)))
		}
	}
	return checkup.Worst(findings...)
}

func checkWatch(ctx context.Context, e *examination) checkup.Result {
	a, f := e.asRequester()
	if f != nil {
		return *f
	}
	name := csr.NewName() // no node has that name
	watch, err := a.call(ctx, http.MethodGet, csrPath, url.Values{"watch": {"true"}, "timeoutSeconds": {"1"}, "fieldSelector": {"metadata.name=" + name}}, nil)
	if f := unanswered(watch, err); f != nil {
		return *f
	}
	get, err := a.call(ctx, http.MethodGet, csrPath+"/"+name, nil, nil)
	if f := unanswered(get, err); f != nil {
		return *f
	}
	watches, gets := watch.Status == http.StatusOK, get.Status == http.StatusNotFound
	switch {
	case watches && gets:
		return ok("with %s: both are allowed", a.credential)
	case watches:
		return warning(nodeaccess.ClassifyRefusal(says(get)).Remedy(), "with %s: get is refused (%d): the plugin cannot find a request again whose answer was lost: %s", a.credential, get.Status, says(get))
	case gets:
		return warning(nodeaccess.ClassifyRefusal(says(watch)).Remedy(), "with %s: watch is refused (%d): the plugin polls every few seconds instead: %s", a.credential, watch.Status, says(watch))
	}
	return failure(nodeaccess.ClassifyRefusal(says(watch)).Remedy(), "with %s: neither watch (%d) nor get (%d) is allowed: %s", a.credential, watch.Status, get.Status, says(watch))
}

// roles are the ClusterRoles with which kube-controller-manager approves requests without
// attestation.
var roles = map[string]bool{
	"system:certificates.k8s.io:certificatesigningrequests:nodeclient":     true,
	"system:certificates.k8s.io:certificatesigningrequests:selfnodeclient": true,
}

func checkBindings(ctx context.Context, e *examination) checkup.Result {
	const elsewhere = "kubectl get clusterrolebindings -o wide | grep -E 'certificatesigningrequests:(self)?nodeclient'"
	a, f := e.asRequester()
	if f != nil {
		return *f
	}
	var names []string
	next := ""
	for {
		query := url.Values{"limit": {"200"}}
		if next != "" {
			query.Set("continue", next)
		}
		result, err := a.call(ctx, http.MethodGet, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", query, nil)
		if f := unanswered(result, err); f != nil {
			return *f
		}
		if result.Status != http.StatusOK {
			return checkup.Result{Status: checkup.Skipped, Message: fmt.Sprintf("a node may not look (%d), which is as it should be", result.Status), Remedy: "run elsewhere: " + elsewhere}
		}
		found, more, err := autoApproving(result.Body)
		if err != nil {
			return failure("run elsewhere: "+elsewhere, "list of ClusterRoleBindings: %v", err)
		}
		names = append(names, found...)
		if next = more; next == "" {
			break
		}
	}
	if len(names) == 0 {
		return ok("there are none")
	}
	return warning("kubectl delete clusterrolebinding "+text.Arguments(names), "kube-controller-manager approves without attestation, unless an admission policy stops it: %s", text.Names(names))
}

// autoApproving returns the bindings in one page of a list that give one of the roles to somebody,
// and the start of the next page.
func autoApproving(page []byte) (names []string, next string, err error) {
	var list struct {
		Metadata struct {
			Continue string `json:"continue"`
		} `json:"metadata"`
		Items []struct {
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
			RoleRef struct {
				Kind string `json:"kind"`
				Name string `json:"name"`
			} `json:"roleRef"`
			Subjects []struct{} `json:"subjects"`
		} `json:"items"`
	}
	if err := json.Unmarshal(page, &list); err != nil {
		return nil, "", err
	}
	for _, item := range list.Items {
		if item.RoleRef.Kind == "ClusterRole" && roles[item.RoleRef.Name] && len(item.Subjects) > 0 {
			names = append(names, item.Metadata.Name)
		}
	}
	return names, list.Metadata.Continue, nil
}
