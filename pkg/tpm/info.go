// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
)

// Info is what a TPM says about itself. Nothing vouches for it.
type Info struct {
	// Manufacturer is the four letters of the TCG's vendor ID registry: "INTC". Trailing blanks
	// are cut off.
	Manufacturer string
	// Vendor is the manufacturer's own text.
	Vendor string
	// Firmware is the version as quotes carry it. Manufacturers differ in how they number.
	Firmware uint64
}

// FirmwareString returns the version as most manufacturers print it: four numbers of 16 bits.
func (i Info) FirmwareString() string {
	return fmt.Sprintf("%d.%d.%d.%d", i.Firmware>>48, i.Firmware>>32&0xffff, i.Firmware>>16&0xffff, i.Firmware&0xffff)
}

// Info asks the TPM what it is.
func (t *TPM) Info() (Info, error) {
	properties, err := t.fixedProperties()
	if err != nil {
		return Info{}, err
	}
	text := func(first, n uint32) string {
		var b []byte
		for p := first; p < first+n; p++ {
			b = binary.BigEndian.AppendUint32(b, properties[p])
		}
		printable := func(r rune) rune {
			if r < ' ' || r > '~' {
				return -1
			}
			return r
		}
		return strings.TrimSpace(strings.Map(printable, string(b)))
	}
	return Info{
		Manufacturer: text(uint32(tpm2.TPMPTManufacturer), 1),
		Vendor:       text(uint32(tpm2.TPMPTVendorString1), 4),
		Firmware:     uint64(properties[uint32(tpm2.TPMPTFirmwareVersion1)])<<32 | uint64(properties[uint32(tpm2.TPMPTFirmwareVersion2)]),
	}, nil
}

// fixedProperties returns the properties from TPM_PT_MANUFACTURER to TPM_PT_NV_BUFFER_MAX. It asks
// the TPM once.
func (t *TPM) fixedProperties() (map[uint32]uint32, error) {
	if t.properties != nil {
		return t.properties, nil
	}
	rsp, err := execute[tpm2.GetCapabilityResponse](t, "TPM2_GetCapability", tpm2.GetCapability{
		Capability:    tpm2.TPMCapTPMProperties,
		Property:      uint32(tpm2.TPMPTManufacturer),
		PropertyCount: uint32(tpm2.TPMPTNVBufferMax-tpm2.TPMPTManufacturer) + 1,
	})
	if err != nil {
		return nil, err
	}
	list, err := rsp.CapabilityData.Data.TPMProperties()
	if err != nil {
		return nil, &commandError{"TPM2_GetCapability", err}
	}
	t.properties = map[uint32]uint32{}
	for _, p := range list.TPMProperty {
		t.properties[uint32(p.Property)] = p.Value
	}
	return t.properties, nil
}

// handles returns the handles in use from first to last.
func (t *TPM) handles(first, last tpm2.TPMHandle) ([]uint32, error) {
	found := []uint32{}
	for range 16 { // bounded, since a faulty TPM may always report more
		rsp, err := execute[tpm2.GetCapabilityResponse](t, "TPM2_GetCapability", tpm2.GetCapability{
			Capability: tpm2.TPMCapHandles, Property: uint32(first), PropertyCount: maxHandles,
		})
		if err != nil {
			return nil, err
		}
		list, err := rsp.CapabilityData.Data.Handles()
		if err != nil {
			return nil, &commandError{"TPM2_GetCapability", err}
		}
		for _, h := range list.Handle {
			if h >= first && h <= last {
				found = append(found, uint32(h))
			}
		}
		if !rsp.MoreData || len(list.Handle) == 0 || list.Handle[len(list.Handle)-1] >= last {
			break
		}
		first = list.Handle[len(list.Handle)-1] + 1
	}
	return found, nil
}

// eventLogPath is where Linux shows the measurements of firmware and boot loader.
const eventLogPath = "/sys/kernel/security/tpm0/binary_bios_measurements"

// maxEventLog bounds the event log, in bytes: a CertificateSigningRequest has to hold it. Servers
// have up to some 100 KiB.
const maxEventLog = 512 << 10

// EventLog returns the firmware's event log, nil if there is none. Only the PCR values in a quote
// show whether it is true.
func EventLog() ([]byte, error) { return eventLog(eventLogPath) }

func eventLog(path string) ([]byte, error) {
	log, err := bounded.ReadFile(path, maxEventLog)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("event log: %w", err)
	}
	return log, nil
}
