// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"encoding/hex"
	"slices"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// event is one of a log. Its digests are of data, in the order of the log's algorithms.
type logEvent struct {
	pcr, kind uint32
	data      []byte
}

type logAlgorithm struct{ id, size uint16 }

func le16(n uint16) []byte { return binary.LittleEndian.AppendUint16(nil, n) }
func le32(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func testAlgorithms() []logAlgorithm { return []logAlgorithm{{4, 20}, {0x0b, 32}, {0x0c, 48}} }

// specEvent is the header's TCG_EfiSpecIdEvent.
func specEvent(algorithms ...logAlgorithm) []byte {
	b := join([]byte("Spec ID Event03\x00"), le32(0), []byte{0, 2, 0, 2}, le32(uint32(len(algorithms))))
	for _, a := range algorithms {
		b = join(b, le16(a.id), le16(a.size))
	}
	return append(b, 0)
}

func logHeader(spec []byte) []byte {
	return join(le32(0), le32(3), make([]byte, 20), le32(uint32(len(spec))), spec)
}

func digests(algorithms []logAlgorithm, data []byte) []byte {
	b := le32(uint32(len(algorithms)))
	for _, a := range algorithms {
		b = append(b, le16(a.id)...)
		switch a.id {
		case 4:
			d := sha1.Sum(data)
			b = append(b, d[:]...)
		case 0x0b:
			d := sha256.Sum256(data)
			b = append(b, d[:]...)
		case 0x0c:
			d := sha512.Sum384(data)
			b = append(b, d[:]...)
		}
	}
	return b
}

func (e logEvent) marshal(algorithms []logAlgorithm) []byte {
	return join(le32(e.pcr), le32(e.kind), digests(algorithms, e.data), le32(uint32(len(e.data))), e.data)
}

func eventLog(events ...logEvent) []byte {
	b := logHeader(specEvent(testAlgorithms()...))
	for _, e := range events {
		b = append(b, e.marshal(testAlgorithms())...)
	}
	return b
}

func locality(n byte) logEvent { return logEvent{0, 3, append([]byte("StartupLocality\x00"), n)} }

// hcrtm is the event of a measurement before TPM2_Startup.
func hcrtm() logEvent { return logEvent{0, eventHCRTM, []byte("HCRTM")} }

func testEvents() []logEvent {
	return []logEvent{
		locality(3), {0, 8, []byte("version")}, {4, 3, []byte("no action, extends nothing")}, {7, 1, []byte("SecureBoot")},
		{4, 5, []byte("boot loader")}, {0, 4, make([]byte, 4)}, {4, 4, make([]byte, 4)}, {7, 4, make([]byte, 4)}, {9, 13, []byte("initrd")},
	}
}

// loggedPCRs are the values to which testEvents leads, computed event by event.
func loggedPCRs() []attestation.PCR {
	zero := make([]byte, 32)
	three := append(make([]byte, 31), 3)
	extend := func(value []byte, list ...string) []byte {
		for _, data := range list {
			d := sha256.Sum256([]byte(data))
			next := sha256.Sum256(append(bytes.Clone(value), d[:]...))
			value = next[:]
		}
		return value
	}
	separator := "\x00\x00\x00\x00"
	return []attestation.PCR{
		{Index: 0, Value: extend(three, "version", separator)},
		{Index: 4, Value: extend(zero, "boot loader", separator)},
		{Index: 7, Value: extend(zero, "SecureBoot", separator)},
	}
}

// wanted asks for a log that leads to each quoted PCR.
func wanted(c *Config) { c.EventLog, c.EventLogPCRs = true, []int{0, 4, 7} }

func eventLogRows() []row {
	good := eventLog(testEvents()...)
	logged := func(log []byte) bend { return bend{policy: wanted, pcrs: loggedPCRs(), eventLog: log} }
	without := func(i int) []byte {
		events := testEvents()
		return eventLog(append(events[:i:i], events[i+1:]...)...)
	}
	swapped := testEvents()
	swapped[1], swapped[5] = swapped[5], swapped[1]
	late := testEvents()
	late[0], late[1] = late[1], late[0]
	altered := testEvents()
	altered[4].data = []byte("another boot loader")
	header := func(spec []byte) []byte { return logHeader(spec) }
	oneMore := func(e []byte) []byte { return append(bytes.Clone(good), e...) }
	two := []logAlgorithm{{4, 20}, {0x0b, 32}}
	spec := specEvent(testAlgorithms()...)
	rows := []row{
		{"event log: missing", logged(nil), false, reasons(reasonEventLogMissing)},
		{"event log: of zeros", logged(make([]byte, 1000)), false, reasons(reasonEventLogMalformed)},
		{"event log: header alone", logged(header(spec)), false, reasons(reasonEventLogMismatch)},
		{"event log: one byte", logged([]byte{0}), false, reasons(reasonEventLogMalformed)},
		{"event log: cut short", logged(good[:len(good)-1]), false, reasons(reasonEventLogMalformed)},
		{"event log: cut within digests", logged(oneMore(logEvent{0, 1, nil}.marshal(testAlgorithms())[:40])), false, reasons(reasonEventLogMalformed)},
		{"event log: zeros after", logged(append(bytes.Clone(good), 0, 0, 0, 0)), false, reasons(reasonEventLogMalformed)},
		{"event log: an event left out", logged(without(4)), false, reasons(reasonEventLogMismatch)},
		{"event log: an event of PCR 0 left out", logged(without(1)), false, reasons(reasonEventLogMismatch)},
		{"event log: an event too many", logged(oneMore(logEvent{7, 1, []byte("x")}.marshal(testAlgorithms()))), false, reasons(reasonEventLogMismatch)},
		{"event log: in another order", logged(eventLog(swapped...)), false, reasons(reasonEventLogMismatch)},
		{"event log: another boot loader", logged(eventLog(altered...)), false, reasons(reasonEventLogMismatch)},
		{"event log: startup locality left out", logged(without(0)), false, reasons(reasonEventLogMismatch)},
		{"event log: another startup locality", logged(eventLog(append([]logEvent{locality(4)}, testEvents()[1:]...)...)), false, reasons(reasonEventLogMismatch)},
		{"event log: H-CRTM, and PCR 0 did not start there", logged(eventLog(append([]logEvent{hcrtm()}, testEvents()...)...)), false, reasons(reasonEventLogMismatch)},
		{"event log: H-CRTM in the place of the startup locality", logged(eventLog(append([]logEvent{hcrtm()}, testEvents()[1:]...)...)), false, reasons(reasonEventLogMismatch)},
		{"event log: startup locality too late after an H-CRTM", logged(eventLog(append([]logEvent{hcrtm()}, late...)...)), false, reasons(reasonEventLogMalformed)},
		{"event log: impossible startup locality after an H-CRTM", logged(eventLog(append([]logEvent{hcrtm(), locality(1)}, testEvents()[1:]...)...)), false, reasons(reasonEventLogMalformed)},
		{"event log: impossible startup locality", logged(eventLog(append([]logEvent{locality(1)}, testEvents()[1:]...)...)), false, reasons(reasonEventLogMalformed)},
		{"event log: startup locality too late", logged(eventLog(late...)), false, reasons(reasonEventLogMalformed)},
		{"event log: startup locality twice", logged(eventLog(append([]logEvent{locality(3)}, testEvents()...)...)), false, reasons(reasonEventLogMalformed)},
		{"event log: startup locality too long", logged(eventLog(append([]logEvent{{0, 3, []byte("StartupLocality\x00\x03\x03")}}, testEvents()[1:]...)...)), false, reasons(reasonEventLogMalformed)},
		{"event log: a PCR that there is not", logged(oneMore(logEvent{24, 1, nil}.marshal(testAlgorithms()))), false, reasons(reasonEventLogMalformed)},
		{"event log: a huge event", logged(oneMore(join(le32(0), le32(1), digests(testAlgorithms(), nil), le32(0xffffffff)))), false, reasons(reasonEventLogMalformed)},
		{"event log: a huge count of digests", logged(oneMore(join(le32(0), le32(1), le32(0xffffffff)))), false, reasons(reasonEventLogMalformed)},
		{"event log: a digest less", logged(oneMore(logEvent{0, 1, nil}.marshal(two))), false, reasons(reasonEventLogMalformed)},
		{"event log: a digest twice", logged(oneMore(logEvent{0, 1, nil}.marshal([]logAlgorithm{{4, 20}, {0x0b, 32}, {0x0b, 32}}))), false, reasons(reasonEventLogMalformed)},
		{"event log: a digest that is not listed", logged(oneMore(join(le32(0), le32(1), le32(3), le16(0x99), make([]byte, 200)))), false, reasons(reasonEventLogMalformed)},
		{"event log: header lists a bank twice", logged(header(specEvent(logAlgorithm{0x0b, 32}, logAlgorithm{0x0b, 32}))), false, reasons(reasonEventLogMalformed)},
		{"event log: header lists a wrong size", logged(header(specEvent(logAlgorithm{0x0b, 20}))), false, reasons(reasonEventLogMalformed)},
		{"event log: header lists a size of none", logged(header(specEvent(logAlgorithm{0x0b, 32}, logAlgorithm{0x77, 0}))), false, reasons(reasonEventLogMalformed)},
		{"event log: header lists a huge size", logged(header(specEvent(logAlgorithm{0x0b, 32}, logAlgorithm{0x77, 0xffff}))), false, reasons(reasonEventLogMalformed)},
		{"event log: header lists nothing", logged(header(specEvent())), false, reasons(reasonEventLogMalformed)},
		{"event log: header without the bank", logged(header(specEvent(logAlgorithm{4, 20}))), false, reasons(reasonEventLogMalformed)},
		{"event log: header with bytes after", logged(header(append(bytes.Clone(spec), 0))), false, reasons(reasonEventLogMalformed)},
		{"event log: header of another version", logged(header(bytes.Replace(spec, []byte("Event03"), []byte("Event02"), 1))), false, reasons(reasonEventLogMalformed)},
		{"event log: header of another major version", logged(header(put(21, 1)(bytes.Clone(spec)))), false, reasons(reasonEventLogMalformed)},
		{"event log: header that extends", logged(put(4, 1)(bytes.Clone(good))), false, reasons(reasonEventLogMalformed)},
		{"event log: header with a digest", logged(put(8, 1)(bytes.Clone(good))), false, reasons(reasonEventLogMalformed)},
		{"event log: header in another PCR", logged(put(0, 1)(bytes.Clone(good))), false, reasons(reasonEventLogMalformed)},
	}
	forged := logged(good)
	forged.sign = func(quote []byte) []byte { return sign(newKey(theKit().ak.Curve), quote) }
	forged.eventLog = eventLog(altered...)
	rows = append(rows, row{"event log: not compared with values that nobody signed", forged, false, reasons(reasonQuoteSignature)})
	return rows
}

// TestEventLogLeadsToTheQuote is the good case.
func TestEventLogLeadsToTheQuote(t *testing.T) {
	p := theKit().play(t, bend{policy: wanted, pcrs: loggedPCRs(), eventLog: eventLog(testEvents()...)})
	evidence, err := p.verifier.VerifyProof(p.proof, p.hello, nil, p.now)
	if err != nil {
		t.Fatal(err)
	}
	if len(evidence.EventLogPCRs) != 3 {
		t.Errorf("led to PCRs %v", evidence.EventLogPCRs)
	}
}

// Some firmware (HPE DL160) does not log the value that PCR 0 starts at. A PCR that the log does
// not lead to fails only what is asked of that PCR. The log never counts as explaining that PCR.
func TestPCRThatTheLogDoesNotExplain(t *testing.T) {
	otherStart := eventLog(testEvents()[1:]...) // without the startup locality
	altered := testEvents()
	altered[4].data = []byte("another boot loader")
	otherBoot := eventLog(logEvent{0, 8, []byte("x")}, logEvent{4, 1, []byte("x")}, logEvent{7, 1, []byte("x")})
	for name, c := range map[string]struct {
		log  []byte
		asks []int
		led  []int // nil if the proof is refused
	}{
		"all, by default":                      {eventLog(testEvents()...), nil, []int{0, 4, 7}},
		"PCR 0, by default":                    {otherStart, nil, []int{4, 7}},
		"PCR 0, and others are asked for":      {otherStart, []int{4, 7}, []int{4, 7}},
		"PCR 0, which is asked for":            {otherStart, []int{0, 4}, nil},
		"PCR 4, by default":                    {eventLog(altered...), nil, nil},
		"PCR 4, and only PCR 7 is asked for":   {eventLog(altered...), []int{7}, []int{0, 7}},
		"PCR 4, which is asked for":            {eventLog(altered...), []int{4}, nil},
		"each of them, and PCR 0 is asked for": {otherBoot, []int{0}, nil},
	} {
		p := theKit().play(t, bend{policy: func(policy *Config) { policy.EventLog, policy.EventLogPCRs = true, c.asks }, pcrs: loggedPCRs(), eventLog: c.log})
		evidence, err := p.verifier.VerifyProof(p.proof, p.hello, nil, p.now)
		switch {
		case c.led == nil:
			if !slices.Equal(reasonsOf(err), reasons(reasonEventLogMismatch)) {
				t.Errorf("%s: %v", name, err)
			}
		case err != nil:
			t.Errorf("%s: %v", name, err)
		case !slices.Equal(evidence.EventLogPCRs, c.led) || (len(c.led) < 3) != (len(evidence.Warnings) == 1):
			t.Errorf("%s: the log led to %v, want %v; warnings %v", name, evidence.EventLogPCRs, c.led, evidence.Warnings)
		}
	}
	// If only PCR 0 is quoted, nothing is asked by default. A log of another boot is refused.
	p := theKit().play(t, bend{policy: func(c *Config) { c.EventLog, c.PCRs.Indexes = true, []int{0} }, pcrs: loggedPCRs()[:1], eventLog: otherBoot})
	if _, err := p.verifier.VerifyProof(p.proof, p.hello, nil, p.now); !slices.Equal(reasonsOf(err), reasons(reasonEventLogMismatch)) {
		t.Errorf("a log that leads to no PCR: %v", err)
	}
}

// TestEventLogLeavesOtherPCRsAlone: PCR 9 is the operating system's too, and so the log need not
// lead to its value.
func TestEventLogLeavesOtherPCRsAlone(t *testing.T) {
	pcrs := append(loggedPCRs(), attestation.PCR{Index: 9, Value: make([]byte, 32)})
	p := theKit().play(t, bend{
		policy: func(c *Config) { wanted(c); c.PCRs.Indexes = []int{0, 4, 7, 9} },
		pcrs:   pcrs, eventLog: eventLog(testEvents()...),
	})
	evidence, err := p.verifier.VerifyProof(p.proof, p.hello, nil, p.now)
	if err != nil {
		t.Fatal(err)
	}
	if len(evidence.EventLogPCRs) != 3 {
		t.Errorf("claims to have led to PCRs %v", evidence.EventLogPCRs)
	}
}

// PCR 0 starts at 4 after an H-CRTM, for any locality of TPM2_Startup, and at that locality without
// one.
func TestStartOfPCR0(t *testing.T) {
	version, other := logEvent{0, 8, []byte("version")}, logEvent{7, 1, []byte("SecureBoot")}
	for name, c := range map[string]struct {
		start  byte
		events []logEvent
	}{
		"nothing said":                           {0, []logEvent{version}},
		"locality 0":                             {0, []logEvent{locality(0), version}},
		"locality 3":                             {3, []logEvent{locality(3), version}},
		"locality 4":                             {4, []logEvent{locality(4), version}},
		"H-CRTM":                                 {4, []logEvent{hcrtm(), version}},
		"H-CRTM alone":                           {4, []logEvent{hcrtm()}},
		"H-CRTM, after other PCRs' events":       {4, []logEvent{other, hcrtm(), version}},
		"H-CRTM, then locality 0":                {4, []logEvent{hcrtm(), locality(0), version}},
		"H-CRTM, then locality 3":                {4, []logEvent{hcrtm(), locality(3), version}},
		"H-CRTM, then locality 4":                {4, []logEvent{hcrtm(), locality(4), version}},
		"locality 0, then H-CRTM":                {4, []logEvent{locality(0), hcrtm(), version}},
		"locality 3, then H-CRTM":                {4, []logEvent{locality(3), hcrtm(), version}},
		"locality 4, then H-CRTM":                {4, []logEvent{locality(4), hcrtm(), version}},
		"H-CRTM twice":                           {4, []logEvent{hcrtm(), hcrtm(), version}},
		"H-CRTM after another event":             {0, []logEvent{version, hcrtm()}},
		"locality 3, H-CRTM after another event": {3, []logEvent{locality(3), version, hcrtm()}},
		"H-CRTM of another PCR":                  {0, []logEvent{{1, eventHCRTM, []byte("HCRTM")}, version}},
	} {
		want := append(make([]byte, 31), c.start)
		for _, e := range c.events {
			if e.pcr == 0 && e.kind != eventNoAction {
				d := sha256.Sum256(e.data)
				next := sha256.Sum256(append(want, d[:]...))
				want = next[:]
			}
		}
		values, err := replay(eventLog(c.events...), "sha256")
		if err != nil || !bytes.Equal(values[0], want) {
			t.Errorf("%s: PCR 0 does not start at %d: %v", name, c.start, err)
		}
	}
	// Of a TPM that was given the H-CRTM "hcrtm" and then started, at locality 0 or 3: what
	// TPM2_PCR_Read returned.
	measured := "455781052d7ada0dac1694514c6ac9956195d012e0cbee43c531c311902fa91f"
	values, err := replay(eventLog(logEvent{0, eventHCRTM, []byte("hcrtm")}), "sha256")
	if err != nil || hex.EncodeToString(values[0]) != measured {
		t.Errorf("a TPM has %s in PCR 0, not %x: %v", measured, values[0], err)
	}
}

func TestReplayInOtherBanks(t *testing.T) {
	values, err := replay(eventLog(logEvent{1, 1, []byte("x")}), "sha384")
	if err != nil {
		t.Fatal(err)
	}
	d := sha512.Sum384([]byte("x"))
	want := sha512.Sum384(append(make([]byte, 48), d[:]...))
	if !bytes.Equal(values[1], want[:]) {
		t.Errorf("got %s", hex.EncodeToString(values[1]))
	}
	if _, err := replay(eventLog(), "sha512"); err == nil {
		t.Error("a bank that is not in the log")
	}
	if _, err := replay(eventLog(), "sha1"); err == nil {
		t.Error("a bank that is never asked for")
	}
}

// FuzzReplay: no bytes make the parser panic, and what it reads does not depend on a second
// reading.
func FuzzReplay(f *testing.F) {
	f.Add(eventLog(testEvents()...))
	f.Add(eventLog(locality(4)))
	f.Add(eventLog(hcrtm(), locality(0)))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, bank := range []string{"sha256", "sha384"} {
			values, err := replay(data, bank)
			if err == nil && len(values) != firmwarePCRs {
				t.Fatal("values are missing")
			}
		}
		_, _ = replay(append(bytes.Clone(data), 0), "sha256")
	})
}
