// @ts-check
// A middleware in the style of Express (req, res, next) that asks the sidecar about each request, to copy beside
// refiller.mjs.
//
//   const sidecar = new Sidecar({ fallback: 'open' })
//   app.use(rateLimit({ sidecar, limit: 'api', key: (req) => req.ip }))
//
// Answers have the RateLimit and RateLimit-Policy headers of the IETF draft. A denied request gets 429 and a problem
// document. While the sidecar is unavailable, requests pass or get 503, as its fallback says.

/**
 * @param {object} options
 * @param {import('./refiller.mjs').Sidecar} options.sidecar
 * @param {string} options.limit a name in the sidecar's file of limits
 * @param {(req: any) => string} [options.key] whose request it is; the address of the connection if left out
 * @param {(req: any) => number} [options.tokens] what the request costs; 1 if left out
 */
export function rateLimit({ sidecar, limit, key = (req) => req.socket.remoteAddress, tokens = () => 1 }) {
  /**
   * @param {import('node:http').IncomingMessage} req
   * @param {import('node:http').ServerResponse} res
   * @param {(error?: unknown) => void} next
   */
  return async function (req, res, next) {
    let check
    try {
      check = await sidecar.check(limit, String(key(req)), tokens(req))
    } catch (e) {
      next(e)
      return
    }
    for (const [name, value] of Object.entries(check.headers)) {
      if (!check.ok || name !== 'Content-Type') res.setHeader(name, value)
    }
    if (check.ok) {
      next()
      return
    }
    res.statusCode = check.status
    res.end(check.body)
  }
}
