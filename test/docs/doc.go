// Package docs tests the documentation. It runs, compiles or decodes every code block of every Markdown file, depending
// on the block's language. It also checks the language of the project. It holds tests only.
//
// The commands of a document run in one shell, one after the other, as they are printed, but with other ports. The
// three backticks of a block are followed by a language and then by words about the block, separated by spaces:
//
//	file=NAME   the block is the content of a file
//	cluster     it needs a Kubernetes cluster, containers or servers that a test doesn't have
//	long        it runs until it is stopped, takes minutes, or changes the machine
//	recipe      it is a step of a recipe: TestRecipesOfPoolsRunAsPrinted runs it
//
// The test of a document doesn't run the commands of a block with one of the last three words. It checks that the
// programs, flags and files in these commands exist.
package docs
