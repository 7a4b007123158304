// Package docs runs the documentation: every code block of every Markdown file is run, compiled or decoded as what it
// is, and the language of the project is kept. It holds tests only.
//
// Commands run in a shell of their own for each document, one after the other, as they are printed; only the ports are
// others. Package internal/markdown says how a block is marked that can't be run here: its commands are looked at.
package docs
