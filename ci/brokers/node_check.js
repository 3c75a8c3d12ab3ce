// The two ends of the Node.js check: `serve MODE PORT` and `client MODE PORT COUNT`.
// Every message carries a number and a checksum; a difference ends the client with status 1.
'use strict';
const net = require('net');
const http = require('http');
const cluster = require('cluster');
const crypto = require('crypto');

const [role, mode, portText, countText] = process.argv.slice(2);
const port = Number(portText);
const count = Number(countText);

function digest(b) {
  return crypto.createHash('md5').update(b).digest('hex');
}

function body(seq, size) {
  const b = Buffer.alloc(size);
  for (let i = 0; i < size; i++) b[i] = (seq * 31 + i * 7) & 255;
  return b;
}

function fail(text) {
  console.error(text);
  process.exit(1);
}

function answer(req, res) {
  const parts = [];
  req.on('data', (p) => parts.push(p));
  req.on('end', () => {
    const b = Buffer.concat(parts);
    res.setHeader('x-md5', digest(b));
    res.end(b);
  });
}

function serve() {
  if (mode === 'cluster' && cluster.isPrimary) {
    cluster.schedulingPolicy = cluster.SCHED_RR; // connections are accepted here and passed on
    for (let i = 0; i < 2; i++) cluster.fork();
    process.on('SIGTERM', () => {
      cluster.disconnect(() => process.exit(0));
      for (const w of Object.values(cluster.workers)) w.process.kill('SIGTERM');
    });
    return;
  }
  const server = mode === 'raw' ? net.createServer((s) => s.pipe(s)) : http.createServer(answer);
  server.keepAliveTimeout = 60000;
  server.listen(port, '127.0.0.1');
  process.on('SIGTERM', () => process.exit(0));
}

function rawClient(index, done) {
  const s = net.connect(port, '127.0.0.1');
  s.setNoDelay(true);
  let seq = 0;
  let want = null;
  let have = [];
  let length = 0;
  const next = () => {
    if (seq === count) {
      s.end();
      return;
    }
    want = body(seq + index, 1 + ((seq * 977) % (seq % 50 === 0 ? 300000 : 3000)));
    seq++;
    s.write(want);
  };
  s.on('connect', next);
  s.on('data', (p) => {
    have.push(p);
    length += p.length;
    if (length < want.length) return;
    if (!Buffer.concat(have).equals(want)) fail(`raw ${index}: message ${seq} came back with other bytes`);
    have = [];
    length = 0;
    next();
  });
  s.on('error', (e) => fail(`raw ${index}: ${e}`));
  s.on('close', () => (seq === count && length === 0 ? done() : fail(`raw ${index}: closed after ${seq}`)));
}

function httpClient(index, done) {
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
  let seq = 0;
  const next = () => {
    if (seq === count) {
      agent.destroy();
      done();
      return;
    }
    const b = body(seq + index, 1 + ((seq * 977) % (seq % 50 === 0 ? 300000 : 3000)));
    seq++;
    const req = http.request({ port, host: '127.0.0.1', agent, method: 'POST', path: '/' + seq }, (res) => {
      const parts = [];
      res.on('data', (p) => parts.push(p));
      res.on('end', () => {
        if (!Buffer.concat(parts).equals(b) || res.headers['x-md5'] !== digest(b)) fail(`http ${index}: ${seq} differs`);
        next();
      });
    });
    req.on('error', (e) => fail(`http ${index}: ${e}`));
    req.end(b);
  };
  next();
}

if (role === 'serve') {
  serve();
} else {
  let left = 4;
  const done = () => {
    if (--left === 0) console.log('OK');
  };
  for (let i = 0; i < 4; i++) (mode === 'raw' ? rawClient : httpClient)(i, done);
}
