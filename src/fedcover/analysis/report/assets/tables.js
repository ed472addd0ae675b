// The runs in numbers, and what to show of them.
const COLUMNS = [
  ["accuracy", "accuracy", percent],
  ["accuracy_averaged", "averaged", percent],
  ["accuracy_single", "one device", percent],
  ["loss", "loss", compact],
  ["gamma_min", "least Γ", compact],
  ["gamma_window", "Γ window", compact],
  ["delta2_mean", "noise δ²", percent],
  ["parameters", "parameters", compact],
  ["moved", "MB moved", compact],
];
const MEANINGS = {
  accuracy: "the assembled global model on the test set",
  accuracy_averaged: "the mean of the global models over rounds, on the test set",
  accuracy_single: "the largest part that a single device holds: the number to beat",
  gamma_min: "fewest clients that trained any parameter, over all rounds",
  gamma_window: "fewest times any parameter was trained in the last window",
  delta2_mean: "share of the model's squared length cut away, mean over clients and rounds",
  parameters: "mean per client",
  moved: "up and down, all clients and rounds",
  loss: "on the test set",
};

function filterBar() {
  const box = h("div", { class: "filters" });
  const search = h("input", {
    type: "search",
    placeholder: "Find runs by name",
    "aria-label": "Find runs by name",
    oninput: () => change({ words: search.value.trim() }),
  });
  const count = h("span", { class: "soft small", role: "status" });
  onChange(() => {
    count.textContent = `${listed().length} of ${GROUPS.length} shown`;
  });
  if (GROUPS.length > 1)
    box.append(
      h(
        "div",
        { class: "bar" },
        search,
        h("button", { type: "button", onclick: () => reset(box, search) }, "Show all"),
        count,
      ),
    );
  for (const [name, values] of Object.entries(DATA.values))
    box.append(
      chips(name, values, (kept) => {
        const without = new Set(values.filter((value) => !kept.has(value)));
        change({ without: { ...shown.without, [name]: without } });
      }),
    );
  if (SEEDS.length > 1) box.append(chips("seed", SEEDS, (seeds) => change({ seeds })));
  if (box.querySelector(".only"))
    box.append(h("p", { class: "soft small" }, "Press a value to hide or show its runs; \u201conly\u201d takes one of them."));
  return box;
}

function reset(box, search) {
  search.value = "";
  for (const input of box.querySelectorAll("input[type=checkbox]")) input.checked = true;
  for (const only of box.querySelectorAll("fieldset select")) only.value = ALL;
  change({ without: {}, seeds: new Set(SEEDS), words: "", hidden: new Set() });
}

const [ALL, SOME] = ["all", "some"];

function chips(name, values, keep) {
  // a switch for every value, and a list to take one of them (by its place) or all again
  const kept = () => values.filter((_, place) => inputs[place].checked);
  const told = () => {
    const on = kept();
    only.value = on.length === values.length ? ALL : on.length === 1 ? values.indexOf(on[0]) : SOME;
    keep(new Set(on));
  };
  const inputs = values.map(() => h("input", { type: "checkbox", checked: true, onchange: told }));
  const only = h(
    "select",
    {
      "aria-label": `only one ${name}`,
      onchange: () => {
        inputs.forEach((input, place) => {
          input.checked = only.value === ALL || only.value === String(place);
        });
        keep(new Set(kept()));
      },
    },
    h("option", { value: ALL }, "all"),
    h("option", { value: SOME, hidden: true, disabled: true }, "some"),
    values.map((value, place) => h("option", { value: place }, String(value))),
  );
  return h(
    "fieldset",
    { "data-setting": name },
    h("legend", {}, name),
    values.length > 2 ? h("label", { class: "only" }, "only", only) : null,
    values.map((value, place) => h("label", { class: "chip" }, inputs[place], h("span", {}, String(value)))),
  );
}

function figureCell(group, [name, , format]) {
  const value = total(group, name);
  return h(
    "td",
    { class: "num", title: spreadText(value, format) },
    value ? format(value.mean) : "–",
    value && value.n > 1 && name === "accuracy"
      ? h("span", { class: "soft small" }, ` ± ${(100 * value.spread).toFixed(1)}`)
      : null,
  );
}

function runTable() {
  const known = COLUMNS.filter(([name]) => DATA.runs.some((run) => number(run.totals[name])));
  const first = known.filter(([name]) => name === "accuracy"); // beside the name: a phone shows no more than that
  const others = known.filter(([name]) => name !== "accuracy");
  const box = scroller({ class: "card", tabindex: 0, role: "region", "aria-label": "Table of the runs" });
  let by = null,
    down = true;

  const head = (name, text) =>
    h(
      "th",
      {
        scope: "col",
        class: name === "label" ? null : "num",
        "aria-sort": by === name ? (down ? "descending" : "ascending") : "none",
        title: MEANINGS[name],
      },
      h(
        "button",
        {
          type: "button",
          onclick: () => {
            down = by === name ? !down : name !== "label";
            by = name;
            draw(name);
          },
        },
        text,
      ),
    );
  const worth = (group) => (by === "label" ? group.place : (total(group, by)?.mean ?? -Infinity));
  const order = (a, b) => {
    const [x, y] = [worth(a), worth(b)];
    return (x > y ? 1 : x < y ? -1 : 0) * (down ? -1 : 1);
  };

  function row(group) {
    const runs = runsOf(group);
    const states = [...new Set(runs.map(statusOf))].map((state) => h("div", { class: "state" }, state));
    const begun = runs.filter((run) => "rounds" in run.totals).length; // the others are in no mean
    const all = runs.length > 1 ? `${runs.length} seeds` : `seed ${runs[0].seed}`;
    const seeds = 0 < begun && begun < runs.length ? `${begun} of ${all}` : all;
    return h(
      "tr",
      {
        class: shown.hidden.has(group.place) ? "off" : null,
        onmouseenter: () => highlight(group.place),
        onmouseleave: () => highlight(null),
      },
      h("th", { scope: "row" }, h("div", { class: "run" }, swatch(group.style), h("span", {}, group.label))),
      first.map((column) => figureCell(group, column)),
      h("td", { class: "num small" }, seeds),
      h("td", { class: runs.some((run) => run.notFinite) ? "warn small" : "small" }, states),
      others.map((column) => figureCell(group, column)),
      h(
        "td",
        {},
        h(
          "button",
          {
            type: "button",
            "aria-label": `Details of ${group.label}`,
            onclick: () => {
              change({ run: DATA.runs.indexOf(runs[0]) });
              document.getElementById("detail").scrollIntoView();
            },
          },
          "Details",
        ),
      ),
    );
  }

  function draw(focused) {
    const groups = by ? [...listed()].sort(order) : listed();
    box.replaceChildren(
      h(
        "table",
        { class: "wide" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            head("label", "runs"),
            first.map(([name, text]) => head(name, text)),
            h("th", { scope: "col", class: "num" }, "seeds"),
            h("th", { scope: "col" }, "state"),
            others.map(([name, text]) => head(name, text)),
            h("th", { scope: "col" }, h("span", { class: "soft" }, "")),
          ),
        ),
        h("tbody", {}, groups.map(row)),
      ),
      ...(groups.length ? [] : [h("p", { class: "nothing" }, NO_MATCH)]),
    );
    if (focused)
      [...box.querySelectorAll("thead button")]
        .find((button) => button.parentNode.getAttribute("aria-sort") !== "none")
        ?.focus();
  }
  onChange(() => draw());
  draw();
  return box;
}

function legend() {
  const list = h("ul", {
    class: GROUPS.length <= 10 ? "legend sticky" : "legend",
    "aria-label": "Runs in the plots; press to hide or show",
  });
  function draw() {
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.place : null;
    list.replaceChildren(
      ...listed().map((group) => {
        const toggle = () => {
          const hidden = new Set(shown.hidden);
          if (!hidden.delete(group.place)) hidden.add(group.place);
          change({ hidden });
        };
        return h(
          "li",
          {},
          h(
            "button",
            {
              type: "button",
              "data-place": group.place,
              "aria-pressed": String(!shown.hidden.has(group.place)),
              onclick: toggle,
              onmouseenter: () => highlight(group.place),
              onmouseleave: () => highlight(null),
            },
            swatch(group.style),
            group.label,
          ),
        );
      }),
    );
    if (focused !== null) list.querySelector(`[data-place="${focused}"]`)?.focus();
  }
  onChange(draw);
  draw();
  return list;
}
