// The conformance runner of the Node client: `node conformance.js TARGET [CA_FILE]`. One call as JSON on each line of
// its input, one JSON line of output for each, in order. What must come of a call is not known here.

import { createInterface } from 'node:readline';
import { CallError, connect } from './index.js';

const [target, caFile] = process.argv.slice(2);
const client = connect(target, { token: process.env.STEPWIRE_TOKEN, tls: caFile && { caFile } });

const METHODS = {
  'GenerationService/Generate': (request, options) => client.generate(request, options),
  'GenerationService/GenerateStream': (request, options) => client.generateStream(request, options),
  'GenerationService/Abort': (request, options) => client.abort(request.request_ids, options),
  'ChatService/Chat': (request, options) => client.chat(request, options),
  'ChatService/ChatStream': (request, options) => client.chatStream(request, options),
  'EmbeddingService/Embed': (request, options) => client.embed(request, options),
  'TokenizationService/Tokenize': ({ texts, model, add_special_tokens, return_offsets }, options) =>
    client.tokenize(texts, {
      model,
      addSpecialTokens: add_special_tokens,
      returnOffsets: return_offsets,
      ...options,
    }),
  'TokenizationService/Detokenize': ({ sequences, model, skip_special_tokens }, options) =>
    client.detokenize(
      sequences.map(({ ids }) => ids),
      { model, skipSpecialTokens: skip_special_tokens, ...options },
    ),
  'ModelService/ListModels': async (request, options) => ({ models: await client.models(options) }),
};

/** A message as protobuf JSON has it: bytes in base64, numbers that JSON lacks as words. */
const asJson = (value) => {
  if (Buffer.isBuffer(value)) return value.toString('base64');
  if (Array.isArray(value)) return value.map(asJson);
  if (typeof value === 'number' && !Number.isFinite(value)) return String(value);
  if (value === null || typeof value !== 'object') return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, asJson(part)]));
};

const errorFields = (error) => {
  const pushback = error.trailers['grpc-retry-pushback-ms'];
  return {
    code: error.code,
    message: error.details,
    reason: error.reason,
    error_metadata: error.metadata,
    retry_delay_ms: Math.round(error.retryDelayMs),
    field_violations: error.violations,
    quota_violations: error.quota,
    trailers: error.trailers,
    pushback_ms: pushback === undefined ? null : Number(pushback),
  };
};

const run = async ({ method, request, timeout_ms, cancel_after_messages, metadata, resume }) => {
  const messages = [];
  let trailers = {};
  const options = {
    metadata,
    onTrailers: (received) => (trailers = received),
    ...(timeout_ms && { timeoutMs: timeout_ms }),
    ...(resume && { maxResumes: 2 }),
  };
  try {
    const answer = METHODS[method.replace('stepwire.v1.', '')](request ?? {}, options);
    if (answer instanceof Promise) return { messages: [asJson(await answer)], code: 'OK', trailers };
    for await (const message of answer) {
      messages.push(asJson(message));
      if (messages.length === cancel_after_messages) return { messages, code: 'CANCELLED' };
    }
    return { messages, code: 'OK', trailers };
  } catch (error) {
    if (!(error instanceof CallError)) throw error;
    return { messages, ...errorFields(error) };
  }
};

for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  process.stdout.write(`${JSON.stringify(await run(JSON.parse(line)))}\n`);
}
client.close();
