// What check_site.py asks in the browser. A page's answers are true, or the texts with a fault.
{
  const all = (selector) => [...document.querySelectorAll(selector)];
  const start = (it) => it.textContent.trim().slice(0, 40);
  const isCut = (it) => it.scrollWidth > it.clientWidth;
  const isPlot = (it) => it.src.startsWith("data:");
  const longest = (it) => { // of its lines, without their numbers and the signs of a diff
    const numbers = it.querySelector(".linenos")?.textContent.length ?? 0;
    const lengths = it.textContent.split("\n").map((line) => line.length);
    return Math.max(...lengths) - numbers - !!it.closest(".highlight-diff");
  };
  const choose = (theme) => (document.body.dataset.theme = theme);

  // How light it is where these colors lie on each other: the relative luminance of WCAG 2.
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const luminance = (colors) => {
    const key = colors.join();
    if (!known.has(key)) known.set(key, measured(colors));
    return known.get(key);
  };
  const measured = (colors) => {
    for (const color of colors) {
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
    }
    return pixel();
  };
  const pixel = () => {
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].map((part) => part / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (below, color) => {
    const [a, b] = [luminance(below) + 0.05, luminance([...below, color]) + 0.05];
    return Math.max(a, b) / Math.min(a, b);
  };

  const behind = (it, ground) => {
    const colors = [];
    for (; it; it = it.parentElement) colors.unshift(getComputedStyle(it).backgroundColor);
    return [ground, ...colors];
  };
  const behindInPicture = (text, ground) => {
    const { left, right, top, bottom } = text.getBoundingClientRect();
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    const boxes = all("svg > rect").filter((box) => {
      const place = box.getBoundingClientRect();
      const isBelow = box.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING;
      return isBelow && place.left < x && x < place.right && place.top < y && y < place.bottom;
    });
    const looks = boxes.map(getComputedStyle).filter(({ fill }) => fill.startsWith("rgb("));
    return [ground, ...looks.map((it) => it.fill.replace(")", `, ${it.fillOpacity})`))];
  };

  window.checks = {
    isWide: () =>
      [document.documentElement, document.querySelector(".content")] // what could scroll
        .some((it) => it && it.scrollWidth > it.clientWidth),
    poorPictures: () =>
      all("article img").filter((it) => {
        const wide = it.getBoundingClientRect().width;
        // Where an SVG has its own width, letters have 19 pixels.
        const isSmall = !isPlot(it) && wide < 0.6 * it.naturalWidth;
        return !it.naturalWidth || isSmall || it.parentElement.clientWidth < Math.floor(wide);
      }).map((it) => it.alt.slice(0, 40)),
    cutCommands: () => // and single lines of output
      all(".highlight-bash pre, .highlight-text pre").filter((it) => {
        const text = it.textContent.trim();
        const isOutput = it.closest(".highlight-text") && text.includes("\n");
        return isCut(it) && (!isOutput || /^(python|torchrun|pip|make) /.test(text));
      }).map(start),
    cutCode: () => all("article pre").filter((it) => isCut(it) && longest(it) <= 100).map(start),
    hidden: () =>
      all("article *")
        .filter((it) => it.scrollWidth > it.clientWidth + 1)
        .map((it) => [it, getComputedStyle(it)])
        .filter(([, look]) => look.overflowX !== "visible" && look.maskImage === "none")
        .map(([it]) => start(it)),

    plotsIgnore: (theme, ground) => { // whose corner has not the color of the page, or nearly so
      choose(theme);
      return all("article img").filter(isPlot).some((it) => {
        canvas.filter = getComputedStyle(it).filter;
        canvas.drawImage(it, 0, 0, 1, 1, 0, 0, 1, 1);
        canvas.filter = "none";
        return Math.abs(pixel() - luminance([ground])) > 0.01;
      });
    },
    picturesIgnore: (theme) => {
      choose(theme);
      const isDark = (it) => getComputedStyle(it).colorScheme.includes("dark");
      return all("article img").some((it) => isDark(it) !== (theme === "dark"));
    },
    faint: (theme, ground, least) => {
      choose(theme);
      const still = document.head.appendChild(document.createElement("style"));
      still.textContent = "* { transition: none !important }";
      const found = new Set();
      const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      while (words.nextNode()) {
        const it = words.currentNode.parentElement;
        const isShown = words.currentNode.data.trim() && it.checkVisibility({ visibilityProperty: true });
        if (!isShown || it.closest("svg")) continue;
        if (contrast(behind(it, ground), getComputedStyle(it).color) < least) found.add(start(it));
      }
      still.remove();
      return [...found];
    },
    faintInPicture: (ground, least) =>
      all("text")
        .filter((it) => start(it) && contrast(behindInPicture(it, ground), getComputedStyle(it).fill) < least)
        .map(start),
    withoutRoom: () => { // texts wider than their box or the picture
      document.documentElement.style.fontFamily = "DejaVu Sans, Verdana"; // wide letters
      const place = (it) => it.getBoundingClientRect();
      const boxes = [document.documentElement, ...all("svg > rect")].map(place);
      const isCut = (text) => {
        const { left, right, top, bottom } = place(text);
        const [x, y] = [(left + right) / 2, (top + bottom) / 2];
        const inside = (box) => box.left < x && x < box.right && box.top < y && y < box.bottom;
        return boxes.filter(inside).some((box) => left < box.left - 1 || box.right + 1 < right);
      };
      return all("text").filter(isCut).map(start);
    },
  };
}
