// The playground: a conversation streamed from /v1/chat/completions, or a text continued by /v1/completions.
import { events } from "./stream.js";
import { recall, remember } from "./settings.js";

const get = (id) => document.getElementById(id);
const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "typical_p",
  "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "draft_tokens",
];

let turns = [];  // {role, content} of the conversation so far
let running = null;  // AbortController of the answer that is coming

// ------------------------------------------------------------------------------------------------ settings

const form = get("options");

function settings() {
  return Object.fromEntries(new FormData(form));
}

// What to send: only what is set, so that the server's own defaults hold for the rest.
function options(values) {
  const chosen = {};
  for (const name of NUMBERS) if (values[name]) chosen[name] = Number(values[name]);
  const stop = values.stop.split("\n").filter((line) => line);
  if (stop.length) chosen.stop = stop;
  return chosen;
}

function headers() {
  const key = form.elements.key.value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function tellSettings() {
  const values = settings();
  const chosen = Object.entries(options(values)).map(([name, value]) => `${name.replaceAll("_", " ")} ${JSON.stringify(value)}`);
  if (values.mode !== "chat") chosen.unshift("plain completion");
  else if (values.system) chosen.unshift("system prompt");
  get("changed").textContent = chosen.length ? `– ${chosen.join(", ")}` : "";
  form.elements.system.disabled = values.mode !== "chat";
  delete values.key;
  remember("options", values);
}

function startSettings() {
  for (const [name, value] of Object.entries(recall("options") ?? {})) {
    const field = form.elements[name];
    if (field && name !== "key" && typeof value === "string") field.value = value;
  }
  form.addEventListener("input", tellSettings);
  form.addEventListener("reset", () => setTimeout(tellSettings));
  form.addEventListener("submit", (event) => event.preventDefault());
  tellSettings();
}

// -------------------------------------------------------------------------------------------- conversation

function addTurn(role, text) {
  get("empty").hidden = true;
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const parts = ["who", "said", "measured"].map((name) => {
    const part = document.createElement("div");
    part.className = name;
    turn.append(part);
    return part;
  });
  const [who, said, measured] = parts;
  who.textContent = role === "user" ? "you" : role === "text" ? "completion" : "model";
  const node = document.createTextNode(text);
  said.append(node);
  if (role === "user") measured.remove();
  get("log").append(turn);
  toEnd(true);
  return { turn, node, measured };
}

// Follows the text only while the reader is at its end.
function toEnd(always = false) {
  const log = get("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function report(measured, parts) {
  measured.textContent = parts.filter(Boolean).join(" · ");
}

const REASONS = { length: "ended at max tokens or the context's end", stop: "", content_filter: "filtered", tool_calls: "wants a tool" };

function tell(times, count, reason) {
  const parts = [`${count} token${count === 1 ? "" : "s"}`];
  const seconds = (times.last - times.first) / 1000;
  if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
  if (times.first) parts.push(`first after ${Math.round(times.first - times.asked)} ms`);
  parts.push(REASONS[reason] ?? reason);
  return parts;
}

// ------------------------------------------------------------------------------------------------- answers

function question(values) {
  const common = { ...options(values), stream: true, stream_options: { include_usage: true } };
  const model = document.body.dataset.model;
  if (model) common.model = model;
  if (values.mode !== "chat") return ["v1/completions", { ...common, prompt: turns.at(-1).content }];
  const system = values.system.trim() ? [{ role: "system", content: values.system }] : [];
  return ["v1/chat/completions", { ...common, messages: [...system, ...turns] }];
}

// Streams one answer into `view`; returns [text, number of tokens, reason, times].
async function receive(view, controller, values) {
  const times = { asked: performance.now(), first: 0, last: 0 };
  let [text, count, reason, usage, waiting] = ["", 0, null, null, ""];
  const flush = () => {
    if (!waiting) return;
    view.node.appendData(waiting);
    waiting = "";
    report(view.measured, tell(times, count, null));
    toEnd();
  };
  const [path, body] = question(values);
  try {
    for await (const part of events(path, body, headers(), controller.signal)) {
      if (part.usage) usage = part.usage.completion_tokens;
      const choice = part.choices?.[0];
      if (!choice) continue;
      const piece = choice.delta?.content ?? choice.text ?? "";
      if (piece) {
        times.last = performance.now();
        times.first ||= times.last;
        count += 1;
        if (!waiting) requestAnimationFrame(flush);
        waiting += piece;
        text += piece;
      }
      reason = choice.finish_reason ?? reason;
    }
  } finally {
    flush();
    view.partial = text;
  }
  return [text, usage ?? count, reason, times];
}

function busy(controller) {
  running = controller;
  get("send").disabled = controller !== null;
  get("stop").hidden = controller === null;
}

async function answer() {
  const values = settings();
  const view = addTurn(values.mode === "chat" ? "assistant" : "text", "");
  const controller = new AbortController();
  busy(controller);
  view.turn.classList.add("busy");
  get("announce").textContent = "Answering";
  const mine = turns;
  try {
    const [text, count, reason, times] = await receive(view, controller, values);
    if (mine === turns) turns.push({ role: "assistant", content: text });
    report(view.measured, tell(times, count, reason));
    get("announce").textContent = `Answered: ${view.measured.textContent}. ${text}`;
  } catch (error) {
    const stopped = controller.signal.aborted;
    if (mine === turns && stopped && view.partial) turns.push({ role: "assistant", content: view.partial });
    const note = document.createElement("span");
    note.className = stopped ? "" : "failed";
    note.textContent = stopped ? `${view.measured.textContent ? " · " : ""}stopped` : error.message;
    if (!stopped) view.measured.textContent = "";
    view.measured.append(note);
    get("announce").textContent = stopped ? "Stopped" : `Failed: ${error.message}`;
    if (!stopped && mine === turns) addRetry(view, error);
  } finally {
    view.turn.classList.remove("busy");
    if (running === controller) busy(null);
    toEnd();
  }
}

function addRetry(view, error) {
  const button = document.createElement("button");
  button.type = "button";
  const template = /chat[ _]template/i.test(error.message) && settings().mode === "chat";
  button.textContent = template ? "Send as plain completion" : "Try again";
  button.addEventListener("click", () => {
    if (running) return;
    if (template) {
      form.elements.mode.value = "completion";
      tellSettings();
    }
    view.turn.remove();
    answer();
  });
  view.measured.append(button);
}

function send() {
  const message = get("message");
  const text = message.value;
  if (running || !text.trim()) return;
  const wrong = form.querySelector(":invalid");
  if (wrong) {
    get("settings").open = true;
    wrong.reportValidity();
    return;
  }
  get("log").querySelectorAll(".measured button").forEach((button) => button.remove());
  // A question that got no answer is replaced: two user turns in a row fit few templates.
  if (turns.at(-1)?.role === "user") turns.pop();
  turns.push({ role: "user", content: text });
  addTurn("user", text);
  message.value = "";
  answer();
}

function clear() {
  running?.abort();
  turns = [];
  for (const turn of get("log").querySelectorAll(".turn")) turn.remove();
  get("empty").hidden = false;
  get("announce").textContent = "New conversation";
  get("message").focus();
}

// Returns headers(), what every question to the server carries.
export function startChat() {
  startSettings();
  get("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  get("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  get("stop").addEventListener("click", () => {
    running?.abort();
    get("message").focus();
  });
  get("clear").addEventListener("click", clear);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  return { headers };
}
