"use strict";
/* The playground: the board, the gallery and the controls. The plans come from the policies in Python (build.py); what
   is proved and priced here is simulator.js. */

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
/* `problem`: the policy and the numbers of the controls; null for a plan from a file. */
const state = { plan: [], planned: [], proved: null, price: null, fault: null, before: null, past: [], micros: 0, asked: 0,
  problem: null };
let plans = {};

function make(tag, attributes = {}, ...children) {
  const element = ["svg", "rect", "text", "path", "g", "title"].includes(tag) ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value); else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const short = (x) => String(+x.toFixed(4));
const copy = (plan) => plan.map((actions) => actions.map((tasks) => [...tasks]));
const colour = (kind) => DATA.palette[kind][0];

/** The plans, packed: {policy: {"ranks,micro-batches,stages per rank": order}}. */
async function unpack() {
  const bytes = Uint8Array.from(atob(DATA.plans), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  plans = JSON.parse(await new Response(stream).text());
}

/** Text whose words between backticks are code. */
const coded = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));

const planOf = (text) => text.split("|").map((rank) => rank.split(" ").filter(Boolean)
  .map((action) => (action.startsWith("(") ? action.slice(1, -1).split(";") : [action])));

/* ---------------------------------------------------------------------------------------------------------- controls */
const cases = () => Object.keys(plans[$("policy").value]).map((key) => key.split(",").map(Number));

/** Fills a list of numbers, and keeps the choice where it still exists, or takes the nearest. */
function fill(id, numbers, wanted = +$(id).value || { ranks: 4, micros: 8 }[id]) {
  const all = [...new Set(numbers)].sort((a, b) => a - b);
  const nearest = all.reduce((best, n) => (Math.abs(n - wanted) < Math.abs(best - wanted) ? n : best), all[0]);
  $(id).replaceChildren(...all.map((n) => make("option", { value: n }, String(n))));
  $(id).value = nearest;
  return nearest;
}

/** Shows the plan of the controls. `policy`: it is another one, so its own number of stages per rank comes first. */
function choose(policy = false) {
  const about = DATA.gallery.find((entry) => entry.name === $("policy").value);
  const ranks = fill("ranks", cases().map((c) => c[0]));
  const micros = fill("micros", cases().filter((c) => c[0] === ranks).map((c) => c[1]));
  const chunks = fill("chunks", cases().filter((c) => c[0] === ranks && c[1] === micros).map((c) => c[2]),
    policy ? about.chunks : +$("chunks").value);
  state.problem = { name: about.name, ranks, micros, chunks };
  load(ordered(), micros, chunks);
  showOrigin();
}

/** The plan of the controls' policy for the controls' times; of a policy that searches, for F = O = W = 1. */
function ordered() {
  const { name, ranks, micros, chunks } = state.problem, now = times();
  const stored = (of) => planOf(plans[of][[ranks, micros, chunks]]);
  return name in Policies.orders && now.F > 0 && now.O > 0 && now.W > 0
    ? Policies.orders[name]({ ranks, micros, chunks, times: now, stored }) : stored(name);
}

/** What the policy is, and for which times this is its order. */
function showOrigin() {
  if (!state.problem) return;
  const { name, ranks, micros } = state.problem, now = times();
  const plain = now.F === 1 && now.O === 1 && now.W === 1 && !now.latency;
  const flags = Object.entries({ forward: now.F, "output-grad": now.O, "weight-grad": now.W, latency: now.latency })
    .map(([flag, value]) => ` --${flag} ${value}`).join("");
  $("origin").replaceChildren(make("span", {}, ...coded(DATA.gallery.find((entry) => entry.name === name).about), " "),
    ...(name in Policies.orders ? ["The order is the one for these times."]
      : !DATA.searched.includes(name) ? ["The order is the same for all times."]
        : plain ? ["The order comes from a search for these times."]
          : ["This order comes from a search for F = O = W = 1 without latency; the figures are for the times above. For "
            + "the order that a search finds for them, import the file of ", make("code", {}, `minidl plan --scheduler ${name}`
            + ` --ranks ${ranks} --micro-batches ${micros}${flags} --save plan.csv`)]));
}

/** Takes a plan as the one to start from. */
function load(plan, micros, asked) {
  focused = { rank: Math.max(0, plan.findIndex((actions) => actions.length)), n: 0 };
  Object.assign(state, { plan: copy(plan), planned: copy(plan), past: [], micros, asked, before: null });
  update();
  state.before = state.price;
  showFigures();
}

const times = () => ({ F: +$("F").value || 0, O: +$("O").value || 0, W: +$("W").value || 0,
  latency: Math.max(0, +$("latency").value || 0) });

/** Proves and prices the plan, and shows it. */
function update() {
  state.fault = state.proved = state.price = null;
  try {
    state.proved = Simulator.prove(state.plan, state.plan.length, state.micros, state.asked);
    state.price = Simulator.price(state.proved, times());
  } catch (fault) {
    if (!(fault instanceof Simulator.Fault)) throw fault;
    state.fault = fault;
  }
  showFigures();
  showBoard();
}

function showFigures() {
  const { price, before, fault } = state;
  $("verdict").className = fault ? "bad" : "";
  $("verdict").textContent = fault ? `not valid: ${fault.message}` : `valid on ${state.plan.length} ranks`;
  const figure = (name, key, value = (p) => p[key]) => {
    const now = price && value(price), then = before && value(before), delta = price && before ? now - then : 0;
    const change = Math.abs(delta) > 1e-9 ? make("i", {}, ` ${delta > 0 ? "+" : ""}${short(delta)}`) : "";
    return make("div", { class: "figure", "data-figure": key }, make("b", {}, price ? short(now) : "-", change),
      make("span", {}, name));
  };
  $("figures").replaceChildren(figure("makespan", "makespan"), figure("largest span", "max_span"),
    figure("period", "period"), figure("bubble rate", "bubble_rate"),
    figure("peak activations", "peak_activations", (p) => Math.max(...p.peak_activations)));
  $("undo").disabled = !state.past.length;
  const command = `minidl check plan.csv --ranks ${state.plan.length} --micro-batches ${state.micros}`
    + (state.asked ? ` --chunks ${state.asked}` : "");
  $("command").replaceChildren(...command.split(" ").flatMap((word) => [make("span", {}, word), " "])); // no break within
}

/* ------------------------------------------------------------------------------------------------------------- board */
const ROW = 34, GAP = 6, LEFT = 64, TOP = 22;

/** Where each action is drawn: by its time; in a plan that is not valid by its place, since it has no time. */
function places() {
  const { plan, proved, price } = state, found = [];
  plan.forEach((actions, rank) => actions.forEach((tasks, n) => {
    if (price) {
      const t = proved.actions[proved.lanes[rank][n]].members[0];
      found.push({ rank, n, tasks, from: price.start[t], to: price.end[t] });
    } else found.push({ rank, n, tasks, from: n, to: n + 1 });
  }));
  return found;
}

function showBoard(scale = null) {
  const all = places(), span = Math.max(...all.map((a) => a.to), 1e-9), wide = Math.max(500, $("board").clientWidth - LEFT - 24);
  const shortest = Math.min(...all.map((a) => (a.to - a.from) / (a.tasks.length || 1)));
  state.scale = scale || Math.min(Math.max(wide / span, 17 / shortest), 72 / shortest);
  const height = TOP + state.plan.length * (ROW + GAP), width = LEFT + span * state.scale + 12;
  const svg = make("svg", { width, height });
  state.plan.forEach((_, rank) => svg.append(
    make("rect", { class: "track", x: LEFT, y: TOP + rank * (ROW + GAP), width: span * state.scale, height: ROW }),
    make("text", { class: "ink", x: 6, y: TOP + rank * (ROW + GAP) + ROW / 2 }, `rank ${rank}`)));
  if (state.price) {
    const least = 60 / state.scale, power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= least * 0.999);
    for (let k = 0; k * step <= span * 1.0001; k++) svg.append(
      make("path", { class: "tick", d: `M${LEFT + k * step * state.scale} ${TOP - 4}V${height}` }),
      make("text", { class: "soft", x: LEFT + k * step * state.scale, y: 12 }, short(k * step)));
  }
  for (const a of all) svg.append(drawn(a));
  $("board").replaceChildren(svg);
}

function drawn({ rank, n, tasks, from, to }) {
  const x = LEFT + from * state.scale, width = (to - from) * state.scale, y = TOP + rank * (ROW + GAP);
  const group = make("g", { class: "task", tabindex: rank === focused.rank && n === focused.n ? 0 : -1, role: "button",
    "aria-label": `${tasks.join(" and ")} on rank ${rank}`, "data-rank": rank, "data-place": n, "data-task": tasks.join(";") });
  tasks.forEach((name, i) => {
    const { kind, micro, stage } = Simulator.parts(name), tall = ROW / tasks.length, top = y + i * tall;
    const culprit = state.fault && state.fault.tasks.includes(name);
    group.append(make("rect", { x, y: top, width: Math.max(1, width - 1), height: tall - (tasks.length > 1 ? 1 : 0),
      fill: colour(kind), class: culprit ? "culprit" : state.fault ? "stuck" : "" }));
    const text = [name, `${kind}${micro}`, String(micro)].find((t) => t.length * 6.7 + 4 <= width);
    if (text) group.append(make("text", { class: state.fault && !culprit ? "on faint" : "on", x: x + width / 2, y: top + tall / 2 }, text));
    group.append(make("title", {}, `${name}: ${DATA.palette[kind][1]} of stage ${stage}, micro-batch ${micro}`
      + (state.price ? `, ${short(from)} to ${short(to)}` : "")));
  });
  group.addEventListener("pointerdown", (e) => hold(e, rank, n));
  group.addEventListener("keydown", (e) => step(e, rank, n));
  return group;
}

/* ---------------------------------------------------------------------------------------------------------- keyboard */
let focused = { rank: 0, n: 0 }; // the task to which Tab leads

/** Arrows go to another task; with Shift they move this one along its rank or to another rank. */
function step(e, rank, n) {
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key] || [];
  if (down === undefined) return;
  e.preventDefault();
  const to = Math.min(Math.max(rank + down, 0), state.plan.length - 1), before = places();
  const here = before.find((a) => a.rank === rank && a.n === n).from;
  const near = before.filter((a) => a.rank === to && a.from < here).length; // the place at the same time
  let place = down ? near : n + right;
  if (place < 0 || (down && to === rank)) return;
  if (e.shiftKey) {
    if (place > state.plan[to].length - (down ? 0 : 1)) return;
    state.past.push(copy(state.plan));
    state.plan[to].splice(place, 0, ...state.plan[rank].splice(n, 1));
  } else if (!state.plan[to].length) return;
  else place = Math.min(place, state.plan[to].length - 1);
  focused = { rank: to, n: place };
  if (e.shiftKey) update(); else showBoard(state.scale);
  const task = $("board").querySelector(`[data-rank="${to}"][data-place="${place}"]`);
  task.focus();
  task.scrollIntoView({ block: "nearest", inline: "nearest" });
}

/* -------------------------------------------------------------------------------------------------------------- drag */
let held = null;

function hold(e, rank, n) {
  if (e.button) return;
  e.preventDefault();
  const box = $("board").getBoundingClientRect();
  held = { rank, n, tasks: state.plan[rank][n], from: copy(state.plan), moved: false, scale: state.scale, x: e.clientX,
    y: e.clientY, left: box.left, others: places().filter((a) => a.rank !== rank || a.n !== n) };
  $("board").querySelector(`[data-rank="${rank}"][data-place="${n}"]`).classList.add("held");
}

/** The held action goes before the first other one of the row whose middle is right of the pointer. */
function drag(e) {
  if (!held) return;
  if (!held.moved && Math.abs(e.clientX - held.x) + Math.abs(e.clientY - held.y) < 5) return;
  held.moved = true;
  const box = $("board").getBoundingClientRect();
  const x = (e.clientX - box.left - 5 + $("board").scrollLeft - LEFT) / held.scale;
  const row = Math.floor((e.clientY - box.top - 5 - TOP + GAP / 2) / (ROW + GAP));
  const rank = Math.min(Math.max(row, 0), state.plan.length - 1);
  const others = held.others.filter((a) => a.rank === rank);
  const before = others.findIndex((a) => (a.from + a.to) / 2 > x), place = before < 0 ? others.length : before;
  const plan = copy(held.from);
  plan[held.rank].splice(held.n, 1);
  plan[rank].splice(place, 0, held.tasks);
  if (JSON.stringify(plan) === JSON.stringify(state.plan)) return;
  state.plan = plan;
  update();
  $("board").querySelector(`[data-rank="${rank}"][data-place="${place}"]`).classList.add("held");
}

function drop() {
  if (!held) return;
  if (JSON.stringify(held.from) !== JSON.stringify(state.plan)) state.past.push(held.from);
  held = null;
  update();
}

window.addEventListener("pointermove", drag);
window.addEventListener("pointerup", drop);
window.addEventListener("pointercancel", drop);
window.addEventListener("keydown", (e) => {
  if (held && e.key === "Escape") { state.plan = held.from; held = null; update(); }
  else if ((e.ctrlKey || e.metaKey) && e.key === "z") { undo(); e.preventDefault(); }
});

function undo() {
  if (state.past.length) { state.plan = state.past.pop(); update(); }
}

/* ------------------------------------------------------------------------------------------------------------- files */
function imported(text) {
  try {
    const plan = Simulator.read(text), all = plan.flat(2).map(Simulator.parts);
    if (!all.length) throw new Simulator.Fault("the plan is empty");
    $("origin").textContent = "A plan of your own.";
    state.problem = null;
    load(plan, Math.max(...all.map((t) => t.micro)) + 1, 0);
  } catch (fault) {
    if (!(fault instanceof Simulator.Fault)) throw fault;
    $("verdict").className = "bad";
    $("verdict").textContent = `this file cannot be read: ${fault.message}`;
  }
}

function exported() {
  const url = URL.createObjectURL(new Blob([Simulator.written(state.plan)], { type: "text/csv" }));
  make("a", { href: url, download: "plan.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/* ----------------------------------------------------------------------------------------------------------- gallery */
function card(entry) {
  const playable = entry.name in plans, span = Math.max(...entry.tasks.map((t) => t[2]), 1), wide = 330, high = 11;
  const rows = 1 + Math.max(0, ...entry.tasks.map((t) => t[0])), scale = wide / span;
  const svg = make("svg", { width: wide, height: rows * (high + 2), role: "img", "aria-label": `the order of ${entry.name}` });
  for (let r = 0; r < rows; r++) svg.append(make("rect", { class: "track", x: 0, y: r * (high + 2), width: wide, height: high }));
  for (const [rank, from, to, kind, part, of] of entry.tasks) svg.append(make("rect", { x: from * scale, fill: colour(kind),
    y: rank * (high + 2) + high * part / of, width: Math.max(0.5, (to - from) * scale - 0.6), height: high / of }));
  const figures = entry.bubble === null ? "figures: minidl simulate, which searches for them"
    : `bubble ${(100 * entry.bubble).toFixed(1)} %, peak ${short(entry.peak)}${entry.stale ? ", trains on older weights" : ""}`;
  const play = () => { $("policy").value = entry.name; choose(true); window.scrollTo({ top: 0, behavior: "smooth" }); };
  return make("div", { class: playable ? "card play" : "card", "data-policy": entry.name, tabindex: playable ? 0 : -1,
    ...(playable ? { role: "button", onclick: play,
      onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); play(); } } } : {}) },
  make("h3", {}, entry.name), svg, make("p", {}, make("b", {}, figures)), make("p", { class: "soft" }, ...coded(entry.about)));
}

async function start() {
  await unpack();
  $("policy").append(...Object.keys(plans).map((name) => make("option", { value: name }, name)));
  $("policy").value = "zb_h1";
  $("legend").append(...["F", "O", "W", "B"].map((kind) =>
    make("span", {}, make("i", { style: `background:${colour(kind)}` }), DATA.palette[kind][1])));
  $("gallery").append(...DATA.gallery.map(card));
  for (const id of ["policy", "ranks", "micros", "chunks"])
    $(id).addEventListener("change", () => choose(id === "policy"));
  for (const id of ["F", "O", "W", "latency"]) $(id).addEventListener("input", () => {
    const plan = state.plan, edited = JSON.stringify(plan) !== JSON.stringify(state.planned);
    if (state.problem) state.planned = ordered();
    state.plan = copy(state.planned);
    update();
    state.before = state.price; // what the plan as planned costs with these times
    if (edited) state.plan = plan;
    else state.past = [];
    update();
    showOrigin();
  });
  $("undo").addEventListener("click", undo);
  $("reset").addEventListener("click", () => { state.past.push(state.plan); state.plan = copy(state.planned); update(); });
  $("export").addEventListener("click", exported);
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    if (file) imported(await file.text());
    $("file").value = "";
  });
  window.addEventListener("resize", () => showBoard());
  choose(true);
  window.playground = { state, plans, imported, places, planOf };
}

start();
