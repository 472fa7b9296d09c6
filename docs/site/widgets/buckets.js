"use strict";
// Buckets and backward: when each bucket is sent, and how long the step takes. The model is that of
// beyond/forecast: step_model.py (ring, step) and gradient_order.py (gradientsOf, fill). Seconds and bytes.
{
  const [MIB, FIRST, DEFAULT] = [2 ** 20, 2 ** 20, 25 * 2 ** 20]; // DDP's first bucket, and others

  // A layer: the numbers in its parameters, and its multiplications for one image.
  const conv = (from, to, kernel, side, bias = []) => {
    const weight = from * to * kernel ** 2;
    return { sizes: [weight, ...bias], work: weight * side ** 2 };
  };
  const norm = (channels, side) => ({ sizes: [channels, channels], work: channels * side ** 2 });
  const both = (from, to, kernel, side) => [conv(from, to, kernel, side), norm(to, side)];
  const linear = (from, to) => conv(from, to, 1, 1, [to]);

  const models = {
    resnet18() { // of stage 04: 64 × 64 pixels, 10 classes
      const layers = both(3, 64, 7, 32);
      let from = 64;
      for (const stage of [0, 1, 2, 3]) {
        const [width, side] = [64 * 2 ** stage, 16 / 2 ** stage];
        layers.push(...both(from, width, 3, side), ...both(width, width, 3, side));
        if (stage) layers.push(...both(from, width, 1, side));
        layers.push(...both(width, width, 3, side), ...both(width, width, 3, side));
        from = width;
      }
      return [...layers, linear(512, 10)];
    },
    resnet50() {
      const layers = both(3, 64, 7, 112);
      let from = 64;
      for (const [stage, blocks] of [3, 4, 6, 3].entries()) {
        const [width, side] = [64 * 2 ** stage, 56 / 2 ** stage];
        for (let block = 0; block < blocks; block++) {
          const before = stage && !block ? 2 * side : side; // the second convolution has the stride
          layers.push(...both(from, width, 1, before), ...both(width, width, 3, side));
          layers.push(...both(width, 4 * width, 1, side));
          if (!block) layers.push(...both(from, 4 * width, 1, side));
          from = 4 * width;
        }
      }
      return [...layers, linear(2048, 1000)];
    },
    vgg16() {
      const widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512];
      const sides = [224, 224, 112, 112, 56, 56, 56, 28, 28, 28, 14, 14, 14];
      const layers = sides.map((s, i) => conv(widths[i], widths[i + 1], 3, s, [widths[i + 1]]));
      return [...layers, linear(512 * 7 * 7, 4096), linear(4096, 4096), linear(4096, 1000)];
    },
  };

  // Each gradient from the last layer to the first: its bytes, and the share of backward done.
  function gradientsOf(model) {
    const layers = models[model]().reverse();
    const total = layers.reduce((sum, { work }) => sum + work, 0);
    let done = 0;
    return layers.flatMap(({ sizes, work }) => {
      done += work;
      return sizes.reverse().map((size) => ({ size: 4 * size, ready: done / total }));
    });
  }

  // Buckets as DDP fills them. cap: bucket_cap_mb. At the default, the first one closes earlier.
  function fill(gradients, cap) {
    const buckets = [];
    let size = 0;
    for (const gradient of gradients) {
      size += gradient.size;
      if (size >= (cap === DEFAULT && !buckets.length ? FIRST : cap)) {
        buckets.push({ size, ready: gradient.ready });
        size = 0;
      }
    }
    return size ? [...buckets, { size, ready: 1 }] : buckets;
  }

  const ring = (size, ranks, alpha, beta) => 2 * (ranks - 1) * (alpha + size / ranks / beta);

  // One step. A span: when a bucket is ready, and when its all-reduce begins and ends.
  function step(forward, backward, buckets, cost) {
    let [free, now] = [forward, forward];
    const spans = buckets.map(({ size, ready }) => {
      now = Math.max(now, forward + ready * backward);
      const begin = Math.max(now, free); // all-reduces go one after the other
      free = begin + cost(size);
      return [now, begin, free];
    });
    return { seconds: Math.max(now, free), spans, backwardEnd: now };
  }

  // A third of computing is forward, as in forecast.py.
  function plan({ model, cap, gbit, latency, ranks, computing }) {
    const buckets = fill(gradientsOf(model), cap);
    const cost = (size) => ring(size, ranks, latency, (gbit * 1e9) / 8);
    const found = step(computing / 3, (2 * computing) / 3, buckets, cost);
    const sending = found.spans.reduce((sum, [, begin, end]) => sum + end - begin, 0);
    return { ...found, buckets, overlap: 1 - (found.seconds - found.backwardEnd) / sending };
  }

  widgets.buckets = { gradientsOf, fill, ring, step, plan, DEFAULT };

  const CAPS = [1, 2, 5, 10, 25, 50, 75, 100, 200, 600]; // MiB

  widgets.builders.buckets = (div) => {
    const { add, say, slider, choice, picture, sentence, intro, note, rect, text, number } = widgets.page;
    intro(div, "One step of the same ResNet-18, on two ranks about as fast as our cores. The second bucket still " +
      "fills while the first is sent. Make the link slower, or the buckets smaller: what is still sent when backward has ended?",
      "同一个 ResNet-18 的一步，两个 rank，速度与我们的核心相近。第一个桶正在发送时，第二个还在装。把链路调慢，或者把桶调小：反向传播结束时，还有哪些没有发完？");
    const names = { resnet18: "ResNet-18", resnet50: "ResNet-50", vgg16: "VGG-16" };
    const model = choice(div, say("model", "模型"), names, () => draw());
    const range = (label, stops, first, unit) =>
      slider(div, label, stops, first, (value) => `${value} ${unit}`, () => draw());
    const cap = range(say("bucket size", "梯度桶大小"), CAPS, 25, "MiB");
    const gbit = range(say("link speed", "链路速率"), [0.3, 1, 2, 5, 10, 25, 50, 100, 400], 5, "Gbit/s");
    const latency = range(say("latency of a message", "消息延迟"), [1, 5, 14, 50, 100, 500], 50, "µs");
    const ranks = range(say("ranks", "rank 数"), [2, 3, 4, 8, 12, 16, 24, 32, 64], 2, "");
    const computing = range(say("one rank computes", "一个 rank 计算"), [10, 20, 45, 90, 200, 415], 200, "ms");
    const told = sentence(div);
    const figure = add(div, "div");
    note(div, "Above: one step, with the number of each bucket where backward fills it and where it is sent. " +
      "Below: how long the step takes with other bucket sizes; the line is computing alone. With 25 MiB, DDP's " +
      "default, the first bucket is full at 1 MiB. A forecast from multiplications, bytes and the link, not a measurement.",
      "上图是一步训练：数字是桶的编号，标在反向传播装桶处和发送处。下图是其他桶大小时一步的时间，横线是只计算的时间。" +
      "25 MiB 是 DDP 的默认值，这时第一个桶到 1 MiB 就装满。这是由乘法次数、字节数和链路算出的预测，不是测量。");

    function draw() {
      const inputs = { model: model(), gbit: gbit(), latency: latency() / 1e6, ranks: ranks() };
      const stepOf = (mib) => plan({ ...inputs, computing: computing() / 1e3, cap: mib * MIB });
      const { seconds, spans, backwardEnd, buckets, overlap } = stepOf(cap());
      const [ms, percent] = [(s) => `${number(1e3 * s, 1)} ms`, (share) => `${number(100 * share)}%`];
      const [whole, work, wait] = [seconds, backwardEnd, seconds - backwardEnd].map(ms);
      const size = `${number(buckets.reduce((sum, { size }) => sum + size, 0) / 1e6, 1)} MB`;
      const [sent, good, count] = [percent(overlap), percent(backwardEnd / seconds), buckets.length];
      told.textContent = say(`The step takes ${whole}: ${work} of computing, ${wait} of waiting. ` +
        `Buckets: ${count}, ${size}. Sent during backward: ${sent}. Efficiency: ${good}.`,
        `一步用 ${whole}：计算 ${work}，等待 ${wait}。桶数：${count}，共 ${size}。反向传播期间发送：${sent}。扩展效率：${good}。`);
      const block = (kind, y, from, to, name) => {
        const [x, width] = [(100 * from) / seconds, (100 * (to - from)) / seconds];
        const label = width < 2.4 * `${name}`.length ? "" : name;
        return rect(kind, x, width, y, 30) + text("on", x + width / 2, y + 20, label);
      };
      const shapes = [
        text("left", 0, 13, say("computing", "计算")),
        text("left", 0, 69, say("all-reduces", "全归约")),
        text("left", 0, 134, say("ms per step, by bucket size in MiB", "每步毫秒数，按桶大小 (MiB)")),
        block("forward", 20, 0, backwardEnd / 3, say("forward", "前向")),
      ];
      spans.forEach(([ready, begin, end], i) => {
        const [kind, start] = [i % 2 ? "odd" : "even", i ? spans[i - 1][0] : backwardEnd / 3];
        shapes.push(block(kind, 20, start, ready, i + 1), block(`sent-${kind}`, 76, begin, end, i + 1));
      });
      const all = CAPS.map((mib) => stepOf(mib).seconds);
      const [scale, wide] = [70 / Math.max(...all), 100 / CAPS.length];
      all.forEach((each, i) => {
        const [top, middle] = [230 - each * scale, (i + 0.5) * wide];
        const words = each < 9.9995 ? number(1e3 * each, each < 0.09995 ? 1 : 0) : `${number(each)} s`;
        const color = CAPS[i] === cap() ? "now" : "even";
        shapes.push(rect(color, middle - 0.4 * wide, 0.8 * wide, top, each * scale));
        shapes.push(text("", middle, top - 5, words), text("", middle, 246, CAPS[i]));
      });
      shapes.push(rect("line", 0, 100, 229 - backwardEnd * scale, 2));
      const name = say("One step, and steps with other buckets", "一个训练步，以及其他桶大小的步时间");
      const described = all.map((each, i) => `${CAPS[i]} MiB: ${ms(each)}`).join("; ");
      picture(figure, 'class="widget-steps"', name, described, shapes);
    }
    draw();
  };
}
