// An application with the middleware: node server.mjs URL FALLBACK PORT
import http from 'node:http'
import { rateLimit } from '../../../examples/node/express.mjs'
import { Sidecar } from '../../../examples/node/refiller.mjs'

const [url, fallback, port] = process.argv.slice(2)
const limit = rateLimit({ sidecar: new Sidecar({ url, fallback }), limit: 'api', key: (req) => req.headers['x-user'] })
http
  .createServer((req, res) =>
    limit(req, res, (error) => {
      res.statusCode = error ? 500 : 200
      res.end(error ? String(error) : 'hello')
    }),
  )
  .listen(Number(port), '127.0.0.1')
