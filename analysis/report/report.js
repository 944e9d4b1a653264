"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const button = document.getElementById("theme");
  const name = () => { button.textContent = isDark() ? "Light page" : "Dark page"; };
  button.hidden = false;
  button.onclick = () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); };
  dark.addEventListener("change", name);
  name();
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
  });

  const NS = "http://www.w3.org/2000/svg";
  const shape = (parent, kind, attributes) => {
    const node = document.createElementNS(NS, kind);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    return parent.appendChild(node);
  };
  const short = (value) => (Math.abs(value) >= 0.001 || value === 0 ? String(+value.toPrecision(3)) : value.toExponential(1));
  const line = (parent, text) => { const row = parent.appendChild(document.createElement("div")); row.append(text); return row; };

  function follow(svg, data) {
    const figure = svg.closest("figure");
    const layer = shape(svg, "g", { "pointer-events": "none" });
    const tip = figure.appendChild(document.createElement("div"));
    tip.className = "tip";
    tip.hidden = true;
    const clear = () => { layer.replaceChildren(); tip.hidden = true; };

    function show(panel, step) {
      clear();
      const [x0, y0, x1, y1] = panel.box;
      const [low, high] = panel.y.map((y) => (panel.log ? Math.log(y) : y));
      const px = x0 + ((step - panel.x[0]) / (panel.x[1] - panel.x[0])) * (x1 - x0);
      shape(layer, "line", { x1: px, x2: px, y1: y0, y2: y1, stroke: "var(--soft)", "stroke-width": 0.5 });
      tip.replaceChildren();
      line(tip, panel.unit ? `rollout step ${step} · gradient step ${+(step * panel.unit).toFixed(1)}` : `rollout step ${step}`);
      for (const series of panel.series) {
        const at = series.step.indexOf(step);
        if (at < 0 || series.value[at] === null) continue;
        const value = series.value[at];
        const py = y1 - (((panel.log ? Math.log(value) : value) - low) / (high - low)) * (y1 - y0);
        shape(layer, "circle", { cx: px, cy: py, r: 2.2, fill: series.colour, stroke: "var(--paper)", "stroke-width": 0.6 });
        const band = series.low[at] === null ? "" : ` (${short(series.low[at])} to ${short(series.high[at])})`;
        const row = line(tip, "");
        row.appendChild(document.createElement("i")).style.background = series.colour;
        row.append(`${series.name} ${short(value)}${band}, n=${series.n[at]}`);
      }
      tip.hidden = false;
      const box = svg.getBoundingClientRect();
      const outer = figure.getBoundingClientRect();
      const scale = box.width / svg.viewBox.baseVal.width;
      const left = box.left - outer.left + px * scale + 12;
      const room = outer.width - tip.offsetWidth;
      tip.style.left = `${Math.max(0, left > room ? Math.min(room, left - tip.offsetWidth - 24) : left)}px`;
      tip.style.top = `${box.top - outer.top + y0 * scale + 6}px`;
    }
    function move(event) {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const panel = data.panels.find(({ box }) => at.x >= box[0] - 4 && at.x <= box[2] + 4 && at.y >= box[1] && at.y <= box[3]);
      if (!panel) return clear();
      const wanted = panel.x[0] + ((at.x - panel.box[0]) / (panel.box[2] - panel.box[0])) * (panel.x[1] - panel.x[0]);
      let best = null;
      for (const series of panel.series)
        for (const step of series.step)
          if (best === null || Math.abs(step - wanted) < Math.abs(best - wanted)) best = step;
      if (best !== null) show(panel, best);
    }
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", clear);
  }
  for (const script of document.querySelectorAll("script[type='application/json']"))
    follow(document.getElementById(script.dataset.figure), JSON.parse(script.textContent));
})();
