package terminal

import (
	"io"
	"os"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/term"
)

// minWidth is the narrowest width to which text is fitted.
const minWidth = 20

// Screen is the output of a program. The zero value is not a terminal.
type Screen struct {
	file    *os.File // nil if the output is not a terminal
	dumb    bool
	noColor bool
}

// Of returns the screen of w. environ determines whether the screen understands escape sequences (TERM) and shows
// colours (NO_COLOR, see https://no-color.org).
func Of(w io.Writer, environ map[string]string) Screen {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return Screen{}
	}
	return Screen{file: f, dumb: environ["TERM"] == "dumb", noColor: environ["NO_COLOR"] != ""}
}

// Rewrites reports whether the program can overwrite earlier output with escape sequences.
func (s Screen) Rewrites() bool { return s.file != nil && !s.dumb }

// Colors reports whether colours are wanted.
func (s Screen) Colors() bool { return s.Rewrites() && !s.noColor }

// Width returns the present number of columns. It returns 0 if there is no limit.
func (s Screen) Width() int {
	if s.file == nil {
		return 0
	}
	width, _, err := term.GetSize(int(s.file.Fd()))
	if err != nil || width <= 0 {
		return 0
	}
	return max(minWidth, width)
}

// Text returns s. It quotes s if a character of s can't be printed. Otherwise a name could colour a terminal or move
// its cursor.
func Text(s string) string {
	for _, r := range s {
		if r == utf8.RuneError || !strconv.IsPrint(r) {
			return strconv.Quote(s)
		}
	}
	return s
}

// printable escapes the characters of text that can't be printed, except line feeds.
func printable(text string) string {
	var b strings.Builder
	for i, r := range text {
		if size := utf8.RuneLen(r); r == '\n' || strconv.IsPrint(r) && r != utf8.RuneError {
			b.WriteString(text[i : i+size])
			continue
		}
		_, size := utf8.DecodeRuneInString(text[i:])
		quoted := strconv.Quote(text[i : i+size])
		b.WriteString(quoted[1 : len(quoted)-1])
	}
	return b.String()
}

// Cut shortens a line to width columns, with an ellipsis at the end. It never cuts within a number, because the rest
// would be another number. Escape sequences need no columns and are not removed. If width is 0, nothing is cut.
func Cut(line string, width int) string {
	if width <= 0 || ansi.StringWidth(line) <= width {
		return line
	}
	plain := ansi.Strip(line)
	head := ansi.Truncate(plain, width-1, "")
	if next, _ := utf8.DecodeRuneInString(plain[len(head):]); inNumber(next) {
		head = strings.TrimRightFunc(head, inNumber)
	}
	return ansi.Truncate(line, ansi.StringWidth(head)+1, "…")
}

// inNumber reports whether a character may be within a number.
func inNumber(r rune) bool { return unicode.IsDigit(r) || strings.ContainsRune(".,-%/", r) }

// Flow joins items into lines of at most width columns. It doesn't break items. A width of 0 means no limit.
func Flow(items []string, separator string, width int) []string {
	var lines []string
	for _, item := range items {
		last := len(lines) - 1
		if last < 0 || width > 0 && ansi.StringWidth(lines[last]+separator+item) > width {
			lines = append(lines, item)
		} else {
			lines[last] += separator + item
		}
	}
	return lines
}

// Wrap breaks text into lines of at most width columns. If possible, it breaks between words. A width of 0 means no
// limit.
func Wrap(text string, width int) []string {
	if width <= 0 {
		return strings.Split(text, "\n")
	}
	lines := strings.Split(ansi.Wrap(text, width, " "), "\n")
	for i := range lines {
		lines[i] = strings.Trim(lines[i], " ")
	}
	return lines
}
