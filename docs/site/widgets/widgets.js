"use strict";
// What the widgets share: two languages, labeled controls, pictures. No framework.
//
// A page writes <div class="widget" data-widget="NAME"></div>. The file NAME.js registers a function
// that fills it. What it computes stands in widgets.NAME: functions of numbers, which need no page.
// tests/pages/test_widgets.py runs them with node and compares them with the chapters.

globalThis.widgets = { builders: {} };
{
  let ids = 0;

  const add = (parent, tag, attributes = {}, text = "") => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return parent.appendChild(element);
  };

  const row = (parent, label) => {
    const id = `widget-${ids++}`;
    const line = add(parent, "div", { class: "widget-row" });
    add(line, "label", { for: id }, label);
    return [line, id];
  };

  widgets.page = {
    add,
    say: (english, chinese) => (document.documentElement.lang.startsWith("zh") ? chinese : english),
    number: (value, digits = 0) =>
      value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }),

    // A slider along stops, a list of numbers. Returns a function that gives the current one.
    slider(parent, label, stops, first, show, changed) {
      const [line, id] = row(parent, label);
      const [min, max, value] = [0, stops.length - 1, stops.indexOf(first)];
      const input = add(line, "input", { type: "range", id, min, max, value });
      const output = add(line, "output", { for: id });
      const read = () => stops[input.value];
      const tell = () => {
        output.textContent = show(read());
        input.setAttribute("aria-valuetext", show(read()));
      };
      tell();
      input.addEventListener("input", () => [tell(), changed()]);
      return read;
    },

    // A list to choose from: {key: text}. Returns a function that gives the chosen key.
    choice(parent, label, texts, changed) {
      const [line, id] = row(parent, label);
      const select = add(line, "select", { id });
      for (const [value, text] of Object.entries(texts)) add(select, "option", { value }, text);
      select.addEventListener("change", changed);
      return () => select.value;
    },

    button(parent, name, text, clicked) {
      const made = add(parent, "button", { type: "button", "data-do": name }, text);
      made.addEventListener("click", clicked);
      return made;
    },

    // What the widget shows, and what to try first. The picture above it is on GitHub, too.
    intro: (parent, english, chinese) =>
      add(parent, "p", { class: "widget-intro" }, widgets.page.say(english, chinese)),

    // The sentence below the controls: read aloud when it changes.
    sentence: (parent) => add(parent, "p", { "aria-live": "polite", class: "widget-sentence" }),

    note: (parent, english, chinese) =>
      add(parent, "p", { class: "widget-note" }, widgets.page.say(english, chinese)),

    // A picture with a name and a description for those who do not see it. shapes: SVG.
    picture(figure, attributes, name, description, shapes) {
      figure.innerHTML = `<svg role="img" ${attributes}><title>${name}</title>
        <desc>${description}</desc>${shapes.join("")}</svg>`;
    },

    // Shapes of a picture as wide as the page: x and width in percent, y and height in pixels.
    rect: (kind, x, width, y, height) =>
      `<rect class="${kind}" x="${x}%" width="${width}%" y="${y}" height="${height}"/>`,
    text: (kind, x, y, words) => `<text class="${kind}" x="${x}%" y="${y}">${words}</text>`,

    // The numbers that a picture shows: heads, then rows of cells. The first cell names its row.
    table(table, heads, rows) {
      table.replaceChildren();
      const line = add(table, "tr");
      for (const head of heads) add(line, head ? "th" : "td", head ? { scope: "col" } : {}, head);
      for (const [name, ...cells] of rows) {
        const line = add(table, "tr");
        add(line, "th", { scope: "row" }, name);
        for (const cell of cells) add(line, "td", {}, cell);
      }
    },
  };

  const fill = () => {
    for (const div of document.querySelectorAll(".widget")) {
      widgets.builders[div.dataset.widget](div);
    }
  };
  if (typeof document !== "undefined") document.addEventListener("DOMContentLoaded", fill);
}
