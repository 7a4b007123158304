// Package override gives single keys of templates other limits than their template's, while everything runs: a tenant
// with a larger plan, a user who is slowed down.
//
// The model: an override is a capacity and a rate for one key. Fields that it leaves open have the values of the
// template at the time when the override is set. It is stored beside the bucket, so that the takes that create the
// bucket find it. It stays in force until it is unset, whatever versions of the template are published meanwhile.
// Thousands of keys may have one; a key without one costs nothing.
//
// Setting and unsetting switch a bucket that exists in the same call that stores the override: it is settled under the
// policy in force, then keeps its tokens as the template's carry-over says. Nothing is refilled. Consumers see it with
// their next take, and where they remember a denial within a second.
//
// The templates are those that refillers publish. A Store's methods are safe for concurrent use; two that set the same
// key at once leave it with what one of them set.
package override
