// Package image builds the image of the Dockerfile without Docker. So tests can build the image, run its programs and
// check its files, and a release can be tried anywhere. It uses the same files as Docker, which are those that
// .dockerignore doesn't exclude. It runs the command in the Dockerfile's first stage that builds the programs, and
// follows every instruction of the last stage. An instruction that it doesn't know is an error.
//
// It leaves out the steps of the first stage that prepare the machine. Instead it uses this machine's module cache and
// certificates of public authorities.
package image
