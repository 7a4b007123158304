package config

import _ "embed"

// Schema is the JSON Schema of a configuration file. "make config-docs" writes it and docs/configuration.md, from the
// fields of file.
//
//go:embed schema.json
var Schema []byte
