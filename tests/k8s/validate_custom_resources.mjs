// Custom resources (a JSON list on stdin) against the models of their operators; a JSON list of findings on stdout.
import { existsSync, readFileSync } from 'node:fs';
import path from 'node:path';

const PACKAGES = {
  'cert-manager.io': 'cert-manager',
  'gateway.networking.k8s.io': 'gateway-api',
  'keda.sh': 'keda',
  'monitoring.coreos.com': 'prometheus-operator',
};
// No package has it; tests/inference_pool_schema.py has.
const UNCHECKED = new Set(['InferencePool']);

async function finding(resource) {
  if (UNCHECKED.has(resource.kind)) return [];
  const place = `${resource.kind}/${resource.metadata.name}`;
  const [group, version] = resource.apiVersion.split('/');
  const file = path.resolve('node_modules/@kubernetes-models', PACKAGES[group] ?? '-', group, version ?? '-', `${resource.kind}.js`);
  if (!existsSync(file)) return [`${place}: no operator has ${resource.apiVersion} ${resource.kind}`];
  const Model = (await import(file))[resource.kind];
  try {
    new Model(resource).validate();
    return [];
  } catch (error) {
    return [`${place}: ${error.message}`];
  }
}

const resources = JSON.parse(readFileSync(0, 'utf8'));
process.stdout.write(JSON.stringify((await Promise.all(resources.map(finding))).flat()));
