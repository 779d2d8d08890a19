// One channel to one stepwire server. gRPC repeats the calls that the service config names; streams are never repeated.

import { readFileSync } from 'node:fs';
import { Client as Channel, Metadata, credentials } from '@grpc/grpc-js';
import { CallError, textOf } from './errors.js';
import { SERVICE_CONFIG, methodOf } from './protos.js';
import { resumed } from './resume.js';
import { requestWithStructs, responseWithoutStructs } from './structs.js';

const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
// Generous for calls that only look something up; generations have no limit unless the caller sets one.
const LOOKUP_TIMEOUT_MS = 10_000;

const CHANNEL_OPTIONS = {
  'grpc.max_receive_message_length': MAX_MESSAGE_BYTES,
  'grpc.max_send_message_length': MAX_MESSAGE_BYTES,
  'grpc.keepalive_time_ms': 30_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.enable_retries': 1,
  'grpc.service_config': SERVICE_CONFIG,
  'grpc.initial_reconnect_backoff_ms': 200,
  'grpc.max_reconnect_backoff_ms': 5_000,
};

const read = (path) => (path === undefined ? undefined : readFileSync(path));

const channelCredentials = ({ caFile, certFile, keyFile } = {}) => {
  if ((certFile === undefined) !== (keyFile === undefined)) {
    throw new TypeError('a client certificate and its key come together');
  }
  return credentials.createSsl(read(caFile), read(keyFile), read(certFile));
};

export class Client {
  #channel;
  #metadata;

  constructor(target = '127.0.0.1:50051', { token, tls, clientClass, channelOptions } = {}) {
    const trust = tls ? channelCredentials(tls === true ? {} : tls) : credentials.createInsecure();
    this.#channel = new Channel(target, trust, { ...CHANNEL_OPTIONS, ...channelOptions });
    this.#metadata = {
      ...(token && { authorization: `Bearer ${token}` }),
      ...(clientClass && { 'x-gateway-inference-fairness-id': clientClass }),
    };
  }

  generate(request, options) {
    return this.#unary('GenerationService', 'Generate', request, options);
  }

  generateStream(request, options) {
    return this.#generation('GenerationService', 'GenerateStream', request, options);
  }

  chat(request, options) {
    return this.#unary('ChatService', 'Chat', request, options);
  }

  chatStream(request, options) {
    return this.#generation('ChatService', 'ChatStream', request, options);
  }

  embed(request, options) {
    return this.#unary('EmbeddingService', 'Embed', request, options);
  }

  abort(requestIds, options) {
    return this.#lookup('GenerationService', 'Abort', { request_ids: requestIds }, options);
  }

  tokenize(texts, { model, addSpecialTokens, returnOffsets, ...options } = {}) {
    const request = { texts, model, add_special_tokens: addSpecialTokens, return_offsets: returnOffsets };
    return this.#lookup('TokenizationService', 'Tokenize', request, options);
  }

  detokenize(sequences, { model, skipSpecialTokens, ...options } = {}) {
    const request = { sequences: sequences.map((ids) => ({ ids })), model, skip_special_tokens: skipSpecialTokens };
    return this.#lookup('TokenizationService', 'Detokenize', request, options);
  }

  async models(options) {
    return (await this.#lookup('ModelService', 'ListModels', {}, options)).models;
  }

  close() {
    this.#channel.close();
  }

  #lookup(service, method, request, options) {
    return this.#unary(service, method, request, { timeoutMs: LOOKUP_TIMEOUT_MS, ...options });
  }

  #generation(service, method, request, { maxResumes = 0, ...options } = {}) {
    const open = (oneRequest, oneOptions) => this.#stream(service, method, oneRequest, oneOptions);
    return maxResumes > 0 ? resumed(open, request, options, maxResumes) : open(request, options);
  }

  async #unary(service, method, request, options = {}) {
    refuseCancelled(options);
    const { path, requestSerialize, responseDeserialize } = methodOf(service, method);
    return new Promise((resolve, reject) => {
      const call = this.#channel.makeUnaryRequest(
        path,
        requestSerialize,
        responseDeserialize,
        requestWithStructs(request),
        this.#metadataOf(options),
        deadlineOf(options),
        (error, response) => {
          unlink();
          if (error) reject(CallError.from(error));
          else resolve(responseWithoutStructs(response));
        },
      );
      tellTrailers(call, options);
      const unlink = cancelBySignal(call, options.signal);
    });
  }

  async *#stream(service, method, request, options = {}) {
    refuseCancelled(options);
    const { path, requestSerialize, responseDeserialize } = methodOf(service, method);
    const call = this.#channel.makeServerStreamRequest(
      path,
      requestSerialize,
      responseDeserialize,
      requestWithStructs(request),
      this.#metadataOf(options),
      deadlineOf(options),
    );
    // A call that nobody reads any more still ends with an error, which must not end the process.
    call.on('error', () => {});
    tellTrailers(call, options);
    const unlink = cancelBySignal(call, options.signal);
    try {
      for await (const message of call) yield responseWithoutStructs(message);
    } catch (error) {
      throw CallError.from(error);
    } finally {
      unlink();
      // Of no effect after the last message; otherwise it is what frees the request's memory in the engine.
      call.cancel();
    }
  }

  #metadataOf({ metadata = {} }) {
    const sent = new Metadata();
    for (const [key, value] of Object.entries({ ...this.#metadata, ...metadata })) sent.set(key, value);
    return sent;
  }
}

const deadlineOf = ({ timeoutMs }) => (timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs });

const tellTrailers = (call, { onTrailers }) => {
  if (onTrailers) call.on('status', ({ metadata }) => onTrailers(textOf(metadata)));
};

const refuseCancelled = ({ signal }) => {
  if (signal?.aborted) throw new CallError('CANCELLED', 'cancelled by the caller');
};

/** Cancel the call when the signal fires; what is returned undoes the connection. */
const cancelBySignal = (call, signal) => {
  const cancel = () => call.cancel();
  signal?.addEventListener('abort', cancel);
  return () => signal?.removeEventListener('abort', cancel);
};

/** A client of the server at `target`; the connection is made by the first call. */
export const connect = (target, options) => new Client(target, options);
