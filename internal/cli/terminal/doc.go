// Package terminal writes text for people: lines that fit the width of their terminal, tables whose numbers are never
// cut, colours only where they are wanted, and no control characters from names.
//
// A [Screen] reads the width each time something is written, since people resize windows. If the output is no terminal
// its width is 0 and nothing is cut, since programs read it.
package terminal
