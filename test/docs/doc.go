// Package docs runs the documentation: every code block of every Markdown file is run, compiled or decoded as what it
// is, and the language of the project is kept. It holds tests only.
//
// Commands run in a shell of their own for each document, one after the other, as they are printed; only the ports are
// others. What follows the three backticks of a block is a language and then words about the block, separated by
// spaces:
//
//	file=NAME   the block is that file
//	cluster     it needs a cluster of Kubernetes, containers or servers that a test doesn't have
//	long        it runs until it is stopped, takes minutes, or changes the machine
//	recipe      it is a step of a recipe, which TestRecipesOfPoolsRunAsPrinted runs between the steps of the text
//
// The commands of a block with one of the last three words are not run by the test of the document. It checks that they
// could be.
package docs
