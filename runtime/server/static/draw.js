// Drawing on canvases: lines over time, and the map of a page pool. Colours come from the style sheet.

const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);

function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// A canvas of `height` CSS pixels, as wide as its place, cleared and scaled to the screen's own pixels.
function prepare(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}

// The next number of the series 1, 2, 5, 10, 20, … that is at least `value`.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

export function show(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${Math.round(value / 1000)}k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

// Lines of up to two series of numbers (null leaves a gap); the newest is at the right edge, `span` samples fill the width.
// `top` fixes the scale; without it the scale follows the values.
export function drawLines(canvas, series, span, top) {
  const height = canvas.clientHeight;
  const [pen, width] = prepare(canvas, height);
  if (!width) return;
  const most = Math.max(...series.flat().filter((value) => value !== null), 0);
  const scale = top ?? (most > 0 ? roundUp(most) : 1);
  const [left, bottom] = [38, height - 4];
  const x = (index, length) => width - 1 - ((length - 1 - index) / (span - 1)) * (width - left - 1);
  const y = (value) => bottom - (value / scale) * (bottom - 7);
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.setLineDash([]);
  for (const part of [0, 0.5, 1]) {
    const at = Math.round(y(part * scale)) + 0.5;
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(left, at);
    pen.lineTo(width, at);
    pen.stroke();
    pen.fillStyle = colour("quiet");
    pen.fillText(top === 1 ? `${100 * part}%` : show(part * scale), left - 5, Math.min(at, height - 6));
  }
  series.forEach((values, number) => {
    pen.strokeStyle = colour(["first", "second"][number]);
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    pen.setLineDash(number ? [4, 2] : []);
    pen.beginPath();
    let open = false;
    values.forEach((value, index) => {
      if (value === null) open = false;
      else if (open) pen.lineTo(x(index, values.length), y(value));
      else {
        pen.moveTo(x(index, values.length), y(value));
        pen.lineTo(x(index, values.length) + 0.01, y(value));  // one value alone is a dot
        open = true;
      }
    });
    pen.stroke();
  });
}

export const STATES = ["free", "cached", "used", "shared"];
const MOST_CELLS = 6000;

// One square a page, in reading order. A pool of very many pages has several in a square, which shows the state of most of
// those that are not free, the paler the more of them are. Returns how many pages a square stands for.
export function drawPages(canvas, states) {
  const each = Math.max(1, Math.ceil(states.length / MOST_CELLS));
  const cells = Math.ceil(states.length / each);
  const width = canvas.clientWidth;
  if (!width || !cells) return each;
  const size = Math.max(3, Math.min(14, Math.floor(Math.sqrt((width * 150) / cells))));
  const columns = Math.max(1, Math.floor((width + 1) / size));
  const height = Math.ceil(cells / columns) * size;
  canvas.style.height = `${height}px`;
  const [pen] = prepare(canvas, height);
  const colours = STATES.map(colour);
  const gap = size > 4 ? 1 : 0.5;
  const box = (cell) => pen.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
  const filled = [[], [], [], []];
  for (let cell = 0; cell < cells; cell += 1) {
    const counts = [0, 0, 0, 0];
    const end = Math.min((cell + 1) * each, states.length);
    for (let page = cell * each; page < end; page += 1) counts[states[page]] += 1;
    const taken = end - cell * each - counts[0];
    const most = [1, 2, 3].reduce((best, state) => (counts[state] >= counts[best] ? state : best), 1);
    if (taken) filled[most].push([cell, taken / (end - cell * each)]);
    if (taken < end - cell * each) filled[0].push([cell, 1]);
  }
  filled.forEach((listed, state) => {  // free first: what is partly taken is laid over it
    pen.fillStyle = colours[state];
    for (const [cell, share] of listed) {
      pen.globalAlpha = share === 1 ? 1 : 0.3 + 0.7 * share;
      box(cell);
    }
  });
  pen.globalAlpha = 1;
  return each;
}
