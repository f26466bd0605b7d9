"use strict";
/* Times that vary: the plan of the board in its order and as a hint, over draws of task times. Its rules are hint.js's. */

const DRAWS = 100, VARY = ["sigma", "cap", "draw"];
const fresh = (id) => $(id).defaultValue || ""; // of a control that nobody has touched
let later = 0; // the timer of the next study: one while a task is dragged would be too many

/** The micro-batches that rank s keeps of each stage, by the control; null: as many as the plan. */
function capOf() {
  const choice = $("cap").value, ranks = state.plan.length;
  return !choice ? null : choice === "2p-s" ? (s) => 2 * ranks - s : () => +choice;
}

const quantile = (numbers, share) => [...numbers].sort((a, b) => a - b)[Math.min(Math.floor(share * numbers.length), numbers.length - 1)];

function study() {
  clearTimeout(later);
  later = setTimeout(showVaried, 100);
}

function showVaried() {
  const { proved } = state, sigma = $("sigma").valueAsNumber, number = $("draw").valueAsNumber;
  const good = sigma >= 0 && sigma <= 2 && number >= 1 && number <= DRAWS && Number.isInteger(number);
  for (const [id, fine] of [["sigma", sigma >= 0 && sigma <= 2], ["draw", good || !(number < 1 || number > DRAWS)]])
    $(id).setAttribute("aria-invalid", !fine);
  $("drawn").replaceChildren();
  if (!proved || !good) return $("varied").replaceChildren(proved ? `Give a spread from 0 to 2, and a draw from 1 to ${DRAWS}.` : "The plan is not valid.");
  const all = { ...times(), stages: stageFactors(proved.place.stages) };
  let found;
  try {
    found = Hint.study(proved, all, capOf(), sigma, DRAWS);
  } catch (fault) {
    if (!(fault instanceof Simulator.Fault)) throw fault;
    return $("varied").replaceChildren(fault.message);
  }
  const middle = quantile(found.own, 0.5), row = (name, key, cell = "td") => make("tr", { "data-way": key },
    ...[name, ...(key ? [0.5, 0.1, 0.9].map((share) => short(quantile(found[key], share))) : ["median", "10 %", "90 %"]),
      key ? (quantile(found[key], 0.5) / middle).toFixed(3) : "ratio"].map((text) => make(cell, {}, text)));
  $("varied").replaceChildren(make("table", {}, row("makespan", "", "th"), row("the plan", "own"), row("its order at this cap", "fixed"),
    row("as a hint", "hint")));
  const one = found.one(number - 1), span = Math.max(one.fixed.makespan, one.hint.makespan), ranks = proved.ranks;
  const scale = Math.max(400, $("drawn").clientWidth - LEFT - 24) / span, tall = ranks * (ROW + GAP) + HEAD;
  const svg = make("svg", { width: LEFT + span * scale + 12, height: 2 * tall });
  [["in its order", one.fixed], ["as a hint", one.hint]].forEach(([words, { start, end, makespan }], k) => {
    svg.append(title(k * tall + HEAD / 2, `${words}: ${short(makespan)}`));
    for (let r = 0; r < ranks; r++) svg.append(make("rect", { class: "track", x: LEFT, y: k * tall + HEAD + r * (ROW + GAP), width: span * scale, height: ROW }),
      make("text", { class: "ink", x: 6, y: k * tall + HEAD + r * (ROW + GAP) + ROW / 2 }, `rank ${r}`));
    found.capped.names.forEach((name, t) => {
      const x = LEFT + start[t] * scale, width = Math.max(1, (end[t] - start[t]) * scale - 1), y = k * tall + HEAD + found.capped.rank[t] * (ROW + GAP);
      svg.append(make("g", {}, make("rect", { x, y, width, height: ROW, fill: colour(Simulator.parts(name).kind) }),
        ...(name.length * LETTER + 3 <= width ? [make("text", { class: "on", x: x + width / 2, y: y + ROW / 2 }, name)] : []),
        make("title", {}, `${name}, ${short(start[t])} to ${short(end[t])}`)));
    });
  });
  $("drawn").replaceChildren(svg);
}

function startVaried() {
  const most = Array.from({ length: 16 }, (_, n) => n + 1);
  $("cap").append(make("option", { value: "" }, "as many as the plan"), make("option", { value: "2p-s" }, "2p - s (twice the ranks, less its number)"),
    ...most.map((n) => make("option", { value: n }, String(n))));
  for (const id of VARY) $(id).addEventListener("input", () => { study(); writeLink(); });
}
