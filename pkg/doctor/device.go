// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// device has the fields of the output of "identify" for a TPM that doctor needs. They are read from
// JSON, so that a binary without the TPM provider does not link that provider.
type device struct {
	Manufacturer string `json:"manufacturer"`
	Firmware     string `json:"firmware"`
	EKs          []struct {
		Template    string `json:"template"`
		Certificate *struct {
			NotAfter string `json:"notAfter"`
			Problem  string `json:"problem"`
		} `json:"certificate"`
		Problem string `json:"problem"`
		Slow    bool   `json:"slow"`
	} `json:"eks"`
}

// errNoProvider says that the settings select no provider.
var errNoProvider = errors.New("no provider: see configuration")

// noDeviceError says that the provider uses no device.
type noDeviceError struct{ provider string }

func (e *noDeviceError) Error() string {
	return "provider " + e.provider + " has no device that this check can read"
}

func (e *examination) readDevice() (device, error) {
	p, err := e.attestor()
	if err != nil {
		return device{}, errNoProvider
	}
	inspector, ok := p.(provider.Inspector)
	if !ok {
		return device{}, &noDeviceError{p.Name()}
	}
	identity, err := inspector.Identify(e.ctx)
	if err != nil {
		return device{}, err
	}
	data, err := json.Marshal(identity)
	if err != nil {
		return device{}, err
	}
	var d device
	return d, json.Unmarshal(data, &d)
}

func checkTPM(_ context.Context, e *examination) checkup.Result {
	d, err := e.device()
	var none *noDeviceError
	var failed *provider.Error
	switch {
	case err == nil:
		return ok("%s firmware %s, %s", d.Manufacturer, d.Firmware, text.Count(len(d.EKs), "endorsement key"))
	case errors.As(err, &none), errors.Is(err, errNoProvider):
		return skipped("%v", err)
	case errors.Is(err, context.DeadlineExceeded):
		return failure("try each command with: tpm selftest, and give doctor longer with --timeout", "%v", err)
	case errors.Is(err, fs.ErrPermission):
		return skipped("%v: run this as root", err)
	case errors.As(err, &failed):
		return failure(failed.Hint, "%v", err)
	}
	return failure("try each command with: tpm selftest", "%v", err)
}

// checkEKTemplate compares the template that the node enrolled with and the setting. The machine's
// record holds the key of the former.
func checkEKTemplate(_ context.Context, e *examination) checkup.Result {
	p, err := e.attestor()
	if err != nil {
		return skipped("%v", errNoProvider)
	}
	chooser, isChooser := p.(provider.Chooser)
	if !isChooser {
		return skipped("provider %s has no choice of endorsement keys", p.Name())
	}
	state, err := e.dir.State()
	switch {
	case errors.Is(err, fs.ErrPermission):
		return skipped("%s: %v", e.dir.File(cache.StateFile), errNeedsRoot)
	case err != nil:
		return skipped("see last-result")
	}
	remembered, setting := state.Remembered[p.Name()], e.Config.EKTemplate
	switch {
	case remembered == "":
		return ok("%s, and the node has not enrolled yet", setting)
	case !chooser.Allows(remembered):
		return warning("replace the old key with the new one, as identify prints it, in the source of endorsement keys, or restore ekTemplate",
			"the node enrolled with %s, and ekTemplate is %s: the next request shows another key than the machine's record has", remembered, setting)
	}
	return ok("%s, enrolled with %s", setting, remembered)
}

func checkEKCertificate(_ context.Context, e *examination) checkup.Result {
	d, err := e.device()
	switch {
	case err != nil:
		return skipped("see tpm")
	case len(d.EKs) == 0:
		return skipped("provider %s has no endorsement keys", e.providerName())
	}
	const remedy = "name the key in the inventory, by the fingerprint that identify prints"
	var good []string
	var findings []checkup.Result
	for _, ek := range d.EKs {
		switch {
		case ek.Problem != "":
			findings = append(findings, warning(remedy, "%s: the certificate is left out: %s", ek.Template, ek.Problem))
		case ek.Certificate == nil:
			findings = append(findings, warning(remedy, "%s: the TPM has no certificate for this key", ek.Template))
		case ek.Certificate.Problem != "":
			findings = append(findings, warning(remedy, "%s: %s", ek.Template, ek.Certificate.Problem))
		default:
			good = append(good, ek.Template+", to "+ek.Certificate.NotAfter)
		}
	}
	if len(good) == 0 {
		return checkup.Worst(findings...)
	}
	if d.EKs[0].Slow {
		return warning("make the key persistent with the TPM maker's tools", "%s; the TPM creates the key again each time, which takes seconds", strings.Join(good, "; "))
	}
	return ok("%s", strings.Join(good, "; ")) // one good certificate is enough
}
