package accesslog

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
)

// These are the reasons why a line of text can't be read.
var (
	errNoTime    = errors.New("no time in brackets")
	errNoAddress = errors.New("no client address")
	errPrefix    = errors.New("more words before the time than client, ident and user")
	errNoRequest = errors.New("no quoted request after the time")
	errOpenQuote = errors.New("the request's quote is not closed")
	errNoStatus  = errors.New("no status after the request")
	errEnvoy     = errors.New("begins with the time, but is in no default format of Envoy or Istio")
)

// textLine has the parts of a line in common or combined format:
//
//	[host] ip ident user [time] "request" status bytes "referer" "agent"
//	[forwarded, …] ip ident user [time] "request" …
//
// The line may also be in one of Envoy's formats, which begin with the time. The part after the status is split only
// when it is needed.
type textLine struct {
	host, ip, ident, user, request, status, rest []byte
	size, agent                                  []byte // in Envoy's formats
	time                                         int64
	envoy                                        bool
}

func (t *textLine) parse(line []byte) error {
	head, tail, err := t.splitTime(line)
	if err != nil {
		return err
	}
	t.envoy = len(head) == 0
	if !t.envoy {
		err = t.splitHead(head)
	}
	if err != nil {
		return err
	}
	tail = bytes.TrimLeft(tail, " ")
	if len(tail) == 0 || tail[0] != '"' {
		return errNoRequest
	}
	var closed bool
	t.request, tail, closed = cutQuoted(tail)
	if !closed {
		return errOpenQuote
	}
	t.status, t.rest = cutWord(tail)
	if !isStatus(t.status) {
		return errNoStatus
	}
	if t.envoy {
		return t.splitEnvoy()
	}
	return nil
}

// splitTime finds the first bracket that opens a time. A user name may have other brackets.
func (t *textLine) splitTime(line []byte) (head, tail []byte, err error) {
	for from := 0; ; {
		i := bytes.IndexByte(line[from:], '[')
		if i < 0 {
			return nil, nil, errNoTime
		}
		from += i + 1
		inside := line[from:min(len(line), from+maxTimeLen+1)]
		end := bytes.IndexByte(inside, ']')
		if end < 0 {
			continue
		}
		if us, ok := parseDate(inside[:end]); ok {
			t.time = us
			return line[:from-1], line[from+end+1:], nil
		}
	}
}

func (t *textLine) splitHead(head []byte) error {
	t.host = nil
	var forwarded bool
	t.ip, head, forwarded = cutClient(head)
	t.ident, head = cutWord(head)
	if forwarded && isAddress(t.ident) { // the second word is the proxy (%h), or the client if there was no proxy
		if !isAddress(t.ip) {
			t.ip = t.ident
		}
		t.ident, head = cutWord(head)
	}
	t.user = bytes.TrimSpace(head)
	switch {
	case len(t.ip) == 0:
		return errNoAddress
	case forwarded:
	case bytes.IndexByte(t.user, ' ') < 0:
	case isAddress(t.ident): // the first word is the virtual host
		t.host, t.ip = t.ip, t.ident
		t.ident, t.user = cutWord(t.user)
		t.user = bytes.TrimSpace(t.user)
	case !isAddress(t.ip): // a user's name may have spaces, but this is a prefix of another kind
		return errPrefix
	}
	return nil
}

// cutClient returns the first word and the rest of the line. forwarded is true if the line begins with a list of
// addresses as in X-Forwarded-For. Then client is the first address, and rest is the text after the list.
func cutClient(head []byte) (client, rest []byte, forwarded bool) {
	list, rest, quoted := cutQuoted(head)
	if quoted {
		client, _, _ = bytes.Cut(list, []byte(","))
		return withoutPort(bytes.TrimSpace(client)), rest, true
	}
	word, rest := cutWord(head)
	client, _, more := bytes.Cut(word, []byte(","))
	for last := word; more && bytes.HasSuffix(last, []byte(",")); {
		last, rest = cutWord(rest)
	}
	if more {
		return withoutPort(client), rest, true
	}
	return client, rest, isAddress(client)
}

// splitEnvoy splits the part after the status in the default formats of Envoy and of Istio:
//
//	flags received sent duration upstream "forwarded" "agent" "id" "authority" "upstream"
//	flags details termination "failure" received sent duration upstream "forwarded" "agent" "id" "authority" "upstream"
//	  cluster local listener client …
//
// Without X-Forwarded-For only Istio's format has the client.
func (t *textLine) splitEnvoy() error {
	words, rest := cutWords(t.rest)
	received := 1
	if len(words) == 3 {
		_, rest, _ = cutQuoted(rest)
		words, rest = cutWords(rest)
		received = 0
	}
	if len(words) != received+4 {
		return errEnvoy
	}
	forwarded, rest, _ := cutQuoted(rest)
	t.agent, rest, _ = cutQuoted(rest)
	_, rest, _ = cutQuoted(rest)
	t.host, rest, _ = cutQuoted(rest)
	_, rest, _ = cutQuoted(rest)
	t.size = words[received+1]
	t.ident = nil
	t.user = nil
	t.ip, _, _ = cutClient(forwarded)
	if addresses, _ := cutWords(rest); len(addresses) > 3 && (len(t.ip) == 0 || bytes.Equal(t.ip, dash)) {
		t.ip = withoutPort(addresses[3])
	}
	if len(t.ip) == 0 || bytes.Equal(t.ip, dash) {
		return errNoAddress
	}
	return nil
}

// cutWords returns the words before the next quote, and the rest of s.
func cutWords(s []byte) (words [][]byte, rest []byte) {
	i := bytes.IndexByte(s, '"')
	if i < 0 {
		return bytes.Fields(s), nil
	}
	return bytes.Fields(s[:i]), s[i:]
}

func (t *textLine) value(f field) ([]byte, error) {
	switch f.kind {
	case ip:
		return t.ip, nil
	case user:
		return t.user, nil
	case status:
		return t.status, nil
	case host:
		return t.host, nil
	case ident:
		return t.ident, nil
	case method, path, uri, protocol:
		m, u, p := splitRequest(t.request)
		switch f.kind {
		case method:
			return m, nil
		case path:
			return withoutQuery(u), nil
		case uri:
			return u, nil
		}
		return p, nil
	case size, referer, agent:
		if t.envoy {
			return t.envoyValue(f.kind), nil
		}
		bytes, rest := cutWord(t.rest)
		if f.kind == size {
			return bytes, nil
		}
		ref, rest, _ := cutQuoted(rest)
		if f.kind == referer {
			return ref, nil
		}
		name, _, _ := cutQuoted(rest)
		return name, nil
	}
	return nil, fmt.Errorf("no field %.100q in a line of text", f.name)
}

// envoyValue returns a value that has another place in Envoy's formats. These formats have no referer.
func (t *textLine) envoyValue(k kind) []byte {
	switch k {
	case size:
		return t.size
	case agent:
		return t.agent
	}
	return nil
}

// cutWord returns the first word of s and the rest of s.
func cutWord(s []byte) (word, rest []byte) {
	s = bytes.TrimLeft(s, " ")
	if i := bytes.IndexByte(s, ' '); i >= 0 {
		return s[:i], s[i:]
	}
	return s, nil
}

// cutQuoted returns the text in quotes at the start of s, and the rest of s. A backslash escapes the next byte. If the
// quote isn't closed, the text extends to the end of s.
func cutQuoted(s []byte) (text, rest []byte, closed bool) {
	s = bytes.TrimLeft(s, " ")
	if len(s) == 0 || s[0] != '"' {
		return nil, nil, false
	}
	s = s[1:]
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			return s[:i], s[i+1:], true
		}
	}
	return s, nil, false
}

func isStatus(s []byte) bool {
	if bytes.Equal(s, dash) {
		return true
	}
	isDigit := func(c byte) bool { return '0' <= c && c <= '9' }
	return len(s) == 3 && isDigit(s[0]) && isDigit(s[1]) && isDigit(s[2])
}

func isAddress(s []byte) bool {
	_, err := netip.ParseAddr(string(s))
	return err == nil
}
