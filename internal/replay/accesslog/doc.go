// Package accesslog reads the requests of a web server's access log: when each
// came, and the value of one field, such as the client's address.
//
// It reads Apache's and nginx's combined and common formats (with or without
// the virtual host or X-Forwarded-For in front), the default formats of Envoy
// and Istio, and lines of JSON as nginx, Caddy, Traefik, Envoy and Istio write
// them. Each line shows its format, so a log may mix them. A log that is
// compressed by gzip, xz or zstd is recognised by its first bytes.
//
// Reading streams: memory doesn't grow with the log, nor with its longest line.
// A line that can't be read is counted and passed over, and the first few such
// lines are kept with the reason.
package accesslog
