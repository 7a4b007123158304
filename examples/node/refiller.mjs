// @ts-check
// A client of the sidecar, "consumer serve", to copy into a service. It needs Node 18 or later, and nothing else.
//
//   const sidecar = new Sidecar({ url: 'http://127.0.0.1:8080', fallback: 'open' })
//   const answer = await sidecar.take('checkout', { tokens: 2 })
//   if (!answer.ok) console.log(`denied, again in ${answer.retry_after_ms} ms`)
//
// A denial is an answer with ok false. If the sidecar or Redis is unavailable, a call that is safe to repeat is
// repeated once, and then the answer is the fallback. A wrong call is a SidecarError.
import { randomUUID } from 'node:crypto'
import http from 'node:http'
import { setTimeout as sleep } from 'node:timers/promises'

// The types are those of openapi.yaml, which the sidecar serves at /openapi.yaml.

/**
 * @typedef {object} TakeRequest
 * @property {string} key of the bucket
 * @property {number} [tokens] 1 if left out
 * @property {string} [leave] tokens that must be left in the bucket, such as "100" or "20%"
 * @property {string} [flow] for whom the take is, in a bucket that is divided
 * @property {string} [request_id] repeated with it, the take is charged once
 *
 * @typedef {object} Amount
 * @property {string} key
 * @property {number} [tokens]
 * @property {string} [flow]
 *
 * @typedef {object} TakeLimitRequest
 * @property {string} key
 * @property {number} [tokens]
 * @property {string} [flow]
 *
 * @typedef {object} ReserveRequest
 * @property {string} key
 * @property {number} [tokens]
 * @property {string} [leave]
 * @property {number} ttl_ms how long the tokens are held at most
 * @property {string} [flow]
 * @property {string} [id] repeated with it, the reservation is made once
 * @property {'clamp' | 'debt'} [overrun] what becomes of tokens that are used beyond the reservation
 *
 * @typedef {object} Result
 * @property {string} key
 * @property {boolean} ok whether the tokens were taken
 * @property {number} taken
 * @property {number} remaining
 * @property {number} limit the bucket's capacity; 0 if it is unknown
 * @property {number | null} retry_after_ms null if it is unknown
 * @property {number | null} reset_after_ms
 * @property {string} source who answered; "fallback:sidecar" is this client
 * @property {boolean} [on_floor]
 * @property {number} [outstanding]
 * @property {boolean} [shadow]
 *
 * @typedef {object} AllResult
 * @property {boolean} ok whether all were taken
 * @property {string | null} denied the first bucket with too few tokens
 * @property {number | null} retry_after_ms
 * @property {Result[]} results
 *
 * @typedef {object} LimitResult
 * @property {string} name of the limit
 * @property {string} key
 * @property {boolean} ok
 * @property {number} taken
 * @property {number} remaining
 * @property {number} limit
 * @property {number | null} retry_after_ms
 * @property {number | null} reset_after_ms
 * @property {string} source
 * @property {boolean} [on_floor]
 * @property {number} [outstanding]
 * @property {boolean} [shadow]
 * @property {number} wait_ms how long to wait before the tokens may be used
 * @property {number} [next_ms]
 * @property {string[]} [denied_by]
 * @property {string} [undo]
 *
 * @typedef {object} Reservation
 * @property {string} key
 * @property {boolean} ok whether the tokens are held
 * @property {number} taken
 * @property {number} remaining
 * @property {number} limit
 * @property {number | null} retry_after_ms
 * @property {number | null} reset_after_ms
 * @property {string} source
 * @property {boolean} [on_floor]
 * @property {boolean} [shadow]
 * @property {string | null} id for settle; null if there is nothing to settle
 * @property {string | null} until
 *
 * @typedef {object} Settlement
 * @property {string} key
 * @property {string} id
 * @property {number} returned
 * @property {number} clamped
 * @property {number} void
 * @property {number} charged
 * @property {number} owed
 * @property {number} forgiven
 * @property {number} remaining
 * @property {boolean} again
 */

/**
 * What the sidecar says about a request of the service: whether it may pass, and what the client gets.
 *
 * @typedef {object} Check
 * @property {boolean} ok
 * @property {number} status of the answer if it may not pass: 429, or 503 if the sidecar is unavailable
 * @property {Record<string, string>} headers RateLimit and others
 * @property {string} body of that answer
 * @property {boolean} fallback whether this client answered
 */

/** SidecarError is an error of a call: it was wrong, or it is unknown whether it had an effect. */
export class SidecarError extends Error {
  /**
   * @param {string} code such as "unknown_bucket", or "unreachable"
   * @param {string} message
   * @param {object} [more]
   * @param {number} [more.status] of HTTP; 0 if there was no answer
   * @param {boolean} [more.unsent] whether the call surely had no effect
   */
  constructor(code, message, { status = 0, unsent = false } = {}) {
    super(`${code}: ${message}`)
    this.code = code
    this.status = status
    this.unsent = unsent
  }

  /** Whether the fallback answers: there was no decision. */
  get unavailable() {
    return this.status === 0 || this.status >= 500
  }
}

const checkHeaders = [
  'RateLimit', 'RateLimit-Policy', 'X-RateLimit-Limit', 'X-RateLimit-Remaining', 'X-RateLimit-Reset', 'Retry-After',
  'Content-Type',
]

/** Sidecar is a client with connections that it keeps. Its methods may be called at once. */
export class Sidecar {
  /** @type {http.Agent} */ #agent
  /** @type {{ host?: string, port?: string, socketPath?: string }} */ #address
  /** @type {number} */ #timeout
  /** @type {'open' | 'closed'} */ #fallback

  /**
   * @param {object} [options]
   * @param {string} [options.url] http://host:port, or unix:/path
   * @param {number} [options.timeout] of each of the two tries, in milliseconds
   * @param {'open' | 'closed'} [options.fallback] whether takes are admitted while there is no decision
   * @param {number} [options.connections] the most
   */
  constructor({ url = 'http://127.0.0.1:8080', timeout = 500, fallback = 'open', connections = 64 } = {}) {
    // The sidecar closes connections that are idle for 30 s. This client does so first: a request on a connection that
    // is just being closed has no answer.
    this.#agent = new http.Agent({ keepAlive: true, maxSockets: connections, timeout: 10_000 })
    const { protocol, hostname, port, pathname } = new URL(url)
    this.#address = protocol === 'unix:' ? { socketPath: pathname } : { host: hostname.replace(/^\[|\]$/g, ''), port }
    this.#timeout = timeout
    this.#fallback = fallback
  }

  /** Closes the connections. */
  close() {
    this.#agent.destroy()
  }

  /**
   * Takes tokens, all or none.
   * @param {string} key
   * @param {Omit<TakeRequest, 'key'>} [options]
   * @returns {Promise<Result>}
   */
  async take(key, options = {}) {
    const answer = await this.#decide('/v1/take', { key, request_id: randomUUID(), ...options }, true)
    return answer ?? this.#result(key)
  }

  /**
   * Takes tokens of several buckets, all or none.
   * @param {Amount[]} requests
   * @param {{ leave?: string, request_id?: string }} [options]
   * @returns {Promise<AllResult>}
   */
  async takeAll(requests, options = {}) {
    const request = { requests, request_id: randomUUID(), ...options }
    const answer = await this.#decide('/v1/take-all', request, true)
    if (answer) return answer
    const results = requests.map((r) => this.#result(r.key))
    const { ok, retry_after_ms } = this.#result('')
    return { ok, denied: ok ? null : (requests[0]?.key ?? null), retry_after_ms, results }
  }

  /**
   * Takes tokens of a limit by its name. The call has no request id: it is repeated only if it had no effect.
   * @param {string} name
   * @param {string} key
   * @param {Omit<TakeLimitRequest, 'key'>} [options]
   * @returns {Promise<LimitResult>}
   */
  async takeLimit(name, key, options = {}) {
    const answer = await this.#decide(`/v1/limits/${encodeURIComponent(name)}/take`, { key, ...options }, false)
    return answer ?? { ...this.#result(key), name, wait_ms: 0 }
  }

  /**
   * Holds tokens for work whose use is known later. There is no fallback.
   * @param {string} key
   * @param {Omit<ReserveRequest, 'key'>} options
   * @returns {Promise<Reservation>}
   */
  reserve(key, options) {
    return this.#call('/v1/reserve', { key, id: randomUUID(), ...options }, true)
  }

  /**
   * Ends a reservation of which so many tokens were used.
   * @param {string} key
   * @param {string} id
   * @param {number} used
   * @returns {Promise<Settlement>}
   */
  settle(key, id, used) {
    return this.#call('/v1/settle', { key, id, used }, true)
  }

  /**
   * Asks whether a request of the service may pass, by a limit's name and a key.
   * @param {string} limit
   * @param {string} key
   * @param {number} [tokens]
   * @returns {Promise<Check>}
   */
  async check(limit, key, tokens = 1) {
    const path = '/v1/check?' + new URLSearchParams({ limit, key, tokens: String(tokens) })
    try {
      const { status, headers, body } = await this.#repeat('GET', path, undefined, false)
      /** @type {Record<string, string>} */
      const kept = {}
      for (const name of checkHeaders) {
        const value = headers[name.toLowerCase()]
        if (value !== undefined) kept[name] = String(value)
      }
      return { ok: status === 200, status, headers: kept, body, fallback: false }
    } catch (e) {
      if (!(e instanceof SidecarError) || !e.unavailable) throw e
      const ok = this.#fallback === 'open'
      /** @type {Record<string, string>} */
      const headers = ok ? {} : { 'Retry-After': '1' }
      return { ok, status: ok ? 200 : 503, headers, body: '', fallback: true }
    }
  }

  /** @param {string} key @returns {Result} */
  #result(key) {
    const ok = this.#fallback === 'open'
    const retry_after_ms = ok ? 0 : 1000
    return { key, ok, taken: 0, remaining: 0, limit: 0, retry_after_ms, reset_after_ms: null, source: 'fallback:sidecar' }
  }

  /**
   * Makes a call; undefined if there was no decision.
   * @param {string} path
   * @param {object} request
   * @param {boolean} repeatable
   */
  async #decide(path, request, repeatable) {
    try {
      return await this.#call(path, request, repeatable)
    } catch (e) {
      if (e instanceof SidecarError && e.unavailable) return undefined
      throw e
    }
  }

  /** @param {string} path @param {object} request @param {boolean} repeatable */
  async #call(path, request, repeatable) {
    const { body } = await this.#repeat('POST', path, JSON.stringify(request), repeatable)
    return JSON.parse(body)
  }

  /**
   * Makes a call once more if it failed and that is safe.
   * @param {string} method
   * @param {string} path
   * @param {string | undefined} body
   * @param {boolean} repeatable
   */
  async #repeat(method, path, body, repeatable) {
    try {
      return await this.#send(method, path, body)
    } catch (e) {
      if (!(e instanceof SidecarError) || !e.unavailable || !(repeatable || e.unsent)) throw e
    }
    await sleep(20 + 30 * Math.random()) // so that the callers don't come at once
    return this.#send(method, path, body)
  }

  /**
   * @param {string} method
   * @param {string} path
   * @param {string | undefined} text
   * @returns {Promise<{ status: number, headers: http.IncomingHttpHeaders, body: string }>}
   */
  #send(method, path, text) {
    return new Promise((resolve, reject) => {
      const request = http.request({
        ...this.#address, method, path, agent: this.#agent, signal: AbortSignal.timeout(this.#timeout),
        headers: {
          Host: 'localhost',
          ...(text === undefined ? {} : { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(text) }),
        },
      })
      /** @param {Error & { code?: string }} e */
      const fail = (e) => {
        const unsent = ['ECONNREFUSED', 'ENOENT', 'ENOTFOUND', 'EHOSTUNREACH'].includes(e.code ?? '')
        reject(new SidecarError('unreachable', e.message, { unsent }))
      }
      request.on('error', fail)
      request.on('response', (response) => {
        const status = response.statusCode ?? 0
        let body = ''
        response.setEncoding('utf8')
        response.on('data', (piece) => (body += piece))
        response.on('error', fail)
        response.on('end', () => {
          if (status === 200 || response.headers['content-type'] === 'application/problem+json') {
            resolve({ status, headers: response.headers, body })
            return
          }
          let { code, message } = { code: String(status), message: body }
          try {
            ;({ code, message } = JSON.parse(body))
          } catch {} // another program has answered
          const unsent = code === 'busy' || code === 'shutting_down'
          reject(new SidecarError(code, message, { status, unsent }))
        })
      })
      request.end(text)
    })
  }
}
