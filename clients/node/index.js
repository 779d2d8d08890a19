// Client of a stepwire inference server. Types and documentation of each call: index.d.ts; examples: README.md.

export { Client, connect } from './client.js';
export { CallError } from './errors.js';
