package accesslog

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

const (
	// MaxLine is the length of the longest line that is read, in bytes with its line end. A longer line counts as
	// unparsed.
	MaxLine = 256 << 10
	// MaxSamples is the number of unparsed lines that are kept with the reason.
	MaxSamples = 5
)

// errTooLong is the reason for a line that is longer than MaxLine.
var errTooLong = fmt.Errorf("longer than %d bytes", MaxLine)

// Record is one request.
type Record struct {
	Time int64  // Unix µs
	Key  []byte // the field's value, "-" if it is empty; valid until the next call of Next
}

// Unparsed describes the lines that could not be read.
type Unparsed struct {
	Lines   int64
	Samples []Sample // the first MaxSamples lines
}

// Sample is one line that could not be read.
type Sample struct {
	Line   int64  `json:"line"` // counted from 1
	Reason string `json:"reason"`
}

// Reader reads the requests of one log. It belongs to one goroutine.
type Reader struct {
	source    io.Reader
	lines     *bufio.Reader // nil until the first call of Next
	field     field
	timeField string
	line      int64
	text      textLine
	object    map[string]rawValue
	unparsed  Unparsed
}

// NewReader returns a reader of log, plain or compressed. The value of the named field becomes the key of each record.
// Every format has the fields ip, user, method, path (without the query) and status. Lines of text also have host,
// ident, uri (the path with the query), protocol, bytes, referer and agent.
//
// In lines of JSON every other name is the path of a field. Dots separate the names of nested objects, and a number
// selects an element of a list. The time of a line of JSON is in the field named timeField. If timeField is empty, it
// is in one of the usual fields.
func NewReader(log io.Reader, name, timeField string) (*Reader, error) {
	f, err := newField(name)
	if err != nil {
		return nil, err
	}
	if timeField != "" {
		if _, err := newField(timeField); err != nil {
			return nil, err
		}
	}
	return &Reader{source: log, field: f, timeField: timeField}, nil
}

// Next returns the next request, and io.EOF after the last. It skips lines that can't be read. Any other error concerns
// the log as a whole, for example a compressed file that was cut short.
func (r *Reader) Next() (Record, error) {
	if r.lines == nil {
		if err := r.open(); err != nil {
			return Record{}, err
		}
	}
	for {
		line, err := r.readLine()
		if errors.Is(err, errTooLong) {
			r.skip(err)
			continue
		}
		if errors.Is(err, io.EOF) {
			return Record{}, io.EOF
		}
		if err != nil {
			return Record{}, fmt.Errorf("accesslog: after line %d: %w", r.line, err)
		}
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			continue
		}
		record, err := r.parse(line)
		if err != nil {
			r.skip(err)
			continue
		}
		if len(record.Key) == 0 {
			record.Key = dash
		}
		return record, nil
	}
}

// Unparsed describes the lines skipped so far.
func (r *Reader) Unparsed() Unparsed { return r.unparsed }

// open unpacks a compressed log and skips a byte order mark.
func (r *Reader) open() error {
	r.lines = bufio.NewReaderSize(r.source, MaxLine)
	unpacked, err := unpack(r.lines)
	if err != nil {
		return fmt.Errorf("accesslog: %w", err)
	}
	if unpacked != nil {
		r.lines = bufio.NewReaderSize(unpacked, MaxLine)
	}
	if mark, _ := r.lines.Peek(3); bytes.Equal(mark, []byte("\xef\xbb\xbf")) {
		_, _ = r.lines.Discard(3) // can't fail: Peek has read these bytes
	}
	return nil
}

// readLine returns the next line. The line is valid until the next call. The last line may lack its line end.
func (r *Reader) readLine() ([]byte, error) {
	line, err := r.lines.ReadSlice('\n')
	if len(line) > 0 {
		r.line++
	}
	switch {
	case err == nil || errors.Is(err, io.EOF) && len(line) > 0:
		return line, nil
	case !errors.Is(err, bufio.ErrBufferFull):
		return nil, err
	}
	for errors.Is(err, bufio.ErrBufferFull) {
		_, err = r.lines.ReadSlice('\n')
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return nil, errTooLong
}

func (r *Reader) parse(line []byte) (Record, error) {
	if line[0] == '{' {
		return r.parseJSON(line)
	}
	if err := r.text.parse(line); err != nil {
		return Record{}, err
	}
	key, err := r.text.value(r.field)
	return Record{Time: r.text.time, Key: key}, err
}

func (r *Reader) skip(reason error) {
	r.unparsed.Lines++
	if len(r.unparsed.Samples) < MaxSamples {
		r.unparsed.Samples = append(r.unparsed.Samples, Sample{Line: r.line, Reason: reason.Error()})
	}
}
