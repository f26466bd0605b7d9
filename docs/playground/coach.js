"use strict";
/* What a coach says of a plan that simulator.js has proved and priced; no DOM, so it also runs under node. */

const Coach = (() => {
  const { Fault, prove, price } = typeof module === "undefined" ? Simulator : require("./simulator.js");
  const short = (x) => String(+x.toFixed(4)), LEAST = 1e-9;

  /** What action n of a rank waits for: {from, to, task, awaited, text}. From `from` on the rank is free, at `to` the action
      starts; `task` of it needs the result of `awaited`, which is the last to arrive; null: it needs none. */
  function wait(proved, priced, latency, rank, n) {
    const { lane, first, names, needs, action, stage, micro } = proved, { start, end } = priced, a = lane[rank] + n;
    const to = start[first[a]], from = n ? end[first[a] - 1] : 0;
    let arrives = -1, task = first[a], awaited = -1, which = 0;
    for (let i = 3 * first[a]; i < 3 * first[a + 1]; i++) {
      const s = needs[i], there = s < 0 || action[s] === a ? -1 : end[s] + (proved.rank[s] === rank ? 0 : latency);
      if (there > arrives + LEAST) { arrives = there; task = Math.floor(i / 3); awaited = s; which = i % 3; }
    }
    const name = names[task], far = awaited >= 0 && proved.rank[awaited] !== rank && latency
      ? `, and the message takes ${short(latency)}` : "";
    const made = awaited < 0 ? "" : which ? `the ${which === 1 ? "activation" : "gradient"} of stage ${stage[awaited]}, micro-batch `
      + micro[awaited] : `the sum of stage ${stage[task]}'s weight gradients up to micro-batch ${micro[awaited]}`;
    const text = awaited < 0 ? `${name} starts at ${short(to)}: it needs no other task, only its rank.`
      : to > from + LEAST ? `Rank ${rank} waits from ${short(from)} to ${short(to)}: ${name} needs ${made}; ${names[awaited]} on `
        + `rank ${proved.rank[awaited]} makes it and ends at ${short(end[awaited])}${far}.`
        : `${name} starts at ${short(to)}, as soon as rank ${rank} is free; ${made} is there since ${short(arrives)}.`;
    return { from, to, task: name, awaited: awaited < 0 ? null : names[awaited], text };
  }

  /** All gaps of the ranks: {rank, n, from, to, text}; the first is before action n, and only if some rank works then. */
  const gaps = (proved, priced, latency) => proved.lane.slice(1).flatMap((end, rank) =>
    Array.from({ length: end - proved.lane[rank] }, (_, n) => ({ rank, n, ...wait(proved, priced, latency, rank, n) }))
      .filter(({ from, to }) => to > from + LEAST));

  /** The tasks of a rank, not before place n, that could run there: what they need has ended when the rank is free. */
  function ready(proved, priced, latency, rank, n) {
    const { lane, first, names, needs, action } = proved, { end } = priced, found = [];
    const at = n ? end[first[lane[rank] + n] - 1] : 0;
    for (let a = lane[rank] + n; a < lane[rank + 1]; a++) {
      let all = true;
      for (let i = 3 * first[a]; i < 3 * first[a + 1]; i++) {
        const s = needs[i];
        if (s >= 0 && action[s] !== a && end[s] + (proved.rank[s] === rank ? 0 : latency) > at + LEAST) all = false;
      }
      if (all) found.push(...names.slice(first[a], first[a + 1]));
    }
    return found;
  }

  /** The one move of an action along its rank after which the ranks hold least above `peak` (activations, summed over
      actions), and then `figure` is smallest: {rank, from, to, task, less, gain, plan}, with what it saves of both; or null.
      No rank's largest peak grows, unless `peak` allows it. Short moves come first; after `patience` ms the best so far. */
  function better(plan, micros, asked, times, figure = "makespan", peak = Infinity, patience = Infinity) {
    const begin = Date.now(), longest = Math.max(...plan.map((own) => own.length));
    const judged = (moved) => {
      const found = price(prove(moved, plan.length, micros, asked), times);
      return { over: found.live.flat().reduce((sum, held) => sum + Math.max(0, held - peak), 0), time: found[figure],
        most: Math.max(...found.peak_activations) };
    };
    const now = judged(plan), allowed = Math.max(peak, now.most);
    let best = null;
    for (let far = 1; far < longest; far++) for (let rank = 0; rank < plan.length; rank++) for (let from = 0; from < plan[rank].length; from++)
      for (const to of [from - far, from + far]) {
        if (to < 0 || to >= plan[rank].length) continue;
        if (Date.now() - begin > patience) return best;
        const row = [...plan[rank]], moved = [...plan];
        row.splice(to, 0, ...row.splice(from, 1));
        moved[rank] = row;
        try {
          const { over, most, time } = judged(moved), less = now.over - over, gain = now.time - time, than = best || { less: 0, gain: 0 };
          if (most <= allowed + LEAST && (less > than.less + LEAST || (less > than.less - LEAST && gain > than.gain + LEAST)))
            best = { rank, from, to, task: plan[rank][from].join(" and "), less, gain, plan: moved };
        } catch (fault) {
          if (!(fault instanceof Fault)) throw fault;
        }
      }
    return best;
  }

  /** The move in words. */
  function advice(plan, move, figure) {
    if (!move) return `No single move along a rank makes the ${figure} smaller.`;
    const { rank, from, to, task, less, gain } = move, neighbour = plan[rank][to].join(" and ");
    const time = Math.abs(gain) > LEAST ? `${gain > 0 ? "saves" : "costs"} ${short(Math.abs(gain))}` : "";
    const memory = less > LEAST ? `rank ${rank} then holds too much for a shorter time${time && ", and it "}` : "that ";
    return `Move ${task} ${to > from ? "behind" : "before"} ${neighbour}: ${memory}${time}.`;
  }

  /** What a run meets in order of time: {at, text}. Gaps; the first moment at which a rank holds more than `peak`; the end. */
  function strange(proved, priced, latency, peak = Infinity) {
    const found = gaps(proved, priced, latency).map(({ from, text }) => ({ at: from, text }));
    priced.live.forEach((levels, rank) => {
      const n = levels.findIndex((held) => held > peak + LEAST);
      if (n >= 0) found.push({ at: priced.start[proved.first[proved.lane[rank] + n]], text: `Rank ${rank} holds `
        + `${short(levels[n])} activations from here on; ${short(peak)} are allowed.` });
    });
    found.push({ at: priced.makespan, text: `The step ends at ${short(priced.makespan)}.` });
    return found.map((each, i) => [each, i]).sort(([a, i], [b, j]) => a.at - b.at || i - j).map(([each]) => each);
  }

  /* -------------------------------------------------------------------------------------------------- building blocks */
  /* A block has the start of F, O and W of one micro-batch on each stage, {F: [..], O: [..], W: [..]}, in ticks; each task
     takes one. It is repeated every three ticks, so that a rank is always busy (Qi et al., "Pipeline parallelism with
     controllable memory", 2024). */
  const INTERVAL = 3;

  /** The first rule that a block breaks, as text with the tasks to blame; null: it can be repeated. */
  function clash({ F, O, W }) {
    for (let s = 0; s < F.length; s++) {
      const start = { F: F[s], O: O[s], W: W[s] };
      const after = [["O", "F", F[s]], ["W", "O", O[s]], ...(s ? [["F", `${s - 1}F`, F[s - 1]]] : []),
        ...(s + 1 < F.length ? [["O", `${s + 1}O`, O[s + 1]]] : [])];
      for (const [kind, other, before] of after) if (start[kind] < before + 1)
        return { tasks: [`${s}${kind}0`], text: `${s}${kind} starts at ${start[kind]}, but ${other.length > 1 ? other : s + other} ends at ${before + 1}` };
      for (const [a, b] of ["FO", "FW", "OW"]) if ((start[a] - start[b]) % INTERVAL === 0)
        return { tasks: [`${s}${a}0`, `${s}${b}0`], text: `${s}${a} and ${s}${b} would meet: they start at `
          + `${start[a]} and ${start[b]}, and every ${INTERVAL} ticks another one starts` };
    }
    return null;
  }

  /** The activations that each rank holds when the block is repeated for long: a micro-batch's from F to the end of W. */
  const held = ({ F, W }) => F.map((start, s) => Math.ceil((W[s] + 1 - start) / INTERVAL));

  /** The plan of the block for so many micro-batches: the order of its tasks in time. */
  const repeated = ({ F, O, W }, micros) => F.map((_, s) => Array.from({ length: micros }, (_, i) =>
    [[F, "F"], [O, "O"], [W, "W"]].map(([start, kind]) => [start[s] + INTERVAL * i, [`${s}${kind}${i}`]])).flat()
    .sort(([a], [b]) => a - b).map(([, action]) => action));

  /** The order as text, each B as O and W: plans with equal text do the same. */
  const order = (plan) => plan.map((own) => own.flat().flatMap((name) =>
    (name.includes("B") ? [name.replace("B", "O"), name.replace("B", "W")] : [name])).join(" ")).join("|");

  return { wait, gaps, ready, better, advice, strange, clash, held, repeated, order };
})();
if (typeof module !== "undefined") module.exports = Coach;
