package accesslog

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// maxWindow bounds the memory for unpacking a log of zstd. "zstd --ultra -22" needs this much.
const maxWindow = 128 << 20

// packing is a compression format of logs.
type packing struct {
	name   string
	magic  []byte // the first bytes
	unpack func(io.Reader) (io.Reader, error)
}

var packings = []packing{
	{"gzip", []byte("\x1f\x8b\x08"), func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }},
	{"xz", []byte("\xfd7zXZ\x00"), func(r io.Reader) (io.Reader, error) { return xz.NewReader(r) }},
	{"zstd", []byte("\x28\xb5\x2f\xfd"), func(r io.Reader) (io.Reader, error) {
		return zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	}},
}

// packingOf returns the packing of a log that begins with these bytes. It returns nil if the log is plain.
func packingOf(log []byte) *packing {
	for i, p := range packings {
		if bytes.HasPrefix(log, p.magic) {
			return &packings[i]
		}
	}
	return nil
}

// unpack returns a reader of the text of a compressed log. It returns nil if the log is plain. If reading fails, or if
// the log is too short to be compressed, the reader of lines handles this.
func unpack(log *bufio.Reader) (io.Reader, error) {
	start, _ := log.Peek(8)
	p := packingOf(start)
	if p == nil {
		return nil, nil
	}
	text, err := p.unpack(log)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.name, err)
	}
	return text, nil
}
