package terminal

import "strings"

// Spark draws parts of a whole, one column for each: from ▁ for 0 to █ for the whole. It draws a dot for an unknown
// part.
func Spark(parts []*float64) string {
	const levels = "▁▂▃▄▅▆▇█"
	steps := []rune(levels)
	var b strings.Builder
	for _, p := range parts {
		if p == nil {
			b.WriteRune('·')
			continue
		}
		b.WriteRune(steps[int(min(1, max(0, *p))*float64(len(steps)-1)+0.5)])
	}
	return b.String()
}
