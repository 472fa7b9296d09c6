"use strict";
// A training step at four levels to step through: what each rank holds, and what it sends. The sums are
// those of beyond/shard/levels.py (formula), in multiples of the parameters' bytes, with AdamW.
{
  const upTo = (n) => [...Array(n).keys()];
  const KINDS = { parameters: 1, gradients: 1, optimizer: 2 }; // multiples: AdamW has two states

  // How many collectives of all parameters there are before a step, in its forward, in its backward
  // and in its update. A reduce-scatter or an all-gather counts once, an all-reduce is both of them.
  const COLLECTIVES = {
    none: [0, 0, 2, 0],
    optimizer: [0, 0, 2, 1],
    gradients: [0, 0, 1, 1],
    parameters: [0, 1, 2, 0],
  };
  const LEVELS = Object.keys(COLLECTIVES); // as in beyond/shard/levels.py

  // The moments of a step. held: of each kind, how much a rank keeps, and whether the rest passes
  // through. sent: by each rank so far. In each collective, a rank sends (n - 1)/n.
  function moments(way, n) {
    const isDivided = (kind) => LEVELS.indexOf(way) >= { optimizer: 1, gradients: 2, parameters: 3 }[kind];
    const hold = (kind, passing) => ({ kept: isDivided(kind) ? 1 / n : 1, passing: passing && isDivided(kind) });
    let sent = 0;
    return ["start", "forward", "backward", "update"].map((name, i) => {
      sent += (COLLECTIVES[way][i] * (n - 1)) / n;
      const gradients = i < 2 ? { kept: 0, passing: false } : hold("gradients", name === "backward");
      const parameters = hold("parameters", name === "forward" || name === "backward");
      return { name, held: { parameters, gradients, optimizer: hold("optimizer", false) }, sent };
    });
  }

  const together = ({ held }) =>
    Object.entries(KINDS).reduce((sum, [kind, size]) => sum + size * held[kind].kept, 0);

  widgets.shard = { moments, together, LEVELS };

  widgets.builders.shard = (div) => {
    const { add, say, slider, choice, button, picture, sentence, intro, note, rect, text, table, number } = widgets.page;
    intro(div, "One training step of four ranks, moment by moment: what each holds, and what it has sent. Press Next.",
      "四个 rank 的一步训练，逐个时刻来看：每个 rank 有什么，发送了多少。请按“下一步”。");
    let step = 0;
    const go = (place) => [(step = place), draw()];
    const ways = { none: "DDP", optimizer: "ZeRO-1", gradients: "ZeRO-2", parameters: "FSDP (ZeRO-3)" };
    const way = choice(div, say("way", "方式"), ways, () => go(0));
    const ranks = slider(div, say("ranks", "rank 数"), [2, 3, 4, 5, 6, 7, 8], 4, String, () => draw());
    const bar = add(div, "div", { class: "widget-buttons" });
    const back = button(bar, "back", say("Back", "上一步"), () => go(Math.max(0, step - 1)));
    const next = button(bar, "next", say("Next", "下一步"), () => go(Math.min(3, step + 1)));
    button(bar, "reset", say("Reset", "重置"), () => go(0));
    const told = sentence(div);
    const figure = add(div, "div", { class: "widget-shards" });
    const numbers = add(div, "table");
    note(div, "The columns of a rank are its parameters (green), its gradients (blue), and, twice as wide, AdamW's " +
      "state (gray). An orange cell is here for a moment only, a layer or a bucket at a time. Table: " +
      "what a rank keeps, and what it sends in a step, in multiples of the parameters' bytes.",
      "每个 rank 的列：参数（绿）、梯度（蓝）、AdamW 状态（灰，两倍宽）。橙色的格子只短暂存在，每次一层或一个桶。" +
      "表：每个 rank 保留多少，一步发送多少，单位是参数的字节数。");

    const whole = say("Forward: each rank has all parameters, and sends nothing.",
      "前向：每个 rank 有全部参数，不发送。");
    const reduced = say("Backward: an all-reduce gives all mean gradients to each rank.",
      "反向：all-reduce 让每个 rank 得到全部平均梯度。");
    const exchanged = say("Update: each rank updates its part, and an all-gather sends it to the others.",
      "更新：每个 rank 更新自己那份，再用 all-gather 发给其他 rank。");
    const texts = { // forward, backward, update
      none: [whole, reduced, say("Update: each rank updates everything.", "更新：每个 rank 更新全部参数。")],
      optimizer: [whole, reduced, exchanged],
      gradients: [
        whole,
        say("Backward: a reduce-scatter gives each rank its part of the mean gradients.",
          "反向：reduce-scatter 让每个 rank 得到自己那份平均梯度。"),
        exchanged,
      ],
      parameters: [
        say("Forward: an all-gather makes each layer whole, and then it is freed.",
          "前向：all-gather 拼出每一层，用完释放。"),
        say("Backward: each layer is gathered again, and a reduce-scatter gives each rank its part of the mean gradients.",
          "反向：每层再次 all-gather，然后 reduce-scatter 让每个 rank 得到自己那份平均梯度。"),
        say("Update: each rank updates its part, and sends nothing.", "更新：每个 rank 更新自己那份，不发送。"),
      ],
    };
    const start = say("Between two steps, after zero_grad.", "两步之间，zero_grad 之后。");

    function draw() {
      const [n, all] = [ranks(), moments(way(), ranks())];
      const { held, sent } = all[step];
      const [width, height] = [100 / n, 96];
      const shapes = upTo(n).flatMap((rank) => {
        let column = 0;
        const cells = Object.entries(KINDS).flatMap(([kind, size]) => {
          const x = rank * width + (column * width * 0.88) / 4;
          column += size;
          return upTo(n).map((part) => {
            const own = held[kind].kept === 1 || (held[kind].kept > 0 && part === rank);
            const fill = own ? kind : held[kind].passing ? "now" : "none";
            return rect(fill, x, (size * width * 0.88) / 4, (part * height) / n, height / n);
          });
        });
        return [...cells, text("", (rank + 0.44) * width, height + 16, `rank ${rank}`)];
      });
      const keeps = say("keeps", "保留");
      const described = Object.keys(KINDS).map((kind) => `${kind}: ${keeps} ${number(held[kind].kept, 2)}`).join("; ");
      picture(figure, 'class="widget-parts"', say("What each rank holds", "每个 rank 的内容"), described, shapes);
      const soFar = number(sent, 2);
      told.textContent = (step ? texts[way()][step - 1] : start) + say(` Sent so far: ${soFar}.`, `目前已发送：${soFar}。`);
      back.setAttribute("aria-disabled", step === 0);
      next.setAttribute("aria-disabled", step === 3);
      const row = (key, found = moments(key, n)) =>
        [ways[key], number(together(found[2]), 2), number(found[3].sent, 2)];
      table(numbers, ["", say("kept", "保留"), say("sent", "发送")], LEVELS.map((key) => row(key)));
    }
    draw();
  };
}
