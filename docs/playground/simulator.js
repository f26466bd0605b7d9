"use strict";
/* Plans of pipelines in the browser: read, prove and price them as minidl does. tests/docs/test_playground_engine.py compares every
   verdict, message and figure with Python's, in the browser and under node. A plan is a list of ranks; a rank is a list of
   actions; an action is a list of task names, one or a pair: [[["0F0"], ["0F1", "0O0"]], ...]. Inside, tasks are columns:
   numbers in the order of the plan, so that a plan of thousands is priced while one drags. */

const Simulator = (() => {
  const KINDS = "FOWB", F = 0, O = 1, W = 2, B = 3, NAME = /^(\d{1,7})([FOWB])(\d{1,7})$/, HEADER = "rank,lane,task";

  /** A fault of a plan: its message, the tasks that are to blame, and why the rule is there. */
  class Fault extends Error {
    constructor(message, tasks = [], why = "") { super(message); Object.assign(this, { tasks, why }); }
  }

  const known = new Map(); // name -> its parts

  function parts(name) {
    const seen = known.get(name);
    if (seen) return seen;
    const found = NAME.exec(name);
    if (!found) throw new Fault(`${name}: a task here is a stage, F, O, W or B, and a micro-batch, such as 2F0`, [name]);
    const made = Object.freeze({ name, stage: +found[1], kind: found[2], micro: +found[3] });
    known.set(name, made);
    return made;
  }

  /** The plan in a CSV of `minidl plan --save` or `simulate`. Throws a Fault. */
  function read(text) {
    const lines = text.replace(/^\uFEFF/, "").split(/\r?\n/), ranks = [], lane = [];
    const cells = (line) => line.split(",").map((cell) => cell.trim());
    const head = lines.findIndex((line) => !line.startsWith("#")); // after the notes of a plan
    if (head < 0 || cells(lines[head]).join(",") !== HEADER)
      throw new Fault(`line ${Math.max(head, 0) + 1}: expected the header ${HEADER}`);
    lines.forEach((line, i) => {
      if (i <= head || !line.trim()) return;
      const [rank, name, action, more] = cells(line);
      if (!/^\d{1,4}$/.test(rank) || !name || !action || more !== undefined)
        throw new Fault(`line ${i + 1}: expected a rank, a lane and a task`);
      const tasks = action.startsWith("(") && action.endsWith(")") ? action.slice(1, -1).split(";") : [action];
      for (const task of tasks) if (!NAME.test(task)) throw new Fault(`line ${i + 1}: ${task} is not F, O, W or B of a `
        + "stage; the playground has no messages and no updates", [task]);
      if (lane[rank] === undefined) { lane[rank] = name; ranks[rank] = []; }
      if (lane[rank] !== name) throw new Fault(`rank ${rank} computes on the lanes ${lane[rank]} and ${name}; a rank of `
        + "a pipeline must compute on one lane", tasks);
      ranks[rank].push(tasks);
    });
    return Array.from(ranks, (actions) => actions || []);
  }

  /** The CSV of a plan, which `minidl check` takes. */
  const written = (plan) => [HEADER, ...plan.flatMap((actions, rank) =>
    actions.map((tasks) => `${rank},main,${tasks.length > 1 ? `(${tasks.join(";")})` : tasks[0]}`)), ""].join("\n");

  /** The tasks of a plan in columns. Action a has the tasks `first[a]` to `first[a + 1]`, lane r the actions `lane[r]` to
      `lane[r + 1]`. */
  function columns(plan) {
    let count = 0;
    for (const own of plan) for (const tasks of own) count += tasks.length;
    const [stage, kind, micro, rank, action] = Array.from({ length: 5 }, () => new Int32Array(count));
    const names = new Array(count), first = [0], lane = [0];
    let task = 0;
    plan.forEach((own, r) => {
      for (const tasks of own) {
        for (const name of tasks) {
          const found = parts(name);
          names[task] = name;
          stage[task] = found.stage;
          kind[task] = KINDS.indexOf(found.kind);
          micro[task] = found.micro;
          rank[task] = r;
          action[task++] = first.length - 1;
        }
        first.push(task);
      }
      lane.push(first.length - 1);
    });
    return { count, names, stage, kind, micro, rank, action, first, lane };
  }

  const first = (count, found) => { // the first number for which it is true, or -1
    for (let t = 0; t < count; t++) if (found(t)) return t;
    return -1;
  };

  /** Where each stage lives: home(stage, micro-batch) -> rank. The forwards show it. Throws a Fault. */
  function placement(c, ranks, microBatches, asked) {
    let highest = 0, most = 0;
    for (let t = 0; t < c.count; t++) {
      most = Math.max(most, c.stage[t]);
      if (c.kind[t] === F) highest = Math.max(highest, c.stage[t]);
    }
    const stages = ranks * (asked || Math.max(1, even((highest + 1) / ranks)));
    const half = (micro) => (micro * 2 >= microBatches ? 1 : 0);
    once(c, ranks, stages, microBatches);
    const table = new Array(stages).fill(-1);
    for (let t = 0; t < c.count; t++) if (c.kind[t] === F && table[c.stage[t]] < 0) table[c.stage[t]] = c.rank[t];
    const stray = first(c.count, (t) => table[c.stage[t]] !== c.rank[t]);
    if (ranks > 1 && most < ranks && (asked === 2 || (!asked && stray >= 0))) {
      const home = (stage, micro) => (half(micro) ? ranks - 1 - stage : stage);
      if (first(c.count, (t) => home(c.stage[t], c.micro[t]) !== c.rank[t]) < 0)
        return { stages: ranks, directions: 2, home, direction: half };
    }
    const missing = table.indexOf(-1), chunks = stages / ranks;
    if (missing >= 0) throw new Fault(`stage ${missing} has no forward; ${ranks} ranks with ${chunks} `
      + `chunk${chunks > 1 ? "s" : ""} each hold stages 0..${stages - 1}`, [], "The last stage makes the loss, "
      + "and its forward needs all stages before it.");
    if (stray >= 0) throw new Fault(`task ${c.names[stray]} is on rank ${c.rank[stray]}, but `
      + `stage ${c.stage[stray]} lives on rank ${table[c.stage[stray]]}; its weights are there`, [c.names[stray]], "A rank "
      + `computes with the weights that it holds. Rank ${c.rank[stray]} would need a copy of stage ${c.stage[stray]}, kept `
      + "equal after each update.");
    return { stages, directions: 1, home: (stage) => table[stage], direction: () => 0 };
  }

  /** Rounds as Python does: a half goes to the even number. */
  const even = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

  function once(c, ranks, stages, microBatches) {
    for (const [column, end, what] of [
      [c.rank, ranks, `is on a rank that does not exist: ranks are 0..${ranks - 1}`],
      [c.stage, stages, `is out of range: stages are 0..${stages - 1}`],
      [c.micro, microBatches, `is out of range: micro-batches are 0..${microBatches - 1}`]]) {
      const bad = first(c.count, (t) => column[t] >= end);
      if (bad >= 0) throw new Fault(`task ${c.names[bad]} ${what}`, [c.names[bad]]);
    }
    const times = new Uint16Array(stages * microBatches * KINDS.length); // in the order in which Python looks
    let twice = -1;
    for (let t = 0; t < c.count; t++) {
      const code = (c.micro[t] * stages + c.stage[t]) * KINDS.length + c.kind[t];
      if (++times[code] > 1 && (twice < 0 || code < twice)) twice = code;
    }
    if (twice < 0) return;
    const kind = KINDS[twice % 4], stage = Math.floor(twice / 4) % stages, name = `${stage}${kind}${Math.floor(twice / 4 / stages)}`;
    const where = c.names.flatMap((other, t) => (other === name ? [`${c.rank[t]}/main`] : [])).join(", ");
    throw new Fault(`task ${name} appears twice, on ${where}`
      + ("WB".includes(kind) ? "; its weight gradient would count twice" : ""), [name],
      "Each task runs once in a step: a second run would give nothing new, or add the same gradient again.");
  }

  /** The task of each (kind, stage, micro-batch), at (kind * stages + stage) * micro-batches + micro-batch; -1: none. */
  function whereabouts(c, stages, microBatches) {
    const where = new Int32Array(KINDS.length * stages * microBatches).fill(-1);
    for (let t = 0; t < c.count; t++) where[(c.kind[t] * stages + c.stage[t]) * microBatches + c.micro[t]] = t;
    return where;
  }

  function complete(where, stages, microBatches) {
    const has = (kind, s, i) => where[(kind * stages + s) * microBatches + i] >= 0;
    for (let i = 0; i < microBatches; i++) for (let s = 0; s < stages; s++) if (has(B, s, i) && (has(O, s, i) || has(W, s, i))) {
      const both = [O, W].filter((kind) => has(kind, s, i)).map((kind) => `${s}${KINDS[kind]}${i}`);
      throw new Fault(`stage ${s} has both ${s}B${i} and ${both.join(" and ")} `
        + `for micro-batch ${i}; the weight gradient would count twice`, [`${s}B${i}`, ...both], `${s}B${i} is ${s}O${i} and `
        + `${s}W${i} in one task.`);
    }
    for (const kind of [F, O, W]) for (let i = 0; i < microBatches; i++) for (let s = 0; s < stages; s++) {
      if (has(kind, s, i) || (kind !== F && has(B, s, i))) continue;
      throw new Fault(`task ${s}${KINDS[kind]}${i}${kind === F ? "" : ` (or ${s}B${i})`} is missing; each stage and micro-batch `
        + "needs one F, and one B or one O and one W", [F, O, W, B].filter((k) => has(k, s, i)).map((k) => `${s}${KINDS[k]}${i}`),
        "Without it the update would lack a part of the gradient.");
    }
  }

  /** What each task needs: the sum of weight gradients so far, an activation, a gradient, at 3 t, 3 t + 1, 3 t + 2; -1:
      none. So they are in sequential order. */
  function edges(c, place, microBatches) {
    const { stages, directions } = place, where = whereabouts(c, stages, microBatches), needs = new Int32Array(3 * c.count).fill(-1);
    const at = (kind, s, i) => where[(kind * stages + s) * microBatches + i];
    const backward = (s, i) => { const joint = at(B, s, i); return joint >= 0 ? joint : at(O, s, i); };
    const sums = new Int32Array(stages * directions).fill(-1);
    for (let i = 0; i < microBatches; i++) for (let s = 0; s < stages; s++) {
      const forward = at(F, s, i), output = backward(s, i), joint = at(B, s, i), weight = joint >= 0 ? joint : at(W, s, i);
      if (forward >= 0 && s) needs[3 * forward + 1] = at(F, s - 1, i);
      if (output >= 0) {
        needs[3 * output + 1] = forward;
        if (s < stages - 1) needs[3 * output + 2] = backward(s + 1, i);
      }
      if (weight < 0) continue;
      const sum = s * directions + place.direction(i);
      needs[3 * weight] = sums[sum];
      sums[sum] = weight;
      if (joint < 0) { needs[3 * weight + 1] = forward; needs[3 * weight + 2] = output; }
    }
    return { where, needs };
  }

  /** Why task t needs another: `which` of its three needs. */
  function reason(c, place, t, which) {
    const stage = c.stage[t], kind = c.kind[t], micro = c.micro[t];
    const of = (what, s) => `reads the ${what} of stage ${s}, micro-batch ${micro}`;
    if (which === 1) return of("activation", kind === F ? stage - 1 : stage);
    if (which === 2) return of("gradient", kind === W ? stage : stage + 1);
    return `reads the weight gradient of stage ${stage}${place.directions > 1 ? `, direction ${place.direction(micro)}` : ""}`;
  }

  /** Stages add up the weight gradients of their micro-batches in ascending order, so that every plan is bit-identical. */
  function addsInOrder(c, { where, needs }, stages, microBatches) {
    const adds = (s, i) => Math.max(where[(W * stages + s) * microBatches + i], where[(B * stages + s) * microBatches + i]);
    for (let s = 0; s < stages; s++) for (let i = 1; i < microBatches; i++) {
      const a = adds(s, i - 1), b = adds(s, i), [earlier, later] = [c.names[a], c.names[b]];
      if (a < b) continue;
      if (needs[3 * b] === a) throw new Fault(`${later} runs before ${earlier}, but a stage adds up the `
        + "weight gradients of its micro-batches in ascending order, so that every plan is bit-identical (torch's "
        + "LoopedBFS adds them in descending order); number the backward tasks of each stage in ascending order",
        [earlier, later], `Gradients are added in micro-batch order: the sum of stage ${s} after ${later} starts `
        + `from the sum after ${earlier}. Rounding makes a sum depend on its order, so another order would train to other `
        + "bits.");
    }
  }

  /** All tasks in the order in which one process would run them. */
  function* sequential({ where }, stages, microBatches) {
    const of = (kind, s, i) => where[(kind * stages + s) * microBatches + i];
    for (let i = 0; i < microBatches; i++) {
      for (let s = 0; s < stages; s++) yield of(F, s, i);
      for (let s = stages - 1; s >= 0; s--) for (const kind of [B, O, W]) if (of(kind, s, i) >= 0) yield of(kind, s, i);
    }
  }

  /** The proof: every task once and on its rank, no order against a dependency, no deadlock. Throws a Fault, or returns
      what `price` needs. `asked`: the number of stages per rank, or 0, which reads it off the plan. */
  function prove(plan, ranks, microBatches, asked = 0) {
    const c = columns(plan), place = placement(c, ranks, microBatches, asked), graph = edges(c, place, microBatches);
    complete(graph.where, place.stages, microBatches);
    addsInOrder(c, graph, place.stages, microBatches);
    const { needs } = graph, wrong = [
      [(t, s) => c.rank[t] === c.rank[s] && s > t,
        (t, s) => `${c.names[t]} comes before ${c.names[s]} on lane ${c.rank[t]}/main but needs it`,
        (t, s) => `A rank runs its row from left to right, so ${c.names[t]} would start before there is a result of `
          + `${c.names[s]}. Put ${c.names[t]} behind ${c.names[s]}.`],
      [(t, s) => c.action[t] === c.action[s],
        (t, s) => `${c.names[t]} needs ${c.names[s]}, but they run as one action, and its results show at its end`,
        () => "The two tasks of an action run side by side, so neither can use a result of the other."]];
    for (const [is, text, why] of wrong) {
      if (first(3 * c.count, (n) => needs[n] >= 0 && is(Math.floor(n / 3), needs[n])) < 0) continue;
      for (const t of sequential(graph, place.stages, microBatches)) for (let n = 0; n < 3; n++) {
        const s = needs[3 * t + n];
        if (s >= 0 && is(t, s)) throw new Fault(`${text(t, s)}: it ${reason(c, place, t, n)}`, [c.names[s], c.names[t]], why(t, s));
      }
    }
    const order = walked(c, needs);
    if (order.length < c.first.length - 1) throw deadlock(c, graph, place, microBatches, new Set(order));
    return { ...c, place, needs, order, ranks, microBatches };
  }

  /** The actions in an order in which the lanes can run them: all of them, unless there is a deadlock. */
  function walked({ action, first: begin, lane }, needs) {
    const next = lane.slice(0, -1), done = new Uint8Array(begin.length), order = [];
    for (let moved = true; moved;) {
      moved = false;
      for (let r = 0; r < next.length; r++) for (; next[r] < lane[r + 1]; next[r]++) {
        const a = next[r];
        let ready = true;
        for (let n = 3 * begin[a]; n < 3 * begin[a + 1] && ready; n++)
          ready = needs[n] < 0 || done[action[needs[n]]] > 0 || action[needs[n]] === a;
        if (!ready) break;
        done[a] = 1;
        order.push(a);
        moved = true;
      }
    }
    return order;
  }

  /** The circle of waits: starts at a task that never ran and follows what its action waits for. */
  function deadlock(c, graph, place, microBatches, done) {
    let at = -1;
    for (const t of sequential(graph, place.stages, microBatches)) if (at < 0 && !done.has(c.action[t])) at = c.action[t];
    const way = new Map();
    while (!way.has(at)) {
      let waits = -1, awaited = c.first[at] - 1; // if it waits only for its lane: the task before
      for (let n = 3 * c.first[at]; n < 3 * c.first[at + 1] && waits < 0; n++) {
        const s = graph.needs[n];
        if (s >= 0 && !done.has(c.action[s]) && c.action[s] !== at) { waits = Math.floor(n / 3); awaited = s; }
      }
      way.set(at, waits < 0 ? c.first[at] : waits);
      at = c.action[awaited];
    }
    const all = [...way.keys()], circle = all.slice(all.indexOf(at)).map((a) => c.names[way.get(a)]);
    return new Fault(`deadlock: ${[...circle, circle[0]].join(" waits for ")}`, circle, "Each of these waits for the next, "
      + "as its input or as the task before it in its row, and the last one for the first: none can ever start. Move one of "
      + "them to the other side of its neighbour.");
  }

  /** How long a stage's tasks take, which has this share of a rank's. */
  function lengths(times, share) {
    const length = { F: times.F * share, O: times.O * share, W: times.W * share };
    return { ...length, B: length.O + length.W };
  }

  /** The figures of `minidl simulate`, when each task runs, and `live`: of each rank the activations that it holds from the
      start of each of its actions. `times`: {F, O, W, latency}, those of a rank, which its stages share; `stages` in it:
      how many times as long each stage takes; `recompute`: an activation is freed after its forward, and is there
      again from its O or B on; the time of that task includes the second forward. */
  function price(proved, times) {
    const { count, stage, kind, micro, rank, action, first: begin, lane, place, needs, order, ranks, microBatches } = proved;
    const share = ranks / place.stages, each = lengths(times, share), by = [...KINDS].map((k) => each[k]), { latency } = times;
    const duration = Float64Array.from({ length: count }, (_, t) => by[kind[t]] * (times.stages ? times.stages[stage[t]] : 1));
    const start = new Float64Array(count), end = new Float64Array(count), now = new Float64Array(count);
    const free = new Float64Array(ranks), ends = [];
    for (let k = 0; k < 6; k++) { // iterations in a row, without a barrier
      const upto = k ? now : end;
      let last = 0;
      for (const a of order) {
        const r = rank[begin[a]];
        let from = free[r];
        for (let n = 3 * begin[a]; n < 3 * begin[a + 1]; n++) {
          const s = needs[n];
          if (s >= 0 && action[s] !== a) from = Math.max(from, upto[s] + (rank[s] === r ? 0 : latency));
        }
        let to = from;
        for (let t = begin[a]; t < begin[a + 1]; t++) to += duration[t];
        for (let t = begin[a]; t < begin[a + 1]; t++) {
          upto[t] = to;
          if (!k) start[t] = from;
        }
        free[r] = to;
        if (to > last) last = to;
      }
      ends.push(last);
    }
    const busy = new Float64Array(ranks), spans = new Array(ranks).fill(0), live = [];
    const born = new Int32Array(2 * place.stages * microBatches).fill(-1), died = born.slice(); // actions of an activation
    for (let t = 0; t < count; t++) {
      const use = 2 * (stage[t] * microBatches + micro[t]) + (times.recompute && kind[t] === F ? 1 : 0);
      busy[rank[t]] += duration[t];
      if (born[use] < 0) born[use] = action[t];
      died[use] = action[t];
    }
    const change = new Int32Array(begin.length + 1);
    for (let use = 0; use < born.length; use++) if (born[use] >= 0) { change[born[use]]++; change[died[use] + 1]--; }
    for (let r = 0, held = 0; r < ranks; r++) {
      const levels = [];
      for (let a = lane[r]; a < lane[r + 1]; a++) levels.push((held += change[a]) * share);
      live.push(levels);
      if (levels.length) spans[r] = end[begin[lane[r + 1]] - 1] - start[begin[lane[r]]];
    }
    const span = Math.max(...spans);
    return { makespan: ends[0] - start.reduce((a, b) => Math.min(a, b), Infinity), max_span: span, period: ends[5] - ends[4], spans,
      peak_activations: live.map((levels) => Math.max(0, ...levels)), live, bubble_rate: 1 - Math.max(...busy) / span, start, end };
  }

  return { read, written, prove, price, parts, columns, edges, lengths, Fault };
})();
if (typeof module !== "undefined") module.exports = Simulator;
