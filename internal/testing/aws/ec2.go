// SPDX-License-Identifier: Apache-2.0

package aws

import (
	"crypto"
	"crypto/x509"
	"encoding/base64"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// EC2Instance is an instance as the EC2 API knows it.
type EC2Instance struct {
	ID, Zone string
	// State is running unless it is set.
	State string
	// TPMSupport is v2.0 for an instance with a NitroTPM.
	TPMSupport string
	LaunchTime time.Time
	// Keys are the endorsement keys by type, rsa-2048 and ecc-sec-p384, in base64 of their DER.
	Keys map[string]string
	// Silent says that a call for the keys is not answered, and Twice that the instance is listed
	// twice.
	Silent, Twice bool
}

// NitroTPMKeys returns Keys for public keys.
func NitroTPMKeys(rsa2048, eccP384 crypto.PublicKey) (map[string]string, error) {
	keys := map[string]string{}
	for name, key := range map[string]crypto.PublicKey{"rsa-2048": rsa2048, "ecc-sec-p384": eccP384} {
		der, err := x509.MarshalPKIXPublicKey(key)
		if err != nil {
			return nil, err
		}
		keys[name] = base64.StdEncoding.EncodeToString(der)
	}
	return keys, nil
}

// EC2 is the EC2 Query API of one region and account. It checks signatures, and knows the two calls
// that a platform adapter makes.
type EC2 struct {
	AWS    *AWS
	Region string
	// Page is the most instances in one answer. Default: what the call asks for.
	Page int

	mu        sync.Mutex
	instances map[string]EC2Instance
	denied    string
}

// Put adds an instance, or replaces it.
func (e *EC2) Put(i EC2Instance) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.instances == nil {
		e.instances = map[string]EC2Instance{}
	}
	if i.State == "" {
		i.State = "running"
	}
	if i.LaunchTime.IsZero() {
		i.LaunchTime = time.Now()
	}
	e.instances[i.ID] = i
}

// Get returns an instance. It is false if there is none.
func (e *EC2) Get(id string) (EC2Instance, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	i, ok := e.instances[id]
	return i, ok
}

// Deny takes away the right to an action.
func (e *EC2) Deny(action string) { e.mu.Lock(); defer e.mu.Unlock(); e.denied = action }

// ServeHTTP answers a call ("Making requests to the Amazon EC2 API").
func (e *EC2) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		WriteEC2Error(w, http.StatusBadRequest, "InvalidRequest", "")
		return
	}
	if _, code, message := e.AWS.authenticate(r, body, time.Now(), "ec2", e.Region); code != "" {
		if code == "InvalidClientTokenId" {
			code = "AuthFailure" // as EC2 calls it
		}
		WriteEC2Error(w, http.StatusUnauthorized, code, message)
		return
	}
	form, err := url.ParseQuery(string(body))
	action := form.Get("Action")
	e.mu.Lock()
	denied := e.denied
	e.mu.Unlock()
	switch {
	case err != nil || r.Method != http.MethodPost || r.URL.Path != "/" || form.Get("Version") != "2016-11-15":
		WriteEC2Error(w, http.StatusBadRequest, "InvalidParameterValue", "")
	case action == denied:
		WriteEC2Error(w, http.StatusForbidden, "UnauthorizedOperation", "You are not authorized to perform this operation.")
	case action == "DescribeInstances":
		e.describeInstances(w, form)
	case action == "GetInstanceTpmEkPub":
		e.getInstanceTPMEkPub(w, r, form)
	default:
		WriteEC2Error(w, http.StatusBadRequest, "InvalidAction", "")
	}
}

// describeInstances knows one filter, instance-id.
func (e *EC2) describeInstances(w http.ResponseWriter, form url.Values) {
	var wanted []string
	for n := 1; form.Has("Filter.1.Value." + strconv.Itoa(n)); n++ {
		wanted = append(wanted, form.Get("Filter.1.Value."+strconv.Itoa(n)))
	}
	most, err := strconv.Atoi(form.Get("MaxResults"))
	switch {
	case form.Get("Filter.1.Name") != "instance-id" || form.Has("Filter.2.Name") || form.Has("InstanceId.1"):
		WriteEC2Error(w, http.StatusBadRequest, "InvalidParameterValue", "")
		return
	case len(wanted) == 0 || len(wanted) > 200:
		WriteEC2Error(w, http.StatusBadRequest, "FilterLimitExceeded", "The maximum number of filter values specified on a single call is 200")
		return
	case err != nil || most < 5 || most > 1000:
		WriteEC2Error(w, http.StatusBadRequest, "InvalidMaxResults", "")
		return
	}
	if e.Page > 0 {
		most = e.Page
	}
	e.mu.Lock()
	var found []EC2Instance
	for _, id := range slices.Sorted(maps.Keys(e.instances)) {
		if slices.Contains(wanted, id) {
			found = append(found, e.instances[id])
			if e.instances[id].Twice {
				found = append(found, e.instances[id])
			}
		}
	}
	e.mu.Unlock()
	after, _ := strconv.Atoi(form.Get("NextToken"))
	found = found[min(after, len(found)):]
	next := ""
	if len(found) > most {
		found, next = found[:most], "\n    <nextToken>"+strconv.Itoa(after+most)+"</nextToken>"
	}
	var items strings.Builder
	for _, i := range found {
		support := ""
		if i.TPMSupport != "" {
			support = "<tpmSupport>" + escape(i.TPMSupport) + "</tpmSupport>"
		}
		_, _ = fmt.Fprintf(&items, `
        <item>
            <reservationId>r-1234567890abcdef0</reservationId>
            <ownerId>123456789012</ownerId>
            <groupSet/>
            <instancesSet>
                <item>
                    <instanceId>%s</instanceId>
                    <instanceState><code>16</code><name>%s</name></instanceState>
                    <launchTime>%s</launchTime>
                    <placement><availabilityZone>%s</availabilityZone><groupName/><tenancy>default</tenancy></placement>
                    <tagSet><item><key>tpmSupport</key><value>of the guest</value></item></tagSet>
                    %s
                </item>
            </instancesSet>
        </item>`, escape(i.ID), escape(i.State), i.LaunchTime.UTC().Format("2006-01-02T15:04:05.000Z"), escape(i.Zone), support) // a Builder does not fail
	}
	writeEC2(w, "DescribeInstances", "<reservationSet>"+items.String()+"\n    </reservationSet>"+next)
}

func (e *EC2) getInstanceTPMEkPub(w http.ResponseWriter, r *http.Request, form url.Values) {
	id, kind, format := form.Get("InstanceId"), form.Get("KeyType"), form.Get("KeyFormat")
	i, exists := e.Get(id)
	key, named := i.Keys[kind]
	switch {
	case !exists:
		WriteEC2Error(w, http.StatusBadRequest, "InvalidInstanceID.NotFound", "The instance ID '"+id+"' does not exist")
	case i.Silent:
		<-r.Context().Done()
	case format != "der" || (kind != "rsa-2048" && kind != "ecc-sec-p384"):
		WriteEC2Error(w, http.StatusBadRequest, "InvalidParameterValue", "")
	case !named || i.TPMSupport == "":
		WriteEC2Error(w, http.StatusBadRequest, "UnsupportedOperation", "The instance does not have a NitroTPM")
	default:
		writeEC2(w, "GetInstanceTpmEkPub", "<instanceId>"+escape(id)+"</instanceId><keyType>"+kind+"</keyType><keyFormat>"+format+"</keyFormat><keyValue>"+escape(key)+"</keyValue>")
	}
}

func writeEC2(w http.ResponseWriter, action, content string) {
	w.Header().Set("Content-Type", "text/xml;charset=UTF-8")
	_, _ = io.WriteString(w, xml.Header+"<"+action+`Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
    <requestId>8f7724cf-496f-496e-8fe3-example</requestId>
    `+content+"\n</"+action+"Response>") // the client may be gone
}

// WriteEC2Error answers with an error, as EC2 does.
func WriteEC2Error(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "text/xml;charset=UTF-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, xml.Header+"<Response><Errors><Error><Code>"+escape(code)+"</Code><Message>"+escape(message)+
		"</Message></Error></Errors><RequestID>ea966190-f9aa-478e-9ede-example</RequestID></Response>") // the client may be gone
}
