// Custom resources (a JSON list on stdin) against the models of their operators; a JSON list of findings on stdout.
// Types and values by the models' validators, misspelt fields by their TypeScript declarations.
import { existsSync, readFileSync } from 'node:fs';
import path from 'node:path';
import ts from 'typescript';

const PACKAGES = {
  'cert-manager.io': 'cert-manager',
  'gateway.networking.k8s.io': 'gateway-api',
  'keda.sh': 'keda',
  'monitoring.coreos.com': 'prometheus-operator',
};
// No package has it; tests/inference_pool_schema.py has.
const UNCHECKED = new Set(['InferencePool']);
// A source file that is nowhere, but as if beside node_modules.
const SOURCE = path.resolve('custom_resources.ts');
const OPTIONS = {
  noEmit: true,
  strict: true,
  skipLibCheck: true,
  types: [],
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
};

const placeOf = (resource) => `${resource.kind}/${resource.metadata.name}`;

function modelOf(resource) {
  const [group, version] = resource.apiVersion.split('/');
  return path.join('node_modules/@kubernetes-models', PACKAGES[group] ?? '-', group, version ?? '-', `${resource.kind}.js`);
}

async function finding(resource) {
  const file = path.resolve(modelOf(resource));
  if (!existsSync(file)) return [`${placeOf(resource)}: no operator has ${resource.apiVersion} ${resource.kind}`];
  const Model = (await import(file))[resource.kind];
  try {
    new Model(resource).validate();
    return [];
  } catch (error) {
    return [`${placeOf(resource)}: ${error.message}`];
  }
}

// An object literal of a declared type may have no field that the type does not know.
function unknownFields(resources) {
  const starts = [];
  let text = '';
  for (const [number, resource] of resources.entries()) {
    starts.push(text.length);
    text += `import type { I${resource.kind} as T${number} } from './${modelOf(resource)}';\n`;
    text += `export const r${number}: T${number} = ${JSON.stringify(resource)};\n`;
  }
  const host = ts.createCompilerHost(OPTIONS);
  const { fileExists, readFile, getSourceFile } = host;
  host.fileExists = (name) => name === SOURCE || fileExists(name);
  host.readFile = (name) => (name === SOURCE ? text : readFile(name));
  host.getSourceFile = (name, ...rest) =>
    name === SOURCE ? ts.createSourceFile(name, text, OPTIONS.target) : getSourceFile(name, ...rest);
  const program = ts.createProgram([SOURCE], OPTIONS, host);
  return ts.getPreEmitDiagnostics(program).map((diagnostic) => {
    const resource = resources[starts.findLastIndex((start) => start <= (diagnostic.start ?? 0))];
    return `${placeOf(resource)}: ${ts.flattenDiagnosticMessageText(diagnostic.messageText, ' ')}`;
  });
}

const resources = JSON.parse(readFileSync(0, 'utf8')).filter((resource) => !UNCHECKED.has(resource.kind));
const findings = (await Promise.all(resources.map(finding))).flat();
const known = resources.filter((resource) => existsSync(modelOf(resource)));
process.stdout.write(JSON.stringify([...findings, ...(findings.length || !known.length ? [] : unknownFields(known))]));
