// The page from top to bottom.
function themeButton() {
  const order = ["auto", "light", "dark"];
  let now = 0;
  const button = h(
    "button",
    {
      type: "button",
      id: "theme",
      onclick: () => {
        now = (now + 1) % order.length;
        if (now) document.documentElement.dataset.theme = order[now];
        else delete document.documentElement.dataset.theme;
        button.textContent = `Theme: ${order[now]}`;
        for (const redraw of redraws) redraw();
      },
    },
    "Theme: auto",
  );
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
  return button;
}

function plotBar() {
  const axis = choice("horizontal axis", AXES, (value) => change({ axis: value }));
  axis.id = "axis";
  const single = h("input", { type: "checkbox", id: "single", onchange: () => change({ single: single.checked }) });
  const seeded = GROUPS.some((group) => group.runs.length > 1);
  return h(
    "div",
    { class: "bar" },
    h("label", {}, "against", axis),
    seeded ? h("label", {}, single, "every seed as a line of its own") : null,
  );
}

function detail() {
  const select = h(
    "select",
    { id: "which", "aria-label": "run in detail", onchange: () => change({ run: +select.value }) },
    DATA.runs.map((run, place) => h("option", { value: place }, `${run.name} (${run.folder})`)),
  );
  const state = h("p", {}),
    box = h("div", {});
  let drawnRun = null;
  function draw() {
    select.value = String(shown.run);
    if (drawnRun === shown.run) return;
    drawnRun = shown.run;
    const run = DATA.runs[shown.run];
    const group = GROUPS.find((one) => one.runs.includes(shown.run));
    state.replaceChildren(
      swatch(group.style),
      ` ${group.label}, seed ${run.seed}: `,
      h("span", { class: run.notFinite ? "warn" : null }, statusOf(run)),
      ".",
    );
    box.replaceChildren(...[certificateCard(run), fleetCard(run), answersCard(run), experimentCard(run)].filter(Boolean));
  }
  onChange(draw);
  draw();
  const pictures = coverageFigure();
  return h(
    "section",
    { "aria-labelledby": "detail" },
    h("h2", { id: "detail", tabindex: -1 }, "One run in detail"),
    h("div", { class: "bar" }, h("label", {}, "Run", select)),
    state,
    pictures,
    box,
  );
}

const notes = () =>
  DATA.notes.length
    ? h(
        "ul",
        { id: "notes", class: "warn small", "aria-label": "Left out of this page" },
        DATA.notes.map((note) => h("li", {}, note)),
      )
    : null;

function start() {
  const seeds = DATA.runs.length > GROUPS.length ? `, ${GROUPS.length} different but for the seed` : "";
  const many = DATA.runs.length === 1 ? "1 run" : `${DATA.runs.length} runs${seeds}`;
  document.getElementById("top").append(
    h(
      "div",
      { class: "grow" },
      h("h1", {}, DATA.title),
      h(
        "div",
        { class: "soft small" },
        `${many} · made ${DATA.made.replace("T", " ").replace("+00:00", " UTC")} · fedcover ${DATA.version}`,
      ),
    ),
    themeButton(),
    h(
      "nav",
      { "aria-label": "Sections" },
      [
        ["runs", "Runs"],
        ["plots", "Plots"],
        ["detail", "One run in detail"],
        ["coverage", "Who trains what"],
        ["fleet", "Fleet"],
        ["experiment", "How to repeat it"],
      ].map(([id, name]) => h("a", { href: `#${id}` }, name)),
    ),
  );
  const late = DATA.runs.some((run) => run.thinned)
    ? h(
        "p",
        { class: "small soft" },
        "Long runs are thinned: of the rounds between two points, coverage shows the lowest, everything else the last.",
      )
    : null;
  document
    .getElementById("main")
    .append(
      h(
        "section",
        { "aria-labelledby": "runs" },
        h("h2", { id: "runs" }, "Runs"),
        notes(),
        filterBar(),
        runTable(),
        h("p", { class: "small soft" }, "± is the sample standard deviation over the seeds, in points."),
      ),
      h(
        "section",
        { "aria-labelledby": "plots" },
        h("h2", { id: "plots" }, "Plots"),
        plotBar(),
        late,
        legend(),
        h(
          "div",
          { class: "grid" },
          accuracyFigure(),
          lossFigure(),
          costFigure(),
          gammaFigure(),
          windowFigure(),
          noiseFigure(),
        ),
      ),
      detail(),
    );
  document
    .getElementById("foot")
    .append("Everything on this page is inside this one file; it asks no network for anything.");
  change({});
  document.body.dataset.ready = "yes";
}
start();
