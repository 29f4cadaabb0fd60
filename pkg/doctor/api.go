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

// probeResult is the answer of one server to a request without a credential.
type probeResult struct {
	server, source string
	// ahead is how far this machine's clock is ahead of the server's. dated is set if the
	// server sent its time.
	ahead time.Duration
	dated bool
	err   error
}

// probeServers probes each server that the plugin would talk to.
func (e *examination) probeServers() []probeResult {
	var all []probeResult
	own, ownErr := e.own()
	bootstrap, bootstrapErr := e.bootstrap()
	if ownErr == nil {
		all = append(all, e.probe(own.Cluster, own.Source))
	}
	needed := e.usable() == nil || !e.renews()
	if bootstrapErr == nil && (ownErr != nil || needed && bootstrap.Cluster.Server != own.Cluster.Server) {
		all = append(all, e.probe(bootstrap.Cluster, bootstrap.Source))
	}
	if asked := e.asked(); len(all) == 0 && asked != nil {
		// There is no credential yet, but the cluster is known.
		all = append(all, e.probe(*asked, e.conf().Path))
	}
	return all
}

// probe sends one request without a credential: other checks test the credentials. Any answer over
// a verified connection is a success.
func (e *examination) probe(cluster cache.Origin, source string) probeResult {
	p := probeResult{server: cluster.Server, source: source}
	config, err := nodeaccess.ClusterConfig(cluster)
	if err != nil {
		p.err = err
		return p
	}
	config.UserAgent = e.UserAgent
	a, err := open(nodeaccess.Access{Config: config, Cluster: cluster, Source: source})
	if err != nil {
		p.err = err
		return p
	}
	before := e.Now()
	answer, err := a.call(e.ctx, http.MethodGet, "/version", nil, nil)
	if err != nil {
		p.err = err
		return p
	}
	if date, err := http.ParseTime(answer.Header.Get("Date")); err == nil {
		// The server set the date between request and answer, and truncated it to seconds.
		local := before.Add(e.Now().Sub(before) / 2)
		p.ahead, p.dated = local.Sub(date.Add(500*time.Millisecond)), true
	}
	return p
}

// badTime reports whether a server was refused because its certificate is expired or not valid yet.
func badTime(err error) bool {
	var invalid x509.CertificateInvalidError
	return errors.As(err, &invalid) && invalid.Reason == x509.Expired
}

func checkClock(_ context.Context, e *examination) checkup.Result {
	const remedy = "have the clock set: chronyc tracking, or timedatectl timesync-status"
	for _, p := range e.servers() {
		if badTime(p.err) {
			return failure(remedy+"; if it is right, renew the API server's certificate", "by this machine's clock, %s, the certificate of %s is not valid", e.Now().UTC().Format(time.RFC3339), p.server)
		}
	}
	for _, p := range e.servers() {
		if p.err != nil || !p.dated {
			continue
		}
		side := "ahead of"
		if p.ahead < 0 {
			side = "behind"
		}
		switch off := p.ahead.Abs().Round(time.Second); {
		case off >= failSkew:
			return failure(remedy, "%s %s the clock of %s", off, side, p.server)
		case off >= warnSkew:
			return warning(remedy, "%s %s the clock of %s", off, side, p.server)
		}
		return ok("within %s of the clock of %s", max(p.ahead.Abs().Round(time.Second), time.Second), p.server)
	}
	return skipped("no API server answered with its time")
}

func checkAPIServer(_ context.Context, e *examination) checkup.Result {
	all := e.servers()
	if len(all) == 0 {
		return skipped("no readable file names an API server")
	}
	findings := make([]checkup.Result, 0, len(all))
	for _, p := range all {
		findings = append(findings, assessServer(p))
	}
	return checkup.Worst(findings...)
}

func assessServer(p probeResult) checkup.Result {
	var verification *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	switch {
	case p.err == nil:
		return ok("%s answers, as of %s", p.server, p.source)
	case badTime(p.err):
		return failure("see clock", "%s: %s", p.server, brief(p.err))
	case errors.As(p.err, &hostname):
		return failure("correct server or tls-server-name in "+p.source, "%s: %s", p.server, brief(p.err))
	case errors.As(p.err, &authority), errors.As(p.err, &verification):
		return failure("correct certificate-authority-data in "+p.source, "%s: the CA in %s did not issue its certificate: %s", p.server, p.source, brief(p.err))
	}
	return failure("check the address in "+p.source+", the network and the proxy", "%s: %s", p.server, brief(p.err))
}

// review asks the API server which user the credential belongs to.
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
		return ok("the API server accepts it as user %s", r.Username)
	}
	// The API server accepted the credential, even if the user may not create such a review, or the
	// API server cannot answer.
	return ok("the API server accepts it, but does not return the user (%d)", r.Status)
}

// checkCertificateWrites tries a write with the node's certificate, as a dry run. Only a write
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
		return ok("the API server accepts a dry run of a write to Node %s", node)
	case !errors.As(err, &refused):
		return skipped("%s: see api-server", brief(err))
	case refused.Status == http.StatusUnauthorized:
		return skipped("the API server does not know the certificate: see certificate-accepted")
	case refused.Status != http.StatusForbidden:
		return skipped("inconclusive answer of the API server: %v", refused)
	case nodeaccess.ClassifyRefusal(refused.Message) == nodeaccess.Suspended:
		return failure("ask the operator why; kubectl attest resume ends the suspension", "this machine is suspended: %v", refused)
	case nodeaccess.ClassifyRefusal(refused.Message) == nodeaccess.Revoked:
		remedy := "the plugin requests another certificate when it finds the announcement: see last-result"
		if e.Config.CheckInterval.Duration == 0 {
			remedy = "set checkInterval: without it the plugin does not learn that the certificate was revoked"
		}
		return failure(remedy, "the certificate was revoked: %v", refused)
	}
	return warning("check the Node authorizer, and the cluster's admission policies", "a write to Node %s is refused: %v", node, refused)
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
		return e.whileServed(failure("create a new one: kubeadm token create --print-join-command", "%s: the credential expired at %s", a.Source, end.UTC().Format(time.RFC3339)))
	}
	r, err := a.review(ctx)
	switch {
	case err != nil:
		return skipped("%s: see api-server", brief(err))
	case r.Status == http.StatusUnauthorized:
		return e.whileServed(failure("create a new one: kubeadm token create --print-join-command", "%s: the API server does not know the credential (401): the credential has expired, was deleted, or is for another cluster", a.Source))
	case r.Status == http.StatusCreated:
		return ok("the API server sees the user %s; needed because %s", r.Username, why)
	}
	return ok("the API server accepts it, but does not return the user (%d); needed because %s", r.Status, why)
}

// expires returns when the credential expires, as far as a client certificate or a service account
// token says so. A bootstrap token does not.
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

// signers returns the signers of the plugin's requests, in the order of filing.
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

// sample returns a request like the plugin's, with constant evidence that needs no TPM.
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
	request, err := attestation.Request{PKCS10: pkcs10, Provider: e.providerName(), Data: []byte(`{"version":"doctor/v1"}`)}.Marshal()
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

// asRequester returns the access that a request would be filed with. If there is none, it returns
// the result of the check.
func (e *examination) asRequester() (*access, *checkup.Result) {
	a, err := e.requester()
	if err != nil {
		f := skipped("no credential for this check: %s", brief(err))
		return nil, &f
	}
	return a, nil
}

// unanswered returns the result of a check whose call failed, or whose credential is unknown. It
// returns nil otherwise.
func unanswered(answer *nodeaccess.Answer, err error) *checkup.Result {
	var f checkup.Result
	switch {
	case err != nil:
		f = skipped("%s: see api-server", brief(err))
	case answer.Status == http.StatusUnauthorized:
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
		answer, err := a.call(ctx, http.MethodPost, csrPath, url.Values{"dryRun": {"All"}}, object)
		if f := unanswered(answer, err); f != nil {
			return *f
		}
		switch {
		case answer.Status == http.StatusForbidden:
			findings = append(findings, failure(nodeaccess.ClassifyRefusal(refusalMessage(answer)).Remedy(), "with %s, under %s: refused (403): %s", a.credential, signer, refusalMessage(answer)))
		case answer.Status != http.StatusCreated:
			findings = append(findings, failure("check the cluster's admission policies and webhooks", "with %s, under %s: refused (%d): %s", a.credential, signer, answer.Status, refusalMessage(answer)))
		}
	}
	return checkup.Worst(findings...)
}

func checkWatch(ctx context.Context, e *examination) checkup.Result {
	a, f := e.asRequester()
	if f != nil {
		return *f
	}
	name := csr.NewName() // no request has that name
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
		return warning(nodeaccess.ClassifyRefusal(refusalMessage(get)).Remedy(), "with %s: get is refused (%d): the plugin cannot find a request again if the answer to its creation was lost: %s", a.credential, get.Status, refusalMessage(get))
	case gets:
		return warning(nodeaccess.ClassifyRefusal(refusalMessage(watch)).Remedy(), "with %s: watch is refused (%d): the plugin polls every few seconds instead: %s", a.credential, watch.Status, refusalMessage(watch))
	}
	return failure(nodeaccess.ClassifyRefusal(refusalMessage(watch)).Remedy(), "with %s: neither watch (%d) nor get (%d) is allowed: %s", a.credential, watch.Status, get.Status, refusalMessage(watch))
}

// roles are the ClusterRoles for whose subjects kube-controller-manager approves requests without
// attestation.
var roles = map[string]bool{
	"system:certificates.k8s.io:certificatesigningrequests:nodeclient":     true,
	"system:certificates.k8s.io:certificatesigningrequests:selfnodeclient": true,
}

func checkBindings(ctx context.Context, e *examination) checkup.Result {
	const command = "kubectl get clusterrolebindings -o wide | grep -E 'certificatesigningrequests:(self)?nodeclient'"
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
		answer, err := a.call(ctx, http.MethodGet, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", query, nil)
		if f := unanswered(answer, err); f != nil {
			return *f
		}
		if answer.Status != http.StatusOK {
			return checkup.Result{Status: checkup.Skipped, Message: fmt.Sprintf("the node may not list ClusterRoleBindings (%d), as intended", answer.Status), Remedy: "run as an administrator: " + command}
		}
		found, more, err := autoApproving(answer.Body)
		if err != nil {
			return failure("run as an administrator: "+command, "list of ClusterRoleBindings: %v", err)
		}
		names = append(names, found...)
		if next = more; next == "" {
			break
		}
	}
	if len(names) == 0 {
		return ok("no ClusterRoleBinding lets it")
	}
	return warning("kubectl delete clusterrolebinding "+text.Arguments(names), "kube-controller-manager approves without attestation, unless an admission policy stops it: %s", text.Names(names))
}

// autoApproving returns the bindings in one page of a list that grant one of the roles to a
// subject. It also returns the token for the next page.
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
