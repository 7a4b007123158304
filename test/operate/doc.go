// Package operate tests what an operator does to the real program: changes of
// its configuration, rolling restarts, scrapes, alerts, dashboards and the status
// page. It holds tests only.
package operate
