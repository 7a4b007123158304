package accesslog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// These are the reasons why a line of JSON can't be read.
var (
	errNotJSON    = errors.New("not a JSON object")
	errNoJSONTime = errors.New("no time that can be read in the JSON object: name its field with --time-field")
)

type rawValue = json.RawMessage

// These are the names of the fields that servers write, the most specific first. Caddy puts the fields into a nested
// object. Traefik's names are capitalised. nginx uses the names in its log_format, which are mostly the names of its
// variables.
var (
	timeNames = []string{
		"StartUTC", "ts", "msec", "time_iso8601", "@timestamp", "timestamp", "time", "time_local", "StartLocal", "datetime",
		"date",
		"start_time",
	}
	fieldNames = map[kind][]string{
		ip: {
			"request.client_ip", "request.remote_ip", "request.remote_addr", "ClientHost", "ClientAddr", "remote_addr",
			"client_ip", "clientip", "remote_ip", "ip", "client.ip", "source.ip", "client_addr", "remote_host", "client",
			"x_forwarded_for", "x-forwarded-for", "downstream_remote_address", // of Envoy and Istio
		},
		user:   {"user_id", "remote_user", "ClientUsername", "user", "user.name", "username"},
		method: {"request.method", "request_method", "method", "RequestMethod", "http.request.method", "verb"},
		path:   {"request.uri", "request_uri", "uri", "RequestPath", "path", "url.path", "request_path", "url"},
		status: {"status", "DownstreamStatus", "status_code", "response.status", "http.response.status_code", "response",
			"response_code"},
	}
)

func (r *Reader) parseJSON(line []byte) (Record, error) {
	if r.object == nil {
		r.object = map[string]rawValue{}
	}
	clear(r.object)
	if json.Unmarshal(line, &r.object) != nil {
		return Record{}, errNotJSON
	}
	us, ok := timeOf(r.object, r.timeField)
	switch {
	case ok:
	case r.timeField != "":
		return Record{}, fmt.Errorf("no time that can be read in the field %.100q", r.timeField)
	default:
		return Record{}, errNoJSONTime
	}
	key, err := valueOf(r.object, r.field)
	return Record{Time: us, Key: key}, err
}

// timeOf returns the time in the named field. If named is empty, it uses one of the usual fields.
func timeOf(object map[string]rawValue, named string) (us int64, ok bool) {
	names := timeNames
	if named != "" {
		names = []string{named}
	}
	for _, name := range names {
		if text, found := lookup(object, name); found {
			us, ok = parseTime(text)
			if ok {
				return us, true
			}
		}
	}
	return 0, false
}

func valueOf(object map[string]rawValue, f field) ([]byte, error) {
	names, known := fieldNames[f.kind]
	if !known {
		if text, found := lookup(object, f.name); found {
			return text, nil
		}
		return nil, fmt.Errorf("no field %.100q in the JSON object", f.name)
	}
	for _, name := range names {
		text, found := lookup(object, name)
		switch {
		case !found:
		case f.kind == ip && (len(text) == 0 || bytes.Equal(text, dash)): // Envoy's, for a request without a proxy
		case f.kind == ip:
			client, _, _ := bytes.Cut(text, []byte(","))
			return withoutPort(client), nil
		case f.kind == path:
			return withoutQuery(text), nil
		default:
			return text, nil
		}
	}
	if line, found := lookup(object, "request"); found && (f.kind == method || f.kind == path) {
		m, u, _ := splitRequest(line)
		if f.kind == method {
			return m, nil
		}
		return withoutQuery(u), nil
	}
	if f.kind == ip {
		return nil, errNoAddress
	}
	return dash, nil
}

// lookup finds the text of a string, number or boolean by its path. A name in the path may itself have dots. lookup
// tries the longest such name first. A list with one element has the value of that element.
func lookup(object map[string]rawValue, path string) (text []byte, found bool) {
	if raw, ok := object[path]; ok {
		return scalar(raw)
	}
	for i := len(path) - 1; i > 0; i-- {
		if path[i] != '.' {
			continue
		}
		raw, ok := object[path[:i]]
		if !ok {
			continue
		}
		text, found = lookupIn(raw, path[i+1:])
		if found {
			return text, true
		}
	}
	return nil, false
}

func lookupIn(raw rawValue, path string) (text []byte, found bool) {
	switch raw[0] {
	case '{':
		var object map[string]rawValue
		if json.Unmarshal(raw, &object) != nil {
			return nil, false
		}
		return lookup(object, path)
	case '[':
		var list []rawValue
		if json.Unmarshal(raw, &list) != nil {
			return nil, false
		}
		for i, element := range list {
			number := strconv.Itoa(i)
			if path == number {
				return scalar(element)
			}
			if len(path) > len(number) && path[:len(number)] == number && path[len(number)] == '.' {
				return lookupIn(element, path[len(number)+1:])
			}
		}
	}
	return nil, false
}

// scalar returns the text of a value that is not an object. null counts as missing.
func scalar(raw rawValue) (text []byte, found bool) {
	switch raw[0] {
	case '"':
		if bytes.IndexByte(raw, '\\') < 0 {
			return raw[1 : len(raw)-1], true
		}
		var s string
		if json.Unmarshal(raw, &s) != nil {
			return nil, false
		}
		return []byte(s), true
	case '[':
		var list []rawValue
		if json.Unmarshal(raw, &list) != nil || len(list) != 1 || list[0][0] == '[' {
			return nil, false
		}
		return scalar(list[0])
	case '{', 'n':
		return nil, false
	}
	return raw, true
}

// withoutPort removes the port of an address such as "192.0.2.1:80" or "[2001:db8::1]:80".
func withoutPort(address []byte) []byte {
	if len(address) > 0 && address[0] == '[' {
		if end := bytes.IndexByte(address, ']'); end >= 0 {
			return address[1:end]
		}
	}
	if i := bytes.IndexByte(address, ':'); i >= 0 && bytes.IndexByte(address[i+1:], ':') < 0 {
		return address[:i]
	}
	return address
}
