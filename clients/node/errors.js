// The one error of a failed call, with everything that the server says of it.

import { status as Status } from '@grpc/grpc-js';
import { fromJSON } from '@grpc/proto-loader';

const field = (type, id, rule) => (rule ? { type, id, rule } : { type, id });

// The messages of google.rpc that stepwire's errors use: only the fields that are read here.
const details = fromJSON(
  {
    nested: {
      details: {
        nested: {
          Any: { fields: { type_url: field('string', 1), value: field('bytes', 2) } },
          Status: { fields: { details: field('Any', 3, 'repeated') } },
          ErrorInfo: { fields: { reason: field('string', 1), metadata: { keyType: 'string', type: 'string', id: 3 } } },
          Duration: { fields: { seconds: field('int64', 1), nanos: field('int32', 2) } },
          RetryInfo: { fields: { retry_delay: field('Duration', 1) } },
          FieldViolation: { fields: { field: field('string', 1), description: field('string', 2) } },
          BadRequest: { fields: { violations: field('FieldViolation', 1, 'repeated') } },
          QuotaViolation: { fields: { subject: field('string', 1), description: field('string', 2) } },
          QuotaFailure: { fields: { violations: field('QuotaViolation', 1, 'repeated') } },
        },
      },
    },
  },
  { keepCase: true, longs: Number, defaults: true },
);

const decode = (name, bytes) => details[`details.${name}`].deserialize(bytes);

/** What a rich status holds, by the short name of each detail; empty when there is none or it can not be read. */
const readDetails = (metadata) => {
  const [bytes] = metadata?.get('grpc-status-details-bin') ?? [];
  const found = {};
  try {
    for (const packed of bytes ? decode('Status', bytes).details : []) {
      const name = packed.type_url.split('.').at(-1);
      if (['ErrorInfo', 'RetryInfo', 'BadRequest', 'QuotaFailure'].includes(name)) {
        found[name] = decode(name, packed.value);
      }
    }
  } catch {
    // A proxy may have cut it: the status code still counts.
  }
  return found;
};

/** The entries that are text, as a plain object. */
export const textOf = (metadata) =>
  Object.fromEntries(Object.entries(metadata?.getMap() ?? {}).filter(([, value]) => typeof value === 'string'));

/** A call failed. The fields are described in index.d.ts. */
export class CallError extends Error {
  constructor(code, message, { metadata, cause } = {}) {
    const found = readDetails(metadata);
    const reason = found.ErrorInfo?.reason ?? '';
    super(reason ? `${code} ${reason}: ${message}` : `${code}: ${message}`, { cause });
    this.name = 'CallError';
    this.code = code;
    this.details = message;
    this.reason = reason;
    this.metadata = { ...found.ErrorInfo?.metadata };
    this.violations = found.BadRequest?.violations ?? [];
    this.quota = found.QuotaFailure?.violations ?? [];
    const delay = found.RetryInfo?.retry_delay;
    this.retryDelayMs = delay ? delay.seconds * 1000 + delay.nanos / 1e6 : 0;
    this.trailers = textOf(metadata);
  }

  /** The same request may succeed later, as it is. */
  get isRetryable() {
    return this.metadata.retryable === 'true';
  }

  /** Tokens of the answer that had been sent before the failure. */
  get tokensEmitted() {
    return Number(this.metadata.tokens_emitted ?? 0);
  }

  /** The failure as gRPC reports it. */
  static from(error) {
    if (error instanceof CallError || typeof error?.code !== 'number') return error;
    return new CallError(Status[error.code], error.details, { metadata: error.metadata, cause: error });
  }
}
