// The figures that compare runs.
const axisPercent = (value) => `${+(100 * value).toFixed(3)} %`;
const AXES = { round: "rounds", moved: "megabytes moved", seconds: "seconds of computing" };
const COSTS = {
  moved: "megabytes moved, all clients and rounds",
  parameters: "parameters per client, mean",
  multiply_adds: "multiply-adds per client and sample, mean",
  seconds: "seconds of computing here",
};
const ACCURACIES = {
  accuracy: "test",
  accuracy_averaged: "test, averaged model",
  validation_accuracy: "validation",
  validation_accuracy_averaged: "validation, averaged model",
};
const LOSSES = {
  "scores.loss": "test",
  "scores.loss_averaged": "test, averaged model",
  "every.train_loss": "training (clients' own)",
  "scores.validation_loss": "validation",
  "scores.validation_loss_averaged": "validation, averaged model",
};

function accuracyFigure() {
  const measured = Object.entries(ACCURACIES).filter(([name]) =>
    DATA.runs.some((run) => run.scores[name]),
  );
  let which = "accuracy";
  const controls =
    measured.length > 1 &&
    choice("data", Object.fromEntries(measured), (value) => {
      which = value;
      change({});
    });
  return lineChart({
    id: "accuracy",
    title: "Accuracy",
    controls,
    note: "of the global model; the band runs from the lowest to the highest seed",
    series: () => series("scores", which),
    format: percent,
    axisFormat: axisPercent,
    most: 1,
  });
}

function lossFigure() {
  let which = "scores.loss";
  const known = Object.entries(LOSSES).filter(([key]) => {
    const [part, name] = key.split(".");
    return DATA.runs.some((run) => run[part][name]);
  });
  const controls =
    known.length > 1 &&
    choice("data", Object.fromEntries(known), (value) => {
      which = value;
      change({});
    });
  if (known.length && !known.some(([key]) => key === which)) which = known[0][0];
  return lineChart({
    id: "loss",
    title: "Loss",
    controls,
    note: "lower is better",
    series: () => series(...which.split(".")),
    format: compact,
    log: true,
  });
}

const gammaFigure = () =>
  lineChart({
    id: "gamma-round",
    title: "Coverage in a round (Γ)",
    note: "fewest clients that trained any parameter in the round; 0: some parameter was trained by nobody",
    series: () => series("every", "gamma_round"),
    format: compact,
    zero: true,
    whole: true,
    step: true,
  });

function windowFigure() {
  const windows = [...new Set(DATA.runs.map((run) => run.settings.window || "10"))];
  return lineChart({
    id: "gamma-window",
    title: `Coverage over the last ${windows.length === 1 ? windows[0] : "window of"} rounds`,
    note: "fewest times that any parameter was trained in them",
    series: () => series("every", "gamma_window"),
    format: compact,
    zero: true,
    whole: true,
    step: true,
  });
}

const noiseFigure = () =>
  lineChart({
    id: "noise",
    title: "Noise (δ²)",
    note: "share of the model's squared length that is cut away, mean over clients",
    series: () => series("every", "delta2_mean"),
    format: percent,
    axisFormat: axisPercent,
    zero: true,
  });

function choice(name, options, then) {
  const select = h(
    "select",
    { "aria-label": name, onchange: () => then(select.value) },
    Object.entries(options).map(([value, text]) => h("option", { value }, text)),
  );
  return select;
}

function costFigure() {
  let cost = "moved";
  const plot = h("div", { class: "plot" });
  const controls = choice("cost", COSTS, (value) => {
    cost = value;
    draw();
  });
  const met = () =>
    drawn()
      .map((group) => ({ group, x: total(group, cost), y: total(group, "accuracy") }))
      .filter((p) => p.x && p.y);
  const behind = lazyTable("Table", () =>
    table(
      [
        ["runs", false],
        [COSTS[cost], true],
        ["accuracy", true],
      ],
      met().map((p) => [p.group.label, compact(p.x.mean), spreadText(p.y, percent)]),
    ),
  );

  function draw() {
    const points = met();
    behind.refresh();
    if (!points.length)
      return plot.replaceChildren(
        h("p", { class: "nothing" }, whyNothing("no run shown here has been evaluated.")),
      );
    const width = plot.clientWidth || 480;
    const frame = { left: 46, right: width - 16, top: 12, bottom: 232, width };
    const x = scaleOf(
      points.flatMap((p) => [p.x.low, p.x.high]),
      { zero: true, log: true },
      frame.left,
      frame.right,
    );
    const y = scaleOf(
      points.flatMap((p) => [p.y.low, p.y.high]),
      { most: 1 },
      frame.bottom,
      frame.top,
    );
    plot.replaceChildren(
      svg(
        "svg",
        {
          viewBox: `0 0 ${width} 268`,
          height: 268,
          role: "img",
          "aria-label": `Accuracy against ${COSTS[cost]}; the table below has the numbers`,
        },
        axes(frame, x, y, { axisFormat: axisPercent, xLabel: () => COSTS[cost] }),
        points.map((p) => dot(p, x, y)),
        points.length <= 12 ? dotNames(points, x, y, frame) : null,
      ),
    );
    return null;
  }
  watchWidth(plot, draw);
  onChange(draw);
  return h(
    "figure",
    { class: "card", id: "cost" },
    h(
      "figcaption",
      {},
      h("h3", {}, "Cost against accuracy"),
      controls,
      h(
        "span",
        { class: "small soft" },
        "where each run stands now; up and to the left is better; bars reach from the lowest to the highest seed",
      ),
    ),
    plot,
    behind,
  );
}

function dot({ group, x: cost, y: accuracy }, x, y) {
  const [left, top] = [x.at(cost.mean), y.at(accuracy.mean)];
  return svg(
    "g",
    { "data-group": group.place, class: "dot" },
    svg("title", {}, `${group.label}: ${percent(accuracy.mean)} for ${compact(cost.mean)}`),
    svg("line", {
      x1: left,
      x2: left,
      y1: y.at(accuracy.low),
      y2: y.at(accuracy.high),
      stroke: group.style.colour,
      "stroke-width": 2,
      opacity: 0.6,
    }),
    markerAt(group.style, left, top, { "stroke-width": 2.5 }),
  );
}

function dotNames(points, x, y, frame) {
  // each name goes to the first of six places around its point where it meets neither a name nor a point
  const taken = points.map((p) => [x.at(p.x.mean) - 6, y.at(p.y.mean) - 6, 12, 12]);
  const meets = (a) =>
    taken.some((b) => a[0] < b[0] + b[2] && b[0] < a[0] + a[2] && a[1] < b[1] + b[3] && b[1] < a[1] + a[3]);
  return points.map((p) => {
    const text = p.group.label.length > 30 ? `${p.group.label.slice(0, 29)}…` : p.group.label;
    const [left, top, long] = [x.at(p.x.mean), y.at(p.y.mean), 6.8 * text.length];
    const boxes = [
      [9, -7],
      [-9 - long, -7],
      [-long / 2, -24],
      [-long / 2, 9],
      [9, -22],
      [9, 8],
    ]
      .map(([dx, dy]) => [left + dx, top + dy, long, 14])
      .filter((box) => box[0] >= frame.left && box[0] + long <= frame.width && box[1] > 0 && box[1] < frame.bottom - 8);
    const box = boxes.find((place) => !meets(place));
    if (!box) return null;
    taken.push(box);
    return svg("text", { class: "name", "data-group": p.group.place, x: box[0], y: box[1] + 11 }, text);
  });
}

const spreadText = (value, format) =>
  !value
    ? "–"
    : value.n > 1 && value.high > value.low
      ? `${format(value.mean)} (${format(value.low)} – ${format(value.high)})`
      : format(value.mean);
