// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path/filepath"
	"strings"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// Kind is the owner of a kubeconfig, by the user of its current context.
type Kind int

// The kinds of a kubeconfig. The zero Kind is none of them.
const (
	// Missing: there is no such file.
	Missing Kind = iota + 1
	// Ours: its user is an exec plugin, and that is this program.
	Ours
	// Bootstrapped: the kubelet wrote it, with a certificate that it requested itself. If this
	// program is configured, the kubelet has overwritten its file.
	Bootstrapped
	// ClientCertificate: its user is a client certificate, as "kubeadm init" has it.
	ClientCertificate
	// otherExec: its user is somebody else's exec plugin.
	otherExec
	// OtherUser: its user is something else, a token for example.
	OtherUser
	// bypassed: its user is this program, but has another credential too. client-go uses that
	// one, and never runs this program.
	bypassed
	// Unreadable: it cannot be read, or others than root could have written it. Problem has the
	// reason.
	Unreadable
)

func (k Kind) String() string {
	switch k {
	case Missing:
		return "there is none"
	case Ours:
		return "its user is this program"
	case Bootstrapped:
		return "the kubelet wrote it after a bootstrap of its own"
	case ClientCertificate:
		return "its user is a client certificate"
	case otherExec:
		return "its user is another exec plugin"
	case OtherUser:
		return "its user is neither an exec plugin nor a client certificate"
	case bypassed:
		return "its user is this program, but has another credential beside it, which goes first"
	case Unreadable:
		return "it cannot be used"
	}
	return fmt.Sprintf("Kind(%d)", int(k))
}

// Kubeconfig is what a kubeconfig file says in its current context. It holds no secret.
type Kubeconfig struct {
	Path string
	Kind Kind
	// Command and Args are those of an exec user.
	Command string
	Args    []string
	// Cluster is the cluster, with the CA from the file that it names. ClusterProblem is the error
	// in it.
	Cluster        cache.Origin
	ClusterProblem error
	// Alone is set if the file has nothing but one cluster, one user and one context.
	Alone bool
	// Problem says why the file is Unreadable.
	Problem error

	// unknown is set if the file system refused to read it. Then it may be ours.
	unknown bool
	content []byte
	user    *clientcmdapi.AuthInfo
}

// programName is the base name of this program. An infrastructure provider's is
// programName-<provider>.
const programName = "kubelet-authenticator"

// isOurs reports whether an exec user's command is this program: it has the program's name, or
// equals ours, the path that this program would write.
func isOurs(command, ours string) bool {
	base := filepath.Base(command)
	return base == programName || strings.HasPrefix(base, programName+"-") || ours != "" && command == ours
}

// ReadKubeconfig reads a kubeconfig. ours is the command that this program would write into it. If
// ours is empty, the program is recognised by its name alone. A file is Unreadable if another user
// could have written or replaced it, or if it is a symbolic link.
func ReadKubeconfig(path, ours string) Kubeconfig {
	if err := trustedfile.Check(filepath.Dir(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Kubeconfig{Path: path, Kind: Unreadable, Problem: err, unknown: !cache.MustBeSetAside(err)}
	}
	return readKubeconfigAt(path, ours)
}

// readKubeconfigAt is ReadKubeconfig without a look at the folders.
func readKubeconfigAt(path, ours string) Kubeconfig {
	k := Kubeconfig{Path: path}
	data, _, err := trustedfile.ReadAt(path)
	if errors.Is(err, fs.ErrNotExist) {
		k.Kind = Missing
		return k
	}
	if err != nil {
		k.Kind, k.Problem, k.unknown = Unreadable, err, !cache.MustBeSetAside(err)
		return k
	}
	config, err := clientcmd.Load(data)
	if err != nil {
		// the cause may quote a token
		k.Kind, k.Problem = Unreadable, fmt.Errorf("%s: cannot be read as a kubeconfig", path)
		return k
	}
	k.content = data
	k.read(config, ours)
	return k
}

// NamesThisProgram reports whether the user runs this program. Other fields of the user do not
// matter.
func (k Kubeconfig) NamesThisProgram() bool { return k.Kind == Ours || k.Kind == bypassed }

func (k *Kubeconfig) read(config *clientcmdapi.Config, ours string) {
	for _, cluster := range config.Clusters {
		cluster.LocationOfOrigin = k.Path
	}
	for _, user := range config.AuthInfos {
		user.LocationOfOrigin = k.Path
	}
	current, ok := config.Contexts[config.CurrentContext]
	if !ok || config.AuthInfos[current.AuthInfo] == nil || config.Clusters[current.Cluster] == nil {
		k.Kind, k.Problem = Unreadable, fmt.Errorf("%s: has no current-context with a cluster and a user", k.Path)
		return
	}
	if err := clientcmd.ResolveLocalPaths(config); err != nil {
		k.Kind, k.Problem = Unreadable, fmt.Errorf("%s: %w", k.Path, err)
		return
	}
	k.Alone = len(config.Clusters) == 1 && len(config.AuthInfos) == 1 && len(config.Contexts) == 1
	k.user = config.AuthInfos[current.AuthInfo]
	k.Cluster, k.ClusterProblem = k.readCluster(config.Clusters[current.Cluster])
	switch user := k.user; {
	case user.Exec != nil:
		k.Kind, k.Command, k.Args = otherExec, user.Exec.Command, user.Exec.Args
		if isOurs(k.Command, ours) {
			k.Kind = Ours
			if hasOther(user) {
				k.Kind = bypassed
			}
		}
	case user.ClientCertificate == "" && len(user.ClientCertificateData) == 0:
		k.Kind = OtherUser
	case current.AuthInfo == "default-auth" && current.Cluster == "default-cluster":
		// The names that the kubelet writes (pkg/kubelet/certificate/bootstrap,
		// writeKubeconfigFromBootstrapping).
		k.Kind = Bootstrapped
	default:
		k.Kind = ClientCertificate
	}
}

func (k *Kubeconfig) readCluster(cluster *clientcmdapi.Cluster) (cache.Origin, error) {
	origin := cache.Origin{
		Server: cluster.Server, TLSServerName: cluster.TLSServerName, ProxyURL: cluster.ProxyURL,
		CertificateAuthorityData: cluster.CertificateAuthorityData,
	}
	if file := cluster.CertificateAuthority; file != "" && len(origin.CertificateAuthorityData) == 0 {
		ca, err := ReadCA(file)
		if err != nil {
			return origin, fmt.Errorf("%s: certificate-authority: %w", k.Path, err)
		}
		origin.CertificateAuthorityData = ca
	}
	if cluster.InsecureSkipTLSVerify {
		return origin, fmt.Errorf("%s: insecure-skip-tls-verify is set; this program has no such mode", k.Path)
	}
	if err := CheckCluster(origin); err != nil {
		return origin, fmt.Errorf("%s: %w", k.Path, err)
	}
	return origin, nil
}

// ReadCA reads a file with an API server's CA.
func ReadCA(path string) ([]byte, error) {
	data, err := trustedfile.Read(path)
	if err != nil {
		return nil, err
	}
	if block, _ := pem.Decode(data); block == nil || block.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("%s: holds no certificate in PEM", path)
	}
	return data, nil
}

// CheckCluster returns an error unless this program may talk to a cluster: HTTPS only.
func CheckCluster(cluster cache.Origin) error {
	u, err := url.Parse(cluster.Server)
	if err != nil || u.Host == "" || !strings.EqualFold(u.Scheme, "https") {
		return fmt.Errorf("server %.253q: not an https URL", cluster.Server)
	}
	if _, err := url.Parse(cluster.ProxyURL); err != nil {
		return errors.New("proxy-url: cannot be parsed") // the cause may quote a password
	}
	return nil
}

// hasCredential reports whether the user is one that the plugin can use: a token or a client
// certificate.
func (k *Kubeconfig) hasCredential() bool {
	u := k.user
	return u != nil && u.Exec == nil && u.AuthProvider == nil &&
		(u.Token != "" || u.TokenFile != "" || u.ClientCertificate != "" || len(u.ClientCertificateData) > 0)
}

// hasOther reports whether a user has another credential than an exec plugin.
func hasOther(u *clientcmdapi.AuthInfo) bool {
	return u.ClientCertificate != "" || len(u.ClientCertificateData) > 0 || u.ClientKey != "" || len(u.ClientKeyData) > 0 ||
		u.Token != "" || u.TokenFile != "" || u.Username != "" || u.Password != "" || u.AuthProvider != nil
}

// Exec is the exec user of a kubeconfig of ours.
type Exec struct {
	// Command is the absolute path of the program.
	Command string
	Args    []string
}

// installHint is what client-go prints if the command of our kubeconfig does not exist.
const installHint = "kubelet-authenticator gets this node's client certificate. It is not where this kubeconfig says: install its package again, or write the kubeconfig again."

// RenderKubeconfig returns a kubeconfig for the kubelet that names this program. The same arguments
// give the same bytes.
func RenderKubeconfig(cluster cache.Origin, exec Exec) ([]byte, error) {
	if !filepath.IsAbs(exec.Command) {
		return nil, fmt.Errorf("command %q: must be an absolute path", exec.Command)
	}
	if err := CheckCluster(cluster); err != nil {
		return nil, err
	}
	return write("kubernetes", "node", cluster, &clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
		APIVersion: clientauthentication.SchemeGroupVersion.String(),
		Command:    exec.Command, Args: exec.Args, InstallHint: installHint,
		InteractiveMode: clientcmdapi.NeverExecInteractiveMode, ProvideClusterInfo: true,
	}})
}

// withCommand returns the file with another command in its exec user, and all else as it is.
func (k *Kubeconfig) withCommand(command string) ([]byte, error) {
	config, err := clientcmd.Load(k.content)
	if err != nil {
		return nil, fmt.Errorf("%s: cannot be read as a kubeconfig", k.Path)
	}
	// it is there: that is what Ours means
	config.AuthInfos[config.Contexts[config.CurrentContext].AuthInfo].Exec.Command = command
	return clientcmd.Write(*config)
}

func write(clusterName, userName string, cluster cache.Origin, user *clientcmdapi.AuthInfo) ([]byte, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters[clusterName] = &clientcmdapi.Cluster{
		Server: cluster.Server, TLSServerName: cluster.TLSServerName, ProxyURL: cluster.ProxyURL, CertificateAuthorityData: cluster.CertificateAuthorityData,
	}
	config.AuthInfos[userName] = user
	config.CurrentContext = userName + "@" + clusterName
	config.Contexts[config.CurrentContext] = &clientcmdapi.Context{Cluster: clusterName, AuthInfo: userName}
	return clientcmd.Write(*config)
}

// ForeignError says that this program may not overwrite a kubeconfig.
type ForeignError struct{ Kubeconfig Kubeconfig }

func (e *ForeignError) Error() string {
	k := e.Kubeconfig
	switch {
	case k.Problem != nil:
		return "the kubeconfig is not changed: " + k.Problem.Error()
	case k.Kind == Ours:
		return k.Path + ": is not changed: it has more than this program wrote"
	}
	return k.Path + ": is not changed: " + k.Kind.String()
}

// WriteKubeconfig writes our kubeconfig if there is none, or replaces another of ours. It refuses
// any other file with a *ForeignError. It reports whether it wrote: a file with the same bytes is
// not touched.
func WriteKubeconfig(path string, content []byte, ours string) (bool, error) {
	k := ReadKubeconfig(path, ours)
	if k.Kind != Missing && (k.Kind != Ours || !k.Alone) {
		return false, &ForeignError{k}
	}
	if k.Kind == Ours && bytes.Equal(k.content, content) {
		return false, nil
	}
	dir, name := cache.At(filepath.Dir(path)), filepath.Base(path)
	dir.CleanFile(name)
	return true, dir.Write(name, content)
}
