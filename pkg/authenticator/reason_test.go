// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

var update = flag.Bool("update", false, "write what is generated from this package's tables into docs/")

func TestReasonsAreNumberedOnce(t *testing.T) {
	codes, names, next := map[int]Reason{}, map[Reason]bool{}, 10
	for _, info := range Reasons() {
		if info.Reason == CertificateDue {
			next = 40 // the codes of the command status start again
		}
		switch {
		case info.Code == 0:
			t.Errorf("%s: 0 means that a credential was printed", info.Reason)
		case info.Code == 2:
			t.Errorf("%s: 2 is what the Go runtime exits with after a crash", info.Reason)
		case info.Code < 0 || info.Code > 125:
			t.Errorf("%s: %d means something else to a shell", info.Reason, info.Code)
		case codes[info.Code] != "":
			t.Errorf("%d is both %s and %s", info.Code, codes[info.Code], info.Reason)
		case info.Code >= 10 && info.Code != next:
			t.Errorf("%s: %d, want %d: in order and without a gap", info.Reason, info.Code, next)
		}
		if info.Code >= 10 {
			next = info.Code + 1
		}
		if names[info.Reason] {
			t.Errorf("%s is there twice", info.Reason)
		}
		codes[info.Code], names[info.Reason] = info.Reason, true
		if got := info.Reason.Code(); got != info.Code {
			t.Errorf("%s: Code returns %d, want %d", info.Reason, got, info.Code)
		}
		if !strings.HasSuffix(info.Meaning, ".") || strings.ContainsAny(info.Meaning, "|\n") {
			t.Errorf("%s: %q is not a sentence for the table", info.Reason, info.Meaning)
		}
	}
	if Unexpected.Code() != 1 || Usage.Code() != 3 || Reason("Nonsense").Code() != 1 {
		t.Error("1 is for what has no name, 3 for the command line")
	}
}

// Codes reach dashboards: they stay as they were published.
func TestPublishedCodesDoNotChange(t *testing.T) {
	for reason, code := range map[Reason]int{
		"Unexpected": 1, "Usage": 3,
		"Configuration": 10, "ExecAPI": 11, "DirectoryRefused": 12, "WorkerUnavailable": 13, "TPMAbsent": 14, "TPMError": 15,
		"AttestationFailed": 16, "NoBootstrapCredential": 17, "BootstrapCredentialRefused": 18, "APIUnreachable": 19, "APIRefused": 20,
		"RequestDenied": 21, "RequestFailed": 22, "WaitingForSigner": 23, "CertificateUnusable": 24, "ClockWrong": 25,
		"APIUntrusted": 26, "DirectoryNotWritable": 27,
	} {
		if got := reason.Code(); got != code {
			t.Errorf("%s has become %d, was %d", reason, got, code)
		}
	}
}

func TestEveryReasonIsInTheTable(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "reason.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var declared []string
	for _, decl := range file.Decls {
		group, ok := decl.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		for _, spec := range group.Specs {
			value := spec.(*ast.ValueSpec)
			if kind, ok := value.Type.(*ast.Ident); !ok || kind.Name != "Reason" {
				continue
			}
			literal, err := strconv.Unquote(value.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			declared = append(declared, literal)
		}
	}
	var listed []string
	for _, info := range Reasons() {
		listed = append(listed, string(info.Reason))
	}
	slices.Sort(declared)
	slices.Sort(listed)
	if len(declared) < 20 || !slices.Equal(declared, listed) {
		t.Errorf("declared: %q\nin the table: %q", declared, listed)
	}
}

const exitCodes = "../../docs/node.md"

// docs/node.md is Reasons() for people. To write it: go test ./pkg/authenticator -run
// ExitCodes -update.
func TestExitCodesAreDocumented(t *testing.T) {
	const begin, end = "<!-- exit codes -->\n", "<!-- /exit codes -->\n"
	var table strings.Builder
	table.WriteString("| code | name | meaning |\n| --- | --- | --- |\n")
	for _, info := range Reasons() {
		_, _ = fmt.Fprintf(&table, "| %d | %s | %s |\n", info.Code, info.Reason, info.Meaning)
	}
	page, err := os.ReadFile(exitCodes)
	if err != nil {
		t.Fatal(err)
	}
	before, remainder, ok := strings.Cut(string(page), begin)
	have, after, ok2 := strings.Cut(remainder, end)
	if !ok || !ok2 || strings.Contains(after, begin) {
		t.Fatalf("%s: the table stands once between %q and %q", exitCodes, begin, end)
	}
	if have == table.String() {
		return
	}
	if !*update {
		t.Fatalf("%s is not what the program does; have\n%s\nwant\n%s", exitCodes, have, table.String())
	}
	if err := os.WriteFile(exitCodes, []byte(before+begin+table.String()+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestAsFailure(t *testing.T) {
	own := &Failure{tpmAbsent, "hint", errors.New("no TPM")}
	for name, c := range map[string]struct {
		err  error
		want Reason
	}{
		"a Failure":             {own, tpmAbsent},
		"a Failure inside":      {fmt.Errorf("worker: %w", own), tpmAbsent},
		"a foreign directory":   {fmt.Errorf("x: %w", &cache.ForeignDirError{Path: "/x", Problem: "is a file"}), directoryRefused},
		"a full disk":           {fmt.Errorf("x: %w", &cache.WriteError{Path: "/x", Err: io.ErrShortWrite}), directoryNotWritable},
		"the lock":              {fmt.Errorf("x: %w", cache.ErrLocked), WorkerUnavailable},
		"a bad certificate":     {fmt.Errorf("x: %w", &cache.UnusableError{Problem: "it is a CA's"}), certificateUnusable},
		"an early certificate":  {fmt.Errorf("x: %w", &cache.UnusableError{Problem: "it is not valid yet", Clock: true}), clockWrong},
		"what nobody has named": {errors.New("x"), Unexpected},
	} {
		if got := AsFailure(c.err); got.Reason != c.want || got.Err == nil || c.want == tpmAbsent && got != own {
			t.Errorf("%s: %s, want %s", name, got.Reason, c.want)
		}
	}
}

// What the certificate directory's file system refuses has a hint of its own.
func TestWriteErrorsHaveTheirHint(t *testing.T) {
	for number, says := range map[syscall.Errno]string{
		syscall.ENOSPC: "free space", syscall.EDQUOT: "quota", syscall.EROFS: "read-write", syscall.EACCES: "run this as root", syscall.EPERM: "run this as root",
		syscall.ENOLCK: "no locks", syscall.ENOSYS: "no locks", syscall.EOPNOTSUPP: "no locks", syscall.EMFILE: "LimitNOFILE=", syscall.ENFILE: "fs.file-max",
		syscall.EIO: "kernel's log", syscall.EISDIR: "free space on the disk",
	} {
		got := AsFailure(fmt.Errorf("x: %w", &cache.WriteError{Path: "/x", Err: &fs.PathError{Op: "flock", Path: "/x", Err: number}}))
		if got.Reason != directoryNotWritable || !strings.Contains(got.Hint, says) {
			t.Errorf("%v: %s, hint %q", number, got.Reason, got.Hint)
		}
		if another := strings.Contains(got.Hint, "--cert-dir"); another == (number == syscall.EMFILE || number == syscall.ENFILE) {
			t.Errorf("%v: hint %q", number, got.Hint)
		}
	}
}

// callAPI returns what a client gets from that server, by which apiFailure has to tell what is
// wrong.
func callAPI(t *testing.T, server string, ca []byte) error {
	t.Helper()
	client, err := csr.NewClient(&rest.Config{Host: server, TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	object := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "node-csr-x"}}
	if _, err = client.Create(ctx, object, true); err == nil {
		t.Fatal("the call succeeded")
	}
	return err
}

// answerStatus answers with a Status object, as an API server does.
func answerStatus(code int, reason metav1.StatusReason, message string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
			Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: message,
		})
	}
}

// answerPage answers with HTML, as a proxy between a node and the API server does.
func answerPage(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, "<html>\n<head>\n<title>No</title>\n</head>\n<body>\n\x1b[2J"+strings.Repeat("<p>Ask your administrator.</p>\n", 100)+"</body>\n</html>\n")
	}
}

func TestAnswersOfTheAPIServerAreSorted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		handler http.Handler
		want    Reason
		says    string
	}{
		"401":                    {answerStatus(401, metav1.StatusReasonUnauthorized, "Unauthorized"), bootstrapRefused, "whose"},
		"403":                    {answerStatus(403, metav1.StatusReasonForbidden, "certificatesigningrequests is forbidden: User \"x\" cannot create"), apiRefused, "cannot create"},
		"403, in many lines":     {answerStatus(403, metav1.StatusReasonForbidden, "admission webhook:\n- no\n- no\n"), apiRefused, "whose"},
		"403, at length":         {answerStatus(403, metav1.StatusReasonForbidden, strings.Repeat("no! ", 10_000)), apiRefused, "no!"},
		"403, with escapes":      {answerStatus(403, metav1.StatusReasonForbidden, "\x1b]0;owned\x07no"), apiRefused, "no"},
		"403 of a proxy":         {answerPage(403), apiRefused, ""},
		"404":                    {answerStatus(404, metav1.StatusReasonNotFound, "the server could not find the requested resource"), apiRefused, ""},
		"404 of a web server":    {answerPage(404), apiRefused, ""},
		"413":                    {answerStatus(413, metav1.StatusReasonRequestEntityTooLarge, "too large"), apiRefused, ""},
		"422":                    {answerStatus(422, metav1.StatusReasonInvalid, "CertificateSigningRequest \"x\" is invalid: [spec.usages: no,\nspec.request: no]"), apiRefused, "spec.request"},
		"400":                    {answerStatus(400, metav1.StatusReasonBadRequest, "no"), apiRefused, ""},
		"500":                    {answerStatus(500, metav1.StatusReasonInternalError, "etcd:\nleader changed"), APIUnreachable, "leader changed"},
		"502 of a load balancer": {answerPage(502), APIUnreachable, ""},
		"200, but not an object": {http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>\nwelcome\n</html>") }), APIUnreachable, ""},
		"no answer":              {http.HandlerFunc(plugintest.Hang), APIUnreachable, "no answer in time"},
		"hangs up":               {http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), APIUnreachable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, ca := plugintest.TlsServer(t, c.handler, nil)
			failure := wantFailure(t, classifyAPIError(callAPI(t, server.URL, ca), "whose"), c.want)
			if !strings.Contains(failure.Error(), c.says) {
				t.Errorf("it does not say %q: %v", c.says, failure)
			}
			if failure.Hint == "" {
				t.Error("nothing is said about what can be done")
			}
		})
	}
}

func TestConnectionsThatFailAreSorted(t *testing.T) {
	t.Parallel()
	certificate := func(change func(*x509.Certificate)) (func(*httptest.Server), []byte) {
		template := &x509.Certificate{
			Subject: pkix.Name{CommonName: "kube-apiserver"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IsCA: true, BasicConstraintsValid: true,
		}
		change(template)
		_, certificate, key := plugintest.NewCertificate(t, template)
		pair, err := tls.X509KeyPair(certificate, key)
		if err != nil {
			t.Fatal(err)
		}
		return func(s *httptest.Server) {
			s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
		}, certificate
	}
	answer := answerStatus(401, metav1.StatusReasonUnauthorized, "reached")
	for name, c := range map[string]struct {
		change func(*x509.Certificate)
		ca     []byte // nil: the server's own
		want   Reason
	}{
		"reached":       {change: func(*x509.Certificate) {}, want: bootstrapRefused},
		"another CA":    {change: func(*x509.Certificate) {}, ca: plugintest.NewCA(t), want: apiUntrusted},
		"another name":  {change: func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} }, want: apiUntrusted},
		"no server's":   {change: func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }, want: apiUntrusted},
		"expired":       {change: func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }, want: apiUntrusted},
		"not yet valid": {change: func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }, want: apiUntrusted},
		"the clock is at 1970": {change: func(c *x509.Certificate) {
			c.NotBefore = time.Now().Add(20 * 365 * 24 * time.Hour)
			c.NotAfter = c.NotBefore.Add(time.Hour)
		}, want: apiUntrusted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			start, own := certificate(c.change)
			server, _ := plugintest.TlsServer(t, answer, start)
			ca := c.ca
			if ca == nil {
				ca = own
			}
			_ = wantFailure(t, classifyAPIError(callAPI(t, server.URL, ca), "whose"), c.want)
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		t.Parallel()
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		address := "https://" + listener.Addr().String()
		if err := listener.Close(); err != nil {
			t.Fatal(err)
		}
		failure := wantFailure(t, classifyAPIError(callAPI(t, address, plugintest.NewCA(t)), "whose"), APIUnreachable)
		if !strings.Contains(failure.Error(), "refused") || !strings.Contains(failure.Error(), address) {
			t.Errorf("it does not say who refused: %v", failure)
		}
	})
	t.Run("no TLS", func(t *testing.T) {
		t.Parallel()
		server := httptest.NewServer(answer)
		t.Cleanup(server.Close)
		_ = wantFailure(t, classifyAPIError(callAPI(t, strings.Replace(server.URL, "http:", "https:", 1), plugintest.NewCA(t)), "whose"), APIUnreachable)
	})
	t.Run("no such name", func(t *testing.T) {
		t.Parallel()
		_ = wantFailure(t, classifyAPIError(callAPI(t, "https://kube-apiserver.invalid:6443", plugintest.NewCA(t)), "whose"), APIUnreachable)
	})
}

// A password in the server's URL must not end in a log.
func TestFailureDoesNotShowAPassword(t *testing.T) {
	t.Parallel()
	err := callAPI(t, "https://user:hunter2@127.0.0.1:1", plugintest.NewCA(t))
	for _, text := range []string{classifyAPIError(err, "whose").Error(), classifyAPIError(errors.Join(err, bytes.ErrTooLarge), "whose").Error()} {
		if strings.Contains(text, "hunter2") {
			t.Errorf("it does: %s", text)
		}
	}
}
