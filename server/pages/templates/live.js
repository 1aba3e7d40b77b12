// Follows the server's events: each brings those parts of a panel that have changed, as HTML that the server escaped.
// Tables and lists stay where a reader has scrolled them, and keep the keyboard's focus.
"use strict";

function replace(part, html) {
  const before = [...part.querySelectorAll(".map svg > g")].map(place);
  const kept = [...part.querySelectorAll("[tabindex]")].map((box) => [box.scrollLeft, box.scrollTop, box === document.activeElement]);
  part.innerHTML = html;
  part.querySelectorAll("[tabindex]").forEach((box, index) => {
    const [left, top, focused] = kept[index] ?? [0, 0, false];
    box.scrollTo(left, top);
    if (focused) box.focus({ preventScroll: true });
  });
  const points = [...part.querySelectorAll(".map svg > g")];
  if (before.length !== points.length || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  points.forEach((point, index) => {
    const [x, y] = place(point);
    const from = `translate(${before[index][0] - x}px, ${before[index][1] - y}px)`;
    point.animate([{ transform: from }, { transform: "none" }], { duration: 400, easing: "ease-out" });
  });
}

function place(point) {
  const box = point.getBBox();
  return [box.x + box.width / 2, box.y + box.height / 2];
}

for (const panel of document.querySelectorAll("[data-changes]")) {
  const changes = new EventSource(panel.dataset.changes);
  changes.onopen = () => panel.removeAttribute("data-lost");
  changes.onerror = () => panel.setAttribute("data-lost", "");
  changes.onmessage = (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) {
      const part = panel.querySelector(`[data-part="${name}"]`);
      if (part) replace(part, html);
    }
  };
}
