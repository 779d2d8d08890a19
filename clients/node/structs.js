// Plain objects in the fields of type google.protobuf.Struct, which the protobuf library takes and gives in pieces.

const toValue = (value) => {
  if (value === null || value === undefined) return { nullValue: 'NULL_VALUE' };
  if (Array.isArray(value)) return { listValue: { values: value.map(toValue) } };
  switch (typeof value) {
    case 'object':
      return { structValue: toStruct(value) };
    case 'string':
      return { stringValue: value };
    case 'boolean':
      return { boolValue: value };
    case 'number':
      return { numberValue: value };
    default:
      throw new TypeError(`a ${typeof value} is no JSON value`);
  }
};

const toStruct = (object) => ({
  fields: Object.fromEntries(Object.entries(object).map(([key, value]) => [key, toValue(value)])),
});

const fromValue = (value) => {
  if ('structValue' in value) return fromStruct(value.structValue);
  if ('listValue' in value) return (value.listValue.values ?? []).map(fromValue);
  return value.stringValue ?? value.boolValue ?? value.numberValue ?? null;
};

const fromStruct = (struct) =>
  Object.fromEntries(Object.entries(struct.fields ?? {}).map(([key, value]) => [key, fromValue(value)]));

const kvWith = (kv, convert) =>
  kv?.transfer_params ? { ...kv, transfer_params: convert(kv.transfer_params) } : kv;

/** A request with its plain objects (tool parameters, template variables, hand-off parameters) as the wire wants them. */
export const requestWithStructs = (request) => {
  const converted = { ...request };
  if (request.kv) converted.kv = kvWith(request.kv, toStruct);
  if (request.chat_template_kwargs) converted.chat_template_kwargs = toStruct(request.chat_template_kwargs);
  if (request.tools) {
    converted.tools = request.tools.map((tool) =>
      tool.parameters ? { ...tool, parameters: toStruct(tool.parameters) } : tool,
    );
  }
  return converted;
};

/** A response with plain objects in it; the response itself is changed. */
export const responseWithoutStructs = (response) => {
  for (const part of [response.finished, ...(response.completions ?? [])]) {
    if (part?.kv) part.kv = kvWith(part.kv, fromStruct);
  }
  return response;
};
