// Chats over /v1/chat/completions of the server that the page comes from. Text from the model is never markup here.
"use strict";

const byId = (id) => document.getElementById(id);
const conversation = [];
let running = null;

function headers() {
  const token = byId("token").value.trim();
  return { "content-type": "application/json", ...(token && { authorization: `Bearer ${token}` }) };
}

function show(kind, text = "") {
  const element = document.createElement("div");
  element.className = `message ${kind}`;
  element.textContent = text;
  byId("messages").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

async function failureOf(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `HTTP ${response.status}`);
}

// The events of a stream of server-sent events, without the last, which says that it is done.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function loadModel() {
  const response = await fetch("../v1/models", { headers: headers() });
  if (!response.ok) throw await failureOf(response);
  return (await response.json()).data[0].id;
}

async function answer(signal) {
  const model = await loadModel();
  byId("model").textContent = model;
  const body = { model, messages: conversation, stream: true, stream_options: { include_usage: true } };
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch("../v1/chat/completions", request);
  if (!response.ok) throw await failureOf(response);
  await showAnswer(response);
}

async function showAnswer(response) {
  const message = { role: "assistant", content: "" };
  let reasoning = null;
  let content = null;
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices[0]?.delta ?? {};
    if (delta.reasoning_content) (reasoning ??= show("reasoning")).textContent += delta.reasoning_content;
    if (delta.content) {
      if (!content) conversation.push(message);
      message.content += delta.content;
      (content ??= show("assistant")).textContent = message.content;
    }
    if (event.usage) byId("status").textContent = `${event.usage.completion_tokens} tokens`;
  }
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
}

async function send(event) {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question || running) return;
  byId("question").value = "";
  byId("status").textContent = "…";
  conversation.push({ role: "user", content: question });
  show("user", question);
  setRunning(new AbortController());
  try {
    await answer(running.signal);
  } catch (error) {
    const isStop = error.name === "AbortError";
    byId("status").textContent = isStop ? "stopped" : "";
    if (!isStop) show("error", error.message);
  } finally {
    setRunning(null);
  }
}

function clear() {
  running?.abort();
  conversation.length = 0;
  byId("messages").replaceChildren();
  byId("status").textContent = "";
}

byId("form").addEventListener("submit", send);
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", clear);
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
loadModel().then((model) => (byId("model").textContent = model), () => {});
