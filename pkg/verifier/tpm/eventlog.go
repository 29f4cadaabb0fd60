// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"

	"github.com/google/go-tpm/tpm2"
)

// firmwarePCRs is the number of PCRs that only the firmware extends: 0 to 7 (TCG PC Client Platform
// Firmware Profile, section 3.3.4).
const firmwarePCRs = 8

func isFirmwarePCR(index int) bool { return 0 <= index && index < firmwarePCRs }

// Event log constants (PC Client Platform Firmware Profile, section 10).
const (
	eventNoAction   = 3
	eventHCRTM      = 0x80000010 // EV_EFI_HCRTM_EVENT
	specID          = "Spec ID Event03\x00"
	startupLocality = "StartupLocality\x00"
	maxAlgorithms   = 16
	maxDigest       = 64
)

var errEventLog = errors.New("ends within an event")

// logReader returns a reader of data from the firmware: always little endian.
func logReader(data []byte) *reader { return &reader{order: binary.LittleEndian, rest: data} }

// replay reads a crypto-agile event log to its last byte. It returns the values of the PCRs 0 to 7
// that the log leads to in one bank. The log comes from the node. If it leads to the quoted values,
// the firmware measured these digests in this order. The other data of an event is not checked, and
// must not be trusted.
//
// PCR 0 starts at one of three values, in its last byte. A log with another start than the TPM's
// does not lead to the quoted value. So a wrong decision here refuses a machine and never admits
// one.
//   - 4, if the TPM was given an H-CRTM event sequence before TPM2_Startup. "The value 0...4
//     represents evidence that the initial measurement was from an H-CRTM" (TPM 2.0 Part 1,
//     revision 1.59, clause 34.3). EV_EFI_HCRTM_EVENT is that measurement (PC Client Platform
//     Firmware Profile, version 1.05 revision 23, clause 10.4.1). TPM2_Startup leaves PCR 0
//     alone then, so a startup locality changes nothing.
//   - The locality of TPM2_Startup, if a startup locality is logged (clause 10.4.5.3).
//   - Otherwise 0.
func replay(data []byte, bank string) (map[int][]byte, error) {
	newHash, wanted := hashOf(bank)
	if newHash == nil {
		return nil, errors.New("no such bank")
	}
	r := logReader(data)
	sizes, err := readHeader(r)
	if err != nil {
		return nil, err
	}
	if _, ok := sizes[wanted]; !ok {
		return nil, fmt.Errorf("has no digests of bank %s", bank)
	}
	values := map[int][]byte{}
	for i := range firmwarePCRs {
		values[i] = make([]byte, newHash().Size())
	}
	// About PCR 0: whether its first event is from an H-CRTM, whether it has another event, and
	// whether its locality is known.
	hcrtm, extended, localitySeen := false, false, false
	for len(r.rest) > 0 {
		// TCG_PCR_EVENT2: pcrIndex, eventType, digests, eventSize, event.
		index, kind := r.uint32(), r.uint32()
		digest, err := readDigests(r, sizes, wanted)
		if err != nil {
			return nil, err
		}
		event := r.bytes(int(r.uint32()))
		switch {
		case r.failed:
			return nil, errEventLog
		case kind == eventNoAction:
			locality, ok := bytes.CutPrefix(event, []byte(startupLocality))
			if !ok || index != 0 {
				continue // such an event extends no PCR
			}
			if extended || localitySeen || len(locality) != 1 || locality[0] != 0 && locality[0] != 3 && locality[0] != 4 {
				return nil, errors.New("has a startup locality in the wrong place, or an impossible one")
			}
			localitySeen = true
			if !hcrtm {
				values[0][len(values[0])-1] = locality[0]
			}
		case index > 23:
			return nil, errors.New("names a PCR that there is not")
		case isFirmwarePCR(int(index)):
			if index == 0 && kind == eventHCRTM && !hcrtm && !extended {
				hcrtm = true
				values[0][len(values[0])-1] = 4
			} else if index == 0 {
				extended = true // a later H-CRTM event, too: none comes after TPM2_Startup
			}
			h := newHash()
			h.Write(values[int(index)])
			h.Write(digest)
			values[int(index)] = h.Sum(nil)
		}
	}
	return values, nil
}

// readHeader reads the first event. It has the older form (TCG_PCClientPCREvent), and says which
// digests follow (TCG_EfiSpecIdEvent). readHeader returns the digest size of each algorithm.
func readHeader(r *reader) (map[tpm2.TPMAlgID]int, error) {
	index, kind := r.uint32(), r.uint32()
	digest := r.bytes(20)
	event := logReader(r.bytes(int(r.uint32())))
	if r.failed {
		return nil, errEventLog
	}
	if index != 0 || kind != eventNoAction || !bytes.Equal(digest, make([]byte, 20)) || string(event.bytes(len(specID))) != specID {
		return nil, errors.New("does not begin as a crypto-agile log")
	}
	event.bytes(4) // platformClass
	event.bytes(1) // specVersionMinor
	major := event.uint8()
	event.bytes(2) // specErrata, uintnSize
	count := event.uint32()
	if event.failed || major != 2 || count == 0 || count > maxAlgorithms {
		return nil, errors.New("is of another version, or lists no digests")
	}
	sizes := map[tpm2.TPMAlgID]int{}
	for range count {
		algorithm, size := tpm2.TPMAlgID(event.uint16()), int(event.uint16())
		_, doubled := sizes[algorithm]
		if event.failed || doubled || size < 1 || size > maxDigest || digestSize(algorithm) != 0 && digestSize(algorithm) != size {
			return nil, errors.New("lists digests twice, or of a wrong size")
		}
		sizes[algorithm] = size
	}
	event.bytes(int(event.uint8())) // vendorInfo
	if event.failed || len(event.rest) > 0 {
		return nil, errors.New("its first event does not parse to its last byte")
	}
	return sizes, nil
}

// readDigests reads a TPML_DIGEST_VALUES, which must have each algorithm of the header once. It
// returns the digest of the wanted algorithm.
func readDigests(r *reader, sizes map[tpm2.TPMAlgID]int, wanted tpm2.TPMAlgID) ([]byte, error) {
	count := r.uint32()
	if r.failed {
		return nil, errEventLog
	}
	if int64(count) != int64(len(sizes)) {
		return nil, errors.New("has an event with other digests than it lists")
	}
	seen := map[tpm2.TPMAlgID][]byte{}
	for range count {
		algorithm := tpm2.TPMAlgID(r.uint16())
		size, listed := sizes[algorithm]
		digest := r.bytes(size)
		if r.failed {
			return nil, errEventLog
		}
		if _, doubled := seen[algorithm]; doubled || !listed {
			return nil, errors.New("has an event with other digests than it lists")
		}
		seen[algorithm] = digest
	}
	return seen[wanted], nil
}

// hashOf returns a bank's hash and its algorithm.
func hashOf(bank string) (func() hash.Hash, tpm2.TPMAlgID) {
	switch bank {
	case "sha256":
		return sha256.New, tpm2.TPMAlgSHA256
	case "sha384":
		return sha512.New384, tpm2.TPMAlgSHA384
	case "sha512":
		return sha512.New, tpm2.TPMAlgSHA512
	}
	return nil, tpm2.TPMAlgNull
}

// digestSize returns the digest size of an algorithm in bytes, 0 if the algorithm is unknown.
func digestSize(algorithm tpm2.TPMAlgID) int {
	switch algorithm {
	case tpm2.TPMAlgSHA1:
		return 20
	case tpm2.TPMAlgSHA256:
		return 32
	case tpm2.TPMAlgSHA384:
		return 48
	case tpm2.TPMAlgSHA512:
		return 64
	}
	return 0
}
