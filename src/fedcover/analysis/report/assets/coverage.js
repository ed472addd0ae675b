// Which client trains what: a picture of every layer for every client, round by round.
function coverageFigure() {
  const body = h("div", {});
  const figure = h(
    "figure",
    { class: "card", id: "coverage" },
    h(
      "figcaption",
      {},
      h("h3", {}, "Who trains what, layer by layer"),
      h(
        "span",
        { class: "small soft" },
        "A square is a layer's weight tensor: outputs from top to bottom, inputs from left to right, shrunk to at most 12 × 12 pixels.",
      ),
    ),
    body,
  );
  let shownRun = null;

  async function show() {
    const run = DATA.runs[shown.run];
    if (run === shownRun) return;
    shownRun = run;
    if (!run.pictures) {
      body.replaceChildren(
        h(
          "p",
          { class: "nothing" },
          run.done
            ? "This run keeps no pictures: it was made by an older version, or they are too large for this page."
            : "No round is done yet.",
        ),
      );
      return;
    }
    try {
      const found = await unpacked(run.pictures);
      if (run === shownRun) body.replaceChildren(...pictureBook(run, found));
    } catch (error) {
      body.replaceChildren(
        h("p", { class: "nothing" }, `The pictures cannot be unpacked by this browser (${error.message}).`),
      );
    }
  }
  onChange(show);
  redraws.push(() => {
    shownRun = null;
    show();
  });
  show();
  return figure;
}
const redraws = [];

function pictureBook(run, { layers, frames }) {
  readColours();
  const names = Object.keys(layers);
  const missed = frames.map((frame) => frame.missed.map((text, place) => average(pixels(text, layers[names[place]]))));
  const grid = scroller({
    tabindex: 0,
    role: "region",
    "aria-label": "Pictures of the layers, one row per client",
  });
  const output = h("output", {});
  const slider = h("input", {
    type: "range",
    min: 0,
    max: frames.length - 1,
    value: frames.length - 1,
    "aria-label": "round",
    oninput: () => turn(),
  });
  const strips = roundStrips(names, missed, (place) => {
    slider.value = place;
    turn();
  });
  const behind = lazyTable("Table", () => layerTable(names, layers, frames, missed, +slider.value));
  let timer = null;
  const play = h("button", { type: "button", onclick: () => (timer ? stop() : start()) }, "Play");
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const start = () => {
    play.textContent = "Stop";
    if (+slider.value === frames.length - 1) slider.value = -1;
    timer = setInterval(
      () => {
        if (!play.isConnected || +slider.value >= frames.length - 1) return stop();
        slider.value = +slider.value + 1;
        return turn();
      },
      Math.max(90, Math.min(500, 8000 / frames.length)),
    );
  };

  function turn() {
    const frame = frames[+slider.value];
    output.textContent = `round ${frame.round} of ${run.rounds}`;
    slider.setAttribute("aria-valuetext", `round ${frame.round}, ${frame.answered} clients`);
    const left = grid.scrollLeft;
    grid.replaceChildren(pictureTable(names, layers, frame));
    grid.scrollLeft = left;
    strips.mark(+slider.value);
    behind.refresh();
  }
  turn();
  const few =
    frames.length < run.done
      ? h("span", { class: "small soft" }, `${frames.length} of ${run.done} rounds are in this page`)
      : null;
  return [
    h("div", { class: "slider" }, frames.length > 1 ? play : null, slider, output, few),
    key(),
    grid,
    strips.element,
    behind,
  ];
}

function key() {
  const square = (style) => h("i", { style });
  return h(
    "div",
    { class: "key" },
    h("span", {}, square("background: var(--held)"), "trains all of it"),
    h("span", {}, square("background: color-mix(in srgb, var(--held) 45%, var(--card))"), "a part of it"),
    h("span", {}, square("background: var(--card)"), "none of it"),
    h(
      "span",
      {},
      square("background: repeating-linear-gradient(135deg, var(--warn) 0 4px, var(--card) 4px 5px)"),
      "trained by nobody in this round",
    ),
  );
}

function pictureTable(names, layers, frame) {
  // whichever there are more of, layers or clients, runs from left to right
  const clients = Object.entries(frame.clients).sort(
    (a, b) => frame.capacities[b[0]] - frame.capacities[a[0]] || a[0] - b[0],
  );
  const some =
    clients.length < frame.answered ? `${clients.length} of ${frame.answered} clients` : `${frame.answered} clients`;
  const who = [
    {
      head: "nobody",
      note: "untrained",
      texts: frame.missed,
      colour: "warn",
      hatched: true,
      said: "trained by nobody",
    },
    { head: "all", note: "mean share", texts: frame.trained, colour: "held", said: "mean share of the clients" },
    ...clients.map(([id, part]) => ({
      head: `client ${id}`,
      note: `holds ${frame.capacities[id]}`,
      texts: frame.parts[part],
      colour: "held",
      said: `client ${id} trains`,
    })),
  ];
  const what = names.map((name, place) => ({ head: name, note: layers[name].join(" × "), place }));
  const cell = (one, layer) => {
    const picture = pixels(one.texts[layer.place], layers[layer.head]);
    const said = `${layer.head}: ${one.said} ${percent(average(picture))}`;
    const canvas = h("canvas", { role: "img", "aria-label": said, title: said });
    paint(canvas, picture, one.colour, one.hatched);
    return h("td", {}, canvas);
  };
  const across = names.length > who.length ? what : who;
  const down = across === what ? who : what;
  const tall = across === what;
  const kind = (entry) => (entry.head === "all" && entry.texts ? "total" : null);
  return h(
    "table",
    { class: across.length > 12 ? "coverage many" : "coverage" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, some),
        across.map((entry) =>
          h(
            "th",
            { scope: "col", class: tall ? "tall" : kind(entry), title: `${entry.head}: ${entry.note}` },
            h("span", {}, entry.head),
            h("small", {}, entry.note),
          ),
        ),
      ),
    ),
    h(
      "tbody",
      {},
      down.map((row) =>
        h(
          "tr",
          { class: kind(row) },
          h("th", { scope: "row" }, row.head, h("small", {}, row.note)),
          across.map((column) => (tall ? cell(row, column) : cell(column, row))),
        ),
      ),
    ),
  );
}

function roundStrips(names, missed, choose) {
  // one strip a layer, one column a round: how much of the layer nobody trained
  const most = Math.max(...missed.flat());
  if (most === 0)
    return {
      element: h(
        "p",
        { class: "small soft" },
        "In every round shown, every parameter of these layers was trained by somebody.",
      ),
      mark: () => {},
    };
  const [base, full] = [resolvedColours.card, resolvedColours.warn];
  const rows = names.map((name, layer) => {
    const canvas = h("canvas", {
      role: "img",
      "aria-label": `${name}: share trained by nobody, by round; highest ${percent(Math.max(...missed.map((row) => row[layer])))}`,
    });
    canvas.addEventListener("click", (event) =>
      choose(Math.floor((event.offsetX / canvas.clientWidth) * missed.length)),
    );
    return [canvas, layer, name];
  });
  const mark = (now) =>
    rows.forEach(([canvas, layer]) => {
      canvas.width = Math.max(1200, 4 * missed.length);
      canvas.height = 12;
      const [pen, wide] = [canvas.getContext("2d"), canvas.width / missed.length];
      missed.forEach((row, place) => {
        pen.fillStyle = mixed(base, full, row[layer] ? 0.15 + 0.85 * row[layer] : 0.04);
        pen.fillRect(Math.floor(place * wide), 0, Math.ceil(wide), 12);
      });
      pen.fillStyle = getComputedStyle(document.body).color;
      pen.fillRect(Math.min(canvas.width - 3, Math.floor((now + 0.5) * wide) - 1), 0, 3, 12);
    });
  return {
    mark,
    element: h(
      "div",
      {},
      h(
        "p",
        { class: "small soft" },
        "Share of each layer that nobody trained, round by round (the stronger the colour, the more); the line marks the round above.",
      ),
      h(
        "div",
        { class: "rounds" },
        rows.map(([canvas, , name]) => [h("span", { title: name }, name), canvas]),
      ),
    ),
  };
}

function layerTable(names, layers, frames, missed, now) {
  const worst = (layer) => missed.reduce((best, row, place) => (row[layer] > missed[best][layer] ? place : best), 0);
  return table(
    [
      ["layer", false],
      ["shape", false],
      [`untrained in round ${frames[now].round}`, true],
      ["most untrained", true],
      ["in round", true],
    ],
    names.map((name, layer) => [
      name,
      layers[name].join(" × "),
      percent(missed[now][layer]),
      percent(missed[worst(layer)][layer]),
      missed[worst(layer)][layer] ? String(frames[worst(layer)].round) : "–",
    ]),
  );
}
