package fetch

import (
	"bufio"
	"context"
	"crypto/sha1" //nolint:gosec // Redis names scripts by their SHA-1.
	"encoding/hex"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// ledger records what a server does to its buckets, as MONITOR shows it: every script that ran and its commands, in
// order, even if no caller got its reply.
type ledger struct {
	server *testenv.RedisServer
	books  map[string]*book
	conn   net.Conn
	lines  chan []string
}

// book has what happened to one bucket.
type book struct {
	entries []bookEntry
	clamped int64            // tokens that came back although the bucket was full
	held    map[string]int64 // tokens of reservations and blocks, by their ids
	over    map[string]bool  // reservations that expired
	ranOut  int64            // tokens of reservations that were not settled in time
}

// bookEntry is the state of a bucket after one script.
type bookEntry struct {
	at          int64 // Unix µs
	script      string
	change      int64 // of its tokens
	tokens      int64
	outstanding int64
	refilled    int64 // the last refill, Unix µs
}

// end is the message that closes a ledger.
const end = "the end of the ledger"

// openLedger makes a ledger that begins with the present state of the buckets. The scripts must not have been loaded
// before.
func openLedger(t *testing.T, server *testenv.RedisServer, keys ...string) *ledger {
	t.Helper()
	l := &ledger{server: server, books: make(map[string]*book), lines: make(chan []string, 1)}
	rdb := server.Client()
	for _, key := range keys {
		p, err := lua.Peek(context.Background(), rdb, key, 1)
		require.NoError(t, err)
		l.books[key] = &book{held: make(map[string]int64), over: make(map[string]bool),
			entries: []bookEntry{{at: p.Now, tokens: p.Tokens, refilled: p.Last}}}
	}
	conn, err := net.Dial("tcp", server.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = conn.Write([]byte("MONITOR\r\n"))
	require.NoError(t, err)
	in := bufio.NewScanner(conn)
	in.Buffer(nil, 1<<20)
	require.True(t, in.Scan())
	require.Equal(t, "+OK", in.Text())
	l.conn = conn
	go func() {
		var lines []string
		for in.Scan() && !strings.HasSuffix(in.Text(), strconv.Quote(end)) {
			lines = append(lines, in.Text())
		}
		l.lines <- lines
	}()
	require.NoError(t, rdb.ScriptFlush(context.Background()).Err())
	require.NoError(t, lua.Load(context.Background(), rdb)) // so that the ledger knows their names
	return l
}

// close reads all lines of MONITOR up to now.
func (l *ledger) close(t *testing.T) {
	t.Helper()
	require.NoError(t, l.server.Client().Echo(context.Background(), end).Err())
	names := make(map[string]string)
	var r *run
	for _, line := range <-l.lines {
		at, source, words, err := parse(line)
		require.NoError(t, err, line)
		if source == "lua" {
			if r != nil {
				r.record(words)
			}
			continue
		}
		l.book(r)
		r = nil
		switch {
		case words[0] == "script" && len(words) == 3: // load
			name, hash := named(words[2])
			names[hash] = name
		case words[0] == "eval":
			name, _ := named(words[1])
			r = newRun(at, name, words)
		case words[0] == "evalsha":
			r = newRun(at, names[words[1]], words)
		}
	}
	l.book(r)
	for key, b := range l.books {
		require.Equal(t, tokens(t, l.server.Client(), key), b.last().tokens, "the ledger of %s is complete", key)
	}
}

// parse parses a line of MONITOR.
func parse(line string) (at int64, source string, words []string, err error) {
	head, rest, ok := strings.Cut(strings.TrimPrefix(line, "+"), "] ")
	seconds, from, okFrom := strings.Cut(head, " [0 ")
	if !ok || !okFrom {
		return 0, "", nil, fmt.Errorf("not a line of MONITOR: %q", line)
	}
	at, err = strconv.ParseInt(strings.Replace(seconds, ".", "", 1), 10, 64)
	if err != nil {
		return 0, "", nil, err
	}
	for rest != "" {
		quoted, err := strconv.QuotedPrefix(rest)
		if err != nil {
			return 0, "", nil, err
		}
		word, err := strconv.Unquote(quoted)
		if err != nil {
			return 0, "", nil, err
		}
		words = append(words, word)
		rest = strings.TrimPrefix(rest[len(quoted):], " ")
	}
	words[0] = strings.ToLower(words[0])
	return at, from, words, nil
}

// named returns the name of a script, with which its source begins, and its hash.
func named(source string) (name, hash string) {
	name, _, _ = strings.Cut(strings.TrimPrefix(source, "-- "), ":")
	sum := sha1.Sum([]byte(source)) //nolint:gosec // as above
	return name, hex.EncodeToString(sum[:])
}

// run is one run of a script.
type run struct {
	at         int64
	name       string
	keys, args []string
	did        bool             // it called a command, so the reply wasn't NOSCRIPT
	changes    map[string]int64 // of strings
	state, out map[string]string
	records    map[string][]int64 // records of the first bucket that it wrote, by id; nil: it dropped the record
}

func newRun(at int64, name string, words []string) *run {
	n, _ := strconv.Atoi(words[2])
	return &run{
		at: at, name: name, keys: words[3 : 3+n], args: words[3+n:],
		changes: make(map[string]int64), state: make(map[string]string), out: make(map[string]string),
		records: make(map[string][]int64),
	}
}

// record records a command of the script.
func (r *run) record(words []string) {
	r.did = true
	switch words[0] {
	case "incrby":
		r.changes[words[1]] += number(words[2])
	case "decrby":
		r.changes[words[1]] -= number(words[2])
	case "hset":
		for i := 2; i+1 < len(words); i += 2 {
			switch field, value := words[i], words[i+1]; {
			case !isTake(r.name) && len(r.keys) > 3 && words[1] == r.keys[3]:
				r.records[field] = numbers(value)
			case field == "st":
				r.state[words[1]] = value
			case field == "out":
				r.out[words[1]] = value
			}
		}
	case "hdel":
		if !isTake(r.name) && len(r.keys) > 3 && words[1] == r.keys[3] { // the key of the records; not so in a take
			r.records[words[2]] = nil
		} else if words[2] == "out" {
			r.out[words[1]] = "0 0 0"
		}
	}
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

func numbers(s string) (all []int64) {
	for _, word := range strings.Fields(s) {
		all = append(all, number(word))
	}
	return all
}

// book adds an entry for a script's run to the books of the script's buckets.
func (l *ledger) book(r *run) {
	if r == nil || !r.did {
		return
	}
	for key, b := range l.books {
		if !slices.Contains(r.keys, key) {
			continue
		}
		e := b.last()
		e.at = r.at
		e.script = r.name
		e.change = r.changes[key]
		e.tokens += e.change
		if st, ok := r.state[lua.ControlKey(key)]; ok {
			e.refilled = number(strings.TrimSpace(st[17:33])) // after era: see lua/shared/bucket.lua
		}
		if out, ok := r.out[lua.ControlKey(key)]; ok {
			e.outstanding = numbers(out)[0]
		}
		if r.keys[0] == key {
			b.clamped += b.balance(r, e.change)
		}
		b.entries = append(b.entries, e)
	}
}

func (b *book) last() bookEntry { return b.entries[len(b.entries)-1] }

// Kinds of records, and the positions of their numbers, as lua/held.lua describes them.
const (
	recordLease       = 1
	recordReservation = 2
	recordSettled     = 3
	recordRunOut      = 4

	leaseGranted    = 5
	settledReturned = 4
	settledClamped  = 5
	settledVoid     = 6
	settledPaid     = 7
)

// balance returns how many of the tokens that a script gave back did not fit into the bucket. It also updates the
// records.
func (b *book) balance(r *run, change int64) (clamped int64) {
	back, out := int64(0), int64(0)
	for id, record := range r.records {
		if record == nil {
			delete(b.held, id)
			continue
		}
		switch record[0] {
		case recordLease:
			out += record[leaseGranted]
		case recordReservation:
			out += record[1]
		case recordSettled:
			back += record[settledReturned] + record[settledClamped]
			if !b.over[id] { // tokens of expired reservations are counted already
				back += record[settledVoid]
			}
			out += record[settledPaid]
		case recordRunOut:
			back += b.held[id]
			b.ranOut += b.held[id]
			b.over[id] = true
		}
		b.held[id] = record[1]
	}
	switch _, written := r.records[r.args[0]]; {
	case r.name == "return":
		back += number(r.args[0])
	case r.name == "lease" && written: // except for a call that was sent again
		back += number(r.args[3])
	case len(r.records) == 0:
		return 0
	}
	return back - out - change
}
