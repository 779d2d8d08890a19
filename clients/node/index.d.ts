/** Client of a stepwire inference server. Messages have the names of protos/stepwire/v1, which document every field. */

/** A message of the protos as a plain object: names as in the protos, enums as names, 64-bit numbers as strings. */
export type ProtoMessage = Record<string, any>;

export interface ConnectOptions {
  /** Sent as `authorization: Bearer ...` with each call. */
  token?: string;
  /** `true` trusts the CAs of this host; the files are PEM. Without it the channel is in clear. */
  tls?: true | { caFile?: string; certFile?: string; keyFile?: string };
  /** Whose share of the engines the calls use; absent = that of all without one. */
  clientClass?: string;
  /** Added to the options of the channel, or in their place. */
  channelOptions?: Record<string, string | number>;
}

export interface CallOptions {
  /** Milliseconds until the call fails with DEADLINE_EXCEEDED; absent = no limit, 10 s for calls that only look up. */
  timeoutMs?: number;
  /** Cancels the call, which frees the request in the engine. */
  signal?: AbortSignal;
  /** More of gRPC's metadata, e.g. `x-request-id`. */
  metadata?: Record<string, string>;
  /** Called at the end of the call, whatever its end, with the trailing metadata that is text. */
  onTrailers?: (trailers: Record<string, string>) => void;
}

export interface StreamOptions extends CallOptions {
  /**
   * How often a stream that was lost after Accepted is continued; 0 = never (the default). The answer is that of an
   * undisturbed stream: the tokens so far and the seed are sent again, and nothing comes twice. Throws TypeError for
   * several choices (`sampling.n`), whose tokens can not be sent along, and for an echoed prompt.
   */
  maxResumes?: number;
}

export interface TokenizeOptions extends CallOptions {
  model?: string;
  /** Default true. */
  addSpecialTokens?: boolean;
  /** Also return character offsets. */
  returnOffsets?: boolean;
}

export interface DetokenizeOptions extends CallOptions {
  model?: string;
  /** Default true. */
  skipSpecialTokens?: boolean;
}

/** One channel to one server. Every failed call throws CallError. */
export class Client {
  constructor(target?: string, options?: ConnectOptions);
  /** GenerateRequest -> GenerateResponse: the whole answer at once. */
  generate(request: ProtoMessage, options?: CallOptions): Promise<ProtoMessage>;
  /** GenerateRequest -> Accepted, deltas, one Finished per choice. Leaving the loop aborts the request. */
  generateStream(request: ProtoMessage, options?: StreamOptions): AsyncGenerator<ProtoMessage, void, void>;
  /** ChatRequest -> ChatResponse; its message can go into the next request as it is. */
  chat(request: ProtoMessage, options?: CallOptions): Promise<ProtoMessage>;
  /** ChatRequest -> Accepted, deltas, one Finished per choice. Leaving the loop aborts the request. */
  chatStream(request: ProtoMessage, options?: StreamOptions): AsyncGenerator<ProtoMessage, void, void>;
  /** EmbedRequest -> EmbedResponse: one vector for each input, in order; one input that fails is the failure of all. */
  embed(request: ProtoMessage, options?: CallOptions): Promise<ProtoMessage>;
  /** End requests of this caller by id; the AbortResponse tells which were live. */
  abort(requestIds: string[], options?: CallOptions): Promise<ProtoMessage>;
  /** TokenizeResponse: one encoding for each text, in order. */
  tokenize(texts: string[], options?: TokenizeOptions): Promise<ProtoMessage>;
  /** DetokenizeResponse: one text for each list of token ids, in order. */
  detokenize(sequences: number[][], options?: DetokenizeOptions): Promise<ProtoMessage>;
  /** Everything that `model` of a request may name. */
  models(options?: CallOptions): Promise<ProtoMessage[]>;
  /** No more calls; those that run may end. */
  close(): void;
}

/** A client of the server at `target` (default `127.0.0.1:50051`); the connection is made by the first call. */
export function connect(target?: string, options?: ConnectOptions): Client;

/** A call failed. No prompt or answer is in it. */
export class CallError extends Error {
  /** Name of the gRPC status, e.g. `UNAVAILABLE`. */
  readonly code: string;
  /** The server's words. */
  readonly details: string;
  /** stepwire's own reason, e.g. `QUEUE_FULL`; empty when no server answered. */
  readonly reason: string;
  /** request_id, engine_id, tokens_emitted, retryable, as far as they are known. */
  readonly metadata: Record<string, string>;
  /** The fields that the server refused, by their path in the request. */
  readonly violations: { field: string; description: string }[];
  /** The limits of the caller's own that were reached. */
  readonly quota: { subject: string; description: string }[];
  /** How long the server asks to wait, in milliseconds; 0 = it does not say. */
  readonly retryDelayMs: number;
  /** Trailing metadata that is text. */
  readonly trailers: Record<string, string>;
  /** The same request may succeed later, as it is. */
  readonly isRetryable: boolean;
  /** Tokens of the answer that had been sent before the failure. */
  readonly tokensEmitted: number;
}
