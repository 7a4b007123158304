package lua

import (
	"os"
)

// Environment variables of a test program that runs with a mutant: the name of the script or shared piece, and the file
// with its text.
const (
	MutantName = "REFILLER_MUTANT"
	MutantText = "REFILLER_MUTANT_TEXT"
)

// init replaces one script or shared piece by a mutant, in every script that includes it.
func init() {
	mutant := os.Getenv(MutantName)
	if mutant == "" {
		return
	}
	text, err := os.ReadFile(os.Getenv(MutantText))
	if err != nil {
		panic(err)
	}
	source := func(name string) string {
		if name == mutant {
			return string(text)
		}
		return read(name)
	}
	for _, s := range allScripts {
		*s = hashed(s.name, include.ReplaceAllStringFunc(source(s.name), func(line string) string {
			return source(include.FindStringSubmatch(line)[1])
		}))
	}
}
