// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	apiversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// askTimeout bounds one call of one API server.
	askTimeout = 3 * time.Second
	// answersFresh is how long answers are reused. It is shorter than policiesInterval, so that a
	// PolicyWatch asks in each interval. noneFresh is the same if there were no static policies:
	// most clusters have none, and a controller may serve a thousand of these.
	answersFresh, noneFresh = 10 * time.Second, 2 * time.Minute
	// lackMemory is how long it counts that an API server behind a load balancer lacked the files.
	lackMemory = 5 * time.Minute
	// maxAPIServers bounds how many API servers are asked. A workload cluster's administrator may
	// write their addresses.
	maxAPIServers = 16
	// maxAnswer bounds an answer, in bytes.
	maxAnswer = 1 << 20
)

// StaticProber asks the API servers of a cluster for the static policies: those that each of them
// reads from its own disk. The API does not list static policies. So the prober tries to write a
// condition that the static policies refuse to everybody. It is a dry run, so nothing changes where
// they are missing. The zero value does not work. A nil StaticProber asks nobody.
type StaticProber struct {
	// Config is a connection to the cluster. Its user needs patch on the status of Namespace, and
	// get on the EndpointSlice default/kubernetes.
	Config *rest.Config
	// Namespace is the name of an existing Namespace.
	Namespace string
	// AskEach has each API server asked even if the API has the policies, and the first answer is
	// that there are no static ones. A user who moves policies wants to see all.
	AskEach bool

	mu sync.Mutex
	// answers are the last ones, of the time asked. ask was called with this inAPI.
	answers staticAnswers
	asked   time.Time
	inAPI   bool
	// lacking is the last answer of the connection's own address without static policies, of the
	// time lackedAt.
	lacking  apiServer
	lackedAt time.Time
}

// apiServer is the answer of one API server.
type apiServer struct {
	// address is host:port, or the connection's URL. That URL may lead to any API server.
	address string
	// static describes its static policies. It is nil if it has none, or if that is not known.
	static *policyset.Identity
	// unknown says why that is not known, in a text that stays the same while the cause does.
	unknown string
	// forbidden says that the user may not ask. unreached says that it did not answer, or could not
	// at that time.
	forbidden, unreached bool
}

// staticAnswers are the answers of a cluster's API servers.
type staticAnswers struct {
	// servers are sorted by address. The connection's own URL is last.
	servers []apiServer
	// notAskedEach says why the API servers could not be asked one by one. It is empty if they
	// were, or if there was no need to.
	notAskedEach string
}

// ask asks the API servers, or returns their last answers. inAPI says that all policies are in
// force through the API. Then the static policies matter only if there are any.
func (p *StaticProber) ask(ctx context.Context, inAPI bool) staticAnswers {
	if p == nil {
		return staticAnswers{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	fresh := noneFresh
	if p.answers.anyHasStatic() || p.answers.unreached() {
		fresh = answersFresh
	}
	if p.inAPI == inAPI && time.Since(p.asked) < fresh {
		return p.answers
	}
	answers := p.askAll(ctx, inAPI)
	if ctx.Err() == nil {
		p.answers, p.asked, p.inAPI = answers, time.Now(), inAPI
	}
	return answers
}

func (p *StaticProber) askAll(ctx context.Context, inAPI bool) staticAnswers {
	// 1. One request through the connection's own address is enough for most clusters.
	own := p.askServer(ctx, "")
	if !own.hasStatic() {
		enough := inAPI && !p.AskEach
		if !enough && p.tooOld(ctx) {
			own, enough = apiServer{address: own.address}, true
		}
		if enough || own.forbidden {
			return staticAnswers{servers: []apiServer{own}}
		}
	}

	// 2. Each API server has its own disk, so each is asked.
	addresses, err := p.addresses(ctx)
	servers := make([]apiServer, len(addresses))
	var asking sync.WaitGroup
	for i, address := range addresses {
		asking.Go(func() { servers[i] = p.askServer(ctx, address) })
	}
	asking.Wait()

	answers := staticAnswers{servers: servers}
	switch {
	case err != nil:
		answers.notAskedEach = cause(err)
	case !slices.ContainsFunc(servers, apiServer.known):
		answers.notAskedEach = "no address of the EndpointSlice default/kubernetes answers"
	}

	// 3. The connection's own address leads to one of these. So its answer counts only if none of
	// them gave it.
	if answers.notAskedEach != "" || slices.ContainsFunc(servers, func(s apiServer) bool { return !s.known() }) {
		own = p.remembered(own)
	}
	if !slices.ContainsFunc(servers, own.equals) {
		answers.servers = append(answers.servers, own)
	}
	return answers
}

// remembered returns an answer through a load balancer, if there are API servers that cannot be
// asked otherwise. The next connection may reach another one. So an answer without static policies
// counts for some time.
func (p *StaticProber) remembered(own apiServer) apiServer {
	switch {
	case own.lacksStatic():
		p.lacking, p.lackedAt = own, time.Now()
	case own.hasStatic() && time.Since(p.lackedAt) < lackMemory:
		return p.lacking
	}
	return own
}

func (s apiServer) known() bool       { return s.unknown == "" }
func (s apiServer) hasStatic() bool   { return s.static != nil }
func (s apiServer) lacksStatic() bool { return s.known() && s.static == nil }

// equals reports whether two answers say the same.
func (s apiServer) equals(other apiServer) bool {
	if s.hasStatic() && other.hasStatic() {
		return s.static.Digest == other.static.Digest
	}
	return s.lacksStatic() && other.lacksStatic()
}

// staticPatch writes the condition that static policies refuse.
var staticPatch = []byte(`{"status": {"conditions": [{"type": "` + string(policyset.ConditionStatic) + `", "status": "Unknown", "reason": "DryRun", "message": "whether static policies refuse it"}]}}`)

// askServer asks one API server. An empty address is the connection's own.
func (p *StaticProber) askServer(ctx context.Context, address string) apiServer {
	server := apiServer{address: cmp.Or(address, p.Config.Host)}
	err := p.call(ctx, address, http.MethodPatch, "/api/v1/namespaces/"+p.Namespace+"/status?dryRun="+metav1.DryRunAll, staticPatch, nil)
	if err == nil {
		return server
	}
	if identity, ok := policyset.ParseRefusal(err); ok {
		server.static = &identity
		return server
	}
	server.unknown, server.forbidden, server.unreached = cause(err), apierrors.IsForbidden(err), isTransient(err)
	return server
}

// firstWithStatic is the first version of Kubernetes whose API servers can have static policies.
var firstWithStatic = version.MustParseGeneric("1.36")

// tooOld reports whether the API server cannot have static policies.
func (p *StaticProber) tooOld(ctx context.Context) bool {
	info := &apiversion.Info{}
	if err := p.call(ctx, "", http.MethodGet, "/version", nil, info); err != nil {
		return false
	}
	v, err := version.ParseGeneric(info.GitVersion)
	return err == nil && v.LessThan(firstWithStatic)
}

// addresses returns host:port of each API server. They come from the cluster, whose administrator
// may have written them.
func (p *StaticProber) addresses(ctx context.Context) ([]string, error) {
	slice := &discoveryv1.EndpointSlice{}
	if err := p.call(ctx, "", http.MethodGet, "/apis/discovery.k8s.io/v1/namespaces/"+metav1.NamespaceDefault+"/endpointslices/kubernetes", nil, slice); err != nil {
		return nil, err
	}
	var all []string
	for _, port := range slice.Ports {
		if port.Port == nil || *port.Port < 1 || *port.Port > 65535 {
			continue
		}
		for i := range slice.Endpoints {
			for _, address := range slice.Endpoints[i].Addresses {
				ip, err := netip.ParseAddr(address)
				// Platforms serve metadata at link-local addresses.
				if err == nil && !ip.Unmap().IsLinkLocalUnicast() {
					all = append(all, net.JoinHostPort(ip.String(), strconv.Itoa(int(*port.Port))))
				}
			}
		}
	}
	slices.Sort(all)
	all = slices.Compact(all)
	return all[:min(len(all), maxAPIServers)], nil
}

// call makes one request by a new connection, since a load balancer may choose another API server
// for it. An empty address is the connection's own.
//
// It does not use client-go's requests: their metrics have the address as a label, and the
// administrator of a workload cluster may change addresses all the time.
func (p *StaticProber) call(ctx context.Context, address, method, path string, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	server, _, err := rest.DefaultServerURL(p.Config.Host, "", schema.GroupVersion{}, true)
	if err != nil {
		return err
	}
	config := rest.CopyConfig(p.Config)
	config.UserAgent = cmp.Or(config.UserAgent, rest.DefaultKubernetesUserAgent())
	base := server.Scheme + "://" + server.Host + server.Path
	if address != "" {
		// The certificate of each API server has the name that the connection knows.
		config.ServerName = cmp.Or(config.ServerName, server.Hostname())
		base = server.Scheme + "://" + address
	}
	wrapped, err := newConnection(config)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, method, base+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Accept", "application/json")
	request.Header.Set("Content-Type", string(types.StrategicMergePatchType))
	response, err := wrapped.RoundTrip(request) // follows no redirect
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	answer, err := bounded.ReadAll(response.Body, maxAnswer)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		status := apierrors.NewGenericServerResponse(response.StatusCode, method, corev1.Resource("namespaces"), p.Namespace, "", 0, false)
		if said := (metav1.Status{}); json.Unmarshal(answer, &said) == nil && said.Kind == "Status" {
			status.ErrStatus = said
		}
		return status
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(answer, into)
}

// newConnection returns a transport with the credential of a configuration. It keeps no connection.
func newConnection(config *rest.Config) (http.RoundTripper, error) {
	options, err := config.TransportConfig()
	if err != nil {
		return nil, err
	}
	base := options.Transport
	if base == nil {
		secured, err := transport.TLSConfigFor(options)
		if err != nil {
			return nil, err
		}
		own := &http.Transport{TLSClientConfig: secured, Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true}
		if config.Proxy != nil {
			own.Proxy = config.Proxy
		}
		if options.DialHolder != nil {
			own.DialContext = options.DialHolder.Dial
		}
		base = own
	}
	return transport.HTTPWrappersForConfig(options, base)
}

// isTransient reports whether a call may succeed when it is repeated.
func isTransient(err error) bool {
	return apierrors.ReasonForError(err) == metav1.StatusReasonUnknown || apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err) ||
		apierrors.IsTooManyRequests(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err)
}

// cause says why a call failed. The text stays the same while the cause does, unlike errors of the
// network, which name ports and times.
func cause(err error) string {
	var certificate *tls.CertificateVerificationError
	var timeout net.Error
	switch {
	case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
		return text.Line(err.Error(), telemetry.MaxLogged)
	case errors.As(err, &certificate):
		return "its certificate is not accepted"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return fmt.Sprintf("no answer within %s", askTimeout)
	}
	return "no connection"
}
