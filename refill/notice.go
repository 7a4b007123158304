package refill

import "github.com/hashicorp/go-hclog"

// notices are the log lines about a batch. Buckets with the same message share a line, because there may be a hundred
// thousand of them at once.
type notices []notice

type notice struct {
	level   hclog.Level
	message string
	fields  []any // of the first bucket with the message
	others  int   // further buckets with the message
}

// add adds a message about one bucket.
func (n *notices) add(level hclog.Level, message string, fields ...any) {
	for i := range *n {
		if (*n)[i].message == message {
			(*n)[i].others++
			return
		}
	}
	*n = append(*n, notice{level: level, message: message, fields: fields})
}

// log writes the lines.
func (n notices) log(to hclog.Logger) {
	for _, line := range n {
		if line.others > 0 {
			line.fields = append(line.fields, "others", line.others)
		}
		to.Log(line.level, line.message, line.fields...)
	}
}
