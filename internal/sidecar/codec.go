package sidecar

import (
	"fmt"
	"strings"
	"unicode/utf8"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/encoding"
	encodingproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// anyText is the codec of protobuf, which also decodes a RateLimitRequest whose texts are not UTF-8. The value of a
// descriptor is what a client wrote into a header, and Envoy sends it as it is. Go's protobuf refuses such a request,
// and Envoy lets requests pass that get an error. So one byte would turn off all limits of a request.
type anyText struct{ encoding.CodecV2 }

func newAnyText() anyText { return anyText{encoding.GetCodecV2(encodingproto.Name)} }

// Unmarshal implements encoding.CodecV2.
func (c anyText) Unmarshal(data mem.BufferSlice, v any) error {
	err := c.CodecV2.Unmarshal(data, v)
	req, ok := v.(*rls.RateLimitRequest)
	if err == nil || !ok {
		return err
	}
	cleaned, ok := escapeEntries(data.Materialize(), descriptors, entries)
	if !ok {
		return err
	}
	return proto.Unmarshal(cleaned, req)
}

// The numbers of fields: the descriptors of a RateLimitRequest, and the entries of a RateLimitDescriptor.
const (
	descriptors protowire.Number = 2
	entries     protowire.Number = 1
)

// escapeEntries returns a message with texts that are UTF-8. path has the numbers of the fields that lead to the
// entries, whose fields are texts. It reports whether the message has the form of protobuf.
func escapeEntries(message []byte, path ...protowire.Number) (cleaned []byte, ok bool) {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeField(message)
		if n < 0 {
			return nil, false
		}
		field := message[:n]
		message = message[n:]
		if kind != protowire.BytesType || len(path) > 0 && number != path[0] {
			cleaned = append(cleaned, field...)
			continue
		}
		_, _, tag := protowire.ConsumeTag(field)
		body, _ := protowire.ConsumeBytes(field[tag:])
		if len(path) == 0 {
			body = []byte(escapeText(string(body)))
		} else {
			body, ok = escapeEntries(body, path[1:]...)
			if !ok {
				return nil, false
			}
		}
		cleaned = protowire.AppendTag(cleaned, number, kind)
		cleaned = protowire.AppendBytes(cleaned, body)
	}
	return cleaned, true
}

// escapeText returns a text as it is if it is UTF-8. Otherwise it replaces each byte that belongs to no character by
// its number, such as %FF, and each percent sign by %25. So different texts that are not UTF-8 stay different. Each of
// them shares its limit with the text that a client could have written with these percent signs.
func escapeText(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if r == utf8.RuneError && n == 1 || r == '%' {
			fmt.Fprintf(&b, "%%%02X", s[0])
		} else {
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}
