// Package timing has the functions with which loops wait: a sleep that can be ended, delays that double or vary, and a
// signal that never blocks. The callers decide whether to retry.
//
// The delays are functions of the number of failures. A back-off of a library has its own count, clock and random
// numbers. Here the caller has them, so that simulations can be repeated with a seed.
package timing

import "time"

// Sleep waits for d and returns true. It returns false as soon as done is closed, and at once if done is closed
// already. done is the Done channel of a context, or a channel that a Close method closes.
func Sleep(done <-chan struct{}, d time.Duration) bool {
	select {
	case <-done:
		return false
	default:
	}
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
		return false
	case <-timer.C:
		return true
	}
}

// Doubled returns first, doubled n times, but at most most. first must be positive. A negative n counts as 0.
func Doubled(first time.Duration, n int, most time.Duration) time.Duration {
	for d := first; ; d *= 2 {
		if d >= most || d > most/2 && n > 0 {
			return most
		}
		if n <= 0 {
			return d
		}
		n--
	}
}

// Between returns a random duration from least up to most. It calls random, which returns a number in [0, 1), once.
func Between(random func() float64, least, most time.Duration) time.Duration {
	return least + time.Duration(random()*float64(most-least))
}

// Signal wakes the goroutine that reads from c, now or when it reads next. The channel must have room for one signal.
// If c already holds a signal, Signal does nothing.
func Signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
