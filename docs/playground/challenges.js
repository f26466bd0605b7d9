"use strict";
/* The challenges. `start`: the policy whose order comes first, each B parted into O and W; `by`: a policy that reaches
   the goal, which tests/docs/test_playground.py checks. Times that are not given are 1, a latency 0. */

const CHALLENGES = [
  { name: "weights can wait", ranks: 2, micros: 4, start: "one_f_one_b", figure: "makespan", goal: 13, by: "zb_h1",
    text: "Only a rank's own update needs a weight gradient, so a W may run later, while the rank would wait." },
  { name: "little memory", ranks: 3, micros: 6, start: "gpipe", figure: "makespan", goal: 20, peak: 3, by: "zb_h1",
    text: "All forwards first keep six activations alive. Start backward earlier, and fill the gaps with weight gradients." },
  { name: "a slow stage", ranks: 4, micros: 4, start: "gpipe", figure: "makespan", goal: 25, peak: 4,
    stages: [1, 2, 1, 1], by: "zb_h1", text: "Stage 1 takes twice as long as the others: it must never wait." },
  { name: "slow links", ranks: 3, micros: 6, start: "zb_h1", figure: "makespan", goal: 22, peak: 5, latency: 1,
    by: "zb_h2", text: "A message takes as long as a task. More micro-batches under way hide it." },
  { name: "no bubble", ranks: 3, micros: 6, start: "zb_h1", figure: "max_span", goal: 18, peak: 5, by: "zb_h2",
    text: "No rank may wait between its first and its last task. This is ZB-H2: it buys time with memory." },
  { name: "ZB-H2 on four ranks", ranks: 4, micros: 8, start: "zb_h1", figure: "max_span", goal: 24, peak: 7, by: "zb_h2",
    text: "The same on four ranks: beat the span of 27 that ZB-H1 has." },
];
