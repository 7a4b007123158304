package config

// closest is the word that s is likely a misspelling of, or empty.
func closest(s string, words []string) string {
	best, least := "", 3
	if len(s) > 64 {
		return ""
	}
	for _, w := range words {
		if d := distance(s, w); d < least && d < len(w)/2+1 && d < len(s) {
			best, least = w, d
		}
	}
	return best
}

// distance counts the letters to insert, delete or replace to get from a to b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
