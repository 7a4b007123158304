package main

import (
	"testing"

	"github.com/tokenrefill/refiller/examples/internal/walk"
)

func TestRequestsBeyondTheLimitAreDenied(t *testing.T) { walk.Through(t, newRouter) }
