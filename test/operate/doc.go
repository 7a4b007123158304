// Package operate tests the work of an operator with the real program: changes of its configuration, rolling restarts,
// scrapes, alerts, dashboards and the status page. It holds tests only.
package operate
