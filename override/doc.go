// Package override gives single keys of a template other limits than the template's, without a restart. Examples are a
// tenant with a larger plan, and a user who is slowed down. It is not for configured buckets: change their
// configuration.
//
// An override is a capacity and a rate for one key. Fields that it leaves open have the values that the template has
// when the override is set. It is stored beside the bucket, so that the take that creates the bucket finds it. It stays
// in force until it is unset, whichever versions of the template are published meanwhile. Thousands of keys may have an
// override; a key without one costs nothing.
//
// The call that stores or removes an override also switches the bucket, if it exists. The bucket is credited under the
// policy in force, and then keeps its tokens as the template's carry_over determines. This does not count as a refill.
// Consumers use the new limit from their next take on. A consumer that remembers a denial uses it within a second.
//
// The templates are those that refillers publish. A Store's methods are safe for concurrent use. If two callers set the
// same key at once, the key has the override of one of them.
package override
