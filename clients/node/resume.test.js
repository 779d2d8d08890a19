// Streams that resume, against servers that are functions. Run by `node --test`.

import assert from 'node:assert/strict';
import test from 'node:test';
import { CallError } from './index.js';
import { resumed } from './resume.js';

const accepted = { accepted: { request_id: 'r1', seed: '9007199254740993', model: 'm' } };
const delta = (text, ...token_ids) => ({ delta: { text, token_ids } });
const finished = (completion_tokens) => ({
  finished: { reason: 'FINISH_REASON_STOP', usage: { completion_tokens, reasoning_tokens: 0 } },
});
const lost = (code = 'UNAVAILABLE') => new CallError(code, 'gone');

/** Each call gets the next list of messages; an error in it is thrown. */
const serverOf = (...calls) => {
  const requests = [];
  const open = async function* (request) {
    requests.push(request);
    for (const message of calls[requests.length - 1]) {
      if (message instanceof Error) throw message;
      yield message;
    }
  };
  return { open, requests };
};

const collect = async (server, request = {}, options = {}, maxResumes = 2) => {
  const messages = [];
  for await (const message of resumed(server.open, request, options, maxResumes)) messages.push(message);
  return messages;
};

const textOf = (messages) => messages.map((message) => message.delta?.text ?? '').join('');
const idsOf = (request) => request.resume_output_token_ids?.ids;

test('the last delta is asked for again and not given twice', async () => {
  const server = serverOf(
    [accepted, delta('a', 1), delta('b', 2), lost()],
    [accepted, delta('b', 2), delta('c', 3), finished(2)],
  );
  const messages = await collect(server, { output: { token_ids: true } });
  assert.equal(textOf(messages), 'abc');
  assert.deepEqual(messages.flatMap((message) => message.delta?.token_ids ?? []), [1, 2, 3]);
  assert.deepEqual(messages.map(({ index }) => index), ['0', '1', '2', '3', '4']);
  assert.deepEqual(server.requests.map(idsOf), [undefined, [1]]);
  assert.equal(server.requests[1].sampling.seed, accepted.accepted.seed);
  assert.equal(server.requests[1].request_id, 'r1');
  assert.equal(messages.at(-1).finished.usage.completion_tokens, 3);
});

test('an answer whose end alone was lost gets its end', async () => {
  const server = serverOf([accepted, delta('a', 1), delta('', 2), lost()], [accepted, delta('', 2), finished(1)]);
  const messages = await collect(server);
  assert.equal(textOf(messages), 'a');
  assert.equal(messages.at(-1).finished.usage.completion_tokens, 2);
});

test('deltas may be cut in other places', async () => {
  const server = serverOf(
    [accepted, delta('ab', 1, 2), lost()],
    [accepted, delta('a', 1), lost()],
    [accepted, delta('abc', 1, 2, 3), finished(3)],
  );
  assert.equal(textOf(await collect(server)), 'abc');
  assert.deepEqual(server.requests.map(idsOf), [undefined, [], []]);
});

test('token ids are shown to those who asked for them', async () => {
  const server = serverOf([accepted, delta('a', 1), lost()], [accepted, delta('a', 1), delta('b', 2), finished(2)]);
  const messages = await collect(server);
  assert.deepEqual(messages.flatMap((message) => message.delta?.token_ids ?? []), []);
});

test('an answer that goes another way is held to what was given, or fails', async () => {
  const server = serverOf(
    [accepted, delta('a', 1), delta('b', 2), lost()],
    [accepted, delta('x', 9)],
    [accepted, delta('c', 3), finished(1)],
  );
  assert.equal(textOf(await collect(server)), 'abc');
  assert.deepEqual(server.requests.map(idsOf), [undefined, [1], [1, 2]]);
  const other = serverOf([accepted, delta('a', 1), lost()], [accepted, delta('x', 9)]);
  await assert.rejects(collect(other, {}, {}, 1), /another one/);
});

test('log-probabilities and tool calls come once', async () => {
  const row = (token_id) => ({ sampled: { token_id } });
  const call = (id, args) => [{ index: 0, id, name: id && 'f', arguments: args }];
  const first = { delta: { content: '', token_ids: [1], logprobs: [row(1)], tool_calls: call('call-1', '{"a"') } };
  const again = { delta: { ...first.delta, tool_calls: call('call-2', '{"a"') } };
  const rest = { delta: { content: '', token_ids: [2], logprobs: [row(2)], tool_calls: call('', ':1}') } };
  const server = serverOf([accepted, first, lost()], [accepted, again, rest, finished(2)]);
  const deltas = (await collect(server)).flatMap((message) => message.delta ?? []);
  assert.deepEqual(deltas.flatMap(({ logprobs }) => logprobs), [row(1), row(2)]);
  const calls = deltas.flatMap(({ tool_calls }) => tool_calls);
  assert.equal(calls.map((one) => one.arguments).join(''), '{"a":1}');
  assert.equal(calls.map((one) => one.id).join(''), 'call-1');
});

test('tokens that a caller resumes from stay in front and are not counted', async () => {
  const server = serverOf(
    [accepted, delta('c', 3), delta('d', 4), lost()],
    [accepted, delta('d', 4), finished(1)],
  );
  const messages = await collect(server, { resume_output_token_ids: { ids: [1, 2] } });
  assert.deepEqual(server.requests.map(idsOf), [[1, 2], [1, 2, 3]]);
  assert.equal(messages.at(-1).finished.usage.completion_tokens, 2);
});

for (const [what, error, numResumes] of [
  ['cancelled', lost('CANCELLED'), 0],
  ['refused', lost('RESOURCE_EXHAUSTED'), 0],
  ['lost', lost(), 2],
]) {
  test(`a stream that is ${what} again and again is opened ${numResumes + 1} times`, async () => {
    const server = serverOf(...Array(5).fill([accepted, error]));
    await assert.rejects(collect(server), error);
    assert.equal(server.requests.length, numResumes + 1);
  });
}

test('the last error counts the tokens of all calls', async () => {
  const server = serverOf([accepted, delta('a', 1), delta('b', 2), lost()], [accepted, delta('b', 2), lost()]);
  await assert.rejects(collect(server, {}, {}, 1), { tokensEmitted: 2 });
});

test('a stream that never began is not resumed', async () => {
  const server = serverOf([lost()]);
  await assert.rejects(collect(server), { code: 'UNAVAILABLE' });
  assert.equal(server.requests.length, 1);
});

test('no call begins after the deadline', async () => {
  const server = serverOf([accepted, lost()]);
  await assert.rejects(collect(server, {}, { timeoutMs: 50 }), { code: 'UNAVAILABLE' });
  assert.equal(server.requests.length, 1);
});

test('several choices and an echoed prompt are refused', async () => {
  await assert.rejects(collect(serverOf([]), { sampling: { n: 2 } }), /several choices/);
  await assert.rejects(collect(serverOf([]), { output: { echo_prompt: true } }), /echoes its prompt/);
});
