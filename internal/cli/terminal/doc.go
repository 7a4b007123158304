// Package terminal writes text for people: lines that fit the width of their terminal, tables whose numbers are never
// cut, colours only where they are wanted, and no control character that somebody else put into a name.
//
// A [Screen] is asked for its width each time something is written, since people resize windows. Where the output is no
// terminal its width is 0 and nothing is cut: programs read it.
package terminal
