package accesslog

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
)

// Reasons why a line of text can't be read.
var (
	errNoTime    = errors.New("no time in brackets")
	errNoAddress = errors.New("no client address")
	errPrefix    = errors.New("more words before the time than client, ident and user")
	errNoRequest = errors.New("no quoted request after the time")
	errOpenQuote = errors.New("the request's quote is not closed")
	errNoStatus  = errors.New("no status after the request")
)

// textLine is a line in common or combined format, split:
//
//	[host] ip ident user [time] "request" status bytes "referer" "agent"
//
// What follows the status is split only when it is asked for.
type textLine struct {
	host, ip, ident, user, request, status, rest []byte
	time                                         int64
}

func (t *textLine) parse(line []byte) error {
	head, tail, err := t.splitTime(line)
	if err != nil {
		return err
	}
	if err := t.splitHead(head); err != nil {
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
	return nil
}

// splitTime finds the first bracket that opens a time: a user name may have
// brackets, too.
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
	t.ip, head = cutWord(head)
	t.ident, head = cutWord(head)
	t.user = bytes.TrimSpace(head)
	switch {
	case len(t.ip) == 0:
		return errNoAddress
	case bytes.IndexByte(t.user, ' ') < 0:
	case isAddress(t.ident): // the virtual host comes first
		t.host, t.ip = t.ip, t.ident
		t.ident, t.user = cutWord(t.user)
		t.user = bytes.TrimSpace(t.user)
	case !isAddress(t.ip): // a user's name may have spaces, but this is some other prefix
		return errPrefix
	}
	return nil
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

// cutWord returns the first word of s and what follows it.
func cutWord(s []byte) (word, rest []byte) {
	s = bytes.TrimLeft(s, " ")
	if i := bytes.IndexByte(s, ' '); i >= 0 {
		return s[:i], s[i:]
	}
	return s, nil
}

// cutQuoted returns the text in quotes at the start of s, and what follows it.
// A backslash escapes the byte after it. Where the quote isn't closed, the text
// is what there is of it.
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
