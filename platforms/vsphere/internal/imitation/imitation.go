// SPDX-License-Identifier: Apache-2.0

// Package imitation imitates a vCenter with virtual machines that have virtual TPMs. It is
// govmomi's simulator. In addition it has virtual TPMs, properties that the user cannot read,
// sessions that end, and calls that are not answered.
package imitation

import (
	"bytes"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/google/uuid"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/simulator/vpx"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// Machine is a virtual machine or a template.
type Machine struct {
	// UUID is the BIOS UUID.
	UUID string `json:"uuid"`
	// Certificates are those of the virtual TPM's endorsement keys. A machine with Bare has a
	// virtual TPM without certificates, and one with neither has no virtual TPM.
	Certificates [][]byte `json:"certificates,omitempty"`
	Bare         bool     `json:"bare,omitempty"`
	// Template says that it cannot run.
	Template bool `json:"template,omitempty"`
	// Hidden says that the user cannot read its configuration.
	Hidden bool `json:"hidden,omitempty"`
	// Stalled says that a call about its devices is not answered.
	Stalled bool `json:"stalled,omitempty"`
}

// VCenter is the server, an http.Handler.
type VCenter struct {
	service *simulator.Service

	mu       sync.Mutex
	machines map[types.ManagedObjectReference]Machine
	byUUID   map[string][]types.ManagedObjectReference
	// odd are the hidden and the stalled machines: each call looks at all of them.
	odd     map[types.ManagedObjectReference]Machine
	version int
	// cookies are those of all sessions, and true for those that have ended.
	cookies map[string]bool
	calls   map[string]int
}

// making guards the making of a simulator, which has state of the package.
var making sync.Mutex

// New returns a vCenter without machines. It lets in one user.
func New(user, password string) *VCenter {
	making.Lock()
	defer making.Unlock()
	ctx := simulator.NewContext()
	v := &VCenter{
		service:  simulator.New(simulator.NewServiceInstance(ctx, vpx.ServiceContent, vpx.RootFolder)),
		machines: map[types.ManagedObjectReference]Machine{}, byUUID: map[string][]types.ManagedObjectReference{},
		odd: map[types.ManagedObjectReference]Machine{}, cookies: map[string]bool{}, calls: map[string]int{},
	}
	ctx.Map.Put(&searchIndex{ctx.Map.SearchIndex(), v})
	v.service.Listen = &url.URL{User: url.UserPassword(user, password)}
	ctx.Map.SessionManager().ValidLogin = func(r *types.Login) bool {
		return subtle.ConstantTimeCompare([]byte(r.UserName+"\x00"+r.Password), []byte(user+"\x00"+password)) == 1
	}
	v.service.RegisterSDK(ctx.Map)
	return v
}

// Add adds a machine with a new instance UUID.
func (v *VCenter) Add(m Machine) { v.put(types.ManagedObjectReference{}, uuid.NewString(), m) }

// Change changes the machines with the BIOS UUID. They keep their instance UUIDs.
func (v *VCenter) Change(biosUUID string, m Machine) {
	for _, ref := range v.refs(biosUUID) {
		v.put(ref, v.service.Context.Map.Get(ref).(*simulator.VirtualMachine).Config.InstanceUuid, m)
	}
}

// Remove removes the machines with the BIOS UUID.
func (v *VCenter) Remove(biosUUID string) {
	for _, ref := range v.refs(biosUUID) {
		v.service.Context.Map.Remove(v.service.Context, ref)
		v.mu.Lock()
		v.forget(ref)
		v.mu.Unlock()
	}
}

// refs returns the references of the machines and templates with the BIOS UUID.
func (v *VCenter) refs(biosUUID string) []types.ManagedObjectReference {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.byUUID[biosUUID])
}

func (v *VCenter) forget(ref types.ManagedObjectReference) {
	old := v.machines[ref].UUID
	v.byUUID[old] = slices.DeleteFunc(v.byUUID[old], func(r types.ManagedObjectReference) bool { return r == ref })
	delete(v.machines, ref)
	delete(v.odd, ref)
}

// searchIndex finds one of thousands of machines faster than the simulator, which looks at all.
type searchIndex struct {
	*simulator.SearchIndex
	vcenter *VCenter
}

// FindAllByUuid returns the machines and templates with the BIOS UUID.
func (s *searchIndex) FindAllByUuid(_ *simulator.Context, r *types.FindAllByUuid) soap.HasFault {
	answer := &types.FindAllByUuidResponse{}
	if r.VmSearch && r.InstanceUuid != nil && !*r.InstanceUuid {
		answer.Returnval = s.vcenter.refs(r.Uuid)
	}
	return &methods.FindAllByUuidBody{Res: answer}
}

// put stores a new object: the simulator reads the old one meanwhile.
func (v *VCenter) put(ref types.ManagedObjectReference, instanceUUID string, m Machine) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.version++
	devices := []types.BaseVirtualDevice{&types.VirtualPCIController{}}
	if len(m.Certificates) > 0 || m.Bare {
		chip := &types.VirtualTPM{VirtualDevice: types.VirtualDevice{Key: 11000}}
		for _, der := range m.Certificates {
			chip.EndorsementKeyCertificate = append(chip.EndorsementKeyCertificate, []byte(base64.StdEncoding.EncodeToString(der)))
		}
		devices = append(devices, chip)
	}
	vm := &simulator.VirtualMachine{VirtualMachine: mo.VirtualMachine{Config: &types.VirtualMachineConfigInfo{
		Uuid: m.UUID, InstanceUuid: instanceUUID, Template: m.Template, ChangeVersion: fmt.Sprint(v.version),
		Hardware: types.VirtualHardware{Device: devices},
	}}}
	vm.Self = ref
	v.forget(ref)
	ref = v.service.Context.Map.Put(vm).Reference()
	v.machines[ref], v.byUUID[m.UUID] = m, append(v.byUUID[m.UUID], ref)
	if m.Hidden || m.Stalled {
		v.odd[ref] = m
	}
}

// EndSessions ends all sessions.
func (v *VCenter) EndSessions() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for cookie := range v.cookies {
		v.cookies[cookie] = true
	}
}

// Calls returns the numbers of calls by method since the last time.
func (v *VCenter) Calls() map[string]int {
	v.mu.Lock()
	defer v.mu.Unlock()
	defer clear(v.calls)
	return maps.Clone(v.calls)
}

var (
	methodName = regexp.MustCompile(`<(?:\w+:)?Body[^>]*><(?:\w+:)?(\w+)`)
	object     = regexp.MustCompile(`(?s)<objects>.*?</objects>`)
	properties = regexp.MustCompile(`(?s)<propSet>.*</propSet>`)
)

// hiddenProperty is vCenter's answer for a property that the user cannot read.
const hiddenProperty = `<missingSet><path>config.uuid</path><fault><fault xmlns:i="http://www.w3.org/2001/XMLSchema-instance" i:type="NoPermission">` +
	`<object type="VirtualMachine">%s</object><privilegeId>System.Read</privilegeId></fault><localizedMessage>no</localizedMessage></fault></missingSet>`

// ServeHTTP answers a call.
func (v *VCenter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 16<<20))
	if err != nil {
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	hidden, stalled := v.begin(r, body)
	if stalled {
		<-r.Context().Done()
		return
	}
	answer := httptest.NewRecorder()
	v.service.ServeMux.ServeHTTP(answer, r)
	text := answer.Body.String()
	if len(hidden) > 0 {
		text = object.ReplaceAllStringFunc(text, func(o string) string {
			for _, ref := range hidden {
				if strings.Contains(o, ">"+ref+"</obj>") {
					return properties.ReplaceAllString(o, fmt.Sprintf(hiddenProperty, ref))
				}
			}
			return o
		})
	}
	maps.Copy(w.Header(), answer.Header())
	w.WriteHeader(answer.Code)
	_, _ = io.WriteString(w, text)
}

// begin counts a call. It returns the references that the user cannot read, and whether the call
// is not answered.
func (v *VCenter) begin(r *http.Request, body []byte) (hidden []string, stalled bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if name := methodName.FindSubmatch(body); name != nil {
		v.calls[string(name[1])]++
	}
	if cookie, err := r.Cookie(soap.SessionCookieName); err == nil {
		if v.cookies[cookie.Value] {
			r.Header.Del("Cookie")
		} else {
			v.cookies[cookie.Value] = false
		}
	}
	for ref, m := range v.odd {
		if m.Hidden {
			hidden = append(hidden, ref.Value)
		}
		if m.Stalled && bytes.Contains(body, []byte("config.hardware.device")) && bytes.Contains(body, []byte(">"+ref.Value+"<")) {
			stalled = true
		}
	}
	return hidden, stalled
}

// NotAuthenticated answers as a vCenter does without a session.
func NotAuthenticated(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusInternalServerError)
	_, _ = io.WriteString(w, `<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" `+
		`xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><soapenv:Body><soapenv:Fault><faultcode>ServerFaultCode</faultcode>`+
		`<faultstring>The session is not authenticated.</faultstring><detail><NotAuthenticatedFault xmlns="urn:vim25" xsi:type="NotAuthenticated">`+
		`<object type="Folder">group-d1</object><privilegeId>System.View</privilegeId></NotAuthenticatedFault></detail></soapenv:Fault></soapenv:Body></soapenv:Envelope>`)
}
