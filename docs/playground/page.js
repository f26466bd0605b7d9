"use strict";
/* The playground: the board, the gallery and the controls. The plans come from the policies in Python (build.py); what
   is proved and priced here is simulator.js. */

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
/* `problem`: the policy and the numbers of the controls; null for a plan from a file, a link or a challenge. `level`: the
   challenge, or null. `other`: the plan that is drawn above, proved and priced. `moment`: the time at which a run stands. */
const state = { plan: [], planned: [], proved: null, price: null, fault: null, before: null, past: [], micros: 0, asked: 0,
  problem: null, level: null, other: null, moment: null };
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
  setLevel(null);
  load(ordered(state.problem), micros, chunks);
}

/** The plan of a policy for the controls' times; of a policy that searches, for F = O = W = 1. */
function ordered({ name, ranks, micros, chunks }) {
  const now = times();
  const stored = (of) => planOf(plans[of][[ranks, micros, chunks]]);
  return name in Policies.orders ? Policies.orders[name]({ ranks, micros, chunks, times: now, stored }) : stored(name);
}

/** Explains the policy, and for which times this is its order. */
function showOrigin() {
  if (!state.problem) {
    $("origin").textContent = state.level ? "" : "A plan of your own.";
    return;
  }
  const { name, ranks, micros } = state.problem, now = times();
  const plain = now.F === 1 && now.O === 1 && now.W === 1 && !now.latency;
  const flags = Object.entries({ forward: now.F, "output-grad": now.O, "weight-grad": now.W, latency: now.latency })
    .map(([flag, value]) => ` --${flag} ${value}`).join("");
  $("origin").replaceChildren(make("span", {}, ...coded(DATA.gallery.find((entry) => entry.name === name).about), " "),
    ...(name in Policies.orders ? [`The order is the one for these times${stageFactors() ? " and equal stages" : ""}.`]
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
  showOrigin();
  offerOthers();
  update();
  state.before = state.price;
  showFigures();
}

/* -------------------------------------------------------------------------------------------------------- challenges */
/** The plan of a policy, each B parted into O and W. */
const parted = (plan) => plan.map((actions) => actions.flatMap((tasks) => (tasks[0].includes("B")
  ? [[tasks[0].replace("B", "O")], [tasks[0].replace("B", "W")]] : [tasks])));

function setLevel(level) {
  state.level = level;
  $("level").value = level ? CHALLENGES.indexOf(level) : "";
}

/** Begins a challenge: sets all controls and loads its first plan. */
function challenge(level) {
  const { ranks, micros, start } = level, stored = start in plans;
  if (stored) $("policy").value = start;
  fill("ranks", stored ? cases().map((c) => c[0]) : [ranks], ranks);
  fill("micros", stored ? cases().filter((c) => c[0] === ranks).map((c) => c[1]) : [micros], micros);
  fill("chunks", [1], 1);
  for (const id of ["F", "O", "W"]) $(id).value = level[id] || 1;
  $("latency").value = level.latency || 0;
  $("stages").value = (level.stages || []).join(" ");
  state.problem = null;
  setLevel(level);
  $("other").value = "planned";
  load(parted(planOf(stored ? plans[start][[ranks, micros, 1]] : start)), micros, 1);
  showBlock();
}

function showChallenge() {
  const { level, price } = state;
  $("challenge").hidden = !level;
  if (!level) return;
  const peak = price && Math.max(...price.peak_activations), number = CHALLENGES.indexOf(level) + 1;
  const solved = price && price[level.figure] <= level.goal + 1e-9 && !(peak > level.peak + 1e-9);
  const goal = `${level.figure === "makespan" ? "a makespan" : "a largest span"} of at most ${level.goal}`
    + (level.peak ? ` with a peak of at most ${level.peak}` : "");
  $("challenge").replaceChildren(make("b", {}, `${number}. ${level.name}`), `: ${level.text} Goal: ${goal}. `, solved
    ? make("b", { class: "solved" }, `Solved! It is proved that no order is better${level.by ? `; ${level.by} gets there too` : ""}.`, " ")
    : "",
  ...(solved && CHALLENGES[number] ? [make("button", { onclick: () => challenge(CHALLENGES[number]) }, "next challenge")] : []));
}

/* ------------------------------------------------------------------------------------------------ the plan above, links */
/** Fills the list of plans that can be drawn above, and keeps the choice if it is still there. */
function offerOthers() {
  const { ranks, micros } = { ranks: state.plan.length, micros: state.micros }, before = $("other").value;
  const fits = Object.keys(plans).filter((name) => chunksOf(name, ranks, micros).length);
  $("other").replaceChildren(make("option", { value: "" }, "nothing"), make("option", { value: "planned" }, "the first plan"),
    ...fits.map((name) => make("option", { value: name }, name)));
  $("other").value = before === "planned" || fits.includes(before) ? before : "";
}

const chunksOf = (name, ranks, micros) => Object.keys(plans[name]).map((key) => key.split(",").map(Number))
  .filter((c) => c[0] === ranks && c[1] === micros).map((c) => c[2]);

/** Proves and prices the plan that is drawn above. */
function priceOther() {
  const name = $("other").value, ranks = state.plan.length, { micros } = state;
  state.other = null;
  if (!name) return;
  const chunks = name === "planned" ? state.asked : Math.min(...chunksOf(name, ranks, micros));
  const plan = name === "planned" ? state.planned : ordered({ name, ranks, micros, chunks });
  try {
    const proved = Simulator.prove(plan, ranks, micros, chunks);
    state.other = { name, plan, proved, price: priced(proved) };
  } catch (fault) {
    if (!(fault instanceof Simulator.Fault)) throw fault;
  }
}

const NUMBERS = ["ranks", "micros", "chunks"], TIMES = ["F", "O", "W", "latency", "stages"];
const edited = () => JSON.stringify(state.plan) !== JSON.stringify(state.planned);

/** Writes the controls, and the plan if it is edited, into the address. */
function writeLink() {
  const link = new URLSearchParams(), { problem, level } = state;
  if (level) link.set("challenge", CHALLENGES.indexOf(level) + 1);
  else {
    if (problem) for (const [key, value] of Object.entries(problem)) link.set(key === "name" ? "policy" : key, value);
    if ($("recompute").value) link.set("recompute", "all");
    for (const id of TIMES) if ($(id).value !== $(id).defaultValue) link.set(id, $(id).value.trim().replaceAll(/[\s,]+/g, "_"));
  }
  if ($("other").value) link.set("above", $("other").value);
  for (const id of VARY) if ($(id).value !== fresh(id)) link.set(id, $(id).value);
  if (block.start && blockText() !== block.plain) link.set("block", blockText());
  if (!problem && !level) Object.entries({ micros: state.micros, chunks: state.asked }).forEach(([key, n]) => link.set(key, n));
  if (edited() || (!problem && !level))
    link.set("plan", state.plan.map((actions) => actions.map((tasks) => tasks.join("-")).join(".")).join("_"));
  history.replaceState(null, "", `#${link}`);
}

/** Shows the plan of the address. Returns whether there is one. */
function readLink() {
  const link = new URLSearchParams(location.hash.slice(1)), level = CHALLENGES[link.get("challenge") - 1], policy = link.get("policy");
  readBlock(link.get("block"));
  for (const id of VARY) $(id).value = link.get(id) || fresh(id);
  if (!level && !(policy in plans) && !link.get("plan")) return false;
  $("recompute").value = link.get("recompute") === "all" ? "all" : "";
  for (const id of TIMES) $(id).value = (link.get(id) || $(id).defaultValue).replaceAll("_", " ");
  const shown = link.get("plan") && link.get("plan").split("_").map((rank) => rank.split(".").filter(Boolean).map((a) => a.split("-")));
  if (level) challenge(level);
  else if (policy in plans) {
    $("policy").value = policy;
    for (const id of NUMBERS) $(id).replaceChildren(make("option", { value: link.get(id) })); // `choose` takes the nearest
    choose();
  }
  try {
    if (shown) shown.flat(2).map(Simulator.parts);
    if (shown && (level || policy in plans)) state.plan = shown;
    else if (shown) { state.problem = null; setLevel(null); load(shown, +link.get("micros") || 1, Math.min(+link.get("chunks") || 0, 64)); }
    $("other").value = link.get("above") || "";
    if ($("other").selectedIndex < 0) $("other").value = "";
    update();
  } catch (fault) {
    if (!(fault instanceof Simulator.Fault)) throw fault;
    refuse("this link cannot be read", fault);
  }
  return true;
}

function refuse(what, { message, why }) {
  $("verdict").className = "bad";
  $("verdict").textContent = `${what}: ${message}`;
  $("why").textContent = why && `Why not? ${why}`;
}

/** The times of the controls. A field that holds no time yet, such as `0` on the way to `0.5`, keeps its last one. */
function times() {
  for (const id of ["F", "O", "W", "latency"]) {
    const value = $(id).valueAsNumber, good = value >= (id === "latency" ? 0 : LEAST) && value <= MOST;
    if (good) lasting[id] = value;
    $(id).setAttribute("aria-invalid", !good);
    $(id).title = good ? "" : `a number from ${id === "latency" ? 0 : LEAST} to ${MOST}; until then ${lasting[id]}`;
  }
  const recompute = !state.level && $("recompute").value === "all";
  return { ...lasting, O: lasting.O + (recompute ? lasting.F : 0), recompute };
}

/** How many times as long each stage takes; null if all are equal, or the field does not have a number for each stage. */
function stageFactors(stages = state.proved ? state.proved.place.stages : 0) {
  const text = $("stages").value.trim(), numbers = text.split(/[\s,]+/).map(Number);
  const good = !text || (numbers.length === stages && numbers.every((n) => n >= LEAST && n <= MOST));
  $("stages").setAttribute("aria-invalid", !good);
  $("stages").title = good ? "" : `${stages} numbers from ${LEAST} to ${MOST}, one for each stage; until then all are equal`;
  return text && good ? numbers : null;
}

const priced = (proved) => Simulator.price(proved, { ...times(), stages: stageFactors(proved.place.stages) });
const LEAST = 0.01, MOST = 10000, lasting = { F: 1, O: 1, W: 1, latency: 0 };

/** Proves and prices the plan, and shows it. */
function update() {
  state.fault = state.proved = state.price = null;
  try {
    state.proved = Simulator.prove(state.plan, state.plan.length, state.micros, state.asked);
    state.price = priced(state.proved);
  } catch (fault) {
    if (!(fault instanceof Simulator.Fault)) throw fault;
    state.fault = fault;
  }
  priceOther();
  state.moment = null;
  showFigures();
  showBoard();
  showChallenge();
  say("");
  study();
  if (!held) writeLink();
}

/* ------------------------------------------------------------------------------------------------------------- coach */
const say = (...what) => $("coach").replaceChildren(...what);
const orders = new Map(); // "ranks,micro-batches,stages per rank" -> {order as text: policy}

/** The policy whose order this plan has; undefined if there is none. */
function built(plan, micros, chunks) {
  const key = `${plan.length},${micros},${chunks}`;
  if (!orders.has(key)) orders.set(key, Object.fromEntries(Object.entries(plans).filter(([, of]) => key in of).reverse()
    .map(([name, of]) => [Coach.order(planOf(of[key])), name])));
  return orders.get(key)[Coach.order(plan)];
}

/** What the action waits for, or the gap before it is there for. */
function explain(rank, n) {
  const { proved, price } = state;
  if (price && !held) say(Coach.wait(proved, price, times().latency, rank, n).text);
}

/** The best move along a rank, with a button that does it. */
function advise() {
  const { plan, micros, asked, proved, level } = state, figure = level ? level.figure : "makespan";
  if (!proved) return say("Only a plan that is valid has a best move.");
  const all = { ...times(), stages: stageFactors(proved.place.stages) };
  const move = Coach.better(plan, micros, asked, all, figure, level && level.peak ? level.peak : Infinity, 1000);
  say(Coach.advice(plan, move, figure === "makespan" ? "makespan" : "largest span"), ...(move ? [" ", make("button", { id: "doit",
    onclick: () => { state.past.push(plan); state.plan = move.plan; update(); } }, "do it")] : []));
}

/** Goes on in time until something strange, and says it. */
function run() {
  const { proved, price, level, moment } = state;
  if (!proved) return say("Only a plan that is valid can run.");
  const all = Coach.strange(proved, price, times().latency, level && level.peak ? level.peak : Infinity);
  const next = all.find(({ at }) => moment === null || at > moment + 1e-9) || all[0];
  state.moment = next.at;
  showBoard(state.scale);
  say(...all.filter(({ at }) => Math.abs(at - next.at) < 1e-9).flatMap(({ text }) => [text, make("br")]));
}

function showFigures() {
  const { price, before, fault } = state;
  $("verdict").className = $("why").textContent = "";
  $("verdict").textContent = `valid on ${state.plan.length} rank${state.plan.length > 1 ? "s" : ""}`;
  const name = !fault && (edited() || !(state.problem || state.level)) && built(state.plan, state.micros, state.proved.place.stages / state.plan.length);
  $("built").textContent = name ? `You built ${name}.` : "";
  if (fault) refuse("not valid", fault);
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
const ROW = 34, MEMORY = 16, GAP = 6, PITCH = ROW + MEMORY + GAP, LEFT = 64, TOP = 22, HEAD = 22, LETTER = 6.7;
const WIDEST = 8000; // pixels

/** Where each action is drawn: by its time; in a plan that is not valid by its place, since it has no time. */
function places({ plan, proved, price } = state) {
  const found = [];
  plan.forEach((actions, rank) => actions.forEach((tasks, n) => {
    if (price) {
      const t = proved.first[proved.lane[rank] + n];
      found.push({ rank, n, tasks, from: price.start[t], to: price.end[t] });
    } else found.push({ rank, n, tasks, from: n, to: n + 1 });
  }));
  return found;
}

/** Draws the plan; `scale`: pixels per unit of time, which follows from the width if it is not given. Another plan is
    drawn above it on the same scale. */
function showBoard(scale = null) {
  const { other, price } = state, all = places(), above = other ? places(other) : [], both = price ? [...all, ...above] : all;
  const spanOf = (list) => Math.max(...list.map((a) => a.to), 1e-9), span = spanOf(both);
  const wide = Math.max(500, $("board").clientWidth - LEFT - 24), shortest = Math.min(...both.map((a) => a.to - a.from));
  const named = LETTER * Math.max(...all.flatMap((a) => a.tasks.map((name) => name.length))) + 4; // what a name needs
  state.scale = scale || Math.min(Math.max(wide / span, named / shortest), Math.max(72, named) / shortest, WIDEST / span);
  if (price) state.lastScale = state.scale;
  const rows = state.plan.length * PITCH, upper = other ? rows + 2 * HEAD : 0, aboveScale = state.lastScale || state.scale;
  state.top = upper + TOP;
  const width = LEFT + Math.max(span * state.scale, other ? spanOf(above) * aboveScale : 0) + 12, height = state.top + rows;
  const svg = make("svg", { width, height });
  if (other) {
    const { makespan, peak_activations: peaks } = other.price, name = other.name === "planned" ? "the first plan" : other.name;
    svg.append(title(HEAD / 2, `${name}: makespan ${short(makespan)}, peak ${short(Math.max(...peaks))}`),
      title(upper - HEAD / 2, "your plan"));
    drawRows(svg, HEAD, other, above, aboveScale, false);
  }
  if (price) {
    const least = 60 / state.scale, power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= least * 0.999);
    for (let k = 0; k * step <= span * 1.0001; k++) svg.append(
      make("path", { class: "tick", d: `M${LEFT + k * step * state.scale} ${state.top - 4}V${height}` }),
      make("text", { class: "soft", x: LEFT + k * step * state.scale, y: state.top - 10 }, short(k * step)));
  }
  drawRows(svg, state.top, state, all, state.scale, true);
  if (price && state.moment !== null) svg.append(make("path", { class: "moment", d: `M${LEFT + state.moment * state.scale} ${state.top - 4}V${height}` }));
  $("board").replaceChildren(svg);
}

const title = (y, text) => make("text", { class: "ink name", x: 6, y }, text);

/** The ranks of a plan with the activations that each holds, from `top` down. `own`: its tasks can be moved. */
function drawRows(svg, top, { plan, price }, all, scale, own) {
  const span = Math.max(...all.map((a) => a.to)), cap = state.level && state.level.peak;
  const most = Math.max(cap || 0, ...[state, state.other].flatMap((p) => (p && p.price ? p.price.peak_activations : [])));
  plan.forEach((_, rank) => {
    const y = top + rank * PITCH, base = y + ROW + MEMORY, level = (n) => base - n / most * (MEMORY - 3);
    svg.append(make("rect", { class: "track", x: LEFT, y, width: span * scale, height: ROW }),
      make("text", { class: "ink", x: 6, y: y + ROW / 2 }, `rank ${rank}`));
    if (!price) return;
    const here = all.filter((a) => a.rank === rank), at = (time) => LEFT + time * scale;
    const steps = here.map((a, n) => `V${level(price.live[rank][n])}H${at(n + 1 < here.length ? here[n + 1].from : a.to)}`);
    if (here.length) svg.append(make("path", { class: "live", "data-live": own ? rank : "",
      d: `M${at(here[0].from)} ${base}${steps.join("")}V${base}Z` }));
    if (cap) svg.append(make("path", { class: "cap", d: `M${LEFT} ${level(cap)}H${at(span)}` }));
    svg.append(make("text", { class: "peak", x: 6, y: base - 2 }, `peak ${short(price.peak_activations[rank])}`));
  });
  if (own && price) for (const { rank, n, from, to, text } of Coach.gaps(state.proved, price, times().latency))
    svg.append(make("rect", { class: "gap", "data-gap": `${rank}/${n}`, x: LEFT + from * scale, y: top + rank * PITCH, height: ROW,
      width: (to - from) * scale, onpointerenter: () => explain(rank, n), onclick: () => explain(rank, n) }, make("title", {}, text)));
  for (const a of all) svg.append(drawn(a, top, scale, own));
}

function drawn({ rank, n, tasks, from, to }, upper, scale, own) {
  const x = LEFT + from * scale, width = (to - from) * scale, y = upper + rank * PITCH, fault = own && state.fault;
  const { F, O, W, recompute } = times();
  const group = make("g", !own ? {} : { class: "task", tabindex: rank === focused.rank && n === focused.n ? 0 : -1, role: "button",
    "aria-label": `${tasks.join(" and ")} on rank ${rank}`, "data-rank": rank, "data-place": n, "data-task": tasks.join(";") });
  tasks.forEach((name, i) => {
    const { kind, micro, stage } = Simulator.parts(name), tall = ROW / tasks.length, top = y + i * tall;
    const culprit = fault && fault.tasks.includes(name), soon = own && held && held.ready.includes(name);
    group.append(make("rect", { x, y: top, width: Math.max(1, width - 1), height: tall - (tasks.length > 1 ? 1 : 0),
      fill: colour(kind), class: `${culprit ? "culprit" : fault ? "stuck" : ""}${soon ? " ready" : ""}` }));
    if (recompute && !fault && "OB".includes(kind)) group.append(make("rect", { x, y: top, height: tall - (tasks.length > 1 ? 1 : 0),
      width: width * F / (kind === "B" ? O + W : O) / tasks.length, fill: colour("R"), class: "again" }));
    if (name.length * LETTER + 3 <= width) group.append(make("text", { class: fault && !culprit ? "on faint" : "on", x: x + width / 2, y: top + tall / 2 }, name));
    group.append(make("title", {}, `${name}: ${DATA.palette[kind][1]} of stage ${stage}, micro-batch ${micro}`
      + (fault ? "" : `, ${short(from)} to ${short(to)}`)));
  });
  if (!own) return group;
  group.addEventListener("pointerdown", (e) => hold(e, rank, n));
  group.addEventListener("keydown", (e) => step(e, rank, n));
  for (const event of ["pointerenter", "focus"]) group.addEventListener(event, () => explain(rank, n));
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
let panned = null; // the board that a finger or the mouse drags, and where that was last

function holdBoard(box) {
  box.addEventListener("pointerdown", (e) => {
    if (held || block.held || e.button) return;
    panned = { box, x: e.clientX, y: e.clientY };
    box.setPointerCapture(e.pointerId);
  });
}

function hold(e, rank, n) {
  if (e.button) return;
  e.preventDefault();
  $("board").setPointerCapture(e.pointerId); // the task itself is drawn anew while it moves
  const all = places();
  held = { rank, n, tasks: state.plan[rank][n], from: copy(state.plan), moved: false, scale: state.scale, x: e.clientX,
    y: e.clientY, all, others: all.filter((a) => a.rank !== rank || a.n !== n), ready: [],
    before: state.price && [state.proved, state.price, times().latency] };
  $("board").querySelector(`[data-rank="${rank}"][data-place="${n}"]`).classList.add("held");
}

function pan(e) {
  panned.box.scrollLeft -= e.clientX - panned.x;
  window.scrollBy(0, panned.y - e.clientY);
  Object.assign(panned, { x: e.clientX, y: e.clientY });
}

/** The held action goes before the first other one of the row whose middle is right of the pointer. */
function drag(e) {
  if (panned) pan(e);
  if (!held) return;
  if (!held.moved && Math.abs(e.clientX - held.x) + Math.abs(e.clientY - held.y) < 5) return;
  held.moved = true;
  const edges = $("board").getBoundingClientRect();
  if (e.clientX > edges.right - 24) $("board").scrollLeft += 12; else if (e.clientX < edges.left + 24) $("board").scrollLeft -= 12;
  const box = $("board").firstElementChild.getBoundingClientRect(), x = (e.clientX - box.left - LEFT) / held.scale;
  const row = Math.floor((e.clientY - box.top - state.top + GAP / 2) / PITCH);
  const rank = Math.min(Math.max(row, 0), state.plan.length - 1);
  const others = held.others.filter((a) => a.rank === rank);
  const before = others.findIndex((a) => (a.from + a.to) / 2 > x), place = before < 0 ? others.length : before;
  if (held.before) held.ready = Coach.ready(...held.before, rank, held.all.filter((a) => a.rank === rank && a.to <= x).length);
  const plan = copy(held.from);
  plan[held.rank].splice(held.n, 1);
  plan[rank].splice(place, 0, held.tasks);
  if (JSON.stringify(plan) === JSON.stringify(state.plan)) return;
  state.plan = plan;
  update();
  $("board").querySelector(`[data-rank="${rank}"][data-place="${place}"]`).classList.add("held");
}

function drop() {
  panned = null;
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
  else if ((e.ctrlKey || e.metaKey) && e.key === "z" && e.target.tagName !== "INPUT") { undo(); e.preventDefault(); }
});

function undo() {
  if (state.past.length) { state.plan = state.past.pop(); update(); }
}

/* ------------------------------------------------------------------------------------------------------------- files */
function imported(text) {
  try {
    const plan = Simulator.read(text), all = plan.flat(2).map(Simulator.parts);
    if (!all.length) throw new Simulator.Fault("the plan is empty");
    state.problem = null;
    setLevel(null);
    load(plan, Math.max(...all.map((t) => t.micro)) + 1, 0);
  } catch (fault) {
    if (!(fault instanceof Simulator.Fault)) throw fault;
    refuse("this file cannot be read", fault);
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
  const figures = entry.command ? `${short(entry.step)} us a step on assumed costs` : entry.bubble === null ? "figures: minidl simulate, which searches for them"
    : `bubble ${(100 * entry.bubble).toFixed(1)} %, peak ${short(entry.peak)}${entry.stale ? ", trains on older weights" : ""}`;
  const play = () => { $("policy").value = entry.name; choose(true); window.scrollTo({ top: 0, behavior: "smooth" }); };
  return make("div", { class: playable ? "card play" : "card", "data-policy": entry.name, tabindex: playable ? 0 : -1,
    ...(playable ? { role: "button", onclick: play,
      onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); play(); } } } : {}) },
  make("h3", {}, entry.name), svg, make("p", {}, make("b", {}, figures)), make("p", { class: "soft" }, ...coded(entry.about)),
  ...(entry.command ? [make("p", { class: "soft" }, make("code", {}, ...entry.command.split(/ (?=--)/).flatMap((part, i) =>
    [...(i ? [" "] : []), make("span", {}, part)])))] : []));
}

/** After a change of the times: a plan that is not edited becomes the one for them. */
function retimed() {
  const { plan } = state, changed = edited();
  if (state.level) { // which has times of its own
    setLevel(null);
    showOrigin();
  }
  if (state.problem) state.planned = ordered(state.problem);
  state.plan = copy(state.planned);
  update();
  state.before = state.price; // the figures of the first plan with these times
  if (changed) state.plan = plan;
  else state.past = [];
  update();
  showOrigin();
}

async function start() {
  await unpack();
  $("policy").append(...Object.keys(plans).map((name) => make("option", { value: name }, name)));
  $("policy").value = "zb_h1";
  $("legend").append(...["F", "O", "W", "B", "R"].map((kind) =>
    make("span", {}, make("i", { style: `background:${colour(kind)}` }), DATA.palette[kind][1])));
  $("gallery").append(...DATA.gallery.map(card));
  $("methods").append(...DATA.methods.map(card));
  for (const id of ["policy", "ranks", "micros", "chunks"])
    $(id).addEventListener("change", () => { choose(id === "policy"); showBlock(); });
  for (const id of [...TIMES, "recompute"]) $(id).addEventListener("input", retimed);
  for (const id of ["F", "O", "W", "latency"]) $(id).addEventListener("blur", () => { // what is no time goes
    if ($(id).getAttribute("aria-invalid") === "true") { $(id).value = lasting[id]; times(); }
  });
  $("level").append(make("option", { value: "" }, "free play"),
    ...CHALLENGES.map(({ name }, i) => make("option", { value: i }, `${i + 1}. ${name}`)));
  $("level").addEventListener("change", () => { if ($("level").value) challenge(CHALLENGES[$("level").value]); else choose(); });
  $("other").addEventListener("change", update);
  holdBoard($("board"));
  holdBoard($("block"));
  $("undo").addEventListener("click", undo);
  $("best").addEventListener("click", advise);
  $("run").addEventListener("click", run);
  $("reset").addEventListener("click", () => { state.past.push(state.plan); state.plan = copy(state.planned); update(); });
  $("export").addEventListener("click", exported);
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    if (file) imported(await file.text());
    $("file").value = "";
  });
  window.addEventListener("resize", () => showBoard());
  window.addEventListener("hashchange", readLink);
  startBlock();
  startVaried();
  if (!readLink()) choose(true);
  window.playground = { state, plans, imported, places, planOf, challenge, update, block };
}

start();
