package sidecar

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/tokenrefill/refiller/fetch"
)

// fields are the members that a JSON object may have, and where they go.
type fields map[string]any

// decode reads one JSON object. Other than encoding/json it refuses members that
// are unknown, null, given twice or spelled in another case, and text that isn't
// UTF-8: a client that is misunderstood would take from the wrong bucket.
func decode(body []byte, into fields) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", errBadRequest, fmt.Sprintf(format, args...))
	}
	if !utf8.Valid(body) {
		return bad("the body is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return bad("the body is not a JSON object")
	}
	seen := make(map[string]bool, len(into))
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return bad("the body is not JSON: %v", err)
		}
		name, _ := t.(string) // the decoder refuses other names
		target, known := into[name]
		if !known {
			return bad("%q: no such field; want %s", name, strings.Join(slices.Sorted(maps.Keys(into)), ", "))
		}
		if seen[name] {
			return bad("%s: given twice", name)
		}
		seen[name] = true
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return bad("the body is not JSON: %v", err)
		}
		if string(value) == "null" || json.Unmarshal(value, target) != nil {
			return bad("%s: want %s", name, kind(target))
		}
	}
	if _, err := d.Token(); err != nil {
		return bad("the body is not JSON: %v", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return bad("there is more than one JSON object in the body")
	}
	return nil
}

// kind says what a field wants.
func kind(target any) string {
	if _, ok := target.(*string); ok {
		return "a string"
	}
	return "a whole number"
}

// takeRequest is the body of a take and of a return.
type takeRequest struct {
	key    string
	tokens int64
}

func (r *takeRequest) fields() fields {
	r.tokens = 1
	return fields{"key": &r.key, "tokens": &r.tokens}
}

// waitRequest is the body of a wait.
type waitRequest struct {
	takeRequest
	timeoutMS int64
}

func (r *waitRequest) fields(longest time.Duration) fields {
	r.timeoutMS = longest.Milliseconds()
	f := r.takeRequest.fields()
	f["timeout_ms"] = &r.timeoutMS
	return f
}

// result is a fetch.Result in JSON. A time that isn't known is null.
type result struct {
	Key          string `json:"key"`
	OK           bool   `json:"ok"`
	Taken        int64  `json:"taken"`
	Remaining    int64  `json:"remaining"`
	Limit        int64  `json:"limit"`
	RetryAfterMS *int64 `json:"retry_after_ms"`
	ResetAfterMS *int64 `json:"reset_after_ms"`
	Source       string `json:"source"`
}

func newResult(key string, r fetch.Result) result {
	return result{
		Key: key, OK: r.OK, Taken: r.Taken, Remaining: r.Remaining, Limit: r.Limit,
		RetryAfterMS: millis(r.RetryAfter), ResetAfterMS: millis(r.ResetAfter), Source: r.Source.String(),
	}
}

// millis rounds up, so that who waits that long waits long enough.
func millis(d time.Duration) *int64 {
	if d == fetch.Never {
		return nil
	}
	ms := d.Milliseconds()
	if d%time.Millisecond > 0 {
		ms++
	}
	return &ms
}

type returnResult struct {
	Key    string `json:"key"`
	Tokens int64  `json:"tokens"`
}

type waitResult struct {
	Key      string `json:"key"`
	OK       bool   `json:"ok"`
	Taken    int64  `json:"taken"`
	WaitedMS int64  `json:"waited_ms"`
}

type errorResult struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}
