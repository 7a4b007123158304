// Package image builds the image of the Dockerfile without Docker, so that tests
// can build it, run what is in it and look at it, and so that a release can be
// tried anywhere: the same files that .dockerignore lets through, the same
// command of the Dockerfile's first stage, and of its last stage every
// instruction. An instruction that it doesn't know is an error.
//
// What it leaves out of the first stage is what prepares the machine: the module
// cache and the certificates of public authorities are those of this one.
package image
