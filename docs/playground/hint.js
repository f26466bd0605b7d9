"use strict";
/* The order as a hint (minidl/passes/hint.py): each rank runs the first ready task of its order, under a cap on what it keeps.
   Times of tasks are drawn, so that waits are not those that the order foresaw. Plans come from simulator.js; no DOM. */

const Hint = (() => {
  const { Fault, prove, lengths } = typeof module === "undefined" ? Simulator : require("./simulator.js");
  const F = 0, OWN = 0.5; // the spread of each task by itself, as a share of the spread of micro-batches

  /** The durations of a proved plan without spread. */
  function durations(proved, times) {
    const each = lengths(times, proved.ranks / proved.place.stages), by = [each.F, each.O, each.W, each.B];
    return Float64Array.from(proved.kind, (kind, t) => by[kind] * (times.stages ? times.stages[proved.stage[t]] : 1));
  }

  /** Numbers of a normal distribution, equal for equal seeds. */
  function normal(seed) {
    let state = seed * 2654435761 >>> 0;
    const uniform = () => { // mulberry32
      let x = state = (state + 0x6d2b79f5) >>> 0;
      x = Math.imul(x ^ (x >>> 15), x | 1);
      x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
      return (((x ^ (x >>> 14)) >>> 0) + 0.5) / 4294967296;
    };
    return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
  }

  /** Factors of one draw by (micro-batch) and by task: lognormal with mean 1. */
  function factors(proved, sigma, seed) {
    const next = normal(seed + 1), one = (spread) => Math.exp(spread * next() - spread * spread / 2), { stages } = proved.place;
    const micro = Float64Array.from({ length: proved.microBatches }, () => one(sigma));
    const own = Float64Array.from({ length: 4 * stages * proved.microBatches }, () => one(OWN * sigma));
    return (t) => micro[proved.micro[t]] * own[(proved.kind[t] * stages + proved.stage[t]) * proved.microBatches + proved.micro[t]];
  }

  /** For each rank and stage, at rank * stages + stage: its forwards in order, each with the tasks that use what it keeps. */
  function forwards({ count, rank, stage, micro, kind, place }) {
    const made = new Map(), users = new Map(), push = (map, key, t) => { if (!map.has(key)) map.set(key, []); map.get(key).push(t); };
    for (let t = 0; t < count; t++) {
      const home = rank[t] * place.stages + stage[t];
      if (kind[t] === F) push(made, home, t); else push(users, `${home},${micro[t]}`, t);
    }
    return new Map([...made].map(([home, own]) => [home, own.map((t) => [t, users.get(`${home},${micro[t]}`) || []])]));
  }

  /** The most micro-batches that the order keeps of each stage of a rank. */
  const windows = (proved) => new Map([...forwards(proved)].map(([home, own]) => {
    const freed = own.map(([, users]) => Math.max(-1, ...users));
    let oldest = 0, most = 1;
    own.forEach(([task], j) => {
      while (oldest < j && freed[oldest] < task) oldest++;
      most = Math.max(most, j - oldest + 1);
    });
    return [home, most];
  }));

  /** Pairs of tasks: the second, a forward, waits until the first has freed what a forward before it keeps. */
  const admissions = (proved, caps) => [...forwards(proved)].flatMap(([home, own]) =>
    own.slice(caps.get(home)).flatMap(([task], j) => own[j][1].map((user) => [user, task])));

  /** Pairs of tasks that follow each other: of a rank if they are `kept` in order, else of a kind and stage of a rank. */
  function chains({ count, rank, stage, kind, place }, kept) {
    const last = new Map(), pairs = [];
    for (let t = 0; t < count; t++) {
      const own = kept ? rank[t] : (rank[t] * place.stages + stage[t]) * 4 + kind[t];
      if (last.has(own)) pairs.push([last.get(own), t]);
      last.set(own, t);
    }
    return pairs;
  }

  /** One iteration in which each rank runs its first ready task: {start, end, order: of each rank}. `pairs`: the second of
      each waits for the first. Null if tasks would wait for each other for ever. */
  function play(proved, duration, latency, pairs) {
    const { count, rank, ranks, needs } = proved, missing = new Int32Array(count), after = Array.from({ length: count }, () => []);
    const wait = (s, t, delay) => { after[s].push([t, delay]); missing[t]++; };
    for (let n = 0; n < 3 * count; n++) {
      const t = Math.floor(n / 3), s = needs[n];
      if (s >= 0) wait(s, t, rank[s] === rank[t] ? 0 : latency);
    }
    for (const [s, t] of pairs) wait(s, t, 0);
    const start = new Float64Array(count), end = new Float64Array(count), at = new Float64Array(count), free = new Float64Array(ranks);
    const open = Array.from({ length: ranks }, () => []), order = open.map(() => []), small = 1e-9 * duration.reduce((a, b) => Math.max(a, b), 0);
    for (let t = 0; t < count; t++) if (!missing[t]) open[rank[t]].push(t);
    for (let done = 0; done < count; done++) {
      let now = Infinity, r = -1;
      for (let q = 0; q < ranks; q++) {
        let from = Infinity;
        for (const t of open[q]) from = Math.min(from, Math.max(free[q], at[t]));
        if (from < now) { now = from; r = q; }
      }
      if (r < 0) return null;
      let task = Infinity; // tasks are numbered in the order of the plan
      for (const t of open[r]) if (t < task && at[t] <= now + small) task = t;
      open[r].splice(open[r].indexOf(task), 1);
      order[r].push(task);
      start[task] = Math.max(now, at[task]);
      free[r] = end[task] = start[task] + duration[task];
      for (const [t, delay] of after[task]) {
        at[t] = Math.max(at[t], end[task] + delay);
        if (!--missing[t]) open[rank[t]].push(t);
      }
    }
    return { start, end, order, makespan: end.reduce((a, b) => Math.max(a, b), 0) };
  }

  /** Pairs of tasks: without spread a rank waits for the first and runs it, although the second could run before. */
  function gaps(proved, duration, latency, admitted) {
    const { count, rank, stage, kind, place, ranks, needs } = proved, ready = new Float64Array(count), after = new Map();
    const { start, end } = play(proved, duration, latency, [...chains(proved, true), ...admitted]);
    for (let n = 0; n < 3 * count; n++) {
      const t = Math.floor(n / 3), s = needs[n];
      if (s >= 0) ready[t] = Math.max(ready[t], end[s] + (rank[s] === rank[t] ? 0 : latency));
    }
    for (const [s, t] of [...chains(proved, false), ...admitted]) ready[t] = Math.max(ready[t], end[s]);
    const small = 1e-9 * duration.reduce((a, b) => Math.max(a, b), 0);
    for (let r = 0; r < ranks; r++) {
      const rest = new Map();
      for (let t = 0; t < count; t++) if (rank[t] === r) {
        const own = (r * place.stages + stage[t]) * 4 + kind[t];
        if (!rest.has(own)) rest.set(own, []);
        rest.get(own).push(t);
      }
      let free = 0;
      for (let task = 0; task < count; task++) if (rank[task] === r) {
        rest.get((r * place.stages + stage[task]) * 4 + kind[task]).shift();
        if (start[task] > free + small)
          for (const [head] of rest.values()) if (head !== undefined && ready[head] < start[task] - small) after.set(head, task);
        free = end[task];
      }
    }
    return [...after].map(([t, task]) => [task, t]);
  }

  /** The plan of a cap: what ranks do without spread if they run their first ready task. `cap`: rank -> micro-batches that
      it keeps of each stage, or null: as many as the plan does, and the plan itself. Throws a Fault for a cap that leaves
      no order. Returns {proved, caps}. */
  function capped(proved, times, cap) {
    if (proved.first.length - 1 < proved.count) throw new Fault("a plan that runs tasks in pairs cannot be a hint");
    const own = windows(proved), { stages } = proved.place;
    const caps = cap ? new Map([...own.keys()].map((home) => [home, Math.min(cap(Math.floor(home / stages)), proved.microBatches)])) : own;
    if ([...caps].every(([home, n]) => own.get(home) === n)) return { proved, caps };
    const played = [...caps.values()].every((n) => n >= 1) && play(proved, durations(proved, times), times.latency,
      [...chains(proved, false), ...admissions(proved, caps)]);
    if (!played) throw new Fault("with this cap ranks would wait for each other for ever; take a larger one");
    const plan = played.order.map((tasks) => tasks.map((t) => [proved.names[t]]));
    return { proved: prove(plan, proved.ranks, proved.microBatches, proved.place.directions > 1 ? 2 : stages / proved.ranks), caps };
  }

  /** The steps of `count` draws: of the plan, of the plan at the cap, and of that as a hint: {own, fixed, hint, capped,
      one}, where `one(n)` is draw n of the last two, with starts and ends of `capped`'s tasks. */
  function study(proved, times, cap, sigma, count, seed = 0) {
    const found = capped(proved, times, cap), plain = durations(found.proved, times), admitted = admissions(found.proved, found.caps);
    const loose = [...chains(found.proved, false), ...admitted, ...gaps(found.proved, plain, times.latency, admitted)];
    const drawn = (plan, n) => { const by = factors(plan, sigma, seed + n); return durations(plan, times).map((d, t) => d * by(t)); };
    const run = (plan, n, pairs) => play(plan, drawn(plan, n), times.latency, pairs);
    const ways = { own: [proved, chains(proved, true)], fixed: [found.proved, chains(found.proved, true)], hint: [found.proved, loose] };
    const steps = Object.fromEntries(Object.entries(ways).map(([name, [plan, pairs]]) =>
      [name, Array.from({ length: count }, (_, n) => run(plan, n, pairs).makespan)]));
    return { ...steps, capped: found.proved, one: (n) => ({ fixed: run(ways.fixed[0], n, ways.fixed[1]), hint: run(ways.hint[0], n, loose) }) };
  }

  return { study, capped, play, chains, admissions, gaps, windows, durations };
})();
if (typeof module !== "undefined") module.exports = Hint;
