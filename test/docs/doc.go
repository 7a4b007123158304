// Package docs tests the documentation: every code block of every Markdown file is run, compiled or decoded, depending
// on its language. It also checks the language of the project. It holds tests only.
//
// The commands of a document run in one shell, one after the other, as they are printed, but with other ports. The
// three backticks of a block are followed by a language and then by words about the block, separated by spaces:
//
//	file=NAME   the block is that file
//	cluster     it needs a cluster of Kubernetes, containers or servers that a test doesn't have
//	long        it runs until it is stopped, takes minutes, or changes the machine
//	recipe      it is a step of a recipe, which TestRecipesOfPoolsRunAsPrinted runs between the steps of the text
//
// The commands of a block with one of the last three words are not run by the test of the document. It checks that they
// could be.
package docs
