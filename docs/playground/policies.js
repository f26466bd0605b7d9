"use strict";
/* The policies whose orders follow the times, as minidl has them: list scheduling, modulo allocation, and the choices
   that simulation makes. tests/docs/test_playground_engine.py compares every order with Python's. Other policies have one order for
   all times, which the page holds. */

const Policies = (() => {
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  /** A free rank never waits while one of its tasks is ready: the first kind of `kinds`, then the oldest micro-batch,
      then the lowest stage. */
  function workConserving({ table, ranks, micros, times }, kinds) {
    const stages = table.length, up = range(stages), down = [...up].reverse(), backward = kinds.filter((k) => k !== "F");
    const names = range(micros).flatMap((i) => [...up.map((s) => `${s}F${i}`),
      ...down.flatMap((s) => backward.map((kind) => `${s}${kind}${i}`))]);
    const columns = Simulator.columns([names.map((name) => [name])]), tasks = names.map(Simulator.parts);
    const { needs } = Simulator.edges(columns, { stages, directions: 1, direction: () => 0 }, micros);
    const rank = tasks.map((t) => table[t.stage]), missing = tasks.map(() => 0), readyAt = tasks.map(() => 0);
    const after = tasks.map(() => []), length = Simulator.lengths(times, ranks / stages);
    const place = tasks.map((t) => (kinds.indexOf(t.kind) * micros + t.micro) * stages + t.stage);
    needs.forEach((s, n) => { if (s >= 0) { after[s].push(Math.floor(n / 3)); missing[Math.floor(n / 3)]++; } });
    const pending = range(ranks).map(() => []), free = range(ranks).map(() => 0), order = range(ranks).map(() => []);
    const least = 1e-9 * Math.max(...tasks.map((t) => length[t.kind]));
    tasks.forEach((_, n) => { if (!missing[n]) pending[rank[n]].push(n); });
    for (let placed = 0; placed < tasks.length; placed++) {
      const starts = pending.map((own, r) => Math.max(free[r], Math.min(...own.map((n) => readyAt[n]))));
      const r = starts.indexOf(Math.min(...starts)), now = starts[r];
      const task = pending[r].filter((n) => readyAt[n] <= now + least).reduce((a, b) => (place[b] < place[a] ? b : a));
      pending[r].splice(pending[r].indexOf(task), 1);
      free[r] = Math.max(now, readyAt[task]) + length[tasks[task].kind];
      order[r].push([tasks[task].name]);
      for (const n of after[task]) {
        readyAt[n] = Math.max(readyAt[n], free[r] + (rank[n] !== r ? times.latency : 0));
        if (!--missing[n]) pending[rank[n]].push(n);
      }
    }
    return order;
  }

  /** All F, all O, all W of a rank's stages: group by group, in a group micro-batch by micro-batch. */
  function phases({ table, ranks, micros }) {
    return range(ranks).map((rank) => {
      const groups = [];
      table.forEach((r, s) => {
        if (r !== rank) return;
        if (s && table[s - 1] === rank) groups[groups.length - 1].push(s); else groups.push([s]);
      });
      const each = (kind, some) => some.flatMap((group) => range(micros).flatMap((i) =>
        group.map((s) => [`${s}${kind}${i}`])));
      return [...each("F", groups), ...each("O", groups.map((group) => [...group].reverse()).reverse()), ...each("W", groups)];
    });
  }

  /** Groups of stages that grow as far as weight gradients hide behind the output gradients that follow. */
  function growing(ranks, chunks, times, first) {
    const { O, W } = Simulator.lengths(times, 1 / chunks), table = new Array(ranks * chunks);
    const left = range(ranks).map(() => chunks), busy = range(ranks).map(() => 0);
    let now = sum(range(first).map(() => W)), stage = 0, last = -1;
    while (stage < table.length) {
      const ahead = range(Math.min(chunks, table.length - stage)).map((n) => sum(range(n + 1).map(() => W)));
      const room = busy.map((b) => ahead.filter((a) => a <= (now - b) * (1 + 1e-9)).length);
      const size = room.map((n, r) => Math.min(Math.max(n, 1), left[r]));
      if (last >= 0 && sum(left) > left[last]) size[last] = 0;
      const rank = range(ranks).reduce((a, b) => {
        for (const key of [Math.min(room[a], size[a]) - Math.min(room[b], size[b]), left[a] - left[b], busy[b] - busy[a]])
          if (key) return key < 0 ? b : a;
        return a;
      });
      for (let k = 0; k < size[rank]; k++) table[stage + k] = rank;
      left[rank] -= size[rank];
      busy[rank] += sum(range(size[rank]).map(() => O)) + sum(range(size[rank]).map(() => W));
      now += sum(range(size[rank]).map(() => O)) + times.latency;
      stage += size[rank];
      last = rank;
    }
    return table;
  }

  /** Where stages may live: on a free link in groups of one; on any other, simulation chooses. */
  function groupings({ ranks, chunks, times }) {
    const grouped = (size) => range(ranks * chunks).map((s) => Math.floor(s / size) % ranks);
    if (!times.latency) return [grouped(1)];
    const sizes = range(chunks).map((n) => n + 1).filter((size) => chunks % size === 0);
    return [...sizes.map(grouped), ...sizes.slice(0, -1).map((size) => growing(ranks, chunks, times, size))];
  }

  /** The plan with the smallest makespan, the first of equals. */
  function best(plans, { ranks, micros, chunks, times }) {
    const time = (plan) => +Simulator.price(Simulator.prove(plan, ranks, micros, chunks), times).makespan.toPrecision(11);
    return plans.map((plan) => [time(plan), plan]).reduce((a, b) => (b[0] < a[0] ? b : a))[1];
  }

  const GREEDY = ["O", "F", "W"];
  const placed = (problem, order) => {
    const tables = groupings(problem);
    return best(tables.map((table) => order({ ...problem, table })), problem);
  };
  const wave = ({ ranks, chunks }) => range(ranks * chunks).map((s) =>
    (Math.floor(s / ranks) % 2 ? ranks - 1 - (s % ranks) : s % ranks));

  /** name -> (problem) -> plan; a problem has ranks, micros, chunks (stages per rank), times {F, O, W, latency} and
      `stored(name)`, the order that the page holds of another policy. */
  const orders = {
    fast_forward_greedy: (problem) => workConserving({ ...problem, table: range(problem.ranks) }, GREEDY),
    hanayo: (problem) => workConserving({ ...problem, table: wave(problem) }, ["B", "F"]),
    modulo: (problem) => placed(problem, phases),
    modulo_greedy: (problem) => placed(problem, (p) => workConserving(p, GREEDY)),
    fast_forward_auto: (problem) => placed(problem, (p) => best([workConserving(p, GREEDY), phases(p),
      ...(p.chunks === 1 ? [p.stored("fast_forward")] : []),
      ...(p.chunks === 1 && p.micros > p.ranks ? [p.stored("fast_forward_push")] : [])], p)),
  };
  return { orders };
})();
