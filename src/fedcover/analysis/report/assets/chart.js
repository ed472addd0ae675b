// A chart of lines with bands: redrawn at the width there is, with a cursor for pointer and keyboard alike.
const MOST_NAMES = 8;

function ticks(low, high, { ticks: wanted, whole }) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1)
    found.push(+(place * step).toPrecision(12));
  return found.filter((mark) => !whole || Number.isInteger(mark));
}

function around(low, high, whole) {
  // the finest round steps of which six marks at most, the outer two included, hold everything between them
  const power = Math.floor(Math.log10((high - low) / 10));
  const steps = [power, power + 1].flatMap((each) => [1, 2, 2.5, 5].map((factor) => factor * 10 ** each));
  const ends = (step) => [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  const step = steps.find((each) => ends(each)[1] - ends(each)[0] <= 5 && (!whole || Number.isInteger(each)));
  const [first, last] = ends(step);
  return Array.from({ length: last - first + 1 }, (_, place) => +((first + place) * step).toPrecision(12));
}

function logScale(low, high, from, to) {
  const first = Math.floor(Math.log10(low));
  const every = Math.ceil((Math.ceil(Math.log10(high)) - first) / 6);
  const marks = [10 ** first];
  while (marks.at(-1) < high) marks.push(10 ** (first + every * marks.length));
  const powers = every * (marks.length - 1);
  return { at: (value) => from + ((Math.log10(value) - first) / powers) * (to - from), marks, log: true };
}

function scaleOf(values, options, from, to) {
  // a linear scale between round marks, or a logarithmic one where values span more than two orders of magnitude
  let low = Math.min(...values),
    high = Math.max(...values);
  if (options.log && low > 0 && high / low > 100) return logScale(low, high, from, to);
  if (options.zero) low = Math.min(0, low);
  if (options.whole) high = Math.max(high, low + 1);
  if (high === low) [low, high] = apart(low, options);
  const marks = options.tight ? ticks(low, high, options) : around(low, high, options.whole);
  if (!options.tight) [low, high] = [marks[0], marks.at(-1)];
  return { at: (value) => from + ((value - low) / (high - low)) * (to - from), marks, log: false };
}

function apart(value, options) {
  // one value alone gets some room around it
  const room = 0.05 * Math.abs(value) || 1;
  return [options.zero || value === 0 ? value : value - room, Math.min(value + room, options.most ?? Infinity)];
}

function lineChart(options) {
  const plot = h("div", { class: "plot", tabindex: 0, role: "slider" });
  for (const [name, value] of Object.entries({ valuemin: 0, valuemax: 0, valuenow: 0, valuetext: "no cursor" }))
    plot.setAttribute(`aria-${name}`, value);
  plot.setAttribute("aria-label", `${options.title}: chart. Left and right arrow keys move the cursor.`);
  let sheet = null;
  const cursor = cursorOn(plot, () => sheet, options.format);
  const ends = h("ul", { class: "ends", "aria-hidden": "true" }); // the cursor and the table tell it to screen readers
  const behind = lazyTable("Table", () => seriesTable(options, sheet ? sheet.lines : []));

  function draw() {
    const lines = options.series();
    sheet = lines.length ? sheetOf(lines, options, plot.clientWidth || 480) : null;
    const nothing = whyNothing("no such figure has been measured in the runs shown.");
    plot.replaceChildren(...(sheet ? [sheet.element, cursor.tip] : [h("p", { class: "nothing" }, nothing)]));
    ends.replaceChildren(...(sheet && !sheet.named ? lineNames(lines) : []));
    cursor.move(null);
    behind.refresh();
  }
  watchWidth(plot, draw);
  onChange(draw);
  const note = h("span", { class: "small soft" }, options.note);
  const caption = h("figcaption", {}, h("h3", {}, options.title), options.controls, note);
  return h("figure", { class: "card", id: options.id }, caption, plot, ends, behind);
}

function sheetOf(lines, options, width) {
  // a drawing, and what the cursor must know of it
  const named = width > 430 && lines.length <= MOST_NAMES;
  const longest = Math.max(...lines.map((line) => line.label.length));
  const right = width - (named ? Math.min(width * 0.3, 28 + 6.6 * longest) : 10);
  const frame = { left: 46, right, top: 12, bottom: 232, width };
  const points = lines.flatMap((line) => line.points);
  const wide = { tight: true, whole: shown.axis === "round", ticks: width > 420 ? 6 : 4 };
  const xs = points.map((p) => p.x);
  const x = scaleOf(xs, wide, frame.left, frame.right);
  const y = scaleOf(
    points.flatMap((p) => [p.low, p.high]),
    options,
    frame.bottom - 8,
    frame.top,
  );
  const mark = svg("g", { class: "mark" });
  const look = { ...options, named, marks: lines.length > 12 ? 2 : 5 };
  const element = svg(
    "svg",
    { viewBox: `0 0 ${width} 268`, height: 268, "aria-hidden": "true" },
    axes(frame, x, y, options),
    lines.map((line, place) => path(line, place, x, y, look)),
    named ? names(lines, y, frame) : null,
    mark,
  );
  return { element, named, lines, frame, x, y, mark, stops: [...new Set(xs)].sort((a, b) => a - b) };
}

function watchWidth(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(element.clientWidth - width) < 2) return;
    width = element.clientWidth;
    draw();
  }).observe(element);
}

function axes(frame, x, y, options) {
  const label = (value) => (options.axisFormat || compact)(value);
  return svg(
    "g",
    {},
    y.marks.map((mark) => [
      svg("line", { class: "gridline", x1: frame.left, x2: frame.right, y1: y.at(mark), y2: y.at(mark) }),
      svg("text", { x: frame.left - 7, y: y.at(mark) + 4, "text-anchor": "end" }, label(mark)),
    ]),
    svg("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }),
    x.marks.map((mark) => svg("text", { x: x.at(mark), y: frame.bottom + 17, "text-anchor": "middle" }, compact(mark))),
    svg(
      "text",
      { x: (frame.left + frame.right) / 2, y: frame.bottom + 34, "text-anchor": "middle" },
      (options.xLabel || (() => AXES[shown.axis]))() + (x.log ? " (log scale)" : ""),
    ),
    y.log ? svg("text", { x: frame.left + 4, y: frame.top }, "log scale") : null,
  );
}

function path(line, place, x, y, options) {
  const steps = (value) =>
    line.points
      .map((p, i) => {
        const here = `${x.at(p.x).toFixed(1)},${y.at(value(p)).toFixed(1)}`;
        return i && options.step ? `H${x.at(p.x).toFixed(1)}V${y.at(value(p)).toFixed(1)}` : `${i ? "L" : "M"}${here}`;
      })
      .join("");
  const banded = line.points.some((p) => p.high > p.low);
  const back = [...line.points].reverse();
  const low = back
    .map((p, i) => {
      const to = `${x.at(p.x).toFixed(1)},${y.at(p.low).toFixed(1)}`;
      return options.step && i ? `V${y.at(p.low).toFixed(1)}H${x.at(p.x).toFixed(1)}` : `L${to}`;
    })
    .join("");
  const every = Math.max(1, Math.ceil(line.points.length / options.marks));
  const marked = line.points.filter(
    (p, i) => (i === line.points.length - 1 && !options.named) || (i + place) % every === every - 1,
  );
  return svg(
    "g",
    { "data-group": line.group, class: "line" },
    banded
      ? svg("path", { class: "band", d: `${steps((p) => p.high)}${low}Z`, fill: line.style.colour, opacity: 0.15 })
      : null,
    svg("path", {
      class: "curve",
      d: steps((p) => p.y),
      fill: "none",
      stroke: line.style.colour,
      "stroke-width": 2,
      "stroke-dasharray": line.style.dash,
      "stroke-linejoin": "round",
    }),
    marked.map((p) => markerAt(line.style, x.at(p.x), y.at(p.y))),
  );
}

function names(lines, y, frame) {
  // labels at the ends of the lines, moved apart where they would meet
  const ends = lines.map((line) => ({ line, y: y.at(line.points.at(-1).y) + 4 })).sort((a, b) => a.y - b.y);
  for (let round = 0; round < 30; round += 1)
    for (let i = 1; i < ends.length; i += 1) {
      const missing = 14 - (ends[i].y - ends[i - 1].y);
      if (missing > 0) {
        ends[i].y += missing / 2;
        ends[i - 1].y -= missing / 2;
      }
      ends[0].y = Math.max(ends[0].y, frame.top + 4);
      ends.at(-1).y = Math.min(ends.at(-1).y, frame.bottom);
    }
  const most = Math.floor((frame.width - frame.right - 22) / 6.4);
  return ends.map(({ line, y: at }) =>
    svg(
      "g",
      { "data-group": line.group },
      markerAt(line.style, frame.right + 13, at - 4),
      svg(
        "text",
        { class: "name", x: frame.right + 22, y: at },
        line.label.length > most ? `${line.label.slice(0, most - 1)}…` : line.label,
      ),
    ),
  );
}

const lineNames = (lines) =>
  // below the drawing where there is no room beside it
  lines.length > MOST_NAMES
    ? []
    : lines.map((line) => h("li", { "data-group": line.group }, swatch(line.style), h("span", {}, line.label)));

function seriesTable(options, lines) {
  const rounds = [...new Set(lines.flatMap((line) => line.points.map((p) => p.round)))].sort((a, b) => a - b);
  const at = lines.map((line) => new Map(line.points.map((p) => [p.round, p])));
  const rows = rounds.map((round) => [
    String(round),
    ...at.map((known) => (known.has(round) ? valueText(known.get(round), options.format) : "–")),
  ]);
  return table([["round", true], ...lines.map((line) => [line.label, true])], rows);
}
