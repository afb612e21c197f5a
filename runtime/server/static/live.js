// The live view: GET /status once a second, drawn as numbers, lines over five minutes, page maps and a table.
import { drawLines, drawPages, show, STATES } from "./draw.js";

const PERIOD = 1000;  // ms between questions
const PATIENCE = 5000;  // ms until a question counts as unanswered
const SPANS = [60, 120, 300];  // samples that a chart is wide, and keeps at last: one, two, five minutes

const get = (id) => document.getElementById(id);
const percent = (share) => (share === null || share === undefined ? null : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`);

// Each chart: its title, one or two lines with the value of a status, and a unit.
const CHARTS = [
  { title: "Throughput", unit: "tokens/s", lines: { "tokens/s": (s) => s.tokens_per_second } },
  { title: "Batch fill", top: 1, lines: { sequences: (s) => s.batch_fill, tokens: (s) => s.token_fill } },
  { title: "First token", unit: "ms", lines: { p50: (s) => s.ttft_ms?.p50, p95: (s) => s.ttft_ms?.p95 } },
  { title: "Between tokens", unit: "ms", lines: { p50: (s) => s.itl_ms?.p50, p95: (s) => s.itl_ms?.p95 } },
  { title: "Requests", lines: { running: (s) => s.running, waiting: (s) => s.waiting } },
  { title: "Pages", top: 1, lines: { used: (s) => pages(s, "used"), "and cached": (s) => pages(s, "used", "cached") } },
];

function pages(status, ...states) {
  const total = status.kv_groups.reduce((sum, group) => sum + group.total, 0);
  if (!total) return null;
  return status.kv_groups.reduce((sum, group) => sum + states.reduce((part, state) => part + group[state], 0), 0) / total;
}

const width = (samples) => SPANS.find((span) => samples <= span) ?? SPANS.at(-1);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function makeChart({ title, unit, top, lines }) {
  const names = Object.keys(lines);
  const figure = element("figure");
  const caption = element("figcaption");
  caption.append(element("span", unit && names.length > 1 ? `${title}, ${unit}` : title));
  const keys = element("span", undefined, "keys");
  const shown = names.map((name) => keys.appendChild(element("span", name)));
  caption.append(keys);
  const canvas = element("canvas");
  canvas.setAttribute("role", "img");
  figure.append(caption, canvas);
  get("charts").append(figure);
  const values = names.map(() => []);
  const draw = () => drawLines(canvas, values, width(values[0].length), top);
  const text = (value) => (top === 1 ? percent(value) ?? "–" : show(value));
  return {
    canvas,
    draw,
    add(status) {
      names.forEach((name, index) => {
        const value = status === null ? null : lines[name](status) ?? null;
        values[index].push(value);
        if (values[index].length > SPANS.at(-1)) values[index].shift();
        shown[index].textContent = `${name} ${text(value)}`;
      });
      const spoken = names.map((name, index) => `${name} ${text(values[index].at(-1))}`);
      canvas.setAttribute("aria-label", `${title} over time; now ${spoken.join(", ")}${unit ? ` (${unit})` : ""}`);
      draw();
    },
  };
}

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

const maps = [];  // {figure, caption, canvas, states} of each KV group

function showMaps(groups) {
  while (maps.length > groups.length) maps.pop().figure.remove();
  groups.forEach((group, index) => {
    if (!maps[index]) {
      const [figure, caption, canvas] = ["figure", "figcaption", "canvas"].map((name) => element(name));
      canvas.setAttribute("role", "img");
      figure.append(caption, canvas);
      get("maps").append(figure);
      maps[index] = { figure, caption, canvas };
      resized.observe(figure);
    }
    const map = maps[index];
    map.states = bytes(group.map);
    const counts = [0, 0, 0, 0];
    for (const state of map.states) counts[state] += 1;
    const each = drawPages(map.canvas, map.states);
    const name = groups.length > 1 ? `group ${index + 1}: ` : "";
    const told = STATES.map((state, number) => `${counts[number].toLocaleString("en")} ${state}`).reverse().join(", ");
    const scale = each > 1 ? `; a square is ${each} pages` : "";
    map.caption.textContent = `${name}${told} of ${group.total.toLocaleString("en")} pages of ${group.page_size} tokens${scale}`;
    map.canvas.setAttribute("aria-label", `Map of the pages. ${map.caption.textContent}`);
  });
}

const age = (seconds) => (seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`);

function span(seconds) {
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

function showRequests(requests, total) {
  const rows = requests.map((request) => {
    const row = element("tr");
    const id = row.appendChild(element("td", request.id));
    id.title = request.id;
    row.append(element("td", request.state));
    const known = request.prompt_tokens + request.generated;
    const bar = element("progress");
    [bar.max, bar.value] = [Math.max(known, 1), Math.min(request.computed, known)];
    bar.setAttribute("aria-label", "tokens computed");
    bar.title = `${request.computed} of ${known} tokens computed`;
    row.appendChild(element("td")).append(bar);
    for (const value of [request.prompt_tokens, request.generated, age(request.age_s)]) row.append(element("td", String(value), "number"));
    return row;
  });
  const rest = total - requests.length;
  if (!rows.length || rest > 0) {
    const row = element("tr");
    const cell = row.appendChild(element("td", rows.length ? `and ${rest} more` : "none", "quiet"));
    cell.colSpan = 6;
    rows.push(row);
  }
  get("requests").replaceChildren(...rows);
}

function showNumbers(status) {
  get("model").textContent = status.model === status.engine ? status.model : `${status.model} (${status.engine})`;
  document.body.dataset.model = status.model;
  get("policy").textContent = `policy ${status.policy}${status.speculation ? `, drafts by ${status.speculation.drafter}` : ""}`;
  get("uptime").textContent = `up ${span(status.uptime_s)}`;
  get("running").textContent = `${status.running} of ${status.max_sequences}`;
  get("waiting").textContent = String(status.waiting);
  get("rate").textContent = show(status.tokens_per_second);
  get("hits").textContent = percent(status.prefix_hit_rate) ?? "–";
  get("preemptions").textContent = String(status.preemptions);
  showSpeculation(status.speculation);
}

// How much of what was proposed came true, and what a step gives a sequence, and how many may be proposed; nothing where the engine does not speculate.
function showSpeculation(speculation) {
  for (const part of document.querySelectorAll(".speculation")) {
    part.hidden = !speculation;
    for (const field of part.querySelectorAll("input")) field.disabled = !speculation;  // nothing is sent that nobody sees
  }
  get("accepted").textContent = percent(speculation?.acceptance_rate) ?? "–";
  get("each").textContent = speculation ? speculation.tokens_per_step.toFixed(2) : "–";
}

let charts = [];
let samples = 0;
let resized;

function redraw() {
  for (const chart of charts) chart.draw();
  for (const map of maps) drawPages(map.canvas, map.states);
}

function connection(state, text, problem = "") {
  const link = get("link");
  if (link.textContent !== text) [link.dataset.state, link.textContent] = [state, text];
  get("problem").hidden = !problem;
  get("problem").textContent = problem;
}

async function ask(headers) {
  const answer = await fetch("status", { headers: headers(), signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
  if (answer.status === 401 || answer.status === 403) throw new Error("the server wants an API key: give it under Settings");
  if (!answer.ok) throw new Error(`the server answered /status with ${answer.status}`);
  return answer.json();
}

function addSample(status) {
  samples += 1;
  const minutes = (width(samples) * PERIOD) / 60000;
  get("span").textContent = `The last ${minutes === 1 ? "minute" : `${minutes} minutes`}, a sample a second while this page is seen.`;
  for (const chart of charts) chart.add(status);
}

async function poll(headers) {
  try {
    const status = await ask(headers);
    showNumbers(status);
    addSample(status);
    showMaps(status.kv_groups);
    showRequests(status.requests, status.running + status.waiting);
    const phase = status.phase ?? "ready";
    connection(phase === "ready" ? "up" : "waiting", phase === "ready" ? "connected" : phase);
  } catch (error) {
    addSample(null);
    const unreachable = error instanceof TypeError || error.name === "TimeoutError";
    connection("down", "not connected", unreachable ? "The server does not answer. Asking again." : `No live view: ${error.message}.`);
  }
}

// `headers()` gives the headers of a question. Hidden pages ask nothing.
export function startLive(headers) {
  resized = new ResizeObserver(redraw);
  charts = CHARTS.map(makeChart);
  for (const chart of charts) chart.canvas.setAttribute("aria-label", "nothing measured yet");
  resized.observe(get("charts"));
  const turn = async () => {
    const started = performance.now();
    if (!document.hidden) await poll(headers);
    setTimeout(turn, Math.max(100, PERIOD - (performance.now() - started)));
  };
  turn();
  return { redraw };
}
