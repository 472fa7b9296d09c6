"use strict";
// Will it fit? The bytes of a training step by kind, and the largest batch: the sum that
// 01_single_gpu/peak.py prints beside the rehearsed peak, and the buckets that fit.py adds for DDP.
{
  const [MIB, GIB] = [2 ** 20, 2 ** 30];

  // Counted by peak.py's parts_of, for 10 classes: the bytes of parameters, of buffers, and of the
  // activations of one sample. Under bf16 autocast: activations,
  // and the 16-bit copies of weights that backward keeps. tests/pages/test_widgets.py counts them again.
  const network = (parameters, buffers, sample, sample16, copies16) =>
    ({ parameters, buffers, sample, sample16, copies16 });
  const NETWORKS = {
    "resnet18, 64 × 64": network(44726568, 38560, 1812528, 971824, 22344064), // as in stage 03
    "net, 28 × 28": network(89360, 0, 59416, 36772, 44500),
    "resnet18, 224 × 224": network(44726568, 38560, 22179888, 11892784, 22344064),
    "resnet50, 224 × 224": network(94114088, 212904, 85909552, 43757616, 46950784),
  };
  const STATES = { sgd: 0, momentum: 1, adam: 2, adamw: 2 }; // of the size of the parameters
  const BUCKETS = { one: 0, ddp: 1, views: 0 }; // of the size of the gradients

  // A model of your own: each 16-bit activation is half as large, and all weights are copied.
  const own = (parameters, mib) =>
    network(4 * parameters, 0, mib * MIB, (mib * MIB) / 2, 2 * parameters);

  // network: one of the names above, or a model of your own.
  function memory({ network, optimizer, precision, parallel, batch }) {
    const { parameters, buffers, sample, sample16, copies16 } = NETWORKS[network] ?? network;
    const half = precision === "bf16";
    return {
      parameters,
      buffers,
      gradients: parameters,
      optimizer: STATES[optimizer] * parameters,
      buckets: BUCKETS[parallel] * parameters,
      copies: half ? copies16 : 0,
      activations: batch * (half ? sample16 : sample),
    };
  }
  const sum = (kinds) => Object.values(kinds).reduce((total, bytes) => total + bytes, 0);

  // The largest batch whose sum is within the limit: 0 if not even one sample is.
  function largest(inputs, limit) {
    const [none, one] = [0, 1].map((batch) => sum(memory({ ...inputs, batch })));
    return Math.max(0, Math.floor((limit - none) / (one - none)));
  }

  widgets.memory = { own, memory, sum, largest };

  const BATCHES = [1, 2, 4, 8, 16, 30, 32, 60, 64, 96, 120, 128, 256, 512, 1024, 2048, 4096];
  const LIMITS = [1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 80, 141]; // GiB
  const MILLIONS = [1, 3, 7, 12, 25, 45, 86, 130, 350, 770, 1500, 3000, 7000, 13000, 70000];
  const SAMPLES = [1, 3, 10, 30, 80, 200, 500, 1000, 3000, 10000]; // MiB

  widgets.builders.memory = (div) => {
    const { add, say, slider, choice, picture, sentence, intro, note, rect, text, table, number } = widgets.page;
    intro(div, "The same ResNet-18, with numbers to change. Double the batch: what grows, and what does not?",
      "同一个 ResNet-18，数字可以改动。把批大小加倍：什么变大了，什么没有变？");
    const redraw = () => draw();
    const names = Object.fromEntries(Object.keys(NETWORKS).map((name) => [name, name]));
    names.own = say("your own", "你自己的模型");
    const network = choice(div, say("network", "网络"), names, redraw);
    const mine = add(div, "div");
    const range = (parent, label, stops, first, unit) =>
      slider(parent, label, stops, first, (value) => `${number(value)} ${unit}`, redraw);
    const unit = say("million", "百万");
    const millions = range(mine, say("parameters", "参数"), MILLIONS, 25, unit);
    const kept = range(mine, say("activations per sample", "每个样本的激活值"), SAMPLES, 80, "MiB");
    const optimizers = { momentum: "SGD, momentum", sgd: "SGD", adam: "Adam", adamw: "AdamW" };
    const optimizer = choice(div, say("optimizer", "优化器"), optimizers, redraw);
    const precisions = { fp32: "fp32", bf16: say("bf16 autocast (stage 05)", "bf16 autocast（阶段 05）") };
    const precision = choice(div, say("precision", "精度"), precisions, redraw);
    const views = say("DDP, gradient_as_bucket_view", "DDP，gradient_as_bucket_view");
    const ways = { one: say("one process", "单进程"), ddp: say("a rank of DDP (stage 04)", "DDP 的一个 rank（阶段 04）"), views };
    const parallel = choice(div, say("runs as", "运行方式"), ways, redraw);
    const batch = range(div, say("batch on this GPU", "本 GPU 的批大小"), BATCHES, 64, "");
    const limit = range(div, say("memory of the GPU", "GPU 显存"), LIMITS, 1, "GiB");
    const told = sentence(div);
    const figure = add(div, "div");
    const numbers = add(div, "table");
    note(div, "The peak of a step is about this sum, as a rule at the end of forward. Leave some hundred " +
      "MiB for what is not counted: the CUDA context, and workspaces. For your own model, we assume " +
      "that bf16 halves its activations.",
      "一步的峰值大约就是这个和，通常出现在前向结束时。CUDA 上下文和工作区没有计入，请留出几百 MiB。你自己的模型在 bf16 下，这里假定激活值减半。");
    const labels = {
      parameters: say("parameters", "参数"),
      buffers: say("buffers", "缓冲区"),
      gradients: say("gradients", "梯度"),
      optimizer: say("optimizer state", "优化器状态"),
      buckets: say("gradients once more, in DDP's buckets", "DDP 桶里的另一份梯度"),
      copies: say("16-bit copies of weights", "权重的 16 位副本"),
      activations: say("activations", "激活值"),
    };

    function advise(total, most) {
      const [held, all] = [`${number(total / GIB, 2)} GiB`, `${limit()} GiB`];
      const batch = say(`The largest batch that fits: ${most}.`, `放得下的最大批：${most}。`);
      if (total <= limit() * GIB) return say(`It fits: ${held} of ${all}. `, `放得下：${held}，共 ${all}。`) + batch;
      const cut = batch + say(" Accumulate, or use more GPUs.", "可以用梯度累积，或者用更多 GPU。");
      const shard = say("Not even one sample fits: shard the model.", "一个样本也放不下：请切分模型。");
      const no = say(`It does not fit: ${held}, not ${all}. `, `放不下：需要 ${held}，只有 ${all}。`);
      return no + (most ? cut : shard);
    }

    function draw() {
      mine.hidden = network() !== "own";
      const found = mine.hidden ? network() : own(1e6 * millions(), kept());
      const how = { optimizer: optimizer(), precision: precision(), parallel: parallel() };
      const inputs = { network: found, ...how, batch: batch() };
      const kinds = memory(inputs);
      const [total, most] = [sum(kinds), largest(inputs, limit() * GIB)];
      told.textContent = advise(total, most);
      const scale = 100 / Math.max(total, limit() * GIB);
      let left = 0;
      const shapes = Object.entries(kinds).map(([kind, bytes]) => {
        const width = bytes * scale;
        left += width;
        return rect(kind, left - width, width, 20, 34);
      });
      const end = limit() * GIB * scale;
      shapes.push(`<line x1="${end}%" x2="${end}%" y1="14" y2="60"/>`);
      shapes.push(text(end < 20 ? "left" : "right", end, 12, `${limit()} GiB`));
      const held = Object.entries(kinds).filter(([, bytes]) => bytes > 0); // the others need no name
      const rows = held.map(([kind, bytes]) => [labels[kind], bytes]);
      const cells = [...rows, [say("sum", "总和"), total]].map(([name, n]) => [name, number(n / MIB, 2)]);
      const name = say("Memory by kind", "各类内存");
      picture(figure, 'class="widget-bar"', name, told.textContent, shapes);
      table(numbers, ["", "MiB"], cells);
      held.forEach(([kind], i) => numbers.rows[i + 1].classList.add(kind));
    }
    draw();
  };
}
