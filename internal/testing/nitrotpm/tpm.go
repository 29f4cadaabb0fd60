// SPDX-License-Identifier: Apache-2.0

package nitrotpm

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha512"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/nitrotpm"
)

// vendorCommand is AWS's, as in AWS's tool.
const vendorCommand tpm2.TPMCC = 0x20000001

// swtpmNVSize is the largest NV index of a software TPM (libtpms, MAX_NV_INDEX_SIZE). The messages
// need more. So this package keeps the content of larger ones itself. The software TPM has a small
// index in place of each, so that it checks the owner's password and lists the handle.
const swtpmNVSize, standInSize = 2048, 8

// TPM is a software TPM that has AWS's vendor command, behind a Unix socket. Its fields must not
// change while a client uses it.
type TPM struct {
	// Maker makes the documents. Nil: the TPM does not have the vendor command, as in an instance
	// whose image does not ask for TpmSupport v2.0.
	Maker *Maker
	// Now is the time of the documents. Default: time.Now.
	Now func() time.Time
	// Answer replaces an answer, if set.
	Answer func(answer []byte) []byte

	dir, backend string
	listener     net.Listener
	serving      sync.WaitGroup

	mu       sync.Mutex
	indices  map[uint32]*index
	sessions map[uint32]*session
}

// index is a large NV index.
type index struct {
	public   tpm2.TPMSNVPublic
	password []byte
	content  []byte
}

// session is an HMAC session that the software TPM started. Its key is empty: it is neither salted
// nor bound.
type session struct{ nonceTPM []byte }

// Open starts the imitation before a software TPM's socket. The caller closes it.
func Open(backend interface{ Socket() string }, maker *Maker) (*TPM, error) {
	dir, err := os.MkdirTemp("/tmp", "nitrotpm-") // not TMPDIR: the path of a socket has at most 107 bytes
	if err != nil {
		return nil, err
	}
	t := &TPM{Maker: maker, Now: time.Now, dir: dir, backend: backend.Socket(), indices: map[uint32]*index{}, sessions: map[uint32]*session{}}
	if t.listener, err = net.Listen("unix", t.Socket()); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	t.serving.Go(t.accept)
	return t, nil
}

// Socket is the path of the socket.
func (t *TPM) Socket() string { return filepath.Join(t.dir, "tpm") }

// Close ends it.
func (t *TPM) Close() {
	_ = t.listener.Close()
	t.serving.Wait()
	_ = os.RemoveAll(t.dir)
}

func (t *TPM) accept() {
	for {
		conn, err := t.listener.Accept()
		if err != nil {
			return
		}
		t.serve(conn) // one after the other, like a software TPM
		_ = conn.Close()
	}
}

func (t *TPM) serve(conn net.Conn) {
	for {
		header := make([]byte, 10)
		if _, err := io.ReadFull(conn, header); err != nil {
			return
		}
		size := binary.BigEndian.Uint32(header[2:])
		if size < 10 || size > 4096 {
			return
		}
		command := append(header, make([]byte, size-10)...)
		if _, err := io.ReadFull(conn, command[10:]); err != nil {
			return
		}
		response, err := t.handle(command)
		if err != nil {
			return
		}
		if _, err := conn.Write(response); err != nil {
			return
		}
	}
}

// parsed is a command with its handles and its one authorization.
type parsed struct {
	code       tpm2.TPMCC
	handles    []uint32
	auth       tpm2.TPMSAuthCommand
	parameters *bytes.Reader
}

// parse splits a command that has n handles.
func parse(command []byte, n int) (*parsed, error) {
	p := &parsed{code: tpm2.TPMCC(binary.BigEndian.Uint32(command[6:])), handles: make([]uint32, n)}
	r := bytes.NewReader(command[10:])
	if err := binary.Read(r, binary.BigEndian, p.handles); err != nil {
		return nil, err
	}
	if tpm2.TPMST(binary.BigEndian.Uint16(command)) == tpm2.TPMSTSessions {
		area, err := sized[uint32](r)
		if err != nil {
			return nil, err
		}
		auth, err := tpm2.Unmarshal[tpm2.TPMSAuthCommand](area)
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(tpm2.Marshal(*auth), area) {
			return nil, errors.New("more than one authorization")
		}
		p.auth = *auth
	}
	p.parameters = r
	return p, nil
}

// sized reads a value with its length before it.
func sized[N uint16 | uint32](r io.Reader) ([]byte, error) {
	var n N
	if err := binary.Read(r, binary.BigEndian, &n); err != nil {
		return nil, err
	}
	if n > 4096 {
		return nil, fmt.Errorf("%d bytes", n)
	}
	value := make([]byte, n)
	_, err := io.ReadFull(r, value)
	return value, err
}

// handle answers what concerns a large NV index, and AWS's command. The software TPM answers the
// rest. An error cuts the connection.
func (t *TPM) handle(command []byte) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch code := tpm2.TPMCC(binary.BigEndian.Uint32(command[6:])); code {
	case tpm2.TPMCCStartAuthSession:
		return t.startSession(command)
	case tpm2.TPMCCNVDefineSpace:
		return t.define(command)
	case tpm2.TPMCCNVReadPublic:
		p, err := parse(command, 1)
		if err != nil {
			return nil, err
		}
		if i := t.indices[p.handles[0]]; i != nil {
			return response(false, tpm2.Marshal(tpm2.New2B(i.public)), tpm2.Marshal(i.name())), nil
		}
	case tpm2.TPMCCNVUndefineSpace, tpm2.TPMCCNVWrite, tpm2.TPMCCNVRead, vendorCommand:
		p, err := parse(command, 2)
		if err != nil {
			return nil, err
		}
		i := t.indices[p.handles[1]]
		switch {
		case i == nil:
		case code == tpm2.TPMCCNVUndefineSpace:
			answer, err := t.forward(command)
			if err == nil && succeeded(answer) {
				delete(t.indices, p.handles[1])
			}
			return answer, err
		case p.handles[0] != p.handles[1]:
			return failed(tpm2.TPMRCNVAuthorization), nil // the index allows its own password only
		case code == vendorCommand && t.Maker == nil:
			return failed(tpm2.TPMRCCommandCode), nil
		case code == vendorCommand:
			return t.vendor(p, i)
		case p.auth.Handle != tpm2.TPMRSPW || !bytes.Equal(p.auth.Authorization.Buffer, i.password):
			return failed(tpm2.TPMRCBadAuth), nil
		case code == tpm2.TPMCCNVWrite:
			return i.write(p)
		default:
			return i.read(p)
		}
	}
	return t.forward(command)
}

func (t *TPM) forward(command []byte) ([]byte, error) {
	conn, err := linuxudstpm.Open(t.backend)
	if err != nil {
		return nil, err
	}
	answer, err := conn.Send(command)
	return answer, errors.Join(err, conn.Close())
}

// startSession notes a session that has no key.
func (t *TPM) startSession(command []byte) ([]byte, error) {
	answer, err := t.forward(command)
	if err != nil || !succeeded(answer) {
		return answer, err
	}
	handle := binary.BigEndian.Uint32(answer[10:])
	delete(t.sessions, handle)
	nonceTPM, err := sized[uint16](bytes.NewReader(answer[14:]))
	if err != nil {
		return nil, err
	}
	null := uint32(tpm2.TPMRHNull)
	if hash := tpm2.TPMAlgID(binary.BigEndian.Uint16(command[len(command)-2:])); hash == tpm2.TPMAlgSHA512 &&
		binary.BigEndian.Uint32(command[10:]) == null && binary.BigEndian.Uint32(command[14:]) == null {
		t.sessions[handle] = &session{nonceTPM}
	}
	return answer, nil
}

// define defines a large index, and a small one in the software TPM.
func (t *TPM) define(command []byte) ([]byte, error) {
	p, err := parse(command, 1)
	if err != nil {
		return nil, err
	}
	password, err := sized[uint16](p.parameters)
	if err != nil {
		return nil, err
	}
	area, err := sized[uint16](p.parameters)
	if err != nil {
		return nil, err
	}
	public, err := tpm2.Unmarshal[tpm2.TPMSNVPublic](area)
	if err != nil || public.DataSize <= swtpmNVSize {
		return t.forward(command) // the software TPM answers
	}
	small := bytes.Clone(command)
	binary.BigEndian.PutUint16(small[len(small)-2:], standInSize) // the size is the last field
	answer, err := t.forward(small)
	if err == nil && succeeded(answer) {
		t.indices[uint32(public.NVIndex)] = &index{*public, password, bytes.Repeat([]byte{0xff}, int(public.DataSize))}
	}
	return answer, err
}

func (i *index) name() tpm2.TPM2BName {
	name, err := tpm2.NVName(&i.public)
	if err != nil {
		panic(err) // the software TPM accepted the hash
	}
	return *name
}

func (i *index) write(p *parsed) ([]byte, error) {
	data, err := sized[uint16](p.parameters)
	if err != nil {
		return nil, err
	}
	var offset uint16
	if err := binary.Read(p.parameters, binary.BigEndian, &offset); err != nil {
		return nil, err
	}
	if len(data) > 1024 || int(offset)+len(data) > len(i.content) {
		return failed(tpm2.TPMRCNVRange), nil
	}
	copy(i.content[offset:], data)
	i.public.Attributes.Written = true
	return response(true), nil
}

func (i *index) read(p *parsed) ([]byte, error) {
	var at struct{ Size, Offset uint16 }
	if err := binary.Read(p.parameters, binary.BigEndian, &at); err != nil {
		return nil, err
	}
	switch {
	case !i.public.Attributes.Written:
		return failed(tpm2.TPMRCNVUninitialized), nil
	case at.Size > 1024 || int(at.Offset)+int(at.Size) > len(i.content):
		return failed(tpm2.TPMRCNVRange), nil
	}
	return response(true, tpm2.Marshal(tpm2.TPM2BMaxNVBuffer{Buffer: i.content[at.Offset : at.Offset+at.Size]})), nil
}

// vendor answers AWS's command. The session's HMAC is checked as the TPM 2.0 Library, part 1,
// section "Session-Based Authorizations" has it.
func (t *TPM) vendor(p *parsed, i *index) ([]byte, error) {
	s := t.sessions[uint32(p.auth.Handle)]
	if s == nil {
		return failed(tpm2.TPMRCAuthMissing), nil
	}
	name := i.name()
	cp := sha512.Sum512(append(append(binary.BigEndian.AppendUint32(nil, uint32(vendorCommand)), name.Buffer...), name.Buffer...))
	key := bytes.TrimRight(i.password, "\x00")
	mac := hmac.New(sha512.New, key)
	for _, part := range [][]byte{cp[:], p.auth.Nonce.Buffer, s.nonceTPM, tpm2.Marshal(p.auth.Attributes)} {
		mac.Write(part)
	}
	if !hmac.Equal(mac.Sum(nil), p.auth.Authorization.Buffer) {
		return failed(tpm2.TPMRCAuthFail), nil
	}
	if !i.public.Attributes.Written {
		return failed(tpm2.TPMRCNVUninitialized), nil
	}
	answer, err := t.answer(i.content)
	if err != nil {
		return nil, err
	}
	if t.Answer != nil {
		answer = t.Answer(answer)
	}
	copy(i.content, answer)
	return response(true), nil
}

// answer answers a message.
func (t *TPM) answer(message []byte) ([]byte, error) {
	var request struct {
		Attestation *struct {
			UserData  []byte `cbor:"user_data"`
			Nonce     []byte `cbor:"nonce"`
			PublicKey []byte `cbor:"public_key"`
		}
	}
	if _, err := cbor.UnmarshalFirst(message, &request); err != nil || request.Attestation == nil {
		return cbor.Marshal(map[string]string{"Error": "InvalidOperation"})
	}
	const limit = 1024
	a := request.Attestation
	if len(a.UserData) > limit || len(a.Nonce) > limit || len(a.PublicKey) > limit {
		return cbor.Marshal(map[string]string{"Error": "InputTooLarge"})
	}
	content := t.Maker.Content(a.Nonce, t.Now())
	content.UserData, content.PublicKey = a.UserData, a.PublicKey
	document, err := t.Maker.Sign(content.Payload())
	if err != nil {
		return nil, err
	}
	return nitrotpm.Answer(document), nil
}

func succeeded(answer []byte) bool {
	return len(answer) >= 10 && tpm2.TPMRC(binary.BigEndian.Uint32(answer[6:])) == tpm2.TPMRCSuccess
}

func failed(code tpm2.TPMRC) []byte {
	return binary.BigEndian.AppendUint32([]byte{0x80, 0x01, 0, 0, 0, 10}, uint32(code))
}

// response returns a successful response. If the command was authorized, its session continues, and
// has no HMAC, as for a password.
func response(authorized bool, parameters ...[]byte) []byte {
	body, tag := bytes.Join(parameters, nil), tpm2.TPMSTNoSessions
	if authorized {
		tag = tpm2.TPMSTSessions
		body = append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...) //nolint:gosec // G115: messages are short
		body = append(body, 0, 0, 1, 0, 0)
	}
	b := binary.BigEndian.AppendUint16(nil, uint16(tag))
	b = binary.BigEndian.AppendUint32(b, uint32(10+len(body))) //nolint:gosec // G115: the same
	return append(binary.BigEndian.AppendUint32(b, 0), body...)
}
