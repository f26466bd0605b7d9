"use strict";
/* Plans of pipelines in the browser: read, prove and price them as minidl does. tests/docs/test_playground.py compares every
   verdict, message and figure with Python's. A plan is a list of ranks; a rank is a list of actions; an action is a list
   of task names, one or a pair: [[["0F0"], ["0F1", "0O0"]], ...]. */

const Simulator = (() => {
  const KINDS = ["F", "O", "W", "B"], NAME = /^(\d{1,7})([FOWB])(\d{1,7})$/, HEADER = "rank,lane,task";

  /** A fault of a plan: its message, the tasks that are to blame, and why the rule is there. */
  class Fault extends Error {
    constructor(message, tasks = [], why = "") { super(message); Object.assign(this, { tasks, why }); }
  }

  const parts = (name) => {
    const found = NAME.exec(name);
    if (!found) throw new Fault(`${name}: a task here is a stage, F, O, W or B, and a micro-batch, such as 2F0`, [name]);
    return { name, stage: +found[1], kind: found[2], micro: +found[3] };
  };

  /** The plan in a CSV of `minidl plan --save` or `simulate`. Throws a Fault. */
  function read(text) {
    const lines = text.replace(/^\uFEFF/, "").split(/\r?\n/), ranks = [], lane = [];
    const cells = (line) => line.split(",").map((cell) => cell.trim());
    if (cells(lines[0]).join(",") !== HEADER) throw new Fault(`line 1: expected the header ${HEADER}`);
    lines.slice(1).forEach((line, i) => {
      if (!line.trim()) return;
      const [rank, name, action, more] = cells(line);
      if (!/^\d{1,4}$/.test(rank) || !name || !action || more !== undefined)
        throw new Fault(`line ${i + 2}: expected a rank, a lane and a task`);
      const tasks = action.startsWith("(") && action.endsWith(")") ? action.slice(1, -1).split(";") : [action];
      for (const task of tasks) if (!NAME.test(task)) throw new Fault(`line ${i + 2}: ${task} is not F, O, W or B of a `
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

  const entriesOf = (plan) => plan.flatMap((actions, rank) => actions.flatMap((tasks, action) =>
    tasks.map((name) => ({ ...parts(name), rank, action }))));

  /** Where each stage lives: home(stage, micro-batch) -> rank. The forwards show it. Throws a Fault. */
  function placement(entries, ranks, microBatches, asked) {
    const highest = Math.max(0, ...entries.filter((e) => e.kind === "F").map((e) => e.stage));
    const stages = ranks * (asked || Math.max(1, even((highest + 1) / ranks)));
    const half = (micro) => (micro * 2 >= microBatches ? 1 : 0);
    once(entries, ranks, stages, microBatches);
    const table = new Array(stages).fill(-1);
    for (const e of entries) if (e.kind === "F" && table[e.stage] < 0) table[e.stage] = e.rank;
    const most = Math.max(0, ...entries.map((e) => e.stage));
    if (ranks > 1 && most < ranks && (asked === 2 || (!asked && entries.some((e) => table[e.stage] !== e.rank)))) {
      const home = (stage, micro) => (half(micro) ? ranks - 1 - stage : stage);
      if (entries.every((e) => home(e.stage, e.micro) === e.rank))
        return { stages: ranks, directions: 2, home, direction: half };
    }
    const missing = table.indexOf(-1), chunks = stages / ranks;
    if (missing >= 0) throw new Fault(`stage ${missing} has no forward; ${ranks} ranks with ${chunks} `
      + `chunk${chunks > 1 ? "s" : ""} each hold stages 0..${stages - 1}`, [], "The last stage makes the loss, "
      + "and its forward needs all stages before it.");
    for (const e of entries) if (e.rank !== table[e.stage]) throw new Fault(`task ${e.name} is on rank ${e.rank}, but `
      + `stage ${e.stage} lives on rank ${table[e.stage]}; its weights are there`, [e.name], "A rank computes with the weights "
      + `that it holds. Rank ${e.rank} would need a copy of stage ${e.stage}, kept equal after each update.`);
    return { stages, directions: 1, home: (stage) => table[stage], direction: () => 0 };
  }

  /** Rounds as Python does: a half goes to the even number. */
  const even = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

  function once(entries, ranks, stages, microBatches) {
    for (const [bad, what] of [
      [(e) => e.rank >= ranks, `is on a rank that does not exist: ranks are 0..${ranks - 1}`],
      [(e) => e.stage >= stages, `is out of range: stages are 0..${stages - 1}`],
      [(e) => e.micro >= microBatches, `is out of range: micro-batches are 0..${microBatches - 1}`]]) {
      const found = entries.find(bad);
      if (found) throw new Fault(`task ${found.name} ${what}`, [found.name]);
    }
    const seen = new Map();
    for (const e of entries) seen.set(e.name, [...(seen.get(e.name) || []), e]);
    const twice = [...seen.values()].filter((all) => all.length > 1).map((all) => all[0])
      .sort((a, b) => a.micro - b.micro || a.stage - b.stage || KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind))[0];
    if (twice) {
      const where = seen.get(twice.name).map((e) => `${e.rank}/main`).join(", ");
      throw new Fault(`task ${twice.name} appears twice, on ${where}`
        + ("WB".includes(twice.kind) ? "; its weight gradient would count twice" : ""), [twice.name],
        "Each task runs once in a step: a second run would give nothing new, or add the same gradient again.");
    }
  }

  function complete(names, stages, microBatches) {
    const each = function* () {
      for (let i = 0; i < microBatches; i++) for (let s = 0; s < stages; s++) yield [s, i];
    };
    for (const [s, i] of each()) {
      const both = ["O", "W"].filter((k) => names.has(`${s}${k}${i}`)).map((k) => `${s}${k}${i}`);
      if (names.has(`${s}B${i}`) && both.length) throw new Fault(`stage ${s} has both ${s}B${i} and ${both.join(" and ")} `
        + `for micro-batch ${i}; the weight gradient would count twice`, [`${s}B${i}`, ...both], `${s}B${i} is ${s}O${i} and `
        + `${s}W${i} in one task.`);
    }
    for (const kind of ["F", "O", "W"]) for (const [s, i] of each()) {
      if (names.has(`${s}${kind}${i}`) || (kind !== "F" && names.has(`${s}B${i}`))) continue;
      throw new Fault(`task ${s}${kind}${i}${kind === "F" ? "" : ` (or ${s}B${i})`} is missing; each stage and micro-batch `
        + "needs one F, and one B or one O and one W", KINDS.map((k) => `${s}${k}${i}`).filter((n) => names.has(n)), "Without it the update would lack a part "
        + "of the gradient.");
    }
  }

  /** The tasks in sequential order, each with those that it needs: [task, why] each. */
  function graph(names, place, microBatches) {
    const tasks = [], at = new Map(), sum = new Map();
    const add = (stage, kind, micro) => {
      const needs = [], name = `${stage}${kind}${micro}`;
      const need = (other, why) => { if (at.has(other)) needs.push([at.get(other), why]); };
      const of = (what, s) => `the ${what} of stage ${s}, micro-batch ${micro}`;
      const gradient = (s) => [`${s}O${micro}`, `${s}B${micro}`].forEach((n) => need(n, `reads ${of("gradient", s)}`));
      if (kind === "F" && stage) need(`${stage - 1}F${micro}`, `reads ${of("activation", stage - 1)}`);
      if (kind !== "F") need(`${stage}F${micro}`, `reads ${of("activation", stage)}`);
      if ((kind === "O" || kind === "B") && stage < place.stages - 1) gradient(stage + 1);
      if (kind === "W") gradient(stage);
      if (kind === "W" || kind === "B") {
        const which = `${stage}/${place.direction(micro)}`;
        if (sum.has(which)) needs.push([sum.get(which), `reads the weight gradient of stage ${stage}`
          + (place.directions > 1 ? `, direction ${place.direction(micro)}` : "")]);
        sum.set(which, tasks.length);
      }
      needs.sort((a, b) => a[0] - b[0]);
      at.set(name, tasks.length);
      tasks.push({ name, stage, kind, micro, needs });
    };
    for (let i = 0; i < microBatches; i++) {
      for (let s = 0; s < place.stages; s++) add(s, "F", i);
      for (let s = place.stages - 1; s >= 0; s--)
        for (const kind of ["B", "O", "W"]) if (names.has(`${s}${kind}${i}`)) add(s, kind, i);
    }
    return { tasks, at };
  }

  /** Stages add up the weight gradients of their micro-batches in ascending order, so that every plan is bit-identical. */
  function addsInOrder(entries, tasks) {
    const where = new Map(entries.map((e, i) => [e.name, i]));
    const adds = tasks.filter((t) => t.kind === "W" || t.kind === "B").sort((a, b) => a.stage - b.stage || a.micro - b.micro);
    for (let i = 1; i < adds.length; i++) {
      const [a, b] = [adds[i - 1], adds[i]];
      if (a.stage !== b.stage || where.get(a.name) < where.get(b.name)) continue;
      if (b.needs.some(([n]) => tasks[n] === a)) throw new Fault(`${b.name} runs before ${a.name}, but a stage adds up the `
        + "weight gradients of its micro-batches in ascending order, so that every plan is bit-identical (torch's "
        + "LoopedBFS adds them in descending order); number the backward tasks of each stage in ascending order",
        [a.name, b.name], `Gradients are added in micro-batch order: the sum of stage ${a.stage} after ${b.name} starts `
        + `from the sum after ${a.name}. Rounding makes a sum depend on its order, so another order would train to other `
        + "bits.");
    }
  }

  /** The proof: every task once and on its rank, no order against a dependency, no deadlock. Throws a Fault, or returns
      what `price` needs. `asked`: the number of stages per rank, or 0, which reads it off the plan. */
  function prove(plan, ranks, microBatches, asked = 0) {
    const entries = entriesOf(plan), place = placement(entries, ranks, microBatches, asked);
    const names = new Set(entries.map((e) => e.name));
    complete(names, place.stages, microBatches);
    const { tasks, at } = graph(names, place, microBatches), actions = [], lanes = [];
    addsInOrder(entries, tasks);
    plan.forEach((own, rank) => lanes.push(own.map((members) => {
      actions.push({ rank, place: lanes.length, members: members.map((name) => at.get(name)) });
      return actions.length - 1;
    })));
    actions.forEach((action, a) => action.members.forEach((t, i) => Object.assign(tasks[t], { action: a, rank: action.rank,
      entry: 2 * a + i })));
    for (const [wrong, text, why] of [
      [(t, s) => t.rank === s.rank && s.entry > t.entry,
        (t, s) => `${t.name} comes before ${s.name} on lane ${t.rank}/main but needs it`,
        (t, s) => `A rank runs its row from left to right, so ${t.name} would start before there is a result of ${s.name}. `
          + `Put ${t.name} behind ${s.name}.`],
      [(t, s) => t.action === s.action,
        (t, s) => `${t.name} needs ${s.name}, but they run as one action, and its results show at its end`,
        () => "The two tasks of an action run side by side, so neither can use a result of the other."]])
      for (const t of tasks) for (const [s, what] of t.needs) if (wrong(t, tasks[s]))
        throw new Fault(`${text(t, tasks[s])}: it ${what}`, [tasks[s].name, t.name], why(t, tasks[s]));
    const proved = { tasks, actions, lanes, place, ranks, microBatches };
    const { order } = walked(proved, () => 1, 0, 1);
    if (order.length < actions.length) throw deadlock(proved, new Set(order));
    return { ...proved, order };
  }

  /** Each lane runs its actions in order, each as early as lane and dependencies allow. */
  function walked(proved, duration, latency, iterations) {
    const { tasks, actions, lanes } = proved, free = lanes.map(() => 0), rounds = [];
    let order = [];
    for (let k = 0; k < iterations; k++) {
      const next = lanes.map(() => 0), start = new Float64Array(tasks.length), end = new Float64Array(tasks.length).fill(-1);
      order = [];
      for (let moved = true; moved;) {
        moved = false;
        lanes.forEach((lane, rank) => {
          while (next[rank] < lane.length) {
            const members = actions[lane[next[rank]]].members;
            let begin = free[rank];
            const ready = members.every((t) => tasks[t].needs.every(([s]) => {
              if (tasks[s].action === tasks[t].action) return true;
              begin = Math.max(begin, end[s] + (tasks[s].rank === rank ? 0 : latency));
              return end[s] >= 0;
            }));
            if (!ready) break;
            let upto = begin;
            for (const t of members) upto += duration(tasks[t]);
            for (const t of members) { start[t] = begin; end[t] = upto; }
            free[rank] = upto;
            order.push(lane[next[rank]++]);
            moved = true;
          }
        });
      }
      rounds.push({ start, end });
      if (order.length < actions.length) break;
    }
    return { order, rounds };
  }

  /** The circle of waits: starts at a task that never ran and follows what its action waits for. */
  function deadlock({ tasks, actions, lanes }, done) {
    let at = tasks.find((t) => !done.has(t.action)).action;
    const way = new Map();
    while (!way.has(at)) {
      const needs = actions[at].members.flatMap((t) => tasks[t].needs.filter(([s]) => !done.has(tasks[s].action)
        && tasks[s].action !== at).map(([s]) => [t, s]));
      if (!needs.length) { // it waits only for its lane
        const lane = lanes[actions[at].rank], before = actions[lane[lane.indexOf(at) - 1]].members;
        needs.push([actions[at].members[0], before[before.length - 1]]);
      }
      way.set(at, needs[0][0]);
      at = tasks[needs[0][1]].action;
    }
    const all = [...way.keys()], circle = all.slice(all.indexOf(at)).map((a) => tasks[way.get(a)].name);
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
    const { tasks, actions, lanes, place, ranks } = proved, share = ranks / place.stages, length = lengths(times, share);
    const duration = (t) => length[t.kind] * (times.stages ? times.stages[t.stage] : 1);
    const { rounds } = walked(proved, duration, times.latency, 6), { start, end } = rounds[0];
    const first = new Array(ranks).fill(Infinity), last = new Array(ranks).fill(0), busy = new Array(ranks).fill(0);
    const live = lanes.map(() => []);
    lanes.forEach((lane, rank) => {
      const uses = new Map(); // activation -> its last action here
      lane.forEach((a, n) => actions[a].members.forEach((t) => {
        const { stage, micro, kind } = tasks[t];
        first[rank] = Math.min(first[rank], start[t]);
        last[rank] = Math.max(last[rank], end[t]);
        busy[rank] += duration(tasks[t]);
        const key = `${stage}/${micro}${times.recompute && kind === "F" ? "F" : ""}`, [from] = uses.get(key) || [n];
        uses.set(key, [from, n]);
      }));
      const change = new Array(lane.length + 2).fill(0);
      for (const [from, to] of uses.values()) { change[from]++; change[to + 1]--; }
      let now = 0;
      live[rank] = lane.map((_, n) => { now += change[n]; return now * share; });
    });
    const spans = first.map((f, r) => (Number.isFinite(f) ? last[r] - f : 0)), ends = rounds.map((r) => Math.max(...r.end));
    const span = Math.max(...spans);
    return { makespan: Math.max(...end) - Math.min(...start), max_span: span, period: ends[5] - ends[4], spans,
      peak_activations: live.map((levels) => Math.max(0, ...levels)), live, bubble_rate: 1 - Math.max(...busy) / span, start, end };
  }

  return { read, written, prove, price, parts, graph, lengths, Fault };
})();
