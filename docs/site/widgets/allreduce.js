"use strict";
// An all-reduce and its two halves to step through: who sends what to whom, and what each rank holds.
{
  const BYTES = 840e6; // of the tensor: any number of ranks from 2 to 8 divides it
  const upTo = (n) => [...Array(n).keys()];

  // Once around the ring: the same chunks in the same order as 03_ddp_manual_allreduce/reducers/ring.py.
  const lap = (n, lead, add) =>
    upTo(n - 1).map((s) =>
      upTo(n).map((from) => {
        const chunks = [(from - s + lead + n) % n];
        return { from, to: (from + 1) % n, chunks, add };
      }),
    );

  // The messages of each step. add: the receiver adds what arrives, else it copies it.
  const messages = {
    ring: (n) => [...lap(n, 0, true), ...lap(n, 1, false)],
    "reduce-scatter": (n) => lap(n, 0, true),
    "all-gather": (n) => lap(n, 1, false),

    // Each rank sends its whole tensor to all the others.
    "one-shot"(n) {
      const others = (from) => upTo(n).filter((to) => to !== from);
      const send = (from) => others(from).map((to) => ({ from, to, chunks: upTo(n), add: true }));
      return [upTo(n).flatMap(send)];
    },
  };

  // All states, from the start on: held[rank][chunk], and what was sent so far. Rank r starts with
  // 10^r in each chunk, so digit r of a sum says how often rank r is in it. An all-gather starts with
  // what a reduce-scatter leaves: one complete chunk on each rank.
  function simulate(n, way, bytes = BYTES) {
    const only = (rank) => upTo(n).map((chunk) => (chunk === (rank + 1) % n ? sumOfAll(n) : 0));
    const whole = (rank) => Array(n).fill(10 ** rank);
    const start = upTo(n).map(way === "all-gather" ? only : whole);
    const states = [{ held: start, sends: [], sent: Array(n).fill(0), messages: 0 }];
    for (const sends of messages[way](n)) {
      const { held, sent, messages } = states.at(-1);
      const [next, more] = [held.map((row) => [...row]), [...sent]];
      for (const { from, to, chunks, add } of sends) {
        for (const c of chunks) next[to][c] = held[from][c] + (add ? next[to][c] : 0);
        more[from] += (bytes * chunks.length) / n;
      }
      states.push({ held: next, sends, sent: more, messages: messages + sends.length });
    }
    return states;
  }

  const sumOfAll = (n) => upTo(n).reduce((sum, rank) => sum + 10 ** rank, 0);
  const complete = (held) => held.flat().every((value) => value === sumOfAll(held.length));
  const ranksIn = (value, n) => upTo(n).filter((rank) => Math.floor(value / 10 ** rank) % 10);

  widgets.allreduce = { simulate, complete };

  function arrow({ from, to, chunks }, places, label) {
    const [[x1, y1], [x2, y2]] = [places[from], places[to]];
    const length = Math.hypot(x2 - x1, y2 - y1);
    const [dx, dy] = [(x2 - x1) / length, (y2 - y1) / length];
    const at = (along, aside) => [x1 + dx * along - dy * aside, y1 + dy * along + dx * aside];
    const [[ax, ay], [bx, by]] = [at(42, -6), at(length - 42, -6)]; // two opposite arrows do not meet
    const [tx, ty] = at(length / 2, -18);
    const text = `<text x="${tx}" y="${ty + 5}" class="chunk">${chunks}</text>`;
    return `<path class="arrow" d="M${ax} ${ay}L${bx} ${by}"/>
      <path class="head" d="M${bx} ${by}l${-8 * dx - 4 * dy} ${-8 * dy + 4 * dx}
        l${8 * dy} ${-8 * dx}z"/>${label ? text : ""}`;
  }

  // A rank as a square: a column for each chunk, a row for each rank that may be in the sum.
  function box(row, rank, [x, y], arrived) {
    const [n, size] = [row.length, 54 / row.length];
    const cells = row.flatMap((value, chunk) =>
      upTo(n).map((other) => {
        const all = value === sumOfAll(n) ? "all" : "some";
        const kind = ranksIn(value, n).includes(other) ? all : "none";
        const [left, top] = [x - 27 + chunk * size, y - 27 + other * size];
        return `<rect class="${kind}" x="${left}" y="${top}" width="${size}" height="${size}"/>`;
      }),
    );
    const frames = arrived.map((chunk) => `<rect class="arrived" x="${x - 27 + chunk * size}"
      y="${y - 27}" width="${size}" height="54"/>`);
    const above = y > 200 ? 41 : -33; // outside, where no arrow is
    return `<text x="${x}" y="${y + above}">rank ${rank}</text>${[...cells, ...frames].join("")}`;
  }

  widgets.builders.allreduce = (div) => {
    const { add, say, slider, choice, button, picture, sentence, intro, note, table, number } = widgets.page;
    intro(div, "Two ranks swap their gradients. What do four do? In a ring, each sends to its neighbor only, " +
      "one chunk after the other: press Next. Then try one-shot, and compare the table.",
      "两个 rank 互相交换梯度就行。四个怎么办？环形方式里，每个 rank 只发给下一个，一次一块：请按“下一步”。然后试试一步方式，比较下表。");
    let step = 0;
    const go = (place) => [(step = place), draw()];
    const ways = {
      ring: say("ring", "环形 (ring)"),
      "one-shot": say("one-shot", "一步 (one-shot)"),
      "reduce-scatter": "reduce-scatter",
      "all-gather": "all-gather",
    };
    const way = choice(div, say("way", "方式"), ways, () => go(0));
    const counts = [2, 3, 4, 5, 6, 7, 8];
    const ranks = slider(div, say("ranks", "rank 数"), counts, 4, String, () => go(0));
    const bar = add(div, "div", { class: "widget-buttons" });
    const last = () => simulate(ranks(), way()).length - 1;
    const back = button(bar, "back", say("Back", "上一步"), () => go(Math.max(0, step - 1)));
    const next = button(bar, "next", say("Next", "下一步"), () => go(Math.min(last(), step + 1)));
    button(bar, "reset", say("Reset", "重置"), () => go(0));
    const told = sentence(div);
    const figure = add(div, "div", { class: "widget-ring" });
    const numbers = add(div, "table");
    note(div, "Each square is what one rank holds: its gradient, cut into chunks from left to right. A chunk is " +
      "a sum: from top to bottom, a filled cell says that the gradient of rank 0, 1, 2 and so on is in it. " +
      "Blue: all are in it. The number at an arrow is the chunk that is sent, from 0 on. " +
      `Table: steps, messages of all ranks together, and what each rank sends, if a gradient has ${BYTES / 1e6} MB.`,
      "每个方块是一个 rank 的内容：它的梯度，从左到右切成若干块 (chunk)。每一块是一个和：从上到下，格子填色表示 rank 0、1、2 等的梯度已经加进去；" +
      `蓝色表示全部加进去了。箭头旁的数字是所发送的块，从 0 开始。表：步数、所有 rank 的消息总数、每个 rank 的发送量（梯度为 ${BYTES / 1e6} MB 时）。`);

    function tell(n, { sends }) {
      if (step === 0 && way() === "all-gather") {
        return say("Start: each rank holds one complete chunk.", "开始：每个 rank 只有一个完整的块。");
      }
      if (step === 0) {
        const chinese = `开始：每个 rank 只有自己的梯度，分成 ${n} 块。`;
        return say(`Start: each rank holds its own gradient, in ${n} chunks.`, chinese);
      }
      if (way() === "one-shot") {
        const chinese = `每个 rank 把整个张量发给另外 ${n - 1} 个 rank，并把收到的加起来。`;
        return say(`Each rank sends its tensor to all others, and adds up what arrives.`, chinese);
      }
      const place = ((step - 1) % (n - 1)) + 1;
      const lap = sends[0].add ? "Reduce-scatter" : "All-gather";
      const why = sends[0].add
        ? say("each rank adds what arrives", "每个 rank 加上收到的块")
        : say("complete chunks are passed on", "传递完整的块");
      const list = (word) => sends.map(({ from, to, chunks }) => `${from} → ${to} ${word} ${chunks}`);
      return say(`${lap}, step ${place} of ${n - 1}: ${why}. Ranks ${list("chunk").join(", ")}.`,
        `${lap}，第 ${place} 步，共 ${n - 1} 步：${why}。rank ${list("块").join("，")}。`);
    }

    function draw() {
      const [n, states] = [ranks(), simulate(ranks(), way())];
      const state = states[step];
      const radius = Math.min(140, 45 + 20 * n);
      const places = upTo(n).map((rank) => {
        const angle = (rank / n - 0.25) * 2 * Math.PI;
        return [180 + radius * Math.cos(angle), 192 + radius * Math.sin(angle)];
      });
      const one = state.sends.filter(({ chunks }) => chunks.length === 1);
      const arrived = (rank) => one.flatMap(({ to, chunks }) => (to === rank ? chunks : []));
      const text = (row) => row.map((value) => ranksIn(value, n).join("+")).join(", ");
      const held = state.held.map((row, rank) => `rank ${rank}: ${text(row)}`).join("; ");
      const name = say(`What each rank holds after step ${step}`, `第 ${step} 步之后每个 rank 的内容`);
      const arrows = state.sends.map((send) => arrow(send, places, one.length));
      const boxes = state.held.map((row, rank) => box(row, rank, places[rank], arrived(rank)));
      const frame = `viewBox="0 ${140 - radius} 360 ${100 + 2 * radius}"`;
      picture(figure, frame, name, held, [...arrows, ...boxes]);
      const checked = say(" Checked: every rank has the sum of all ranks.", "已检查：每个 rank 都有全部 rank 的和。");
      const parts = say(" Checked: each rank has the sum of one chunk.", "已检查：每个 rank 各有一个块的和。");
      const oneEach = state.held.every((row) => row.filter((value) => value === sumOfAll(n)).length === 1);
      told.textContent = tell(n, state) + (complete(state.held) ? checked : step && oneEach ? parts : "");
      back.setAttribute("aria-disabled", step === 0);
      next.setAttribute("aria-disabled", step === states.length - 1);
      const row = (name, all, s) => [name, s, all[s].messages, number(all[s].sent[0] / 1e6)];
      const end = (key, all = simulate(n, key)) => row(say(`whole ${ways[key]}`, `${ways[key]}，全程`), all, all.length - 1);
      const heads = [say("steps", "步数"), say("messages", "消息数"), say("MB sent", "发送 MB")];
      const soFar = row(say("so far", "目前"), states, step);
      table(numbers, ["", ...heads], [soFar, ...Object.keys(ways).map((key) => end(key))]);
    }
    draw();
  };
}
