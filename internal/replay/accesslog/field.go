package accesslog

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
)

// ErrField is returned for an invalid name of a field.
var ErrField = errors.New("accesslog: bad field")

// kind is one of the fields with a known name.
type kind int

const (
	other kind = iota // a name that is only a path into JSON
	ip
	user
	method
	path
	status
	host
	ident
	uri
	protocol
	size
	referer
	agent
)

// field is the field that is read. In JSON, the kinds after status are paths, like names of the kind other.
type field struct {
	kind kind
	name string
}

var kinds = map[string]kind{
	"ip": ip, "user": user, "method": method, "path": path, "status": status, "host": host, "ident": ident, "uri": uri,
	"protocol": protocol, "bytes": size, "referer": referer, "agent": agent,
}

func newField(name string) (field, error) {
	for part := range strings.SplitSeq(name, ".") {
		if part == "" {
			return field{}, fmt.Errorf(
				"%w %q: want ip, user, method, path, status, or the name of a field with dots between nested names", ErrField, name)
		}
	}
	return field{kinds[name], name}, nil
}

// dash marks a missing value, as in the logs themselves.
var dash = []byte("-")

// splitRequest splits a request line such as "GET /path?query HTTP/1.1". It returns nothing for other text, such as the
// first bytes of a TLS handshake.
func splitRequest(line []byte) (method, uri, protocol []byte) {
	method, uri, found := bytes.Cut(line, []byte(" "))
	if !found {
		return nil, nil, nil
	}
	if i := bytes.LastIndexByte(uri, ' '); i >= 0 && bytes.HasPrefix(uri[i+1:], []byte("HTTP/")) {
		uri, protocol = uri[:i], uri[i+1:]
	}
	return method, uri, protocol
}

func withoutQuery(uri []byte) []byte {
	if i := bytes.IndexByte(uri, '?'); i >= 0 {
		return uri[:i]
	}
	return uri
}
