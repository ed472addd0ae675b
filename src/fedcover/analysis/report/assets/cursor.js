// The cursor of a chart, for pointer and keyboard alike: it stops at every x that any line has, and says what is there.
function cursorOn(plot, current, format) {
  const tip = h("div", { class: "tip", hidden: true });
  let stop = null;

  function move(wanted) {
    const sheet = current();
    stop = sheet && wanted !== null ? Math.max(0, Math.min(sheet.stops.length - 1, wanted)) : null;
    tip.hidden = stop === null;
    if (sheet) plot.setAttribute("aria-valuemax", sheet.stops.length - 1);
    if (stop === null) return sheet && sheet.mark.replaceChildren();
    const at = sheet.stops[stop];
    const met = meeting(sheet, at);
    mark(sheet, at, met);
    const where = shown.axis === "round" ? `round ${at}` : `${AXES[shown.axis]} ${compact(at)}`;
    const values = met.map(([line, p]) => [
      line,
      valueText(p, format) + (p.n < line.of ? `, ${p.n} of ${line.of} seeds` : ""),
    ]);
    write(tip, where, values);
    place(tip, sheet, at);
    plot.setAttribute("aria-valuenow", stop);
    plot.setAttribute(
      "aria-valuetext",
      `${where}: ${values.map(([line, text]) => `${line.label} ${text}`).join("; ")}`,
    );
    return null;
  }

  const follow = (event) => current() && move(closest(current(), event.clientX - plot.getBoundingClientRect().left));
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", () => move(null));
  plot.addEventListener("blur", () => move(null));
  plot.addEventListener("keydown", (event) => {
    if (!current()) return;
    const last = current().stops.length - 1;
    const step = event.shiftKey ? 10 : 1;
    const [left, right] = [(stop ?? last + 1) - step, (stop ?? -1) + step];
    const to = { ArrowLeft: left, ArrowRight: right, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to);
  });
  return { tip, move };
}

const valueText = (p, format) =>
  format(p.y) + (p.n > 1 && p.high > p.low ? ` (${format(p.low)} – ${format(p.high)})` : "");

const nearest = (points, x) =>
  points.reduce((best, p) => (!best || Math.abs(p.x - x) < Math.abs(best.x - x) ? p : best), null);

function meeting(sheet, at) {
  // the lines that have a point here, highest first
  return sheet.lines
    .map((line) => [line, nearest(line.points, at)])
    .filter(([, p]) => p && Math.abs(sheet.x.at(p.x) - sheet.x.at(at)) < 9)
    .sort((a, b) => b[1].y - a[1].y);
}

function closest(sheet, wanted) {
  const distance = (place) => Math.abs(sheet.x.at(sheet.stops[place]) - wanted);
  return sheet.stops.reduce((best, _, place) => (distance(place) < distance(best) ? place : best), 0);
}

function mark(sheet, at, met) {
  const left = sheet.x.at(at);
  const line = svg("line", { class: "cursor", x1: left, x2: left, y1: sheet.frame.top, y2: sheet.frame.bottom });
  sheet.mark.replaceChildren(line, ...met.map(([one, p]) => markerAt(one.style, sheet.x.at(p.x), sheet.y.at(p.y))));
}

function write(tip, where, values) {
  const rows = values
    .slice(0, 12)
    .map(([line, text]) =>
      h("div", {}, swatch(line.style), h("span", {}, line.label), h("span", { class: "value" }, text)),
    );
  const more = values.length > 12 ? `and ${values.length - 12} more: see the table` : "";
  tip.replaceChildren(h("b", {}, where), ...rows, more);
}

function place(tip, sheet, at) {
  const [left, width] = [sheet.x.at(at), sheet.frame.width];
  const beside = left > width / 2 ? left - 14 - tip.offsetWidth : left + 14;
  tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, beside))}px`;
  tip.style.top = width < 430 ? "100%" : "8px"; // on a phone below the lines, not over them
}
