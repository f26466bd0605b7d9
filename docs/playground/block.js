"use strict";
/* The building block: a board of one micro-batch, which is repeated on the other board. Its rules are coach.js's. */

/* `start`: the ticks at which F, O and W of each stage start; `held`: the task that is dragged; `focused`: the one to which
   Tab leads; `plain`: the address of the first block. */
const block = { start: null, held: null, focused: "0F0", plain: "" };
const TICK = 26;

/** The block of 1F1B: forwards up, gradients down, and each W right after its O. */
function plain(ranks) {
  const F = Array.from({ length: ranks }, (_, s) => s), O = F.map((s) => ranks + 2 * (ranks - 1 - s));
  return { F, O, W: O.map((start) => start + 1) };
}

function showBlock() {
  const { start, focused } = block, clash = Coach.clash(start), ranks = start.F.length;
  const span = Math.max(...start.W, ...start.O, ...start.F) + 4, svg = make("svg", { width: LEFT + span * TICK, height: TOP + ranks * (ROW + GAP) });
  for (let tick = 0; tick < span; tick += 3) svg.append(make("path", { class: "tick", d: `M${LEFT + tick * TICK} ${TOP - 4}v${TOP + ranks * (ROW + GAP)}` }),
    make("text", { class: "soft", x: LEFT + tick * TICK, y: TOP - 10 }, String(tick)));
  for (let s = 0; s < ranks; s++) {
    const y = TOP + s * (ROW + GAP);
    svg.append(make("rect", { class: "track", x: LEFT, y, width: span * TICK, height: ROW }), make("text", { class: "ink", x: 6, y: y + ROW / 2 }, `rank ${s}`));
    for (const kind of "FOW") {
      const name = `${s}${kind}0`, x = LEFT + start[kind][s] * TICK, bad = clash && clash.tasks.includes(name);
      const group = make("g", { class: "task", role: "button", tabindex: name === focused ? 0 : -1, "data-block": name,
        "aria-label": `${name} at tick ${start[kind][s]}`, onpointerdown: (e) => holdBlock(e, kind, s), onkeydown: (e) => stepBlock(e, kind, s) },
      make("rect", { x, y, width: TICK - 1, height: ROW, fill: colour(kind), class: bad ? "culprit" : "" }),
      make("text", { class: "on", x: x + TICK / 2, y: y + ROW / 2 }, `${s}${kind}`));
      svg.append(group);
    }
  }
  $("block").replaceChildren(svg);
  $("stamp").disabled = Boolean(clash);
  const what = clash ? `This block cannot be repeated: ${clash.text}.` : foretold();
  $("stamped").textContent = what;
  $("stamped").className = clash ? "bad" : "";
}

/** What the repeated block costs, and its name if it has one. */
function foretold() {
  const { start } = block, ranks = start.F.length, micros = +$("micros").value || 8, plan = Coach.repeated(start, micros);
  const held = Coach.held(start), figures = Simulator.price(Simulator.prove(plan, ranks, micros, 1), { F: 1, O: 1, W: 1, latency: 0 });
  const name = built(plan, micros, 1);
  return `${micros} of them: makespan ${short(figures.makespan)}, bubble rate ${short(figures.bubble_rate)}, peak `
    + `${Math.max(...figures.peak_activations)} (${held.join(", ")} on the ranks of a long run).${name ? ` This is ${name}.` : ""}`;
}

function moveBlock(kind, s, tick) {
  block.start[kind][s] = Math.max(0, Math.min(tick, 300));
  block.focused = `${s}${kind}0`;
  showBlock();
  writeLink();
}

function stepBlock(e, kind, s) {
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key] || [];
  if (down === undefined) return;
  e.preventDefault();
  if (right) moveBlock(kind, s, block.start[kind][s] + right);
  else { // the same kind of the next rank
    block.focused = `${Math.min(Math.max(s + down, 0), block.start.F.length - 1)}${kind}0`;
    showBlock();
  }
  $("block").querySelector(`[data-block="${block.focused}"]`).focus();
}

function holdBlock(e, kind, s) {
  if (e.button) return;
  e.preventDefault();
  $("block").setPointerCapture(e.pointerId);
  block.held = { kind, s, x: e.clientX, from: block.start[kind][s] };
}

function dragBlock(e) {
  if (!block.held) return;
  const { kind, s, x, from } = block.held, tick = from + Math.round((e.clientX - x) / TICK);
  if (tick !== block.start[kind][s]) moveBlock(kind, s, tick);
}

/** The block in the address, and back: 0.1-3.2-4.6. */
const blockText = () => [..."FOW"].map((kind) => block.start[kind].join(".")).join("-");

function readBlock(text) {
  const rows = (text || "").split("-").map((row) => row.split(".").map(Number)), ranks = rows[0].length;
  const good = rows.length === 3 && ranks <= 8 && rows.every((row) => row.length === ranks && row.every((n) => Number.isInteger(n) && n >= 0 && n <= 300));
  block.start = good ? { F: rows[0], O: rows[1], W: rows[2] } : plain(4);
  $("wide").value = block.start.F.length;
  showBlock();
}

function startBlock() {
  block.start = plain(4);
  block.plain = blockText();
  $("wide").append(...[2, 3, 4, 6, 8].map((n) => make("option", { value: n }, String(n))));
  $("wide").addEventListener("change", () => { block.start = plain(+$("wide").value); showBlock(); writeLink(); });
  $("stamp").addEventListener("click", () => {
    state.problem = null;
    setLevel(null);
    const micros = +$("micros").value || 8;
    load(Coach.repeated(block.start, micros), micros, 1);
    $("board").scrollIntoView({ block: "nearest" });
  });
  window.addEventListener("pointermove", dragBlock);
  for (const event of ["pointerup", "pointercancel"]) window.addEventListener(event, () => { block.held = null; });
}
