"use strict";
/* Draws what views/page.py has computed. All figures come from there; here are only looks, search and zoom. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const TYPES = { f8: Float64Array, i4: Int32Array, u1: Uint8Array };
const $ = (id) => document.getElementById(id);
const groups = Object.entries(DATA.palette).map(([name, [colour, text]]) => ({ name, colour, text }));
const WAIT = groups.findIndex((g) => g.name === "wait"), TRANSFER = groups.findIndex((g) => g.name === "transfer");

/** Columns come as {type: base64 of little-endian numbers}; rows as [ptr, ids]. */
function unpacked(value) {
  if (Array.isArray(value)) return value.length && typeof value[0] === "object" ? value.map(unpacked) : value;
  if (!value || typeof value !== "object") return value;
  const [[type, text] = []] = Object.entries(value);
  if (type in TYPES) return new TYPES[type](Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, unpacked(v)]));
}

const rowOf = (rows, i) => rows[1].subarray(rows[0][i], rows[0][i + 1]);

/** The first index of a sorted array whose value is greater than x. */
function after(sorted, x, low = 0, high = sorted.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}

const plans = DATA.plans.map((packed) => {
  const plan = unpacked(packed);
  plan.timelines = [plan.predicted, plan.measured].filter(Boolean);
  for (const t of plan.timelines) {
    t.plan = plan;
    t.last = Float64Array.from(t.end); // of each lane the latest end so far, for the search of what is in view
    for (let lane = 0; lane + 1 < t.ptr.length; lane++)
      for (let i = t.ptr[lane] + 1; i < t.ptr[lane + 1]; i++) t.last[i] = Math.max(t.last[i], t.last[i - 1]);
    t.laneOf = new Int32Array(t.start.length);
    for (let lane = 0; lane + 1 < t.ptr.length; lane++) t.laneOf.fill(lane, t.ptr[lane], t.ptr[lane + 1]);
    t.pausesOf = new Map();
    for (let k = 0; k < t.pauses.task.length; k++) {
      const i = t.pauses.task[k];
      if (!t.pausesOf.has(i)) t.pausesOf.set(i, []);
      t.pausesOf.get(i).push(k);
    }
  }
  const p = plan.predicted, n = p.start.length;
  if (plan.preds) { // who waits for each task: the edges the other way round
    const count = new Int32Array(n + 1);
    for (const s of plan.preds[1]) count[s + 1]++;
    for (let i = 0; i < n; i++) count[i + 1] += count[i];
    const ids = new Int32Array(plan.preds[1].length), at = count.slice();
    for (let i = 0; i < n; i++) for (const s of rowOf(plan.preds, i)) ids[at[s]++] = i;
    plan.succs = [count, ids];
  }
  if (plan.measured) {
    plan.measuredOf = new Map();
    plan.measured.entry.forEach((e, i) => { if (e >= 0) plan.measuredOf.set(e, i); });
  }
  plan.span = Math.max(...plan.timelines.map((t) => t.makespan)) || 1;
  return plan;
});

/* All plans below each other: their runs first, or what is predicted. */
const all = { ...plans[0], title: "all", memory: [], span: Math.max(...plans.map((p) => p.span)),
  timelines: plans.flatMap((p) => p.measured || []).concat(plans.map((p) => p.predicted)) };
let plan = plans.length > 1 ? all : plans[0];
let view = { from: 0, to: plan.span };
let chosen = null; // {t, i}
let hovered = null;

/* ------------------------------------------------------------------------------------------------------------- text */
const number = (x) => {
  const value = x * plan.scale, size = Math.abs(value);
  const digits = size >= 1000 || size === 0 ? 0 : Math.max(0, 3 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(digits, 12) });
};
const time = (x) => (number(x) + " " + plan.unit).trim();
const size = (bytes) => {
  let power = 0;
  while (bytes >= 1024 && power < 4) { bytes /= 1024; power++; }
  return bytes.toFixed(power ? 2 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
};
const share = (part, whole) => (whole ? (100 * part / whole).toFixed(1).replace(/^-(?=[0.]*$)/, "") + " %" : "-");
const title = (t, i) => (t.plan.labels[t.unit[i]] ? t.names[i] + " " + t.plan.labels[t.unit[i]] : t.names[i]);
const titleOf = (t) => (plan === all ? `${t.plan.title}, ${t.title}` : t.title);

function make(tag, attributes = {}, ...children) {
  const element = ["svg", "path", "text", "g", "rect", "circle", "title"].includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes))
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value); else element.setAttribute(key, value);
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

const laneBefore = (t, i) => (i > t.ptr[t.laneOf[i]] ? i - 1 : -1);
const laneAfter = (t, i) => (i + 1 < t.ptr[t.laneOf[i] + 1] ? i + 1 : -1);

/** What is known of a task, with names and raw times. */
function explained(t, i) {
  const { plan } = t, p = plan.predicted, e = t === p ? i : t.entry[i];
  const about = { task: t.names[i], label: title(t, i), lane: t.lanes[t.laneOf[i]], start: t.start[i], end: t.end[i],
    critical: !!t.critical[i] };
  const name = (k) => (k < 0 ? null : t.names[k]);
  about.lane_before = name(laneBefore(t, i));
  about.lane_after = name(laneAfter(t, i));
  about.pauses = (t.pausesOf.get(i) || []).map((k) => ({ what: groups[t.pauses.group[k]].name,
    time: t.pauses.end[k] - t.pauses.start[k], for: t.awaited[i] >= 0 ? t.names[t.awaited[i]] : null }));
  if (e >= 0 && plan.preds) {
    about.may_start = plan.may_start[e];
    about.must_end = plan.must_end[e];
    about.slack = plan.must_end[e] - p.end[e];
    about.needs = [...rowOf(plan.preds, e)].map((k) => p.names[k]);
    about.needed_by = [...rowOf(plan.succs, e)].map((k) => p.names[k]);
    about.relatives = { before: [...rowOf(plan.preds, e)], behind: [...rowOf(plan.succs, e)] };
    about.reads = [...rowOf(plan.reads, e)].map((b) => plan.buffers[b]);
    about.writes = [...rowOf(plan.writes, e)].map((b) => plan.buffers[b]);
  }
  if (plan.measured && t === p && plan.measuredOf.has(e)) {
    const m = plan.measuredOf.get(e);
    about.other = ["measured", plan.measured.end[m] - plan.measured.start[m]];
  } else if (t === plan.measured && e >= 0) about.other = ["predicted", p.end[e] - p.start[e]];
  return about;
}

/** The critical path is one chain; other tasks may have no slack as well. */
const slack = (a) => time(Math.max(0, a.slack)) + (a.critical ? ", on the critical path"
  : a.slack * plan.scale <= 1e-9 ? ", a delay would make the step longer" : "");

const buffers = (list, most) => list.slice(0, most).map(([name, bytes]) => (bytes ? `${name} (${size(bytes)})` : name)).join(", ")
  + (list.length > most ? ` and ${list.length - most} more` : "");

function tipText(t, i) {
  const a = explained(t, i);
  const lines = [`${a.label} on ${a.lane}`, `${number(a.start)} to ${time(a.end)}, takes ${time(a.end - a.start)}`];
  if (a.other) lines.push(`${a.other[0]}: ${time(a.other[1])}`);
  if (a.slack !== undefined) lines.push(`slack ${slack(a)}`);
  for (const p of a.pauses) lines.push(`before it a ${p.what} of ${time(p.time)}${p.for ? " for " + p.for : ""}`);
  if (a.reads && a.reads.length) lines.push("reads " + buffers(a.reads, 6));
  if (a.writes && a.writes.length) lines.push("writes " + buffers(a.writes, 6));
  return lines.join("\n");
}

function showExplanation() {
  const box = $("explain");
  box.replaceChildren();
  if (!chosen) {
    box.append(make("p", { class: "soft" }, "Click a task: when it may start, when it must end, which tasks it needs, "
      + "and which tasks need it."));
    return;
  }
  const { t, i } = chosen, a = explained(t, i), list = make("dl");
  const row = (name, ...value) => list.append(make("dt", {}, name), make("dd", {}, ...value));
  const links = (ids) => {
    const out = [];
    for (const k of ids.slice(0, 60)) out.push(out.length ? ", " : "", link(t.plan.predicted, k));
    if (ids.length > 60) out.push(` and ${ids.length - 60} more`);
    return out.length ? out : ["no task"];
  };
  const neighbour = (k) => (k < 0 ? "nothing" : link(t, k));
  if (a.may_start !== undefined) row("may start", time(a.may_start));
  row("runs", `${number(a.start)} to ${time(a.end)}, takes ${time(a.end - a.start)}`);
  if (a.other) row(a.other[0], `takes ${time(a.other[1])}`);
  if (a.must_end !== undefined) {
    row("must end", time(a.must_end));
    row("slack", slack(a));
  }
  for (const p of a.pauses)
    row(p.what === "wait" ? "waited" : "transfer", time(p.time), p.for ? " for " : "",
      p.for ? link(t, t.awaited[i]) : "");
  if (a.relatives) {
    row("needs", ...links(a.relatives.before));
    row("needed by", ...links(a.relatives.behind));
  }
  row("on its lane", "after ", neighbour(laneBefore(t, i)), ", before ", neighbour(laneAfter(t, i)));
  if (a.reads) {
    row("reads", buffers(a.reads, 40) || "nothing");
    row("writes", buffers(a.writes, 40) || "nothing");
  }
  box.append(make("h3", {}, a.label), make("p", { class: "soft" }, `${titleOf(t)}, lane ${a.lane}`), list);
}

const link = (t, i) => make("a", { href: "#canvas", onclick: (e) => { e.preventDefault(); choose(t, i, true); } }, t.names[i]);

function choose(t, i, move = false) {
  chosen = t === null ? null : { t, i };
  if (chosen && move) {
    const width = view.to - view.from, middle = (t.start[i] + t.end[i]) / 2;
    if (t.start[i] < view.from || t.end[i] > view.to) setView(middle - width / 2, middle + width / 2);
    const row = layout().rows.find((r) => r.t === t && r.lane === t.laneOf[i]);
    if (row && (row.y < $("scroller").scrollTop || row.y + row.h > $("scroller").scrollTop + canvas.clientHeight))
      $("scroller").scrollTop = row.y - 60;
  }
  showExplanation();
  redraw();
}

/* ----------------------------------------------------------------------------------------------------------- canvas */
const canvas = $("canvas"), context = canvas.getContext("2d"), FONT = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
const AXIS = 24, GUTTER = 12;
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "ink", "soft", "track", "line", "mark", "path"])
    colours[name] = style.getPropertyValue("--" + name).trim();
}

let laidOut = null;
function layout() {
  if (laidOut) return laidOut;
  const lanes = plan.timelines.reduce((n, t) => n + t.shown.length, 0), h = lanes > 64 ? 12 : lanes > 24 ? 18 : 26;
  const rows = [];
  let y = AXIS, longest = 0;
  for (const t of plan.timelines) {
    rows.push({ kind: "title", text: `${titleOf(t)}: makespan ${time(t.makespan)}`, y, h: 22 });
    y += 22;
    for (const lane of t.shown) {
      rows.push({ kind: "lane", t, lane, y, h, label: t.lanes[lane] });
      longest = Math.max(longest, t.lanes[lane].length);
      y += h + (h > 12 ? 4 : 2);
    }
    y += 6;
  }
  const most = Math.max(...plan.memory.map((m) => m.peak), 0);
  if (plan.memory.length) {
    rows.push({ kind: "title", text: plan.memory[0].what, y, h: 22 });
    y += 22;
    for (const m of plan.memory) {
      rows.push({ kind: "memory", m, most, y, h: 40, label: m.label });
      longest = Math.max(longest, m.label.length);
      y += 46;
    }
  }
  context.font = FONT;
  return laidOut = { rows, height: y + 6, left: GUTTER + Math.ceil(context.measureText("m".repeat(longest + 1)).width) };
}

const width = () => canvas.clientWidth - layout().left - GUTTER;
const toX = (time) => layout().left + (time - view.from) / (view.to - view.from) * width();
const toTime = (x) => view.from + (x - layout().left) / width() * (view.to - view.from);

function setView(from, to) {
  const least = plan.span * 1e-7, span = Math.min(Math.max(to - from, least), plan.span * 1.02);
  const middle = (from + to) / 2, low = -0.01 * plan.span, high = 1.01 * plan.span;
  view.from = Math.min(Math.max(middle - span / 2, low), Math.max(low, high - span));
  view.to = view.from + span;
  redraw();
}

let pending = false;
function redraw() {
  if (!pending) { pending = true; requestAnimationFrame(() => { pending = false; draw(); }); }
}

function draw() {
  const { rows, height, left } = layout(), scroller = $("scroller"), dpr = window.devicePixelRatio || 1;
  const tall = Math.min(height, Math.max(200, window.innerHeight * 0.68 - 2));
  $("tall").style.height = height + "px";
  canvas.style.height = tall + "px";
  const wide = canvas.clientWidth;
  if (canvas.width !== Math.round(wide * dpr) || canvas.height !== Math.round(tall * dpr)) {
    canvas.width = Math.round(wide * dpr);
    canvas.height = Math.round(tall * dpr);
  }
  context.setTransform(dpr, 0, 0, dpr, 0, 0);
  context.fillStyle = colours.card;
  context.fillRect(0, 0, wide, tall);
  context.font = FONT;
  context.textBaseline = "middle";
  const top = scroller.scrollTop;
  for (const row of rows) {
    const y = row.y - top;
    if (y + row.h < AXIS - 30 || y > tall) continue;
    if (row.kind === "title") {
      context.fillStyle = colours.ink;
      context.font = "bold " + FONT;
      const fits = [row.text, row.text.split(";")[0], row.text.split(/[,:;]/)[0]].find((s) => context.measureText(s).width <= width());
      context.fillText(fits || "", left, y + row.h / 2);
      context.font = FONT;
      continue;
    }
    context.fillStyle = colours.track;
    context.fillRect(left, y, width(), row.h);
    context.save();
    context.beginPath();
    context.rect(left, y - 2, width(), row.h + 4);
    context.clip();
    if (row.kind === "lane") drawLane(row.t, row.lane, y, row.h); else drawMemory(row.m, row.most, y, row.h);
    context.restore();
    context.fillStyle = colours.ink;
    context.textAlign = "left";
    context.fillText(row.label, GUTTER, y + row.h / 2);
  }
  drawEdges(rows, top);
  drawAxis(wide, tall);
}

function drawAxis(wide, tall) {
  const left = layout().left, span = (view.to - view.from) * plan.scale, least = span * 90 / Math.max(width(), 90);
  const power = 10 ** Math.floor(Math.log10(least)), step = [1, 2, 5, 10].find((m) => m * power >= least * 0.999) * power;
  context.fillStyle = colours.card;
  context.fillRect(0, 0, wide, AXIS);
  context.fillStyle = colours.soft;
  context.textAlign = "left";
  context.fillText(plan.unit || "time", GUTTER, AXIS / 2);
  context.textAlign = "center";
  for (let k = Math.ceil(view.from * plan.scale / step - 1e-9); k * step <= view.to * plan.scale; k++) {
    const x = toX(k * step / plan.scale);
    if (x < left - 1) continue;
    context.fillStyle = colours.soft;
    context.fillText(+(k * step).toPrecision(7) + "", x, AXIS / 2);
    context.globalAlpha = 0.35;
    context.fillRect(Math.round(x), AXIS - 4, 1, tall);
    context.globalAlpha = 1;
  }
  context.textAlign = "left";
}

/** The tasks of a lane that may be in view: [first, last). */
function inView(t, lane) {
  const low = t.ptr[lane], high = t.ptr[lane + 1];
  return [after(t.last, view.from, low, high), after(t.start, view.to, low, high)];
}

function drawLane(t, lane, y, h) {
  const [first, last] = inView(t, lane), perTime = width() / (view.to - view.from), base = layout().left;
  const bin = new Float64Array(groups.length);
  let binX = -1, onPath = false, filled = 0;
  const flush = () => {
    if (binX < 0) return;
    let at = y, whole = 0;
    for (const spent of bin) whole += spent;
    const part = Math.min(1, filled);
    if (whole > 0) for (let g = 0; g < bin.length; g++) if (bin[g]) {
      const tall = h * bin[g] / whole;
      context.globalAlpha = 0.35 + 0.65 * part;
      context.fillStyle = groups[g].colour;
      context.fillRect(base + binX, at, 1, tall);
      at += tall;
    }
    context.globalAlpha = 1;
    if (onPath && $("critical").checked) { context.fillStyle = colours.path; context.fillRect(base + binX, y + h - 2, 1, 2); }
    bin.fill(0); binX = -1; onPath = false; filled = 0;
  };
  for (let i = first; i < last; i++) {
    const x = (t.start[i] - view.from) * perTime, wide = (t.end[i] - t.start[i]) * perTime;
    if (wide < 1) {
      const px = Math.max(0, Math.floor(x));
      if (px !== binX) { flush(); binX = px; }
      bin[t.group[i]] += Math.max(wide, 1e-6);
      filled += wide;
      onPath = onPath || t.critical[i] === 1;
      continue;
    }
    flush();
    const top = y + h * t.part[i] / t.of[i], tall = h / t.of[i], gap = wide > 4 ? 0.75 : 0;
    context.fillStyle = groups[t.group[i]].colour;
    context.fillRect(base + x, top, wide - gap, tall);
    if (t.critical[i] && $("critical").checked) {
      context.fillStyle = colours.path;
      context.fillRect(base + x, top + tall - 3, wide - gap, 3);
    }
    if (wide > 16 && tall >= 11) {
      const covered = i + 1 < t.ptr[lane + 1] && t.of[i] === 1 && t.start[i + 1] < t.end[i]; // messages may overlap
      const until = covered ? (t.start[i + 1] - view.from) * perTime : x + wide;
      const name = t.names[i], seen = Math.min(base + until, canvas.clientWidth) - Math.max(base + x, base);
      const fits = [title(t, i), name].find((text) => context.measureText(text).width + 6 <= seen);
      if (fits) {
        context.fillStyle = "#000";
        context.textAlign = "center";
        context.fillText(fits, Math.max(base + x, base) + seen / 2, top + tall / 2 + 0.5);
        context.textAlign = "left";
      }
    }
  }
  flush();
  for (let k = t.pauses.ptr[lane]; k < t.pauses.ptr[lane + 1]; k++) {
    const wide = (t.pauses.end[k] - t.pauses.start[k]) * perTime, g = t.pauses.group[k];
    if (wide < 1 || t.pauses.end[k] < view.from || t.pauses.start[k] > view.to) continue;
    const thick = g === WAIT ? Math.max(2, h * 0.12) : Math.max(4, h * 0.28);
    context.fillStyle = groups[g].colour;
    context.fillRect(base + (t.pauses.start[k] - view.from) * perTime, y + (h - thick) / 2, wide, thick);
  }
  for (const one of [hovered, chosen])
    if (one && one.t === t && t.laneOf[one.i] === lane) {
      const i = one.i, top = y + h * t.part[i] / t.of[i];
      context.strokeStyle = one === chosen ? colours.mark : colours.ink;
      context.lineWidth = one === chosen ? 2.5 : 1.5;
      context.strokeRect(toX(t.start[i]), top, Math.max(2, toX(t.end[i]) - toX(t.start[i])), h / t.of[i]);
    }
}

function drawMemory(m, most, y, h) {
  const scale = most ? h / most : 0, left = layout().left;
  context.fillStyle = groups[0].colour;
  context.globalAlpha = 0.75;
  context.beginPath();
  context.moveTo(left, y + h);
  const first = Math.max(0, after(m.time, view.from) - 1), wide = width();
  let x = left, level = 0, high = 0, px = -1;
  for (let k = first; k < m.time.length && m.time[k] <= view.to; k++) {
    const next = Math.min(Math.max(toX(m.time[k]), left), left + wide), now = Math.floor(next);
    if (now !== px) { context.lineTo(x, y + h - high * scale); context.lineTo(next, y + h - level * scale); px = now; high = 0; }
    level = m.live[k];
    high = Math.max(high, level);
    x = next;
    context.lineTo(next, y + h - high * scale);
  }
  context.lineTo(left + wide, y + h - level * scale);
  context.lineTo(left + wide, y + h);
  context.fill();
  context.globalAlpha = 1;
  const at = y + h - m.peak * scale;
  context.fillStyle = colours.path;
  context.fillRect(left, Math.max(y, at), wide, 1);
  context.fillStyle = colours.ink;
  context.textAlign = "right";
  context.fillText("peak " + (m.bytes ? size(m.peak) : +m.peak.toPrecision(6)), left + wide - 4, Math.max(y + 8, at + 8));
  context.textAlign = "left";
}

/** Lines from the chosen task to the tasks on both ends of its edges. */
function drawEdges(rows, top) {
  if (!chosen || !chosen.t.plan.preds || chosen.t !== chosen.t.plan.predicted) return;
  const { t, i } = chosen, { plan } = t, place = (k) => rows.find((r) => r.t === t && r.lane === t.laneOf[k]);
  const line = (from, to) => {
    const a = place(from), b = place(to);
    if (!a || !b) return;
    const x0 = toX(t.end[from]), x1 = toX(t.start[to]), y0 = a.y + a.h / 2 - top, y1 = b.y + b.h / 2 - top;
    const bend = Math.max(20, Math.abs(x1 - x0) / 3);
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    context.stroke();
  };
  context.save();
  context.beginPath();
  context.rect(layout().left, AXIS, width(), canvas.clientHeight);
  context.clip();
  context.strokeStyle = colours.mark;
  context.lineWidth = 1.5;
  for (const k of rowOf(plan.preds, i).slice(0, 200)) line(k, i);
  context.setLineDash([4, 3]);
  for (const k of rowOf(plan.succs, i).slice(0, 200)) line(i, k);
  context.restore();
}

/* ------------------------------------------------------------------------------------------------------------ input */
/** The task under a point of the canvas: the one that runs there, or the nearest within 3 pixels. */
function taskAt(x, y) {
  if (y < AXIS || x < layout().left) return null;
  const at = y + $("scroller").scrollTop, row = layout().rows.find((r) => r.kind === "lane" && at >= r.y && at <= r.y + r.h);
  if (!row) return null;
  const { t, lane } = row, moment = toTime(x), slack = 3 * (view.to - view.from) / width();
  const low = t.ptr[lane], high = t.ptr[lane + 1], begin = after(t.last, moment - slack, low, high);
  let best = null, least = Infinity;
  for (let i = begin; i < high && t.start[i] <= moment + slack; i++) {
    const inside = (at - row.y) / row.h * t.of[i], own = inside >= t.part[i] && inside < t.part[i] + 1 ? 0 : slack;
    const far = Math.max(t.start[i] - moment, moment - t.end[i], 0) + own;
    if (far < least) { least = far; best = i; }
    if (far === 0) break;
  }
  return best === null ? null : { t, i: best };
}

let dragged = null;
canvas.addEventListener("pointerdown", (e) => {
  dragged = { x: e.clientX, y: e.clientY, from: view.from, to: view.to, top: $("scroller").scrollTop, moved: false };
  canvas.setPointerCapture(e.pointerId);
});
canvas.addEventListener("pointermove", (e) => {
  const box = canvas.getBoundingClientRect();
  if (dragged) {
    const dx = e.clientX - dragged.x, dy = e.clientY - dragged.y;
    if (Math.abs(dx) + Math.abs(dy) > 4) dragged.moved = true;
    if (dragged.moved) {
      const shift = -dx / width() * (dragged.to - dragged.from);
      setView(dragged.from + shift, dragged.to + shift);
      $("scroller").scrollTop = dragged.top - dy;
      $("tip").hidden = true;
      return;
    }
  }
  const found = taskAt(e.clientX - box.left, e.clientY - box.top);
  const same = found && hovered && found.t === hovered.t && found.i === hovered.i;
  hovered = found;
  const tip = $("tip");
  tip.hidden = !found;
  if (found) {
    if (!same) tip.textContent = tipText(found.t, found.i);
    tip.style.left = Math.max(4, Math.min(e.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
    const above = box.top - tip.offsetHeight - 4; // beside the rows, which it would cover
    tip.style.top = Math.max(4, above >= 4 ? above : Math.min(box.bottom + 4, window.innerHeight - tip.offsetHeight - 4)) + "px";
  }
  redraw();
});
canvas.addEventListener("pointerup", (e) => {
  const box = canvas.getBoundingClientRect(), click = dragged && !dragged.moved;
  dragged = null;
  if (click) {
    const found = taskAt(e.clientX - box.left, e.clientY - box.top);
    choose(found ? found.t : null, found ? found.i : 0);
  }
});
canvas.addEventListener("pointerleave", () => { hovered = null; $("tip").hidden = true; redraw(); });
const zoom = (factor, at) => setView(at - (at - view.from) * factor, at + (view.to - at) * factor);
canvas.addEventListener("wheel", (e) => {
  e.preventDefault();
  if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
    const shift = (e.deltaX || e.deltaY) / width() * (view.to - view.from);
    setView(view.from + shift, view.to + shift);
  } else zoom(Math.exp(Math.max(-1, Math.min(1, e.deltaY / 300))), toTime(e.clientX - canvas.getBoundingClientRect().left));
}, { passive: false });
const middle = () => (view.from + view.to) / 2;
const byButton = (factor) => (factor ? zoom(factor, middle()) : setView(0, plan.span * 1.005));
canvas.addEventListener("keydown", (e) => {
  const shift = (view.to - view.from) / 8;
  const act = { "+": () => byButton(0.5), "=": () => byButton(0.5), "-": () => byButton(2), 0: () => byButton(0),
    ArrowLeft: () => setView(view.from - shift, view.to - shift),
    ArrowRight: () => setView(view.from + shift, view.to + shift), n: () => walk(1, 0), p: () => walk(-1, 0),
    ArrowDown: () => walk(0, 1), ArrowUp: () => walk(0, -1), Escape: () => choose(null) }[e.key];
  if (act && !e.ctrlKey && !e.metaKey && !e.altKey) { act(); e.preventDefault(); }
});
for (const button of document.querySelectorAll("[data-zoom]"))
  button.addEventListener("click", () => byButton(+button.dataset.zoom));
$("critical").addEventListener("change", redraw);
$("scroller").addEventListener("scroll", redraw);
$("find").addEventListener("change", () => find($("find").value.trim()));
window.addEventListener("resize", () => { laidOut = null; redraw(); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });

function find(name) {
  for (const t of plan.timelines) {
    const i = t.names.indexOf(name);
    if (i >= 0) { choose(t, i, true); return true; }
  }
  if (name) $("explain").replaceChildren(make("p", {}, `There is no task ${name} here; names are like ${plan.timelines[0].names[0]}.`));
  return false;
}

/** Chooses the task `along` places further on its lane, or the one at the same time `across` lanes further down. */
function walk(along, across) {
  const lanes = layout().rows.filter((r) => r.kind === "lane" && r.t.ptr[r.lane] < r.t.ptr[r.lane + 1]);
  if (!lanes.length) return;
  if (!chosen) { choose(lanes[0].t, lanes[0].t.ptr[lanes[0].lane], true); return; }
  const { t, i } = chosen, at = lanes.findIndex((r) => r.t === t && r.lane === t.laneOf[i]);
  const row = lanes[Math.min(Math.max(at + across, 0), lanes.length - 1)], low = row.t.ptr[row.lane], high = row.t.ptr[row.lane + 1];
  if (!across) choose(t, Math.min(Math.max(i + along, low), high - 1), true);
  else if (row !== lanes[at]) choose(row.t, Math.max(low, after(row.t.start, t.start[i], low, high) - 1), true);
}

/* ----------------------------------------------------------------------------------------------------------- tables */
function plain(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") return Number.isInteger(value) ? value.toLocaleString("en") : (+value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 6 });
  if (Array.isArray(value)) return value.slice(0, 16).map(plain).join(" ") + (value.length > 16 ? " ..." : "");
  if (typeof value === "object") return Object.entries(value).map(([k, v]) => `${k} ${plain(v)}`).join(", ");
  return String(value);
}

function tableOf(head, rows) {
  const cell = (tag) => (c) => (c instanceof Node && tag === "td" ? make(tag, { class: "share" }, c) : make(tag, {}, c));
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map(cell("th")))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell("td")))))));
}

/* ------------------------------------------------------------------------------------------------------------ graph */
const MOST = 2000; // tasks of a graph that can be read

/** Draws the tasks of a plan and their edges: a column for each unit, a row for each kind and micro-batch. */
function showGraph(p) {
  const t = p.predicted, n = t.start.length, W = 64, H = 20, DX = 92, DY = 34, LEFT = 8, TOP = 34;
  $("network").hidden = !p.preds || n > MOST || !n;
  $("graph").replaceChildren();
  if ($("network").hidden) return;
  const kinds = ["F", "other", "B", "O", "W", "U"], parts = t.names.map((name) => /^(\d+)([A-Z]+)(\d+)/.exec(name) || [name, 0, "", 0]);
  const index = (values, order) => new Map([...new Set(values)].sort(order).map((v, k) => [v, k]));
  const rowKey = ([, , kind, micro]) => (kinds.includes(kind) ? kinds.indexOf(kind) : 1) * 1e6 + +micro;
  const columns = index(parts.map((q) => +q[1]), (a, b) => a - b), rows = index(parts.map(rowKey), (a, b) => a - b);
  const at = parts.map((q) => ({ c: columns.get(+q[1]), r: rows.get(rowKey(q)), k: 0 })), cells = new Map();
  for (const a of at) { // tasks of one cell, such as messages, lie beside each other
    const key = a.c * 1e6 + a.r;
    a.k = cells.get(key) || 0;
    cells.set(key, a.k + 1);
  }
  const x = (a) => LEFT + a.c * DX + 6 * a.k, y = (a) => TOP + a.r * DY + 4 * a.k, own = Array.from({ length: n }, () => []);
  const svg = make("svg", { width: LEFT + columns.size * DX + 40, height: TOP + rows.size * DY + 20, role: "img",
    "aria-label": `the graph: ${n} tasks` });
  for (let i = 0; i < n; i++) for (const s of rowOf(p.preds, i)) {
    const a = at[s], b = at[i], way = Math.sign(b.c - a.c), y0 = y(a) + H / 2, y1 = y(b) + H / 2;
    const x0 = x(a) + (way > 0 ? W : way < 0 ? 0 : W / 2), x1 = x(b) + (way > 0 ? 0 : way < 0 ? W : W / 2);
    const far = a.r === b.r && Math.abs(b.c - a.c) > 1 ? Math.min(26, 12 + 2 * Math.abs(b.c - a.c)) : 0; // over those between
    const line = make("path", { "data-from": t.names[s], "data-to": t.names[i], d: way
      ? `M${x0} ${y0 - far / 3}C${x0 + 18 * way} ${y0 - far} ${x1 - 18 * way} ${y1 - far} ${x1} ${y1 - far / 3}`
      : Math.abs(b.r - a.r) > 1 ? `M${x(a) + W} ${y0}C${x(a) + W + 20} ${y0} ${x(b) + W + 20} ${y1} ${x(b) + W} ${y1}` // beside rows between
        : `M${x0} ${y(a) + (b.r > a.r ? H : 0)}L${x1} ${y(b) + (b.r > a.r ? 0 : H)}` });
    own[s].push(line);
    own[i].push(line);
    svg.append(line);
  }
  at.forEach((a, i) => {
    const mark = (on) => () => own[i].forEach((line) => line.classList.toggle("own", on));
    svg.append(make("g", { "data-task": t.names[i], onpointerenter: mark(true), onpointerleave: mark(false), onclick: () => {
      choose(t, i, true);
      $("work").scrollIntoView({ block: "nearest" });
    } }, make("title", {}, title(t, i)), make("rect", { x: x(a), y: y(a), width: W, height: H, rx: 3, fill: groups[t.group[i]].colour }),
    make("text", { x: x(a) + W / 2, y: y(a) + 14 }, t.names[i])));
  });
  $("graph").append(svg);
}

function showTables() {
  showGraph(plan === all ? plans[0] : plan);
  const spent = ["busy", "wait", "transfer", "gap", "idle"];
  const tint = [groups[0].colour, groups[WAIT].colour, groups[TRANSFER].colour, "#7f6fb0", "transparent"];
  const mark = (s) => make("span", {}, make("i", { class: "swatch", style: `background:${tint[spent.indexOf(s)]}` }), s);
  const bar = (u, whole) => make("div", { class: "bar" },
    ...spent.map((s, k) => make("i", { style: `width:${whole ? 100 * u[s] / whole : 0}%;background:${tint[k]}`, title: s })));
  $("usage").replaceChildren(...plan.timelines.flatMap((t) => [
    make("p", {}, make("b", {}, titleOf(t)), " ", make("span", { class: "soft" },
      `of each lane${plan.unit ? ", in " + plan.unit : ""}: busy, waits for other lanes and ranks, transfers, gaps in which it could have run, idle at the end; `
      + "bubble: all that is not busy")),
    tableOf(["lane", "tasks", mark("busy"), "", mark("wait"), mark("transfer"), mark("gap"), "idle", "bubble", ""],
      t.shown.slice(0, 200).map((lane) => t.usage[lane]).map((u) => [u.lane, plain(u.tasks), number(u.busy), share(u.busy, t.makespan), number(u.wait),
        number(u.transfer), number(u.gap), number(u.idle), share(t.makespan - u.busy, t.makespan), bar(u, t.makespan)])),
    ...(t.shown.length > 200 ? [make("p", { class: "soft" }, `and ${t.shown.length - 200} more lanes`)] : [])]));
  $("path").replaceChildren(...plan.timelines.flatMap((t) => {
    const shown = t.path.length > 400 ? [...t.path.slice(0, 200), -1, ...t.path.slice(-200)] : [...t.path];
    return [make("p", {}, make("b", {}, titleOf(t)), ` ${plain(t.path.length)} tasks: `,
      Object.entries(t.path_time).map(([what, s]) => `${what} ${share(s, t.makespan)}`).join(", ")),
    make("p", {}, ...shown.flatMap((i) => (i < 0 ? ["... "] : [link(t, i), " "])))];
  }));
  const each = plan === all ? plans : [plan], headed = (p, text) => (plan === all && text ? `${p.title}\n\n${text}` : text);
  $("grids").hidden = !each.some((p) => p.grid);
  $("grid").replaceChildren(...each.flatMap((p, i) => {
    const grid = make("div");
    grid.innerHTML = p.grid; // made and escaped in Python
    return [plan === all ? `${i ? "\n" : ""}${p.title}` : "", grid];
  }));
  $("report").textContent = each.map((p) => headed(p, p.report)).join("\n\n\n");
  $("remarks").textContent = [...new Set(each.map((p) => p.remarks))].join(" ");
  const used = new Set();
  for (const t of plan.timelines) { for (const g of t.group) used.add(g); for (const g of t.pauses.group) used.add(g); }
  $("legend").replaceChildren(...groups.filter((_, g) => used.has(g)).map((g) =>
    make("span", {}, make("i", { style: `background:${g.colour}` }), g.text)),
  make("span", {}, make("i", { style: `background:${colours.path};height:3px;vertical-align:2px` }), "critical path"));
}

/** The table of `compare`: an arm in each row. */
function armsTable(arms) {
  const names = [...new Set(arms.flatMap((a) => Object.keys(a.test)))].filter((n) => n !== "loss");
  const rows = arms.map((a) => [a.scheduler, plain(a.step_ms.median), `${plain(a.step_ms.p10)} to ${plain(a.step_ms.p90)}`,
    (arms[0].step_ms.median / a.step_ms.median).toFixed(2), plain(a.predicted_step_ms), size(a.peak_bytes), plain(a.loss_last),
    ...names.map((n) => (n === "accuracy" ? share(a.test[n], 1) : plain(a.test[n]))), a.params_sha256.slice(0, 12)]);
  return tableOf(["scheduler", "step, ms", "p10 to p90", "speed-up", "predicted, ms", "peak memory", "last loss", ...names,
    "parameters"], rows);
}

/** Values inside of values as rows of their own, with the names of the way to them. */
function flat(name, value) {
  const words = name.replaceAll("_", " ");
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[words, plain(value)]];
  return Object.entries(value).flatMap(([k, v]) => flat(`${words}, ${k}`, v));
}

/** A chart: lines of [name, steps, values] over steps. */
function chart(what, lines) {
  const W = 440, H = 150, L = 52, B = 20, T = 22, steps = lines.flatMap((l) => [...l[1]]), values = lines.flatMap((l) => [...l[2]]);
  const [first, last, low, high] = [Math.min(...steps), Math.max(...steps), Math.min(...values), Math.max(...values)];
  const x = (s) => L + (last > first ? (s - first) / (last - first) : 0.5) * (W - L - 8);
  const y = (v) => H - B - (high > low ? (v - low) / (high - low) : 0.5) * (H - B - T);
  const text = (px, py, said, anchor = "end") => make("text", { x: px, y: py, "text-anchor": anchor, class: "soft" }, said);
  const said = (v) => (what === "accuracy" ? share(v, 1) : plain(+v.toPrecision(4)));
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${what} by step` },
    text(L - 6, y(high) + 4, said(high)), ...(high > low ? [text(L - 6, y(low) + 4, said(low))] : []),
    text(L, H - 5, `step ${first}`, "start"), text(W - 8, H - 5, String(last)),
    make("text", { x: L, y: 12, class: "head" }, what), make("path", { class: "axis", d: `M${L} ${T - 4}V${H - B}H${W - 8}` }));
  lines.forEach(([name, at, v], n) => {
    const last = v.length - 1;
    svg.append(make("path", { class: `line${name === "test" ? " test" : ""}`, d: [...at].map((s, k) => `${k ? "L" : "M"}${x(s)} ${y(v[k])}`).join("")
      + (last ? "" : "h0.01") }), make("text", { class: name === "test" ? "test" : "", x: W - 8, y: 12 + 13 * n, "text-anchor": "end" },
    `${name} ${said(v[last])}`));
  });
  const move = (e) => { // the step under the pointer
    const box = svg.getBoundingClientRect(), px = (e.clientX - box.left) * W / box.width, tip = $("tip");
    const near = lines.map(([name, at, v]) => {
      const k = [...at].reduce((best, s, i) => (Math.abs(x(s) - px) < Math.abs(x(at[best]) - px) ? i : best), 0);
      return `${name} ${said(v[k])} at step ${at[k]}`;
    });
    tip.hidden = false;
    tip.textContent = near.join("\n");
    tip.style.left = Math.max(4, Math.min(e.clientX + 14, window.innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(4, box.top - tip.offsetHeight - 2) + "px";
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  return svg;
}

/** Step against peak: a point for each plan, which a click or the Enter key chooses. */
function tradeOff(points) {
  const W = 440, H = 190, L = 60, B = 34, T = 22, peaks = points.map((p) => p.peak_bytes), steps = points.map((p) => p.step_ms);
  const scale = (all, v, from, to) => from + (Math.max(...all) > Math.min(...all)
    ? (v - Math.min(...all)) / (Math.max(...all) - Math.min(...all)) : 0.5) * (to - from);
  const x = (p) => scale(peaks, p.peak_bytes, L + 8, W - 14), y = (p) => scale(steps, p.step_ms, H - B - 6, T + 6);
  const text = (px, py, said, anchor = "end", css = "soft") => make("text", { x: px, y: py, "text-anchor": anchor, class: css }, said);
  const [least, most] = [points[0], points[points.length - 1]], said = make("p", { id: "command-of" });
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": "predicted step by planned peak" },
    text(L, 12, "predicted step, ms, by planned peak", "start", "head"), make("path", { class: "axis", d: `M${L} ${T - 4}V${H - B}H${W - 8}` }),
    text(L - 6, y(least) + 4, plain(least.step_ms)), text(L, H - B + 14, size(least.peak_bytes), "start"),
    ...(most === least ? [] : [text(L - 6, y(most) + 4, plain(most.step_ms)), text(W - 8, H - B + 14, size(most.peak_bytes))]),
    make("path", { class: "line", d: points.map((p, i) => (i ? `H${x(p)}V${y(p)}` : `M${x(p)} ${y(p)}h0.01`)).join("") }));
  const dots = points.map((p, i) => {
    const name = `${p.choice}: ${size(p.peak_bytes)}, ${plain(p.step_ms)} ms`;
    const dot = make("circle", { cx: x(p), cy: y(p), r: 5, tabindex: 0, role: "button", "aria-label": name }, make("title", {}, name));
    const choose = () => {
      dots.forEach((other) => other.classList.toggle("on", other === dot));
      said.replaceChildren(make("b", {}, name), make("code", {}, p.command));
      $("plan").value = i;
      show(i);
    };
    dot.addEventListener("click", choose);
    dot.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(); } });
    return dot;
  });
  svg.append(...dots);
  said.textContent = "Choose a point to see its plan and the command that makes it.";
  return [svg, said];
}

function showFigures() {
  const entries = Object.entries(DATA.figures);
  $("curves").replaceChildren(...Object.entries(DATA.curves).map(([what, lines]) =>
    chart(what, lines.map(([name, steps, values]) => [name, unpacked(steps), unpacked(values)]))));
  if (DATA.figures.curve) $("curves").replaceChildren(...tradeOff(DATA.figures.curve));
  if (DATA.figures.arms) $("arms").replaceChildren(armsTable(DATA.figures.arms));
  $("figures").replaceChildren(...entries.filter(([k, v]) => typeof v !== "object" && !k.endsWith("sha256")).slice(0, 12)
    .map(([k, v]) => make("div", { class: "figure" }, make("b", {}, plain(v)), make("span", {}, k.replaceAll("_", " ")))));
  const { diagnosis } = DATA.figures, found = !diagnosis ? [] : "headline" in diagnosis ? [["", diagnosis]]
    : Object.entries(diagnosis);
  $("diagnosis").replaceChildren(...found.map(([name, d]) => make("p", {}, make("b", {}, (name && name + ": ") + d.headline),
    d.fits ? ": as predicted" : d.reasons.length ? ": " + [d.reasons.join("; ") + ".", ...d.advice].join(" ")
      : ": no reason was found")));
  const isTable = ([, v]) => Array.isArray(v) && v.length && typeof v[0] === "object";
  const tables = entries.filter((e) => isTable(e) && e[0] !== "arms"); // these have a table on top
  const rest = entries.filter((e) => !isTable(e) && e[0] !== "diagnosis");
  const shown = tables.flatMap(([k, v]) => [make("p", {}, make("b", {}, DATA.figures.board ? k : k.replaceAll("_", " "))),
    tableOf(Object.keys(v[0]).map((c) => c.replaceAll("_", " ")), v.map((row) => Object.values(row).map(plain)))]);
  if (DATA.figures.board) $("arms").replaceChildren(...shown); // the arena's tables are what its page is for
  $("numbers").replaceChildren(...(DATA.figures.board ? [] : shown),
    tableOf(["name", "value"], rest.flatMap(([k, v]) => flat(k, v))));
}

function show(index) {
  plan = plans[index] || all;
  $("find").placeholder = `find a task, such as ${plan.timelines[0].names[0]}`;
  laidOut = null;
  chosen = hovered = null;
  view = { from: 0, to: plan.span * 1.005 };
  showTables();
  showExplanation();
  redraw();
}

readColours();
if (plans.length > 1 && plans.every((p) => p.of_times === plans[0].of_times)) $("plan").append(make("option", { value: "all" }, "all"));
$("plan").append(...plans.map((p, i) => make("option", { value: i }, p.title)));
$("plan").hidden = plans.length < 2;
$("plan").addEventListener("change", () => show($("plan").value));
showFigures();
show($("plan").value);
if (DATA.task) find(DATA.task);
window.page = { plans, find, explained: (name, which = 0) => {
  const t = plan.timelines[which];
  return explained(t, t.names.indexOf(name));
}, chosen: () => chosen && chosen.t.names[chosen.i], view: () => view, setView, draw, taskAt, toX, layout, share };
