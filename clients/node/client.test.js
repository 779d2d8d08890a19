// What of the client needs no server. Run by `node --test`.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';
import { Metadata } from '@grpc/grpc-js';
import { CallError, Client, connect } from './index.js';
import { requestWithStructs, responseWithoutStructs } from './structs.js';

test('structs are the same after both ways', () => {
  const params = { a: [1, 'x', null, { b: true }], nested: { c: 0.5 }, empty: {} };
  const { kv } = requestWithStructs({ kv: { transfer_params: params } });
  assert.deepEqual(responseWithoutStructs({ finished: { kv } }).finished.kv.transfer_params, params);
});

test('a request is not changed, and what is no JSON is refused', () => {
  const request = { tools: [{ name: 't', parameters: { type: 'object' } }] };
  const before = structuredClone(request);
  requestWithStructs(request);
  assert.deepEqual(request, before);
  assert.throws(() => requestWithStructs({ chat_template_kwargs: { a: () => 1 } }), /no JSON value/);
});

test('a status that can not be read leaves the code', () => {
  const metadata = new Metadata();
  metadata.set('grpc-status-details-bin', Buffer.from('\xff\xff nonsense', 'latin1'));
  const error = CallError.from({ code: 14, details: 'gone', metadata });
  assert.equal(error.code, 'UNAVAILABLE');
  assert.equal(error.reason, '');
  assert.deepEqual([error.isRetryable, error.retryDelayMs, error.tokensEmitted], [false, 0, 0]);
});

test('half a pair of certificate and key is refused', () => {
  assert.throws(() => connect('localhost:1', { tls: { certFile: 'x.pem' } }), /come together/);
});

test('the types declare every method', () => {
  const types = readFileSync(new URL('index.d.ts', import.meta.url), 'utf8');
  const declared = [...types.matchAll(/^ {2}(?:async )?(\w+)\(.*\)(?:: .*)?;$/gm)].map(([, name]) => name);
  assert.deepEqual(declared.sort(), Object.getOwnPropertyNames(Client.prototype).sort());
});
