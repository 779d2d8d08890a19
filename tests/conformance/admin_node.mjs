// Calls of the admin port from Node: `node admin_node.mjs TARGET`, one JSON line in and one out for each call, as the
// conformance runner of the Node client has them. The client's library has no admin calls; its errors are used here.

import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { Client, Metadata, credentials } from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import { CallError } from '../../clients/node/errors.js';

const includeDirs = [fileURLToPath(new URL('../../protos', import.meta.url))];
const definition = loadSync('stepwire/v1/admin_service.proto', { includeDirs, keepCase: true, longs: String, enums: String });
const service = definition['stepwire.v1.AdminService'];
const channel = new Client(process.argv[2], credentials.createInsecure());

// What a client of another version may have.
const unknown = (name) => ({
  path: `/stepwire.v1.AdminService/${name}`,
  requestSerialize: () => Buffer.alloc(0),
  responseDeserialize: () => ({}),
});

const call = ({ method, request, metadata = {}, timeout_ms = 30_000 }) =>
  new Promise((resolve) => {
    const name = method.split('/').at(-1);
    const { path, requestSerialize, responseDeserialize } = service[name] ?? unknown(name);
    const sent = new Metadata();
    for (const [key, value] of Object.entries(metadata)) sent.set(key, value);
    const deadline = Date.now() + timeout_ms;
    channel.makeUnaryRequest(path, requestSerialize, responseDeserialize, request, sent, { deadline }, (error, response) => {
      if (!error) return resolve({ messages: [response], code: 'OK' });
      const { code, details, reason, metadata: facts, violations } = CallError.from(error);
      resolve({ messages: [], code, message: details, reason, error_metadata: facts, field_violations: violations });
    });
  });

for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  process.stdout.write(`${JSON.stringify(await call(JSON.parse(line)))}\n`);
}
channel.close();
