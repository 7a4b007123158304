// Package accesslog reads the requests of a web server's access log. It reads the time of each request and one field,
// such as the client's address. It doesn't count or limit requests: see package replay.
//
// It reads Apache's and nginx's combined and common formats (with or without the virtual host or X-Forwarded-For in
// front), the default formats of Envoy and Istio, and lines of JSON as nginx, Caddy, Traefik, Envoy and Istio write
// them. The format is recognised line by line, so a log may mix formats. A log that is compressed by gzip, xz or zstd
// is recognised by its first bytes.
//
// The log is read as a stream, so the memory in use grows neither with the log nor with its longest line. A line that
// can't be read is counted and skipped. The first few such lines are kept with the reason.
package accesslog
