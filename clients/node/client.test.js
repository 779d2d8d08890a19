// What of the client needs no server. Run by `node --test`.

import assert from 'node:assert/strict';
import test from 'node:test';
import { Metadata } from '@grpc/grpc-js';
import { CallError, connect } from './index.js';
import { resumed } from './resume.js';
import { requestWithStructs, responseWithoutStructs } from './structs.js';

const accepted = { index: '0', accepted: { request_id: 'r1', seed: '9007199254740993' } };
const delta = (text, ...token_ids) => ({ index: '1', delta: { text, token_ids } });
const finished = { index: '2', finished: { reason: 'FINISH_REASON_STOP' } };
const lost = (code = 'UNAVAILABLE') => new CallError(code, 'gone');

/** A server in one function: each try gets the next list; an error in it is thrown. */
const serverOf = (...tries) => {
  const requests = [];
  const open = async function* (request) {
    requests.push(request);
    for (const message of tries[requests.length - 1]) {
      if (message instanceof Error) throw message;
      yield message;
    }
  };
  return { open, requests };
};

const collect = async (stream) => {
  const messages = [];
  for await (const message of stream) messages.push(message);
  return messages;
};

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

test('a stream goes on with its tokens and its seed, and counts on', async () => {
  const { open, requests } = serverOf([accepted, delta('a', 1, 2), lost()], [accepted, delta('b', 3), finished]);
  const messages = await collect(resumed(open, { text: 'x' }, {}, 1));
  assert.deepEqual(messages.map(({ index }) => index), ['0', '1', '2', '3']);
  assert.equal(messages.map((message) => message.delta?.text ?? '').join(''), 'ab');
  assert.equal(messages.filter((message) => message.accepted).length, 1);
  assert.deepEqual(requests[1].resume_output_token_ids, { ids: [1, 2] });
  assert.equal(requests[1].sampling.seed, accepted.accepted.seed);
});

test('a stream that was resumed by hand keeps the tokens it came with', async () => {
  const { open, requests } = serverOf([accepted, delta('b', 3), lost()], [accepted, finished]);
  await collect(resumed(open, { text: 'x', resume_output_token_ids: { ids: [1, 2] } }, {}, 1));
  assert.deepEqual(requests[1].resume_output_token_ids, { ids: [1, 2, 3] });
});

for (const [what, error, numResumes] of [
  ['cancelled', lost('CANCELLED'), 0],
  ['refused', lost('RESOURCE_EXHAUSTED'), 0],
  ['lost', lost(), 2],
]) {
  test(`a stream that is ${what} again and again is tried ${numResumes + 1} times`, async () => {
    const { open, requests } = serverOf(...Array(5).fill([accepted, error]));
    await assert.rejects(collect(resumed(open, { text: 'x' }, {}, 2)), error);
    assert.equal(requests.length, numResumes + 1);
  });
}

test('a stream that never began is not resumed', async () => {
  const { open, requests } = serverOf([lost()]);
  await assert.rejects(collect(resumed(open, { text: 'x' }, {}, 2)), { code: 'UNAVAILABLE' });
  assert.equal(requests.length, 1);
});

test('no try begins after the deadline', async () => {
  const { open, requests } = serverOf([accepted, lost()]);
  await assert.rejects(collect(resumed(open, { text: 'x' }, { timeoutMs: 50 }, 2)), { code: 'UNAVAILABLE' });
  assert.equal(requests.length, 1);
});

test('several choices and half a key pair are refused', async () => {
  const { open } = serverOf([]);
  await assert.rejects(collect(resumed(open, { sampling: { n: 2 } }, {}, 1)), /several choices/);
  assert.throws(() => connect('localhost:1', { tls: { certFile: 'x.pem' } }), /come together/);
});
