package dev

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

// plainEvery is the time between two prints of the status on an output on which it can't be rewritten.
const plainEvery = 5 * time.Second

// screen is the output for people. It has lines that stay and, on a terminal, a status below them that is rewritten in
// place. It is safe for concurrent use.
type screen struct {
	out      io.Writer
	rewrites bool       // the status is overwritten
	width    func() int // columns; 0: no limit
	style    style
	failed   func(error) // called when the output has no reader any more

	mu      sync.Mutex
	status  []string  // the lines below the events
	printed time.Time // when the status was last printed as a line
}

func newScreen(out io.Writer, s terminal.Screen, failed func(error)) *screen {
	return &screen{out: out, rewrites: s.Rewrites(), width: s.Width, style: style(s.Colors()), failed: failed}
}

// Autowrap is off while the status is written. Otherwise a terminal that became narrower would show a line on two rows,
// and moving the cursor up would miss one of them.
const (
	wrapOff = "\x1b[?7l"
	wrapOn  = "\x1b[?7h"
)

// println writes one or more lines that stay.
func (s *screen) println(lines ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(s.erase() + strings.Join(lines, "\n") + "\n" + s.draw())
}

// show shows a status. On a terminal it writes the lines, elsewhere the short form from time to time.
func (s *screen) show(now time.Time, lines []string, short string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.rewrites {
		if now.Sub(s.printed) >= plainEvery {
			s.printed = now
			s.write(short + "\n")
		}
		return
	}
	erase := s.erase()
	s.status = lines
	s.write(erase + s.draw())
}

// clear removes the status. It is not shown again.
func (s *screen) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(s.erase())
	s.status = nil
}

// erase moves to the beginning of the status and deletes it.
func (s *screen) erase() string {
	if len(s.status) == 0 {
		return ""
	}
	return fmt.Sprintf("\x1b[%dA\r\x1b[J", len(s.status))
}

func (s *screen) draw() string {
	if len(s.status) == 0 {
		return ""
	}
	width, lines := s.width(), make([]string, len(s.status))
	for i, l := range s.status {
		lines[i] = terminal.Cut(l, width)
	}
	return wrapOff + strings.Join(lines, "\n") + "\n" + wrapOn
}

func (s *screen) write(text string) {
	if text == "" {
		return
	}
	if _, err := io.WriteString(s.out, text); err != nil {
		s.failed(err)
	}
}

// style marks words with colours if it is true.
type style bool

func (s style) bold(text string) string   { return s.mark("1", text) }
func (s style) dim(text string) string    { return s.mark("2", text) }
func (s style) green(text string) string  { return s.mark("32", text) }
func (s style) yellow(text string) string { return s.mark("33", text) }
func (s style) red(text string) string    { return s.mark("31", text) }

func (s style) mark(code, text string) string {
	if !s {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}
