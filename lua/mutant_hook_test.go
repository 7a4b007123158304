package lua

import (
	"os"
)

// Of a test program that runs with a mutant: the script or shared piece, and the file with its text.
const (
	MutantName = "REFILLER_MUTANT"
	MutantText = "REFILLER_MUTANT_TEXT"
)

// Shared scripts and pieces come from the embedded files; a mutant takes the place of one of them in every script.
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
