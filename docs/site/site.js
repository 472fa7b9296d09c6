// Draws the diagrams, in light and in dark colors, lets the keyboard scroll what is too wide, and
// says on which sides more of it is.
{
  const diagrams = [...document.querySelectorAll("pre.mermaid")];
  const sources = diagrams.map((diagram) => diagram.textContent);
  const system = matchMedia("(prefers-color-scheme: dark)");
  let drawn;

  const sides = ({ currentTarget: box }) => {
    const rest = box.scrollWidth - box.clientWidth - Math.abs(box.scrollLeft);
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", rest > 1);
  };

  const reach = () => {
    for (const box of document.querySelectorAll("article pre, .table-wrapper, p:has(> img)")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
      box.addEventListener("scroll", sides, { passive: true });
      sides({ currentTarget: box });
    }
  };

  const draw = async () => {
    const chosen = document.body.dataset.theme;
    const dark = chosen === "dark" || (chosen !== "light" && system.matches);
    if (diagrams.length && dark !== drawn) {
      drawn = dark;
      diagrams.forEach((diagram, i) => {
        diagram.removeAttribute("data-processed");
        diagram.textContent = sources[i];
      });
      const themeVariables = dark ? { edgeLabelBackground: "#222" } : {};
      const theme = dark ? "dark" : "default";
      mermaid.initialize({ startOnLoad: false, theme, themeVariables, fontFamily: "sans-serif" });
      await mermaid.run({ nodes: diagrams });
      for (const { style } of document.querySelectorAll("pre.mermaid svg")) {
        style.minWidth = `${0.7 * parseFloat(style.maxWidth)}px`; // its letters stay large enough
      }
    }
    reach();
  };

  new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-theme"] });
  system.addEventListener("change", draw);
  addEventListener("resize", reach);
  addEventListener("load", reach); // when the pictures are there
  draw();
}
