// The methods of the public API, read from the .proto files when the module is loaded; no generated code.

import { existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { loadSync } from '@grpc/proto-loader';

// A published package carries copies of what the repository has once.
const shared = (name, inRepository) => {
  const copy = fileURLToPath(new URL(name, import.meta.url));
  return existsSync(copy) ? copy : fileURLToPath(new URL(inRepository, import.meta.url));
};

const SERVICES = ['generation', 'chat', 'embedding', 'tokenization', 'model'];

const definition = loadSync(
  SERVICES.map((name) => `stepwire/v1/${name}_service.proto`),
  {
    includeDirs: [shared('./protos', '../../protos')],
    // Names as in the protos and their documentation. 64-bit numbers (seeds) do not fit into a JavaScript number.
    keepCase: true,
    longs: String,
    enums: String,
    defaults: true,
  },
);

/** The definition of a method, e.g. `methodOf('ChatService', 'ChatStream')`: its path, and how its messages are written. */
export const methodOf = (service, method) => definition[`stepwire.v1.${service}`][method];

/** JSON text: which calls gRPC may repeat by itself, and how often. */
export const SERVICE_CONFIG = readFileSync(shared('./service_config.json', '../service_config.json'), 'utf8');
