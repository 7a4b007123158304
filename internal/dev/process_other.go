//go:build !unix

package dev

import "syscall"

func ownedProcess() *syscall.SysProcAttr { return nil }
