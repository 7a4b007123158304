// Package terminal formats the text output of commands. Lines fit the width of their terminal, and the numbers in
// tables are never cut. Colours appear only where they are wanted, and control characters in names are escaped.
//
// A [Screen] reads the width each time that something is written, because a window may be resized. If the output is not
// a terminal, its width is 0 and nothing is cut, because programs may read it.
//
// The package is not for logs, which package hclog writes, nor for JSON, which package cli writes. It reads no input
// from the terminal.
package terminal
