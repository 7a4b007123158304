// Package image builds the image of the Dockerfile without Docker, so that tests can build it, run its programs and
// check its files, and so that a release can be tried anywhere. It uses the same files that .dockerignore lets through,
// the same command of the Dockerfile's first stage, and every instruction of its last stage. An instruction that it
// doesn't know is an error.
//
// It leaves out the steps of the first stage that prepare the machine: the module cache and the certificates of public
// authorities are those of this machine.
package image
