package terminal

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"
)

const (
	gap        = 2 // columns between two cells
	minCutCell = 8 // smallest number of columns of a text that is cut
)

// Column is a column of a table.
type Column struct {
	Name  string
	Right bool // its cells are numbers, and aligned to the right
	Text  bool // its cells may be cut
	// Least is a width of the column. Its cells are cut to fewer columns only after all columns with Spare were left out.
	Least int
	// Spare orders the columns that are left out of a table that is too wide even after its texts were cut. The column
	// with the highest value is left out first. A column with 0 is never left out.
	Spare int
}

// Table has rows of cells below each other.
type Table struct {
	columns []Column
	rows    []row
}

type row struct {
	cells []string
	rest  string // in place of the missing cells
}

// NewTable makes a table. The table has a heading if any column has a name.
func NewTable(columns ...Column) *Table { return &Table{columns: columns} }

// Row adds a row. It has a cell for each column, formatted by fmt.Sprint.
func (t *Table) Row(cells ...any) {
	r := row{cells: make([]string, len(cells))}
	for i, c := range cells {
		r.cells[i] = Text(fmt.Sprint(c))
	}
	t.rows = append(t.rows, r)
}

// Span adds a row with a first cell and text across all the other columns.
func (t *Table) Span(first, text string) {
	t.rows = append(t.rows, row{cells: []string{Text(first)}, rest: Text(text)})
}

// Write writes the table in lines of at most width columns. A width of 0 means no limit.
func (t *Table) Write(w io.Writer, width int) error {
	rows := t.rows
	if t.headed() {
		names := make([]string, len(t.columns))
		for i, c := range t.columns {
			names[i] = c.Name
		}
		rows = append([]row{{cells: names}}, rows...)
	}
	widths := t.fit(rows, width)
	var b strings.Builder
	for _, r := range rows {
		b.WriteString(Cut(t.line(r, widths), width))
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (t *Table) headed() bool {
	for _, c := range t.columns {
		if c.Name != "" {
			return true
		}
	}
	return false
}

// fit returns the widths of the columns. The width of a column that is left out is 0. Texts are cut before a column is
// left out. When it is left out, the texts get its columns.
func (t *Table) fit(rows []row, width int) []int {
	whole := make([]int, len(t.columns))
	for _, r := range rows {
		for i, cell := range r.cells {
			whole[i] = max(whole[i], ansi.StringWidth(cell))
		}
	}
	for {
		widths, spare := slices.Clone(whole), t.mostSpare(whole)
		for width > 0 && total(widths) > width {
			widest := t.widestText(widths, spare >= 0)
			if widest < 0 {
				break
			}
			widths[widest]--
		}
		if width <= 0 || total(widths) <= width || spare < 0 {
			return widths
		}
		whole[spare] = 0
	}
}

// widestText returns the widest column that may be cut further, or -1 if there is none. spare is set while a column may
// still be left out. Then no column is cut below its Least.
func (t *Table) widestText(widths []int, spare bool) int {
	widest := -1
	for i, c := range t.columns {
		least := minCutCell
		if spare {
			least = max(least, c.Least)
		}
		if c.Text && widths[i] > least && (widest < 0 || widths[i] > widths[widest]) {
			widest = i
		}
	}
	return widest
}

// mostSpare returns the next column to leave out, or -1 if there is none.
func (t *Table) mostSpare(widths []int) int {
	spare := -1
	for i, c := range t.columns {
		if c.Spare > 0 && widths[i] > 0 && (spare < 0 || c.Spare > t.columns[spare].Spare) {
			spare = i
		}
	}
	return spare
}

func total(widths []int) int {
	sum := -gap
	for _, w := range widths {
		if w > 0 {
			sum += w + gap
		}
	}
	return sum
}

func (t *Table) line(r row, widths []int) string {
	var cells []string
	for i, cell := range r.cells {
		if widths[i] == 0 {
			continue
		}
		cell = Cut(cell, widths[i])
		pad := strings.Repeat(" ", max(0, widths[i]-ansi.StringWidth(cell)))
		if t.columns[i].Right {
			cell = pad + cell
		} else {
			cell += pad
		}
		cells = append(cells, cell)
	}
	if r.rest != "" {
		cells = append(cells, r.rest)
	}
	return strings.TrimRight(strings.Join(cells, strings.Repeat(" ", gap)), " ")
}

// Pair is a name and a text about it.
type Pair struct{ Name, Text string }

// WritePairs writes pairs as a list in lines of at most width columns. A width of 0 means no limit. The names are on
// the left, with the texts beside them. Texts are broken between words. A pair without a name continues the pair before
// it. Characters that can't be printed are escaped.
func WritePairs(w io.Writer, width int, pairs []Pair) error {
	names := 0
	for _, p := range pairs {
		names = max(names, ansi.StringWidth(p.Name))
	}
	var b strings.Builder
	for _, p := range pairs {
		b.WriteString(p.Name + strings.Repeat(" ", names-ansi.StringWidth(p.Name)+gap))
		room := 0
		if width > 0 {
			room = max(minWidth, width-names-gap)
		}
		b.WriteString(strings.Join(Wrap(printable(p.Text), room), "\n"+strings.Repeat(" ", names+gap)))
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}
